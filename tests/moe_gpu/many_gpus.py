"""Several GPUs under torchrun: every case on every rank, then latencies. Run by ``scripts/moe_many_gpus.sh``.

torchrun --nproc-per-node=gpu -m tests.moe_gpu.many_gpus [--cases] [--times] [--direct]
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ops.moe_comm_gpu import Config
from ops.moe_comm_gpu.nvshmem import host, probe
from ops.moe_comm_gpu.nvshmem.backend import Exchange
from tests.moe.strategies import Case
from tests.moe_gpu import cases

WARM_UP, ROUNDS = 20, 200


def main() -> int:
    """Runs what is asked for and returns the exit status, the same on every rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", action="store_true", help="only check rows and sums")
    parser.add_argument("--times", action="store_true", help="only measure")
    parser.add_argument("--direct", action="store_true", help="plain stores in place of puts")
    options = parser.parse_args()
    reason = probe.probe()
    if reason is not None:
        sys.stdout.write(f"nvshmem: {reason}\n")
        return 2
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("cpu:gloo,cuda:nccl", timeout=timedelta(minutes=5))
    failures = 0
    try:
        if not options.times:
            failures = sum(not _passes(case, options.direct) for case in cases.world_cases(dist.get_world_size()))
            _say(f"{failures} cases failed" if failures else "all cases passed")
        if not options.cases and not failures:
            _measure(options.direct)
        host.finalise()
    finally:
        dist.destroy_process_group()
    return int(failures > 0)


def _say(text: str) -> None:
    if dist.get_rank() == 0:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()


def _passes(case: Case, direct: bool) -> bool:
    """Runs a case three times on one exchange; every rank sends what it saw to rank 0, which checks."""
    rank, device = dist.get_rank(), torch.device("cuda", torch.cuda.current_device())
    error = None
    with Exchange(case.config(rank), direct=direct) as exchange:
        for _ in range(3):
            observed: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(observed, cases.observe(case, exchange, device))
            if rank == 0 and error is None:
                try:
                    cases.check_everywhere(case, observed)
                except AssertionError:
                    error = traceback.format_exc()
    verdict = [error]
    dist.broadcast_object_list(verdict)
    _say(f"{'FAILED' if verdict[0] else 'passed'}: {case}")
    if verdict[0]:
        _say(verdict[0])
    return verdict[0] is None


def _measure(direct: bool) -> None:
    """Dispatch and combine at the published size: 128 tokens and 1 token a rank, hidden 7168, 8 of 256 experts."""
    world_size, rank = dist.get_world_size(), dist.get_rank()
    for mode in ("per_rank", "per_expert"):
        for num_tokens in (128, 1):
            config = Config(max_num_tokens=num_tokens, num_experts=256, experts_per_token=8, hidden=7168,
                            world_size=world_size, rank=rank, mode=mode, in_dtype=torch.float8_e4m3fn,
                            scale_block=128)  # fmt: skip
            tokens = torch.randn(num_tokens, 7168, device="cuda").to(torch.float8_e4m3fn)
            scales = torch.ones(num_tokens, config.num_scales, device="cuda")
            ids = torch.rand(num_tokens, 256, device="cuda").argsort(dim=1)[:, :8].to(torch.int32)
            weights = torch.rand(num_tokens, 8, device="cuda")
            rows = torch.zeros(*config.rows_prefix, 7168, device="cuda", dtype=torch.bfloat16)
            with Exchange(config, direct=direct) as exchange:

                def dispatch() -> Any:
                    return exchange.dispatch(tokens, ids, scales=scales, weights=weights)  # noqa: B023

                def combine(handle: Any) -> None:
                    exchange.combine(handle, rows)  # noqa: B023

                times = _times_us(dispatch, combine)
            for name, values in times.items():
                p10, median, p90 = (float(torch.quantile(values, q)) for q in (0.1, 0.5, 0.9))
                _say(f"{mode:10s} {num_tokens:4d} tokens a rank, {world_size} ranks, {name:8s} "
                     f"median {median:7.1f} us, p10 {p10:7.1f}, p90 {p90:7.1f}")  # fmt: skip


def _times_us(dispatch: Callable[[], Any], combine: Callable[[Any], None]) -> dict[str, torch.Tensor]:
    """Time of each half of each round by CUDA events, the slowest rank's, after a barrier of the GPUs."""
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(3)] for _ in range(WARM_UP + ROUNDS)]
    token = torch.zeros(1, device="cuda")
    for first, second, third in marks:
        dist.all_reduce(token)
        first.record()
        handle = dispatch()
        second.record()
        combine(handle)
        third.record()
    torch.cuda.synchronize()
    spans = [[1e3 * a.elapsed_time(b), 1e3 * b.elapsed_time(c)] for a, b, c in marks[WARM_UP:]]
    slowest = torch.tensor(spans, device="cuda")
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return {"dispatch": slowest[:, 0].cpu(), "combine": slowest[:, 1].cpu()}


if __name__ == "__main__":
    sys.exit(main())
