"""Dispatch and combine on NVIDIA GPUs: one here, or several under torchrun; skipped where there are none."""
