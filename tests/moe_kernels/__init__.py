"""The four kernels on the simulator and the emulation: rows, sums, protocol, planted faults."""
