#!/usr/bin/env bash
# Checks dispatch and combine on all GPUs of this machine (or of several: pass torchrun's arguments in TORCHRUN_ARGS),
# then measures latencies at 128 tokens and at 1 token a rank. Arguments go to tests.moe_gpu.many_gpus.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-.venv/bin/python}
"$PYTHON" -c 'import sys; from ops.moe_comm_gpu.nvshmem.probe import probe; why = probe(); sys.exit(f"nvshmem: {why}" if why else 0)'
# shellcheck disable=SC2086
"$PYTHON" -m torch.distributed.run ${TORCHRUN_ARGS:---nproc-per-node=gpu} -m tests.moe_gpu.many_gpus "$@"
