"""The exchange end to end on the emulation: the published test's matrix, speed, reuse, absent ranks, a small heap."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import Any

import pytest
import torch

from ops.moe_comm_gpu import Config, emulation_backend
from ops.moe_comm_gpu.agreement import Ledger
from ops.moe_comm_gpu.device.runtime import NotEnqueuedError
from ops.moe_comm_gpu.device.watchdog import WaitTimeoutError
from ops.moe_comm_gpu.emulation.launcher import run_processes
from ops.moe_comm_gpu.emulation.processes import EmulatedRuntime, create_heap_file
from ops.moe_comm_gpu.emulation_backend import Exchange
from ops.moe_comm_gpu.kernel_exchange import KernelExchange
from reference import moe_cases
from tests.moe import harness
from tests.moe.strategies import Case, full
from tests.moe_kernels.worlds import opened, simulate

BACKEND = "nvshmem_emulated"
LIMIT_S = 2.0
IN_DTYPES = ["bfloat16", "float16", "float8_e4m3fn"]
PUBLISHED = [
    pytest.param(
        shape,
        in_dtype,
        out_dtype,
        id=f"{shape}-{in_dtype}-{out_dtype}",
        marks=[] if (shape, in_dtype, out_dtype) == ("published_small", "bfloat16", "bfloat16") else pytest.mark.slow,
    )
    for shape in ("published_small", "published_large")
    for in_dtype in IN_DTYPES
    for out_dtype in ("bfloat16", "float16")
]


def published(shape: str, in_dtype: str, out_dtype: str, mode: str = "per_rank") -> Case:
    """The case of the published test: each row with scales of blocks of 128 if it is fp8."""
    block = 128 if in_dtype.startswith("float8") else None
    return full(shape, in_dtype=in_dtype, out_dtype=out_dtype, scale_block=block, mode=mode, weights_early=True)


@pytest.mark.parametrize(("shape", "in_dtype", "out_dtype"), PUBLISHED)
@pytest.mark.parametrize("mode", ["per_rank", pytest.param("per_expert", marks=pytest.mark.slow)])
def test_published_matrix_on_the_emulation(shape: str, in_dtype: str, out_dtype: str, mode: str) -> None:
    harness.run(published(shape, in_dtype, out_dtype, mode), BACKEND)


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "in_dtype", "out_dtype"), PUBLISHED)
@pytest.mark.parametrize("mode", ["per_rank", "per_expert"])
def test_published_matrix_on_the_simulator(shape: str, in_dtype: str, out_dtype: str, mode: str) -> None:
    simulate([published(shape, in_dtype, out_dtype, mode)], 1, heap_bytes=64 << 20)


def _timed_rounds(runtime: EmulatedRuntime) -> float:
    shape = replace(moe_cases.SHAPES["six_of_eight"], hidden=256, max_num_tokens=16, experts_per_token=2)
    case = full(shape, weights_early=True)
    tokens = harness._tokens(case, runtime.my_pe, 0)
    ids, weights = harness._ids(case, runtime.my_pe, 0), torch.from_numpy(case.weights(runtime.my_pe))
    slowest: list[float] = []
    with KernelExchange(case.config(runtime.my_pe), runtime, num_programs=1) as exchange:
        # Neighbours on the machine only ever make a round slower, so the fastest of many tells.
        while len(slowest) < 20 and (len(slowest) < 3 or min(slowest) >= LIMIT_S):
            runtime.barrier()
            start = time.perf_counter()
            handle = exchange.dispatch(tokens, ids, weights=weights)
            exchange.combine(handle, handle.rows)
            slowest.append(max(runtime.all_gather(time.perf_counter() - start)))
    return min(slowest)


def test_dispatch_and_combine_of_16_tokens_by_4_processes_within_two_seconds() -> None:
    assert max(run_processes(4, _timed_rounds)) < LIMIT_S


def _all_sizes(number: int) -> list[Case]:
    shape = replace(moe_cases.SHAPES["two_ranks"], hidden=16)
    case = full(shape, weights_early=True)
    counts = range(shape.max_num_tokens + 1)
    return [
        replace(case, num_tokens=tuple(counts[(call + 3 * member) % len(counts)] for member in range(2)), seed=call)
        for call in range(number)
    ]


def _rounds(rank: int, group: Any, cases: list[Case]) -> list[list[harness.Observation]]:
    with Exchange(cases[0].config(rank), group, num_programs=1) as exchange:
        return [harness._observe_rank(rank, exchange, case, f"{opened.__module__}:opened") for case in cases]


@pytest.mark.parametrize("number", [12, pytest.param(1000, marks=pytest.mark.slow)])
def test_many_calls_on_one_buffer_with_changing_numbers_of_tokens(number: int) -> None:
    cases = _all_sizes(number)
    by_rank = harness.workers().run(_rounds, [(cases,)] * 2, timeout_s=500)
    for case, *seen in zip(cases, *by_rank, strict=True):
        harness.check(case, seen)


PAIR = Config(max_num_tokens=1, num_experts=2, experts_per_token=1, hidden=8, world_size=2, num_buffer_sets=2)


def _skips_combine(runtime: EmulatedRuntime) -> str:
    """Rank 1 leaves after its dispatch; what rank 0 hears then."""
    exchange = KernelExchange(replace(PAIR, rank=runtime.my_pe), runtime, num_programs=1)
    tokens, ids = torch.ones(1, 8).bfloat16(), torch.tensor([[1 - runtime.my_pe]])
    handle = exchange.dispatch(tokens, ids, weights=torch.ones(1, 1))
    if runtime.my_pe == 1:
        return ""
    runtime.set_timeout(1.0)
    with pytest.raises(WaitTimeoutError) as caught:
        exchange.combine(handle, handle.rows)
    with pytest.raises(RuntimeError, match="earlier call failed"):
        exchange.dispatch(tokens, ids)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EmulatedRuntime, "barrier", _waits_for_nobody)
        exchange.close()
    return str(caught.value)


def _waits_for_nobody(self: EmulatedRuntime) -> None:
    raise AssertionError("waits for ranks that may be anywhere")


def test_a_wait_that_takes_too_long_names_rank_operation_and_what_was_awaited() -> None:
    message, _ = run_processes(2, _skips_combine)
    assert message.startswith("rank 0: combine receive, program (0, 0, 0): combine receive: rows: waits for rank 1 ")
    assert "gave up after 1 s" in message


def _never_dispatches(runtime: EmulatedRuntime) -> str:
    exchange = KernelExchange(replace(PAIR, rank=runtime.my_pe), runtime, num_programs=1)
    runtime.barrier()
    if runtime.my_pe == 1:
        return ""
    runtime.set_timeout(1.0)
    with pytest.raises(WaitTimeoutError) as caught:
        exchange.dispatch(torch.ones(1, 8).bfloat16(), torch.tensor([[1]]))
    return str(caught.value)


def test_a_rank_that_never_dispatches_is_named_by_the_wait_in_the_kernel() -> None:
    message, _ = run_processes(2, _never_dispatches)
    assert "dispatch receive: number of rows: waits for rank 1 (signal is 0, has to reach 4294967296)" in message


def _heap_of_64_kib(rank: int, group: Any) -> str:
    config = Config(max_num_tokens=16, num_experts=2, experts_per_token=1, hidden=4096, world_size=2, rank=rank)
    os.environ["NVSHMEM_SYMMETRIC_SIZE"] = "64K"
    try:
        with pytest.raises(MemoryError) as caught:
            Exchange(config, group)
    finally:
        del os.environ["NVSHMEM_SYMMETRIC_SIZE"]
    return str(caught.value)


def test_a_heap_that_is_too_small_is_refused_on_every_rank_and_named() -> None:
    for message in harness.workers().run(_heap_of_64_kib, [()] * 2):
        assert "exchange buffer set 0 needs" in message
        assert "available" in message
        assert "NVSHMEM_SYMMETRIC_SIZE" in message


class _ImpatientLedger(Ledger):
    """Waits long for the others' configurations, and then no longer."""

    def __init__(self, config: Config, group: Any = None) -> None:
        super().__init__(config, group)
        self.timeout_s = 0.5


def _no_room_for_a_file(*_: int) -> str:
    raise OSError("no space left")


def _heap_without_a_file(rank: int, group: Any) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(emulation_backend, "Ledger", _ImpatientLedger)
        patch.setattr(emulation_backend, "create_heap_file", _no_room_for_a_file)
        with pytest.raises(OSError) as caught:
            Exchange(replace(PAIR, rank=rank), group)
    return str(caught.value)


def test_a_heap_that_rank_0_cannot_make_is_awaited_with_a_limit() -> None:
    own, others = harness.workers().run(_heap_without_a_file, [()] * 2)
    assert own == "no space left"
    assert others.startswith("rank 1: making the exchange: ranks [0] did not come within 0.5 s")


def _make_and_close(rank: int, group: Any) -> tuple[int, list[str]]:
    config = Config(max_num_tokens=2, num_experts=2, experts_per_token=1, hidden=16, world_size=2, rank=rank)
    files: list[str] = []

    def create(*sizes: int) -> str:
        files.append(create_heap_file(*sizes))
        return files[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(emulation_backend, "create_heap_file", create)
        for _ in range(20):
            with Exchange(config, group) as exchange:
                handle = exchange.dispatch(torch.ones(2, 16).bfloat16(), torch.zeros(2, 1, dtype=torch.int32))
                exchange.combine(handle, handle.rows, torch.ones(2, 1))
    return len(files), [path for path in files if os.path.exists(path)]


def test_making_and_closing_leaves_no_heap_behind() -> None:
    assert harness.workers().run(_make_and_close, [()] * 2) == [(20, []), (0, [])]


def test_plain_stores_in_place_of_puts() -> None:
    for mode in ("per_rank", "per_expert"):
        harness.run(
            full("two_ranks", mode=mode, weights_early=True), "tests.moe_kernels.test_emulation:direct_exchange"
        )


def direct_exchange(config: Config, group: Any) -> Exchange:
    """An exchange that writes to other ranks with plain stores."""
    return Exchange(config, group, direct=True)


def test_a_failed_block_closes_without_waiting_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing_block() -> None:
        with Exchange(Config(max_num_tokens=2, num_experts=2, experts_per_token=1, hidden=8)):
            monkeypatch.setattr(EmulatedRuntime, "barrier", _waits_for_nobody)
            raise KeyError("the caller's own")

    with pytest.raises(KeyError, match="the caller's own"):
        failing_block()


def test_a_refused_launch_leaves_the_exchange_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config(max_num_tokens=2, num_experts=2, experts_per_token=1, hidden=8)
    tokens, ids = torch.ones(2, 8).bfloat16(), torch.zeros(2, 1, dtype=torch.int32)

    def refused(*_: object, **__: object) -> None:
        raise NotEnqueuedError("not now")

    with Exchange(config) as exchange:
        with monkeypatch.context() as patch:
            patch.setattr(EmulatedRuntime, "launch", refused)
            with pytest.raises(NotEnqueuedError):
                exchange.dispatch(tokens, ids)
        handle = exchange.dispatch(tokens, ids)
        assert torch.equal(exchange.combine(handle, handle.rows, torch.ones(2, 1)), tokens)


def test_a_last_batch_without_room_is_told_by_close() -> None:
    config = Config(max_num_tokens=3, num_experts=1, experts_per_token=1, hidden=8, capacity=2)
    exchange = Exchange(config)
    exchange._reports[0] = 3  # as a kernel leaves it that ends after the last call
    with pytest.raises(ValueError, match="capacity: rank 0 received 3 rows of one expert, has room for 2"):
        exchange.close()
