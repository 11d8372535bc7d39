#!/usr/bin/env bash
# Checks dispatch and combine on one NVIDIA GPU: rows and sums, CUDA graphs, timeouts, memory.
# Needs the environment of `make env` (or PYTHON=...), a driver and a GPU; says why if it cannot run.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-.venv/bin/python}
"$PYTHON" -c 'import sys; from ops.moe_comm_gpu.nvshmem.probe import probe; why = probe(); sys.exit(f"nvshmem: {why}" if why else 0)'
"$PYTHON" -m pytest tests/moe_gpu -m gpu -n 0 -v "$@"
