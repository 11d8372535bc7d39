"""The device layer and what stands in for it on a CPU: primitives, simulator, emulation, compile check."""
