"""Benchmarks: `python -m bench.kda_tpu`, `python -m bench.moe_comm_gpu`."""
