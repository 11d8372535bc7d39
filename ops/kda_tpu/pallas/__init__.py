"""Pallas TPU kernels of Kimi Delta Attention."""
