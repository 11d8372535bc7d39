"""`python -m demo`: both operators on real text, end to end."""
