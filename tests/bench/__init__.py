"""Tests of the benchmarks themselves: timing, the static profile, the KDA bench."""
