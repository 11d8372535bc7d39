"""The kernels on the emulation, in both modes, against a padded dense all-to-all made of the same device operations.

Bytes and messages are those that a GPU would send; times are of Triton's interpreter and say nothing about a GPU. The
dense exchange has a slot for every token of every source at every expert and sends all of them, used or not, both ways.
Every result is checked before it is timed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from bench import timing
from ops.moe_comm_gpu.contract import Config
from ops.moe_comm_gpu.device.primitives import SIGNAL_ADD, put_signal_nbi, wait_ge
from ops.moe_comm_gpu.emulation.launcher import run_processes
from ops.moe_comm_gpu.emulation.operations import Operation
from ops.moe_comm_gpu.emulation.processes import EmulatedRuntime
from ops.moe_comm_gpu.kernel_exchange import KernelExchange, most_symmetric_bytes
from reference import moe_cases
from reference.moe_cases import Shape

_ROUNDINGS = 2 * 2.0**-8  # of bfloat16: each row, and the sum
_SLACK_BYTES = 1 << 20


@dataclass(frozen=True)
class Options:
    """What to run: sizes, and rounds that count."""

    shape: Shape
    repeats: int = 5
    seed: int = 0


def rows(options: Options) -> list[dict[str, object]]:
    """Runs every rank in a process of its own; one record for each half of each variant.

    Raises:
        RuntimeError: a result is wrong.
    """
    shape = options.shape
    dense = 3 * shape.num_experts * shape.max_num_tokens * shape.hidden * 2
    heap = dense + sum(most_symmetric_bytes(_config(shape, 0, mode)) for mode in ("per_rank", "per_expert"))
    reports = run_processes(
        shape.world_size,
        lambda runtime: _measure(runtime, options),
        heap_bytes=heap + _SLACK_BYTES,
        limit_s=600,
        trace=True,
    )
    merged: list[dict[str, object]] = []
    for name in reports[0]:
        parts = [report[name] for report in reports]
        slowest = tuple(max(of_round) for of_round in zip(*(part["seconds"] for part in parts), strict=True))
        counts = {count: sum(part[count] for part in parts) for count in ("MB_put", "puts", "signals")}
        measured = timing.Timing(name, slowest, max(part["first"] for part in parts))
        merged.append(timing.timing_row(measured, **counts))
    return merged


def _config(shape: Shape, rank: int, mode: Any) -> Config:
    return Config(
        max_num_tokens=shape.max_num_tokens,
        num_experts=shape.num_experts,
        experts_per_token=shape.experts_per_token,
        hidden=shape.hidden,
        world_size=shape.world_size,
        rank=rank,
        mode=mode,
    )


def _measure(runtime: EmulatedRuntime, options: Options) -> dict[str, dict[str, Any]]:
    shape, rank = options.shape, runtime.my_pe
    count = shape.max_num_tokens
    tokens = torch.from_numpy(moe_cases.payload(moe_cases.global_ids(shape, rank, count), shape.hidden)).bfloat16()
    ids = torch.from_numpy(moe_cases.random_ids(shape, count, options.seed, rank))
    weights = torch.from_numpy(moe_cases.random_weights(shape, count, options.seed, rank))
    halves = {"padded dense": _Dense(shape, runtime, tokens, ids, weights).halves()}
    exchanges = []
    for mode in ("per_rank", "per_expert"):
        exchanges.append(KernelExchange(_config(shape, rank, mode), runtime, num_programs=1))
        halves[mode] = _halves(exchanges[-1], tokens, ids, weights)
    want = tokens.float() * weights.sum(dim=1, keepdim=True)
    calls: dict[str, Callable[[], object]] = {}
    reports: dict[str, dict[str, Any]] = {}
    for name, (dispatch, combine) in halves.items():
        reports[f"{name}, dispatch"] = _traffic(runtime, dispatch)
        reports[f"{name}, combine"] = _traffic(runtime, combine)
        _check(name, rank, combine_again(dispatch, combine), want)
        calls |= {f"{name}, dispatch": dispatch, f"{name}, combine": combine}
    for name, measured in timing.interleave(calls, repeats=options.repeats, warmup=1).items():
        reports[name] |= {"seconds": measured.seconds, "first": measured.warmup_seconds}
    for exchange in exchanges:
        exchange.close()
    return reports


def combine_again(dispatch: Callable[[], object], combine: Callable[[], Tensor]) -> Tensor:
    """One more round trip; its result."""
    dispatch()
    return combine()


def _halves(
    exchange: KernelExchange, tokens: Tensor, ids: Tensor, weights: Tensor
) -> tuple[Callable[[], object], Callable[[], Tensor]]:
    held: list[Any] = [None]

    def dispatch() -> None:
        held[0] = exchange.dispatch(tokens, ids, weights=weights)

    def combine() -> Tensor:
        return exchange.combine(held[0], held[0].rows)

    return dispatch, combine


def _traffic(runtime: EmulatedRuntime, call: Callable[[], object]) -> dict[str, Any]:
    """Puts to other ranks and their bytes, and signals beside them, of one call."""
    runtime.trace.clear()
    call()
    puts = [o for o in runtime.trace if o.kind == "put" and o.pe != runtime.my_pe]
    return {
        "MB_put": sum(o.num_bytes for o in puts) / 1e6,
        "puts": len(puts),
        "signals": sum(map(_is_signal_to_another, runtime.trace)),
    }


def _is_signal_to_another(operation: Operation) -> bool:
    return operation.kind == "signal" and operation.pe != operation.rank


def _check(name: str, rank: int, output: Tensor, want: Tensor) -> None:
    # Experts are the identity, and no term is negative, so the sum is its own magnitude.
    off = ~((output.float() - want).abs() <= _ROUNDINGS * want + 1e-6)  # not a number never passes
    if bool(off.any()):
        token, column = (int(index) for index in off.nonzero()[0])
        raise RuntimeError(
            f"{name}, rank {rank}: token {token}, column {column} is {output[token, column]}, "
            f"expected {want[token, column]}"
        )


@triton.jit
def _send_blocks(
    source_ptr: tl.tensor, target_ptr: tl.tensor, signals_ptr: tl.tensor, rank: tl.tensor, block_bytes: tl.constexpr
) -> None:
    """Puts block p of this rank to block ``rank`` of rank p, one program for each."""
    peer = tl.program_id(0)
    put_signal_nbi(
        target_ptr + tl.cast(rank, tl.int64) * block_bytes,
        source_ptr + tl.cast(peer, tl.int64) * block_bytes,
        block_bytes,
        signals_ptr + rank,
        1,
        SIGNAL_ADD,
        peer,
    )


@triton.jit
def _await_blocks(signals_ptr: tl.tensor, watchdog_ptr: tl.tensor, number: tl.tensor) -> None:
    """Waits for the ``number``-th block of every rank, one program for each."""
    peer = tl.program_id(0)
    wait_ge(signals_ptr + peer, number, watchdog_ptr, 0, peer)


class _Dense:
    """A slot for every token at every expert: ``[E, M, D]`` there, and the same back."""

    def __init__(self, shape: Shape, runtime: EmulatedRuntime, tokens: Tensor, ids: Tensor, weights: Tensor) -> None:
        self.runtime, self.tokens, self.ids, self.weights = runtime, tokens, ids, weights
        experts = -(-shape.num_experts // shape.world_size) * shape.world_size
        self.block_bytes = experts // shape.world_size * shape.max_num_tokens * shape.hidden * 2
        self.sizes = (experts, shape.max_num_tokens, shape.hidden)
        self.there, self.received, self.back = (
            runtime.allocate(shape.world_size * self.block_bytes, name) for name in ("there", "received", "back")
        )
        self.signals = runtime.allocate(8 * 2 * shape.world_size, "signals").view(torch.int64)
        self.rounds = 0

    def halves(self) -> tuple[Callable[[], object], Callable[[], Tensor]]:
        """Dispatch and combine."""
        return self.dispatch, self.combine

    def dispatch(self) -> None:
        self.rounds += 1
        token = torch.arange(len(self.tokens))[:, None].expand_as(self.ids)
        self.there.view(torch.bfloat16).view(self.sizes)[self.ids, token] = self.tokens[token]
        self._all_to_all(self.there, self.received, self.signals[: self.runtime.n_pes])

    def combine(self) -> Tensor:
        self._all_to_all(self.received, self.back, self.signals[self.runtime.n_pes :])
        rows = self.back.view(torch.bfloat16).view(self.sizes)
        total = torch.zeros(self.tokens.shape)
        token = torch.arange(len(self.tokens))
        for choice in range(self.ids.shape[1]):
            total += rows[self.ids[:, choice], token].float() * self.weights[:, choice, None]
        return total.bfloat16()

    def _all_to_all(self, source: Tensor, target: Tensor, signals: Tensor) -> None:
        grid, runtime = (self.runtime.n_pes,), self.runtime
        runtime.launch(
            _send_blocks, grid, source, target, signals, runtime.my_pe, label="dense", block_bytes=self.block_bytes
        )
        runtime.launch(_await_blocks, grid, signals, runtime.watchdog, self.rounds, label="dense")
