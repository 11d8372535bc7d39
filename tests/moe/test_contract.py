"""The config's rules, and the functions that state a rule each."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ops.moe_comm_gpu import contract
from ops.moe_comm_gpu.contract import Config
from reference import moe

SIZES = {"max_num_tokens": 4, "num_experts": 8, "experts_per_token": 2, "hidden": 16}


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"max_num_tokens": 0}, ValueError, "max_num_tokens: expected at least 1, got 0"),
        ({"hidden": 1.5}, TypeError, "hidden: expected an int, got float"),
        ({"num_experts": True}, TypeError, "num_experts: expected an int, got bool"),
        ({"world_size": 2, "rank": 2}, ValueError, "rank: expected less than world_size = 2, got 2"),
        ({"world_size": 4, "dp_size": 3}, ValueError, "dp_size: expected a divisor of world_size = 4, got 3"),
        ({"in_dtype": torch.int8}, TypeError, "in_dtype: expected one of torch.bfloat16, .*, got torch.int8"),
        ({"out_dtype": torch.float8_e5m2}, TypeError, "out_dtype: expected one of .*, got torch.float8_e5m2"),
        ({"layout": "rows"}, ValueError, "layout: expected one of expert_major, contiguous, got rows"),
        ({"mode": "fast"}, ValueError, "mode: expected one of per_rank, per_expert, got fast"),
        ({"row_multiple": 4}, ValueError, "row_multiple: expected 1 in layout .*, got 4; choose capacity"),
        ({"scale_block": 0}, ValueError, "scale_block: expected at least 1, got 0"),
        ({"capacity": -1}, ValueError, "capacity: expected at least 1, got -1"),
        ({"timeout_s": 0}, ValueError, "timeout_s: expected a positive number of seconds, got 0"),
        ({"expert_map": [0] * 8}, TypeError, "expert_map: expected a tuple of ranks, got list"),
        ({"expert_map": (0,) * 7}, ValueError, "expert_map: expected one rank for each of 8 experts, got 7"),
        ({"expert_map": (0,) * 7 + (1,)}, ValueError, "expert_map: expected ranks 0 to 0, got 1 for expert 7"),
    ],
)
def test_what_a_config_refuses(changes, error, words):
    with pytest.raises(error, match=words):
        Config(**(SIZES | changes))


def test_experts_in_blocks():
    config = Config(**(SIZES | {"num_experts": 10, "world_size": 4}))
    assert config.expert_rank == moe.blocks(10, 4) == (0, 0, 0, 1, 1, 1, 2, 2, 2, 3)
    assert config.expert_slot == (0, 1, 2, 0, 1, 2, 0, 1, 2, 0)
    assert config.num_local_experts == 3
    assert config.local_experts(3) == (9,)


def test_experts_by_map():
    config = Config(**(SIZES | {"num_experts": 4, "world_size": 3, "expert_map": (2, 0, 2, 2)}))
    assert config.num_local_experts == 3
    assert config.local_experts(2) == (0, 2, 3)
    assert config.local_experts(1) == ()
    assert config.expert_slot == (0, 0, 1, 2)


def test_room():
    config = Config(**(SIZES | {"world_size": 4, "dp_size": 2}))
    assert config.rows_prefix == (2, 8)
    assert config.num_rows == 16
    contiguous = Config(**(SIZES | {"world_size": 4, "layout": "contiguous", "row_multiple": 16}))
    assert contiguous.rows_prefix == (64,)  # 16 tokens, 2 experts each, and 2 * 15 to round up: 62, rounded up
    assert contiguous.num_rows == 64


@given(counts=st.lists(st.integers(0, 20), min_size=1, max_size=6), multiple=st.sampled_from([1, 4, 16]))
def test_the_default_room_is_enough(counts, multiple):
    # Any counts that distinct choices can give one rank: at most one row per token and expert, J rows per token.
    tokens, choices = max(counts) or 1, 3
    config = Config(
        max_num_tokens=tokens, num_experts=len(counts), experts_per_token=choices, hidden=8, layout="contiguous",
        row_multiple=multiple,
    )  # fmt: skip
    if sum(counts) <= tokens * min(choices, len(counts)):
        contract.check_capacity(config, counts)


def test_ids_become_int32_with_one_mark_for_dropped():
    ids = torch.tensor([[0, 7], [-1, 8], [2**31, -5]])
    assert contract.normalise_ids(ids, 8).tolist() == [[0, 7], [-1, -1], [-1, -1]]
    unsigned = torch.tensor([[0, -1]], dtype=torch.int32).view(torch.uint32)
    assert contract.normalise_ids(unsigned, 8).tolist() == [[0, -1]]
    assert contract.normalise_ids(ids, 8, bound=torch.tensor([1])).tolist() == [[0, 7], [-1, -1], [-1, -1]]
    assert contract.normalise_ids(ids, 8).dtype == torch.int32


@pytest.mark.parametrize("dtype", contract.ID_DTYPES)
def test_ids_out_of_range_are_named_when_asked(dtype):
    def of(values: list[list[int]]) -> torch.Tensor:
        ids = torch.tensor(values, dtype=torch.int32)
        return ids.view(torch.uint32) if dtype == torch.uint32 else ids.to(dtype)

    contract.check_id_range(of([[0, 7], [-1, 3]]), 8)
    with pytest.raises(ValueError, match=r"ids: expected -1 \(dropped\) or 0 to 7, got 8 at token 1, choice 0"):
        contract.check_id_range(of([[0, 7], [8, 3]]), 8)
    with pytest.raises(ValueError, match="ids: expected"):
        contract.check_id_range(of([[0, -2]]), 8)


@pytest.mark.parametrize("dtype", contract.FLOAT8)
@pytest.mark.parametrize(("hidden", "block"), [(256, 128), (136, 128), (40, 8), (7, 16)])
def test_quantised_rows_restore_their_values(dtype, hidden, block):
    tokens = torch.randn(5, hidden, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, 5)[:, None]
    tokens[2] = 0
    rows, scales = contract.quantise(tokens, dtype, block)
    assert rows.dtype == dtype
    assert scales.shape == (5, -(-hidden // block))
    restored = rows.float() * scales.repeat_interleave(block, dim=1)[:, :hidden]
    peak = torch.nn.functional.pad(tokens.abs(), (0, scales.shape[1] * block - hidden)).reshape(5, -1, block).amax(-1)
    # Half a step of the type, or of its smallest numbers, each scaled.
    relative = {torch.float8_e4m3fn: 2**-4, torch.float8_e5m2: 2**-3}[dtype]
    smallest = {torch.float8_e4m3fn: 2**-10, torch.float8_e5m2: 2**-17}[dtype]
    bound = tokens.abs() * relative + (scales * smallest).repeat_interleave(block, dim=1)[:, :hidden]
    assert torch.all((restored - tokens).abs() <= bound * 1.0001)
    assert torch.equal(scales[2], torch.ones_like(scales[2]))
    largest = (rows.float().abs() * scales.repeat_interleave(block, dim=1)[:, :hidden]).amax(dim=1)
    assert torch.allclose(largest, peak.amax(dim=1), rtol=1e-6)


def test_importing_the_package_loads_no_framework():
    code = "import sys, ops.moe_comm_gpu; assert not {'torch', 'numpy', 'triton', 'nvshmem'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_package_names_what_it_offers():
    import ops.moe_comm_gpu as package

    assert all(getattr(package, name) is not None for name in package.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'Confg'"):
        package.Confg  # noqa: B018
