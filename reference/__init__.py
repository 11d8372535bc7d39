"""Float64 oracles in numpy. Nothing here imports :mod:`ops`: an oracle shares no code with its subject."""
