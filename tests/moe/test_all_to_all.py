"""The published signature, used as its own test uses it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from ops.moe_comm_gpu import AllToAll, Config
from ops.moe_comm_gpu import all_to_all as module
from ops.moe_comm_gpu.kernels.layout import Layout
from reference import moe
from reference.moe_cases import Shape
from tests.moe import tolerances
from tests.moe.strategies import Case, full
from tests.moe.workers import workers

POISON = 77.0


def _exchange(rank: int, group: Any, case: Case, split: bool) -> dict[str, np.ndarray]:
    shape: Shape = case.shape
    in_dtype, out_dtype = getattr(torch, case.in_dtype), getattr(torch, case.out_dtype)
    num_scales = 0 if case.scale_block is None else -(-shape.hidden // case.scale_block)
    make = AllToAll.intranode if split else AllToAll.internode
    all_to_all = make(
        max_num_tokens=shape.max_num_tokens,
        num_experts=shape.num_experts,
        experts_per_token=shape.experts_per_token,
        rank=rank,
        world_size=shape.world_size,
        dp_size=shape.dp_size,
        hidden_dim=shape.hidden,
        hidden_dim_bytes=shape.hidden * in_dtype.itemsize,
        hidden_dim_scale_bytes=num_scales * 4,
        backend="torch",
        group=group,
    )
    local = -(-shape.num_experts // shape.world_size)
    room = shape.max_num_tokens * shape.num_groups
    counts = torch.full((local,), -7, dtype=torch.int32)
    rows = torch.full((local, room, shape.hidden), POISON).to(in_dtype)
    scales = torch.full((local, room, num_scales), POISON) if num_scales else None
    my_group = rank // shape.dp_size
    tokens = torch.from_numpy(case.payload(my_group)).to(in_dtype)
    token_scales = None if case.scales(my_group) is None else torch.from_numpy(case.scales(my_group))
    ids = torch.from_numpy(case.ids(my_group)).to(torch.int32).view(torch.uint32)
    bound = torch.tensor([len(tokens)], dtype=torch.int32).view(torch.uint32)
    output = torch.full((shape.max_num_tokens, shape.hidden), POISON, dtype=out_dtype)
    halves = [(True, False), (False, True)] if split else [(True, True)]
    for send, recv in halves:
        all_to_all.dispatch(counts, rows, scales, tokens, token_scales, ids, bound, do_send=send, do_recv=recv)
    expert_rows = (rows.float() * 0.5).to(out_dtype)
    weights = torch.from_numpy(case.weights(my_group))
    for send, recv in halves:
        all_to_all.combine(output, ids, weights, expert_rows, bound, do_send=send, do_recv=recv)
    all_to_all.destroy()
    with pytest.raises(RuntimeError, match="closed"):
        all_to_all.dispatch(counts, rows, scales, tokens, token_scales, ids, bound)
    return {
        "counts": counts.numpy(),
        "rows": rows.float().numpy(),
        "scales": np.zeros(0) if scales is None else scales.numpy(),
        "output": output.float().numpy(),
    }


@pytest.mark.parametrize("split", [True, False], ids=["in halves", "whole"])
@pytest.mark.parametrize(("in_dtype", "out_dtype"), [("float16", "bfloat16"), ("float8_e5m2", "float16")])
@pytest.mark.parametrize("shape", ["published_small", "uneven_experts"])
def test_the_published_calls(shape, in_dtype, out_dtype, split):
    block = 128 if in_dtype == "float8_e5m2" else None
    case = full(shape, in_dtype=in_dtype, out_dtype=out_dtype, scale_block=block, seed=4)
    sizes = case.shape
    seen = workers().run(_exchange, [(case, split)] * sizes.world_size)
    world = moe.World(sizes.world_size, sizes.expert_rank, sizes.dp_size)
    groups = range(sizes.num_groups)
    ids = [case.ids(group) for group in groups]
    weights = [case.weights(group) for group in groups]
    expert_rows = moe.dispatch(world, [case.payload(group) for group in groups], ids)
    halved = [rows * 0.5 for rows in expert_rows]
    outputs = moe.combine(world, halved, ids, weights)
    for rank, got in enumerate(seen):
        for slot, expert in enumerate(world.experts_of(rank)):
            count = len(expert_rows[expert])
            assert got["counts"][slot] == count
            assert np.array_equal(got["rows"][slot, :count], expert_rows[expert])
            untouched = torch.tensor(POISON).to(getattr(torch, in_dtype)).item()
            assert np.all(got["rows"][slot, count:] == untouched)
        want = outputs[rank // sizes.dp_size]
        bound = tolerances.allowed("output", out_dtype, np.abs(want), sizes.experts_per_token)
        tolerances.check("output", got["output"][: len(want)], want, bound, f"rank {rank}")


def make(**changes: Any) -> AllToAll:
    """A world of one."""
    arguments = {
        "max_num_tokens": 4, "num_experts": 2, "experts_per_token": 1, "rank": 0, "world_size": 1, "dp_size": 1,
        "hidden_dim": 16, "hidden_dim_bytes": 32, "hidden_dim_scale_bytes": 0, "backend": "torch",
    }  # fmt: skip
    return AllToAll.intranode(**(arguments | changes))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_dim_bytes": 33}, "hidden_dim_bytes: expected 1, 2 or 4 times hidden_dim = 16, got 33"),
        ({"hidden_dim_bytes": 128}, "hidden_dim_bytes: expected 1, 2 or 4 times"),
        ({"hidden_dim_scale_bytes": 6}, "hidden_dim_scale_bytes: expected 0, or 4 bytes for each block"),
        ({"hidden_dim_scale_bytes": 4 * 11}, "hidden_dim_scale_bytes: expected 0, or 4 bytes for each block"),
        ({"dp_size": 2}, "dp_size: expected a divisor of world_size = 1, got 2"),
    ],
)
def test_sizes_that_are_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        make(**changes)


@pytest.mark.parametrize(("hidden", "block"), [(7168, 128), (136, 128), (2880, 128), (16, 16), (3584, 64)])
def test_scale_bytes_of_usual_blocks(hidden, block):
    num_scales = -(-hidden // block)
    exchange = make(hidden_dim=hidden, hidden_dim_bytes=hidden, hidden_dim_scale_bytes=4 * num_scales).exchange
    assert exchange.config.num_scales == num_scales


def test_halves_in_the_wrong_order():
    exchange = make()
    counts, rows = torch.zeros(2, dtype=torch.int32), torch.zeros(2, 4, 16, dtype=torch.bfloat16)
    tokens, ids = torch.ones(1, 16, dtype=torch.bfloat16), torch.zeros(1, 1, dtype=torch.int32)
    with pytest.raises(RuntimeError, match="do_recv needs an earlier call with do_send"):
        exchange.dispatch(counts, rows, None, tokens, None, ids, None, do_send=False)
    with pytest.raises(RuntimeError, match="combine: expected a dispatch before it"):
        exchange.combine(tokens, ids, torch.ones(1, 1), rows, None)
    exchange.dispatch(counts, rows, None, tokens, None, ids, None)
    with pytest.raises(ValueError, match=r"indices: expected shape \[1, 1\] as in dispatch, got \[2, 1\]"):
        exchange.combine(tokens, torch.zeros(2, 1, dtype=torch.int32), torch.ones(2, 1), rows, None)
    with pytest.raises(RuntimeError, match="do_recv needs an earlier call with do_send"):
        exchange.combine(tokens, ids, torch.ones(1, 1), rows, None, do_send=False)


def test_symmetric_memory_is_known_from_the_beginning():
    all_to_all = make(backend="nvshmem_emulated")
    held = all_to_all.exchange.symmetric_bytes
    assert held == Layout.of(all_to_all.exchange.config).symmetric_bytes > 0
    counts, rows = torch.zeros(2, dtype=torch.int32), torch.zeros(2, 4, 16, dtype=torch.bfloat16)
    tokens, ids = torch.ones(1, 16, dtype=torch.bfloat16), torch.zeros(1, 1, dtype=torch.int32)
    output = torch.zeros(1, 16, dtype=torch.bfloat16)
    all_to_all.dispatch(counts, rows, None, tokens, None, ids, None)
    all_to_all.combine(output, ids, torch.full((1, 1), 0.5), rows, None)
    assert torch.equal(output, torch.full((1, 16), 0.5).bfloat16())
    assert all_to_all.exchange.symmetric_bytes == held
    all_to_all.destroy()


def test_symmetric_memory_of_the_published_sizes():
    """What the class says of it."""
    sizes = {"max_num_tokens": 128, "num_experts": 256, "experts_per_token": 8, "world_size": 8, "hidden_dim": 7168}
    seen: list[Config] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "open_exchange", lambda config, backend, **_: seen.append(config))
        make(**sizes, hidden_dim_bytes=2 * 7168)
    (config,) = seen
    late, early = (
        Layout.of(replace(config, late_weights=late)).symmetric_bytes for late in (config.late_weights, False)
    )
    assert (round(late / 2**20), round(early / 2**20)) == (142, 44)
    assert "142 MiB at 128 tokens" in AllToAll.__doc__
    assert "it 44)" in AllToAll.__doc__
