"""The exchange over gloo between local processes, against the padded dense all-to-all that it replaces.

The dense exchange has a slot for every token of every source at every expert, and sends all of them, used or not,
both ways: shapes that no routing can overflow, at ``E * M`` rows a rank. Both are checked against the float64
reference first.
"""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from bench import timing
from ops.moe_comm_gpu.agreement import Ledger
from ops.moe_comm_gpu.contract import Config
from ops.moe_comm_gpu.exchange import open_exchange
from reference import moe, moe_cases
from reference.moe_cases import Shape

_PATIENCE_S = 300
_ROUNDINGS = 2 * 2.0**-8  # of bfloat16: each row, and the sum


@dataclass(frozen=True)
class Options:
    """What to run: sizes, rounds, and the seconds after which no round begins."""

    shape: Shape
    repeats: int = 20
    budget_seconds: float = 60.0
    seed: int = 0


@dataclass(frozen=True)
class _Variant:
    """Two halves of a round trip and what a rank sends to others in each."""

    dispatch: Callable[[], Any]
    combine: Callable[[], Tensor]
    sent: Callable[[], tuple[int, int]]  # bytes and messages so far


def rows(options: Options) -> list[dict[str, object]]:
    """Runs every rank in a process of its own; one record for each half of each variant.

    Raises:
        RuntimeError: a rank failed, or its result is wrong.
    """
    size = options.shape.world_size
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed", "bench.moe_gloo"])
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(size):
            mine, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, folder, options, theirs), daemon=True)
            process.start()
            theirs.close()
            pipes.append(mine)
            processes.append(process)
        try:
            reports = [_receive(pipe, rank) for rank, pipe in enumerate(pipes)]
        finally:
            for process in processes:
                process.kill()
                process.join()
    return _merged(reports)


def _receive(pipe: Connection, rank: int) -> dict[str, dict[str, Any]]:
    if not pipe.poll(_PATIENCE_S):
        raise RuntimeError(f"rank {rank} gave no answer within {_PATIENCE_S} s")
    answer = pipe.recv()
    if isinstance(answer, str):
        raise RuntimeError(f"rank {rank}: {answer}")
    report: dict[str, dict[str, Any]] = answer
    return report


def _merged(reports: list[dict[str, dict[str, Any]]]) -> list[dict[str, object]]:
    """The slowest rank of every round; bytes and messages of all ranks together."""
    merged: list[dict[str, object]] = []
    for name in reports[0]:
        parts = [report[name] for report in reports]
        rounds = tuple(max(of_round) for of_round in zip(*(part["seconds"] for part in parts), strict=True))
        slowest = timing.Timing(name, rounds, max(part["first"] for part in parts))
        extra: dict[str, object] = {}
        if "num_bytes" in parts[0]:
            extra["MB_sent"] = sum(part["num_bytes"] for part in parts) / 1e6
            extra["messages"] = sum(part["num_messages"] for part in parts)
        merged.append(timing.timing_row(slowest, **extra))
    return merged


def _serve(rank: int, folder: str, options: Options, pipe: Connection) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=options.shape.world_size,
            timeout=timedelta(seconds=_PATIENCE_S),
        )
        pipe.send(_measure(rank, options))
    except Exception as error:  # noqa: BLE001 - the process that asked reports it
        pipe.send(f"{type(error).__name__}: {error}")


def _measure(rank: int, options: Options) -> dict[str, dict[str, Any]]:
    shape = options.shape
    config = Config(
        max_num_tokens=shape.max_num_tokens,
        num_experts=shape.num_experts,
        experts_per_token=shape.experts_per_token,
        hidden=shape.hidden,
        world_size=shape.world_size,
        rank=rank,
        timeout_s=_PATIENCE_S,
    )
    count = shape.max_num_tokens
    tokens = torch.from_numpy(moe_cases.payload(moe_cases.global_ids(shape, rank, count), shape.hidden)).bfloat16()
    ids = torch.from_numpy(moe_cases.random_ids(shape, count, options.seed, rank))
    weights = torch.from_numpy(moe_cases.random_weights(shape, count, options.seed, rank))
    with open_exchange(config, "torch") as exchange:
        variants = {
            "exchange": _sparse(exchange, tokens, ids, weights),
            "padded dense": _Dense(config, tokens, ids, weights).variant(),
        }
        reports: dict[str, dict[str, Any]] = {}
        calls: dict[str, Callable[[], object]] = {}
        for name, variant in variants.items():
            before = variant.sent()
            variant.dispatch()
            between = variant.sent()
            _check(name, variant.combine(), options, rank)
            after = variant.sent()
            for half, call, first, last in (
                ("dispatch", variant.dispatch, before, between),
                ("combine", variant.combine, between, after),
            ):
                calls[f"{name}, {half}"] = call
                reports[f"{name}, {half}"] = {
                    "num_bytes": last[0] - first[0],
                    "num_messages": last[1] - first[1],
                }
        ledger = Ledger(config)
        calls["noting an arrival"] = lambda: ledger.arrive("bench")
        reports["noting an arrival"] = {}
        # Every rank must run the same rounds, so the first measured one sets their number for all.
        repeats = torch.tensor(_affordable(calls, options))
        dist.all_reduce(repeats, op=dist.ReduceOp.MIN)
        for name, measured in timing.interleave(calls, repeats=int(repeats), warmup=1).items():
            reports[name] |= {"seconds": measured.seconds, "first": measured.warmup_seconds}
    return reports


def _affordable(calls: dict[str, Callable[[], object]], options: Options) -> int:
    once = sum(sum(measured.seconds) for measured in timing.interleave(calls, repeats=1, warmup=1).values())
    return max(1, min(options.repeats, int(options.budget_seconds / once)))


def _check(name: str, output: Tensor, options: Options, rank: int) -> None:
    shape, groups = options.shape, range(options.shape.num_groups)
    world = moe.World(shape.world_size, shape.expert_rank)
    count = shape.max_num_tokens
    ids = [moe_cases.random_ids(shape, count, options.seed, group) for group in groups]
    weights = [moe_cases.random_weights(shape, count, options.seed, group) for group in groups]
    tokens = [moe_cases.payload(moe_cases.global_ids(shape, group, count), shape.hidden) for group in groups]
    # Experts are the identity, and no term is negative, so the sum is its own magnitude.
    want = moe.combine(world, moe.dispatch(world, tokens, ids), ids, weights)[rank]
    off = ~(np.abs(output.double().numpy() - want) <= _ROUNDINGS * want + 1e-6)  # not a number never passes
    if off.any():
        token, column = (int(index) for index in np.argwhere(off)[0])
        raise RuntimeError(
            f"{name}: token {token}, column {column} is {output[token, column]}, expected {want[token, column]}"
        )


def _sparse(exchange: Any, tokens: Tensor, ids: Tensor, weights: Tensor) -> _Variant:
    held: list[Any] = [None]

    def dispatch() -> None:
        held[0] = exchange.dispatch(tokens, ids)

    def combine() -> Tensor:
        output: Tensor = exchange.combine(held[0], held[0].rows, weights)
        return output

    return _Variant(dispatch, combine, lambda: (exchange.traffic.num_bytes, exchange.traffic.num_messages))


class _Dense:
    """A slot for every token at every expert: ``[E, M, D]`` there, and the same back."""

    def __init__(self, config: Config, tokens: Tensor, ids: Tensor, weights: Tensor) -> None:
        self.config, self.tokens, self.ids, self.weights = config, tokens, ids, weights
        self.there = tokens.new_zeros(config.num_experts, config.max_num_tokens, config.hidden)
        self.received = torch.empty_like(self.there)
        self.back = torch.empty_like(self.there)
        self.num_bytes = self.num_messages = 0

    def variant(self) -> _Variant:
        return _Variant(self.dispatch, self.combine, lambda: (self.num_bytes, self.num_messages))

    def dispatch(self) -> None:
        token = torch.arange(len(self.tokens))[:, None].expand_as(self.ids)
        self.there[self.ids, token] = self.tokens[token]
        self._all_to_all(self.received, self.there)

    def combine(self) -> Tensor:
        self._all_to_all(self.back, self.received)
        total = torch.zeros(self.tokens.shape)
        token = torch.arange(len(self.tokens))
        for choice in range(self.ids.shape[1]):
            total += self.back[self.ids[:, choice], token].float() * self.weights[:, choice, None]
        return total.bfloat16()

    def _all_to_all(self, out: Tensor, rows: Tensor) -> None:
        others = self.config.world_size - 1
        self.num_bytes += rows.numel() * rows.itemsize * others // self.config.world_size
        self.num_messages += others
        dist.all_to_all_single(out.view(torch.uint8).flatten(), rows.view(torch.uint8).flatten())
