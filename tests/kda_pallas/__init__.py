"""Tests of the Pallas TPU kernels of Kimi Delta Attention, interpreted on the CPU."""
