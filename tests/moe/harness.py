"""Runs a case on a backend and holds every row, count and sum it yields against the float64 reference."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ops import registry
from ops.moe_comm_gpu.batch import Handle, RowTensors
from ops.moe_comm_gpu.exchange import Exchange
from reference import moe, moe_cases
from tests.moe import tolerances
from tests.moe.strategies import Case, expert_factor
from tests.moe.workers import workers

POISON = 77.0  # in places that must stay untouched; exact in every type


@dataclass
class Observation:
    """What one rank saw of one batch, as numpy arrays."""

    rows: np.ndarray  # [N, D]
    scales: np.ndarray | None  # [N, S]
    tokens_per_expert: np.ndarray  # [L]
    offsets: np.ndarray  # [L + 1]
    source: np.ndarray  # [N, 3]: rank, token, choice
    row_weights: np.ndarray | None  # [N]
    output: np.ndarray  # [T, D]
    d_tokens: np.ndarray | None = None
    d_expert_rows: np.ndarray | None = None  # [N, D]
    d_weights: np.ndarray | None = None


def usable_backends() -> list[str]:
    """Rows of the registry that run here, by themselves or on request, but for the oracle's own arithmetic."""
    return [status.backend.name for status in registry.backends("moe_comm") if status.usable]


def run(case: Case, backend: str) -> None:
    """Runs the case on a backend of the registry and checks it."""
    check(case, observe(case, backend))


def observe(case: Case, backend: str) -> list[list[Observation]]:
    """What every rank saw of every batch, ``[rank][batch]``.

    Args:
        case: what to run.
        backend: a registry row, or ``"module:attribute"`` of a class or function that makes an exchange.
    """
    return workers().run(_observe_rank, [(case, backend)] * case.shape.world_size)


def open_named(backend: str) -> Callable[..., Exchange]:
    """What makes the exchange that a row or a ``"module:attribute"`` names."""
    if ":" in backend:
        module, attribute = backend.split(":")
        return getattr(importlib.import_module(module), attribute)
    return registry.select("moe_comm", backend)


def _observe_rank(rank: int, group: Any, case: Case, backend: str) -> list[Observation]:
    config = case.config(rank)
    with open_named(backend)(config, group=group) as exchange:
        if case.gradient:
            return [_train(case, exchange, batch) for batch in range(case.batches)]
        weights = [_floats(case.weights(config.group, batch)) for batch in range(case.batches)]
        sent = [
            exchange.dispatch_send(
                _tokens(case, config.group, batch),
                _ids(case, config.group, batch),
                scales=_scales(case, config.group),
                weights=weights[batch] if case.weights_early else None,
            )
            for batch in range(case.batches)
        ]
        buffers = [_poisoned(case, config) for _ in sent]
        handles = [exchange.dispatch_recv(request, out) for request, out in zip(sent, buffers, strict=True)]
        outputs = []
        for batch, handle in enumerate(handles):
            early = None if case.weights_early else weights[batch]
            request = exchange.combine_send(handle, _apply_experts(case, handle), early)
            outputs.append(exchange.combine_recv(request, **_addends(case, config.group)))
        return [_observation(handle, output) for handle, output in zip(handles, outputs, strict=True)]


def _train(case: Case, exchange: Exchange, batch: int) -> Observation:
    group, dtype = exchange.config.group, exchange.config.out_dtype
    tokens = _tokens(case, group, batch).requires_grad_()
    weights = _floats(case.weights(group, batch)).requires_grad_()
    early = {"weights": weights} if case.weights_early else {}
    handle = exchange.dispatch(tokens, _ids(case, group, batch), scales=_scales(case, group), **early)
    expert_rows = _apply_experts(case, handle)
    expert_rows.retain_grad()
    bias = _floats(case.addend(group, "bias")).to(dtype).requires_grad_() if case.bias else None
    output = exchange.combine(handle, expert_rows, None if case.weights_early else weights, bias=bias)
    cotangent = _floats(case.addend(group, "cotangent")).to(dtype)
    output.backward(cotangent)
    if bias is not None:
        assert bias.grad is not None
        assert torch.equal(bias.grad, cotangent)
    observation = _observation(handle, output)
    observation.d_tokens = _gradient(tokens)
    observation.d_weights = _gradient(weights)
    assert expert_rows.grad is not None
    observation.d_expert_rows = expert_rows.grad.float().numpy().reshape(exchange.config.num_rows, -1)
    return observation


def _gradient(tensor: torch.Tensor) -> np.ndarray:
    assert tensor.grad is not None, "a gradient is missing"
    return tensor.grad.float().numpy()


def _apply_experts(case: Case, handle: Handle) -> torch.Tensor:
    """Each row times its expert's factor; not a number wherever there is no row."""
    config = handle.config
    rows = handle.rows.reshape(config.num_rows, config.hidden).float()
    factor = torch.full((config.num_rows, 1), float("nan"))
    for slot, expert in enumerate(config.local_experts()):
        start = int(handle.offsets[slot])
        factor[start : start + int(handle.tokens_per_expert[slot])] = expert_factor(expert)
    rows = torch.where(factor.isnan(), torch.nan, rows * factor)
    return rows.to(config.out_dtype).reshape(*config.rows_prefix, config.hidden)


def _observation(handle: Handle, output: torch.Tensor) -> Observation:
    config = handle.config
    source = torch.stack([handle.source_rank, handle.source_token, handle.source_choice], dim=-1)

    def flat(tensor: torch.Tensor) -> np.ndarray:
        return tensor.detach().reshape(config.num_rows, -1).float().numpy()

    return Observation(
        rows=flat(handle.rows),
        scales=None if handle.scales is None else flat(handle.scales),
        tokens_per_expert=handle.tokens_per_expert.numpy(),
        offsets=handle.offsets.numpy(),
        source=source.reshape(config.num_rows, 3).numpy(),
        row_weights=None if handle.row_weights is None else flat(handle.row_weights)[:, 0],
        output=output.detach().float().numpy(),
    )


def _floats(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array, dtype=np.float32))


def _tokens(case: Case, group: int, batch: int) -> torch.Tensor:
    return _floats(case.payload(group, batch)).to(getattr(torch, case.in_dtype))


def _scales(case: Case, group: int) -> torch.Tensor | None:
    scales = case.scales(group)
    return None if scales is None else _floats(scales)


def _ids(case: Case, group: int, batch: int) -> torch.Tensor:
    ids = torch.from_numpy(case.ids(group, batch))
    if case.id_dtype == "uint32":
        return ids.to(torch.int32).view(torch.uint32)
    return ids.to(getattr(torch, case.id_dtype))


def _poisoned(case: Case, config: Any) -> RowTensors:
    prefix = config.rows_prefix
    scales = torch.full((*prefix, config.num_scales), POISON) if config.num_scales else None
    rows = torch.full((*prefix, config.hidden), POISON).to(config.in_dtype)
    return RowTensors(rows, scales, torch.full((config.num_local_experts,), 77, dtype=torch.int32))


def _addends(case: Case, group: int) -> dict[str, Any]:
    dtype = getattr(torch, case.out_dtype)
    addends: dict[str, Any] = {}
    if case.bias:
        addends["bias"] = _floats(case.addend(group, "bias")).to(dtype)
    if case.accumulate:
        addends |= {"out": _floats(case.addend(group, "accumulate")).to(dtype), "accumulate": True}
    return addends


def check(case: Case, observed: list[list[Observation]]) -> None:
    """Every row of every rank and batch, then every sum, then every gradient.

    Raises:
        AssertionError: names the rank, the expert, the row, and whose row it is.
    """
    for batch in range(case.batches):
        _check_batch(case, batch, [of_rank[batch] for of_rank in observed])


def _check_batch(case: Case, batch: int, observed: list[Observation]) -> None:
    shape = case.shape
    world = moe.World(shape.world_size, shape.expert_rank, shape.dp_size)
    groups = range(shape.num_groups)
    ids = [case.ids(group, batch) for group in groups]
    weights = [case.weights(group, batch) for group in groups]
    expert_rows = moe.dispatch(world, [case.payload(group, batch) for group in groups], ids)
    for rank, seen in enumerate(observed):
        _check_rows(case, batch, world, rank, seen)
    expert_rows = [rows.astype(np.float64) * expert_factor(expert) for expert, rows in enumerate(expert_rows)]
    outputs = moe.combine(world, expert_rows, ids, weights)
    magnitudes = moe.combine(world, [np.abs(rows) for rows in expert_rows], ids, weights)
    for rank, seen in enumerate(observed):
        group = rank // shape.dp_size
        want, magnitude = outputs[group].copy(), magnitudes[group].copy()
        for what in ("bias", "accumulate"):
            if getattr(case, what):
                addend = _rounded(case.addend(group, what), case.out_dtype)
                want += addend
                magnitude += np.abs(addend)
        bound = tolerances.allowed("output", case.out_dtype, magnitude, shape.experts_per_token)
        tolerances.check("output", seen.output, want, bound, f"rank {rank}, batch {batch}")
    if case.gradient:
        _check_gradients(case, batch, world, expert_rows, observed)


def _check_rows(case: Case, batch: int, world: moe.World, rank: int, seen: Observation) -> None:
    shape = case.shape
    groups = range(shape.num_groups)
    table = moe.sources(world, [case.ids(group, batch) for group in groups])
    rows = moe.dispatch(
        world, [case.payload(group, batch) for group in groups], [case.ids(group, batch) for group in groups]
    )
    experts = world.experts_of(rank)
    counts = [len(table[expert].rank) for expert in experts]
    counts += [0] * (len(seen.tokens_per_expert) - len(counts))
    assert seen.tokens_per_expert.tolist() == counts, (
        f"rank {rank}, batch {batch}: rows of each expert are {seen.tokens_per_expert.tolist()}, expected {counts}"
    )
    capacity = len(seen.rows) // len(counts)
    starts = [slot * capacity for slot in range(len(counts) + 1)]
    if case.layout == "contiguous":
        starts = moe.first_rows(counts, case.row_multiple)
    assert seen.offsets.tolist() == starts, f"rank {rank}: offsets are {seen.offsets.tolist()}, expected {starts}"
    unused = np.ones(len(seen.rows), dtype=bool)
    for start, expert in zip(starts, experts, strict=False):
        source = table[expert]
        for index, (source_rank, token, choice) in enumerate(
            zip(source.rank, source.token, source.choice, strict=True)
        ):
            place, group = start + index, source_rank // shape.dp_size
            where = f"rank {rank}, batch {batch}, expert {expert}, row {index}"
            unused[place] = False
            _same_row(where, seen.rows[place], rows[expert][index], case)
            assert tuple(seen.source[place]) == (source_rank, token, choice), (
                f"{where}: source is {tuple(seen.source[place])}, expected {(source_rank, token, choice)}"
            )
            scales = case.scales(group)
            if scales is not None:
                assert seen.scales is not None
                assert np.array_equal(seen.scales[place], scales[token]), f"{where}: scales of another token"
            if case.weights_early and seen.row_weights is not None:
                assert seen.row_weights[place] == case.weights(group, batch)[token, choice], f"{where}: another weight"
    assert np.all(seen.source[unused] == -1), f"rank {rank}, batch {batch}: a source where there is no row"
    if not case.gradient:
        assert np.all(seen.rows[unused] == _rounded(np.float32(POISON), case.in_dtype)), (
            f"rank {rank}, batch {batch}: a place without a row was written"
        )


def _same_row(where: str, got: np.ndarray, want: np.ndarray, case: Case) -> None:
    if not np.array_equal(got, want):
        column = int(np.argmax(got != want))
        token, layer = (moe_cases.payload_id(row) if np.isfinite(row).all() else None for row in (got, want))
        raise AssertionError(f"{where}: holds (token, layer) {token}, expected {layer}; first off in column {column}")


def _rounded(array: np.ndarray, dtype: str) -> np.ndarray:
    return torch.from_numpy(np.asarray(array)).to(getattr(torch, dtype)).double().numpy()


def _check_gradients(
    case: Case, batch: int, world: moe.World, expert_rows: list[np.ndarray], observed: list[Observation]
) -> None:
    shape = case.shape
    groups = range(shape.num_groups)
    ids = [case.ids(group, batch) for group in groups]
    weights = [case.weights(group, batch) for group in groups]
    cotangents = [_rounded(case.addend(group, "cotangent"), case.out_dtype) for group in groups]
    d_expert_rows, d_weights = moe.combine_gradient(world, expert_rows, ids, weights, cotangents)
    absolute = [np.abs(rows) for rows in expert_rows], ids, weights, [np.abs(rows) for rows in cotangents]
    large_rows, large_weights = moe.combine_gradient(world, *absolute)
    factors = [expert_factor(expert) for expert in range(shape.num_experts)]
    d_rows = [rows * factor for rows, factor in zip(d_expert_rows, factors, strict=True)]
    d_tokens = moe.dispatch_gradient(world, d_rows, ids)
    large_tokens = moe.dispatch_gradient(
        world, [rows * abs(factor) for rows, factor in zip(large_rows, factors, strict=True)], ids
    )
    coarse = max(case.in_dtype, case.out_dtype, key=tolerances.UNIT_ROUNDOFF.__getitem__)
    for rank, seen in enumerate(observed):
        group, where = rank // shape.dp_size, f"rank {rank}, batch {batch}"
        assert seen.d_expert_rows is not None
        for slot, expert in enumerate(world.experts_of(rank)):
            start = int(seen.offsets[slot])
            got = seen.d_expert_rows[start : start + len(d_expert_rows[expert])]
            bound = tolerances.allowed("d_expert_rows", case.out_dtype, large_rows[expert], 1)
            tolerances.check("d_expert_rows", got, d_expert_rows[expert], bound, f"{where}, expert {expert}")
        assert seen.d_tokens is not None
        bound = tolerances.allowed("d_tokens", coarse, large_tokens[group], shape.experts_per_token)
        tolerances.check("d_tokens", seen.d_tokens, d_tokens[group], bound, where)
        assert seen.d_weights is not None
        bound = tolerances.allowed("d_weights", case.out_dtype, large_weights[group], shape.hidden)
        tolerances.check("d_weights", seen.d_weights, d_weights[group], bound, where)
