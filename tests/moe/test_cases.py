"""Named cases: the published test's matrix, faults that exchanges of this kind are known for, and ordinary extremes."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from ops.moe_comm_gpu import autograd
from ops.moe_comm_gpu.contract import Config
from ops.moe_comm_gpu.exchange import Exchange, open_exchange
from ops.moe_comm_gpu.torch_backend import Exchange as TorchExchange
from reference import moe_cases
from reference.moe_cases import Shape
from tests.moe import harness
from tests.moe.strategies import Case, full
from tests.moe.workers import workers

BACKENDS = harness.usable_backends()
every_backend = pytest.mark.parametrize("backend", BACKENDS)


def run(case: Case, backend: str) -> None:
    """Runs the case, or says that an emulation would take long."""
    if backend == "nvshmem_emulated" and not case.small():
        pytest.skip("too large for the emulation")
    harness.run(case, backend)


# The published test's matrix.


@pytest.mark.parametrize("out_dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("in_dtype", ["bfloat16", "float16", "float8_e4m3fn"])
@pytest.mark.parametrize("shape", ["published_small", "published_large"])
@every_backend
def test_published_matrix(backend, shape, in_dtype, out_dtype):
    block = 128 if in_dtype == "float8_e4m3fn" else None
    run(full(shape, in_dtype=in_dtype, out_dtype=out_dtype, scale_block=block, id_dtype="uint32"), backend)


# Ids.


@pytest.mark.parametrize("id_dtype", ["int32", "int64", "uint32"])
@every_backend
def test_every_id_type_gives_the_same(backend, id_dtype):
    run(full("six_of_eight", id_dtype=id_dtype, routing="dropped", seed=14), backend)


@every_backend
def test_dropped_choices(backend):
    exchange = open_exchange(
        Config(max_num_tokens=2, num_experts=2, experts_per_token=2, hidden=8, out_dtype=torch.float32), backend
    )
    with exchange:
        tokens = torch.arange(16.0).reshape(2, 8).to(torch.bfloat16)
        handle = exchange.dispatch(tokens, torch.tensor([[0, -1], [-1, -1]]))
        assert handle.tokens_per_expert.tolist() == [1, 0]
        assert torch.equal(handle.rows[0, 0], tokens[0])
        output = exchange.combine(handle, handle.rows.float(), torch.full((2, 2), 0.5))
        assert torch.equal(output, torch.stack([tokens[0].float() * 0.5, torch.zeros(8)]))


@pytest.mark.parametrize("routing", ["out_of_range", "duplicates", "one_expert"])
@pytest.mark.parametrize("layout", ["expert_major", "contiguous"])
@every_backend
def test_routing_at_the_edges(backend, routing, layout):
    multiple = 1 if layout == "expert_major" else 8
    run(full("uneven_experts", routing=routing, layout=layout, row_multiple=multiple), backend)


# Tokens.


@every_backend
def test_a_rank_without_tokens_gets_everyone_elses(backend):
    shape = Shape(6, 6, 32, 4, 4, expert_map=(0,) * 6)
    case = Case(shape, (0, 4, 4, 4), gradient=False)
    run(case, backend)
    if backend == "torch":
        seen = [batches[0] for batches in harness.observe(case, backend)]
        assert [int(of_rank.tokens_per_expert.sum()) for of_rank in seen] == [72, 0, 0, 0]
        assert seen[0].output.shape == (0, 32)


@pytest.mark.parametrize(
    "num_tokens", [(0, 0, 0, 0), (1, 0, 0, 0), (0, 6, 0, 6)], ids=["nobody", "one token", "every other rank"]
)
@pytest.mark.parametrize("gradient", [False, True])
@every_backend
def test_empty_ranks(backend, num_tokens, gradient):
    run(Case(moe_cases.SHAPES["uneven_experts"], num_tokens, gradient=gradient), backend)


@every_backend
def test_identity_experts_return_the_sum_of_the_weights(backend):
    with open_exchange(
        Config(max_num_tokens=1, num_experts=2, experts_per_token=2, hidden=16, out_dtype=torch.float32), backend
    ) as exchange:
        tokens = torch.arange(16.0)[None].to(torch.bfloat16)
        weights = torch.tensor([[0.25, 0.5]])
        for early in ({"weights": weights}, {}):
            handle = exchange.dispatch(tokens, torch.tensor([[0, 1]]), **early)
            output = exchange.combine(handle, handle.rows.float(), None if early else weights)
            assert torch.equal(output, 0.75 * tokens.float())  # 0.3125 were they applied twice


@pytest.mark.parametrize(
    "shape", ["all_replicated", "published_small", "redundant_experts", "fewer_experts_than_ranks"]
)
@pytest.mark.parametrize("gradient", [False, True])
@every_backend
def test_groups_and_placements(backend, shape, gradient):
    run(full(shape, gradient=gradient, batches=2, weights_early=True), backend)


@pytest.mark.parametrize("hidden", [136, 2880, 3584])
@pytest.mark.parametrize(
    ("in_dtype", "scale_block"), [("bfloat16", None), ("float8_e4m3fn", 128), ("float8_e5m2", 128)]
)
def test_hidden_sizes(hidden, in_dtype, scale_block):
    run(full(f"hidden_{hidden}", in_dtype=in_dtype, scale_block=scale_block), "torch")


def test_full_capacity_again_and_again():
    run(full("full_256", batches=2, accumulate=True), "torch")


@every_backend
def test_one_rank(backend):
    run(full("one_rank", gradient=True), backend)
    run(full("one_rank", routing="dropped", layout="contiguous", row_multiple=4, bias=True), backend)


@every_backend
@pytest.mark.parametrize("weights_early", [False, True])
def test_the_handle_owns_its_routing(backend, weights_early):
    """A router may write its next batch into the same tensors before this one is combined."""
    config = Config(max_num_tokens=3, num_experts=4, experts_per_token=2, hidden=16)
    tokens = torch.arange(48).reshape(3, 16).bfloat16()
    ids, weights, bound = torch.tensor([[0, 1], [2, 3], [3, 0]]), torch.tensor([[0.5, 0.25]] * 3), torch.tensor(2)
    with harness.open_named(backend)(config) as exchange:
        handle = exchange.dispatch(tokens, ids, bound=bound, weights=weights if weights_early else None)
        ids.fill_(-1)
        bound.fill_(3)
        if weights_early:
            weights.zero_()
        pending = exchange.combine_send(handle, handle.rows, None if weights_early else weights)
        weights.zero_()
        output = exchange.combine_recv(pending)
    expected = 0.75 * tokens
    expected[2] = 0  # behind the bound
    torch.testing.assert_close(output, expected, rtol=1e-2, atol=0)


@every_backend
def test_two_batches_never_mix(backend):
    run(full("two_ranks", batches=2, seed=22, weights_early=True), backend)


# The order of calls.


class Bounded(TorchExchange):
    """As strict as a backend of kernels: as many batches as buffer sets, one combine for each dispatch."""

    reuses_handles = False
    unbounded_batches = False
    _return_scalars = Exchange._return_scalars


@pytest.mark.parametrize("shape", ["published_small", "uneven_experts", "one_rank"])
@pytest.mark.parametrize("weights_early", [False, True])
def test_gradients_of_a_backend_with_buffers(shape, weights_early):
    case = full(shape, gradient=True, weights_early=weights_early, batches=2, out_dtype="float32", seed=3)
    harness.run(case, "tests.moe.test_cases:Bounded")


def _layers(rank: int, group: Any, config: Config, trained: tuple[bool, bool]) -> bool:
    """Two layers in one graph, one buffer set: backward has to alternate as forward does."""
    with Bounded(replace(config, rank=rank), group) as exchange:
        tokens = torch.ones(3, config.hidden, dtype=config.in_dtype, requires_grad=trained[0])
        weights = torch.full((3, 2), 0.5, requires_grad=trained[1])
        ids = torch.tensor([[0, 3], [1, 2], [3, 1]])
        hidden = tokens
        for _ in range(2):
            handle = exchange.dispatch(hidden, ids)
            hidden = exchange.combine(handle, handle.rows * 2, weights)
        hidden.sum().backward()
        for tensor, wanted in zip((tokens, weights), trained, strict=True):
            assert (tensor.grad is not None) == wanted
        if trained[0]:
            assert torch.all(tokens.grad == 4)
        exchange.dispatch(tokens.detach(), ids)  # a buffer set is free again
    return True


@pytest.mark.parametrize("trained", [(True, True), (True, False), (False, True)])
def test_layers_share_one_buffer_set(trained):
    config = Config(max_num_tokens=3, num_experts=4, experts_per_token=2, hidden=16, world_size=2)
    assert workers().run(_layers, [(config, trained)] * 2) == [True] * 2


def test_rows_have_a_gradient_without_that_of_their_combine():
    config = Config(max_num_tokens=2, num_experts=2, experts_per_token=1, hidden=8)
    with Bounded(config) as exchange:
        tokens = torch.ones(2, 8, dtype=torch.bfloat16, requires_grad=True)
        handle = exchange.dispatch(tokens, torch.tensor([[1], [0]]))
        with torch.no_grad():
            exchange.combine(handle, handle.rows, torch.ones(2, 1))
        sent = []
        exchange._dispatch_send = lambda request: sent.append(request) or Bounded._dispatch_send(exchange, request)
        (handle.rows[0, 0] * 3).sum().backward()
        assert tokens.grad[:, 0].tolist() == [0, 3]
        assert len(sent) == 1, "the way back needs a dispatch of its own"


def test_more_batches_than_buffers_are_refused():
    config = Config(max_num_tokens=2, num_experts=2, experts_per_token=1, hidden=8)
    tokens, ids, weights = (
        torch.ones(2, 8, dtype=torch.bfloat16),
        torch.zeros(2, 1, dtype=torch.int32),
        torch.ones(2, 1),
    )
    with Bounded(config) as exchange:
        handle = exchange.dispatch(tokens, ids)
        with pytest.raises(RuntimeError, match=r"1 dispatched but not yet combined, the buffers hold 1; .* = 2"):
            exchange.dispatch(tokens, ids)
        exchange.combine(handle, handle.rows, weights)
        with pytest.raises(RuntimeError, match="combined already"):
            exchange.combine(handle, handle.rows, weights)
        exchange.dispatch(tokens, ids)


def _unused_experts(rank: int, group: Any, config: Config) -> list[Any]:
    with TorchExchange(replace(config, rank=rank), group) as exchange:
        tokens = torch.ones(2, 16, dtype=torch.bfloat16, requires_grad=True)
        handle = exchange.dispatch(tokens, torch.zeros(2, 1, dtype=torch.int32))  # all to rank 0
        rows = handle.rows * 3 if rank == 0 else torch.zeros((*config.rows_prefix, 16), dtype=torch.bfloat16)
        exchange.combine(handle, rows, torch.ones(2, 1)).sum().backward()
        return tokens.grad.unique().tolist()


def test_a_rank_whose_experts_had_nothing_to_do_takes_part_in_backward():
    config = Config(max_num_tokens=2, num_experts=2, experts_per_token=1, hidden=16, world_size=2)
    assert workers().run(_unused_experts, [(config,)] * 2) == [[3.0], [3.0]]


def _many_calls(rank: int, group: Any, config: Config, backend: str, calls: int) -> int:
    """Round trips with changing numbers of tokens; every token must come back as itself."""
    config = replace(config, rank=rank)
    checked = 0
    with harness.open_named(backend)(config, group=group) as exchange:
        for call in range(calls):
            rng = np.random.default_rng((call, config.group))
            count = int(rng.integers(0, config.max_num_tokens + 1))
            rows = moe_cases.payload(config.group * 32 + np.arange(count), config.hidden, layer=call % 64)
            tokens = torch.from_numpy(rows).to(config.in_dtype)
            ids = torch.from_numpy(rng.integers(0, config.num_experts, (count, config.experts_per_token)))
            handle = exchange.dispatch(tokens, ids)
            weights = torch.full((count, config.experts_per_token), 1 / config.experts_per_token)
            output = exchange.combine(handle, handle.rows.float(), weights)
            assert torch.equal(output, tokens.float()), f"call {call}"
            checked += count
    return checked


@pytest.mark.parametrize("calls", [50, pytest.param(1000, marks=pytest.mark.slow)])
def test_many_calls_on_one_exchange(calls):
    config = Config(
        max_num_tokens=12, num_experts=6, experts_per_token=2, hidden=32, world_size=4, dp_size=2,
        out_dtype=torch.float32, in_dtype=torch.bfloat16, capacity=48,
    )  # fmt: skip
    checked = workers().run(_many_calls, [(config, "torch", calls)] * 4, timeout_s=300)
    assert sum(checked) > 10 * calls


def _cycles(rank: int, group: Any, config: Config, cycles: int) -> int:
    import torch.distributed as dist

    store = dist.distributed_c10d._get_default_store()
    sizes = []
    for _ in range(cycles):
        with TorchExchange(replace(config, rank=rank), group) as exchange:
            exchange.dispatch(torch.ones(1, 8, dtype=torch.bfloat16), torch.zeros(1, 1, dtype=torch.int32))
        sizes.append(store.num_keys())
    return max(sizes[-5:]) - max(sizes[:5])


@pytest.mark.parametrize("cycles", [20, pytest.param(100, marks=pytest.mark.slow)])
def test_exchanges_made_and_closed(cycles):
    config = Config(max_num_tokens=1, num_experts=2, experts_per_token=1, hidden=8, world_size=2)
    grown = workers().run(_cycles, [(config, cycles)] * 2)
    assert max(grown) <= 10 * cycles


def _quantised(rank: int, group: Any, config: Config) -> None:
    from ops.moe_comm_gpu import contract

    config = replace(config, rank=rank)
    tokens = torch.randn(3, 136, generator=torch.Generator().manual_seed(rank)).to(torch.bfloat16)
    ids = torch.full((3, 1), 1 - rank)
    with TorchExchange(config, group) as exchange:
        handle = exchange.dispatch(tokens, ids)
        other = torch.randn(3, 136, generator=torch.Generator().manual_seed(1 - rank)).to(torch.bfloat16)
        rows, scales = contract.quantise(other, torch.float8_e4m3fn, 128)
        assert handle.rows.dtype == torch.float8_e4m3fn
        assert torch.equal(handle.rows[0, :3].view(torch.uint8), rows.view(torch.uint8))
        assert torch.equal(handle.scales[0, :3], scales)


def test_tokens_are_quantised_on_the_way():
    config = Config(
        max_num_tokens=3, num_experts=2, experts_per_token=1, hidden=136, world_size=2, scale_block=128,
        in_dtype=torch.float8_e4m3fn,
    )  # fmt: skip
    workers().run(_quantised, [(config,)] * 2)


@every_backend
def test_bound_counts_the_leading_tokens(backend):
    config = Config(max_num_tokens=4, num_experts=2, experts_per_token=1, hidden=8, out_dtype=torch.float32)
    with open_exchange(config, backend) as exchange:
        tokens = torch.arange(1.0, 33).reshape(4, 8).to(torch.bfloat16)
        handle = exchange.dispatch(
            tokens, torch.tensor([[1], [0], [1], [0]]), bound=torch.tensor([3], dtype=torch.int32)
        )
        assert handle.tokens_per_expert.tolist() == [1, 2]
        output = exchange.combine(handle, handle.rows.float(), torch.ones(4, 1))
        assert torch.equal(output, torch.cat([tokens[:3].float(), torch.zeros(1, 8)]))


def test_scalars_travel_in_rows_exactly():
    config = Config(max_num_tokens=4, num_experts=3, experts_per_token=2, hidden=8)
    values = torch.tensor([1e-40, -3.25, float("inf"), 2**-126, float("nan"), -0.0, 3.4e38])
    with TorchExchange(config) as exchange:
        handle = exchange.dispatch(
            torch.zeros(4, 8, dtype=torch.bfloat16), torch.tensor([[0, 2], [1, -1], [0, 1], [2, 0]])
        )
        per_row = torch.full((config.num_rows,), 7.0)
        per_row[handle.source_rank.reshape(-1) >= 0] = values
        returned = autograd.return_scalars(exchange, handle, per_row)
        assert torch.equal(returned.view(torch.int32), exchange._return_scalars(handle, per_row).view(torch.int32))
        assert returned[1, 1] == 0


def test_nothing_waits_in_a_world_of_one():
    config = Config(max_num_tokens=1, num_experts=1, experts_per_token=1, hidden=8)
    started = time.perf_counter()
    with open_exchange(config, "torch") as exchange:
        exchange.dispatch(torch.zeros(1, 8, dtype=torch.bfloat16), torch.zeros(1, 1, dtype=torch.int32))
    assert time.perf_counter() - started < config.timeout_s / 2
