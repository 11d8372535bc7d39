"""The communication kernels on a CPU: interpreter, one-process simulator, multi-process emulation."""
