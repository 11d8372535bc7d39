"""What the kernels promise beyond right rows: messages, memory, determinism, refusals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from ops.moe_comm_gpu import Config, contract
from ops.moe_comm_gpu.emulation import operations
from ops.moe_comm_gpu.emulation.simulator import Simulation
from ops.moe_comm_gpu.kernel_exchange import KernelExchange, as_words, most_symmetric_bytes
from ops.moe_comm_gpu.kernels import combine, dispatch
from ops.moe_comm_gpu.kernels.common import WITH_WEIGHTS
from reference import moe, moe_cases
from reference.moe_cases import Shape
from tests.moe import harness
from tests.moe.strategies import Case, full
from tests.moe_kernels.worlds import opened, simulate

SHAPE = Shape(num_experts=6, experts_per_token=3, hidden=8, max_num_tokens=4, world_size=3)


def ranks(config: Config, host: Callable[[KernelExchange], Any], seed: int = 0, **options: Any) -> list[Any]:
    """``host(exchange)`` on every rank of a simulation."""

    def run(runtime: Any) -> Any:
        with KernelExchange(replace(config, rank=runtime.my_pe), runtime, **options) as exchange:
            return host(exchange)

    return Simulation(config.world_size, seed, heap_bytes=1 << 18, max_resident_programs=2).run(run)


@pytest.mark.parametrize("mode", ["per_rank", "per_expert"])
def test_number_of_messages(mode: str) -> None:
    """A put for each (token, destination) and a signal for each (source, destination), both ways."""
    case = full(SHAPE, mode=mode, weights_early=True)
    trace = simulate([case]).trace
    world = moe.World(SHAPE.world_size, SHAPE.expert_rank)
    pairs = [(rank, token, expert) for expert, source in enumerate(moe.sources(world, [case.ids(g) for g in range(3)]))
             for rank, token in zip(source.rank, source.token, strict=True)]  # fmt: skip
    trips = {(rank, token, SHAPE.expert_rank[expert]) for rank, token, expert in pairs}
    buckets = 1 if mode == "per_rank" else 2
    sent = len(trips) if mode == "per_rank" else len(set(pairs))
    assert operations.count(trace, "put", lambda o: o.label == "dispatch send") == sent
    assert operations.count(trace, "put", lambda o: o.label == "combine send") == sent
    assert operations.count(trace, "signal", lambda o: o.label == "dispatch send") == 9 * buckets
    assert operations.count(trace, "signal", lambda o: o.label == "combine send") == 9
    assert {o.kind for o in trace} == {"put", "signal", "wait"}


def test_sends_never_wait() -> None:
    trace = simulate([full(SHAPE)]).trace
    assert {o.label for o in trace if o.kind == "wait"} == {"dispatch receive", "combine receive"}


@pytest.mark.parametrize("mode", ["per_rank", "per_expert"])
@pytest.mark.parametrize("direct", [False, True])
def test_results_are_the_same_bit_for_bit_in_any_order_of_arrival(mode: str, direct: bool) -> None:
    config = Config(
        max_num_tokens=4, num_experts=6, experts_per_token=3, hidden=8, world_size=3, mode=mode, out_dtype=torch.float32
    )

    def host(exchange: KernelExchange) -> torch.Tensor:
        rank = exchange.config.rank
        tokens = torch.from_numpy(moe_cases.random_floats((4, 8), rank)).bfloat16()
        ids = torch.from_numpy(moe_cases.random_ids(SHAPE, 4, 5, rank))
        weights = torch.from_numpy(moe_cases.random_weights(SHAPE, 4, 5, rank))
        handle = exchange.dispatch(tokens, ids, weights=weights)
        return exchange.combine(handle, handle.rows.float() * 1.1)

    first, *others = [torch.stack(ranks(config, host, seed, direct=direct)) for seed in range(4)]
    for other in others:
        assert torch.equal(first, other)


@pytest.mark.parametrize("in_kernel", [True, False])
@pytest.mark.parametrize("scale_block", [3, 4, 128])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_quantisation_on_the_way_equals_quantisation_before(
    dtype: torch.dtype, scale_block: int, in_kernel: bool
) -> None:
    config = Config(
        max_num_tokens=5, num_experts=1, experts_per_token=1, hidden=10, in_dtype=dtype, scale_block=scale_block
    )
    tokens = torch.from_numpy(moe_cases.random_floats((5, 10), 1)).bfloat16()
    tokens[1] = 0  # a block of zeros
    tokens[2, 0] = 1e6
    tokens[3, 4], tokens[4, 5] = torch.nan, -torch.inf  # a row that is not finite must not arrive as one that is
    rows, scales = contract.quantise(tokens, dtype, scale_block)

    def host(exchange: KernelExchange) -> tuple[torch.Tensor, torch.Tensor]:
        handle = exchange.dispatch(tokens, torch.zeros(5, 1, dtype=torch.int32))
        exchange.combine(
            handle, torch.zeros(config.num_local_experts, config.row_capacity, 10).bfloat16(), torch.ones(5, 1)
        )
        return handle.rows[0], handle.scales[0]

    ((got_rows, got_scales),) = ranks(config, host, quantise_in_kernel=in_kernel)
    assert torch.equal(got_scales, scales)
    nan = rows.float().isnan()
    assert torch.equal(got_rows.float().isnan(), nan)
    assert torch.equal(got_rows.view(torch.uint8)[~nan], rows.view(torch.uint8)[~nan])
    assert nan.any()


def test_a_bound_on_the_device_leaves_later_tokens_out() -> None:
    config = Config(max_num_tokens=4, num_experts=2, experts_per_token=1, hidden=8, world_size=2)

    def host(exchange: KernelExchange) -> tuple[list[int], torch.Tensor]:
        bound = torch.tensor(3 - exchange.config.rank, dtype=torch.int64)
        ids = torch.tensor([[0], [1], [0], [1]])
        handle = exchange.dispatch(torch.ones(4, 8).bfloat16(), ids, bound=bound)
        output = exchange.combine(handle, handle.rows, torch.ones(4, 1))
        return handle.tokens_per_expert.tolist(), output[:, 0]

    (counts_0, output_0), (counts_1, output_1) = ranks(config, host)
    assert (counts_0, counts_1) == ([3], [2])
    assert output_0.tolist() == [1, 1, 1, 0]
    assert output_1.tolist() == [1, 1, 0, 0]


@pytest.mark.parametrize("layout", ["expert_major", "contiguous"])
def test_rows_without_room_are_refused_and_nothing_else_is_overwritten(layout: str) -> None:
    config = Config(max_num_tokens=3, num_experts=1, experts_per_token=1, hidden=8, capacity=2, layout=layout)

    def host(exchange: KernelExchange) -> None:
        exchange.dispatch(torch.ones(3, 8).bfloat16(), torch.zeros(3, 1, dtype=torch.int32))

    with pytest.raises(ValueError, match=r"capacity: rank 0 received 3 rows .* has room for 2"):
        ranks(config, host)


def test_with_check_ids_too_many_rows_are_refused_on_every_rank_before_anything_is_sent() -> None:
    config = Config(
        max_num_tokens=3, num_experts=2, experts_per_token=1, hidden=8, capacity=2, world_size=2, check_ids=True
    )

    def host(exchange: KernelExchange) -> int:
        with pytest.raises(ValueError, match="capacity"):
            exchange.dispatch(torch.ones(3, 8).bfloat16(), torch.zeros(3, 1, dtype=torch.int32))
        handle = exchange.dispatch(torch.ones(1, 8).bfloat16(), torch.zeros(1, 1, dtype=torch.int32))
        exchange.combine(handle, handle.rows, torch.ones(1, 1))
        return int(handle.tokens_per_expert[0])

    assert ranks(config, host) == [2, 0]


@pytest.mark.parametrize("mode", ["per_rank", "per_expert"])
@pytest.mark.parametrize("what", ["weights", "gradient"])
def test_ranks_that_dispatch_in_different_manners_are_told_by_the_kernels(mode: str, what: str) -> None:
    """Where hosts do not meet: every rank raises, also one that has nothing to do with the one that differs."""
    config = Config(max_num_tokens=1, num_experts=6, experts_per_token=1, hidden=8, world_size=3, mode=mode)

    def host(exchange: KernelExchange) -> str:
        tokens, weights = torch.ones(1, 8).bfloat16(), torch.ones(1, 1)
        ids = torch.tensor([[2 * exchange.config.rank]])
        differs = exchange.config.rank == 1
        tokens.requires_grad_(differs and what == "gradient")
        with pytest.raises(ValueError, match="on all ranks or on none") as caught:
            exchange.dispatch(tokens, ids, weights=weights if differs and what == "weights" else None)
        return str(caught.value)

    same, other = (f"Manner(itemsize=2, weights={differs and what == 'weights'}, "
                   f"gradient={differs and what == 'gradient'})" for differs in (False, True))  # fmt: skip
    messages = ranks(config, host)
    assert messages[0].endswith(f"got {same} on rank 0 and {other} on rank 1")
    assert messages[1].endswith(f"got {same} on rank 0 and {other} on rank 1")
    assert messages[2].endswith(f"got {other} on rank 1 and {same} on rank 2")


def test_ranks_that_differ_do_not_allocate_for_one_another() -> None:
    """Memory for late weights is allocated by all ranks together, so a report that is there comes first."""
    config = Config(max_num_tokens=1, num_experts=2, experts_per_token=1, hidden=8, world_size=2)

    def host(exchange: KernelExchange) -> None:
        handle = exchange.dispatch(torch.ones(1, 8).bfloat16(), torch.zeros(1, 1, dtype=torch.int32))
        synchronize = exchange._runtime.synchronize

        def reports() -> None:  # as of a kernel that ends only now
            synchronize()
            exchange._reports[2 - exchange.config.rank] = 1 + WITH_WEIGHTS

        exchange._runtime.synchronize = reports
        with pytest.raises(ValueError, match="weights on all ranks or on none"):
            exchange.combine(handle, handle.rows, torch.ones(1, 1))

    ranks(config, host)


def test_a_second_batch_without_buffers_is_refused() -> None:
    config = Config(max_num_tokens=1, num_experts=1, experts_per_token=1, hidden=8)

    def host(exchange: KernelExchange) -> None:
        tokens, ids = torch.ones(1, 8).bfloat16(), torch.zeros(1, 1, dtype=torch.int32)
        handle = exchange.dispatch(tokens, ids)
        with pytest.raises(RuntimeError, match="num_buffer_sets"):
            exchange.dispatch(tokens, ids)
        exchange.combine(handle, handle.rows, torch.ones(1, 1))

    ranks(config, host)


def test_batches_may_end_in_another_order_than_they_began() -> None:
    config = Config(max_num_tokens=2, num_experts=2, experts_per_token=1, hidden=8, world_size=2, num_buffer_sets=2)

    def host(exchange: KernelExchange) -> list[float]:
        ids, weights = torch.tensor([[0], [1]]), torch.ones(2, 1)
        last = []
        for round in range(3):
            handles = [exchange.dispatch(torch.full((2, 8), 10.0 * round + batch).bfloat16(), ids) for batch in (1, 2)]
            late, early = (exchange.combine(handle, handle.rows, weights) for handle in reversed(handles))
            last += [float(early[0, 0]), float(late[1, 0])]
        return last

    assert ranks(config, host) == [[1, 2, 11, 12, 21, 22]] * 2


def test_configurations_that_differ_are_refused_on_every_rank() -> None:
    def run(runtime: Any) -> None:
        config = Config(
            max_num_tokens=1 + runtime.my_pe,
            num_experts=2,
            experts_per_token=1,
            hidden=8,
            world_size=2,
            rank=runtime.my_pe,
        )
        mine, theirs = 1 + runtime.my_pe, 2 - runtime.my_pe
        with pytest.raises(ValueError, match=f"max_num_tokens: {mine} here, {theirs} there"):
            KernelExchange(config, runtime)

    Simulation(2, 0).run(run)


@pytest.mark.parametrize(("number", "error"), [(3, ValueError), (0, ValueError), (True, TypeError)])
def test_programs_beyond_what_is_resident_are_refused(number: int, error: type[Exception]) -> None:
    config = Config(max_num_tokens=1, num_experts=1, experts_per_token=1, hidden=8)
    with pytest.raises(error, match="num_programs"):
        ranks(config, lambda exchange: None, num_programs=number)


def test_a_heap_that_is_too_small_is_named_with_what_is_needed() -> None:
    config = Config(max_num_tokens=100, num_experts=8, experts_per_token=2, hidden=4096)
    with pytest.raises(MemoryError, match=r"needs \d+ bytes, \d+ of 262144 are available.*NVSHMEM_SYMMETRIC_SIZE"):
        ranks(config, lambda exchange: None)


def test_a_heap_that_is_too_small_for_the_second_set_has_the_first_back() -> None:
    config = Config(max_num_tokens=2, num_experts=2, experts_per_token=1, hidden=8, num_buffer_sets=2)

    def run(runtime: Any) -> None:
        with pytest.raises(MemoryError, match="exchange buffer set 1 needs"):
            KernelExchange(config, runtime)
        assert runtime.simulation.layout.used_bytes == 0

    Simulation(1, 0, heap_bytes=most_symmetric_bytes(replace(config, num_buffer_sets=1))).run(run)


@pytest.mark.parametrize("late", [False, True])
def test_weights_for_combine_take_no_more_memory_where_it_was_set_aside(late: bool) -> None:
    config = Config(max_num_tokens=4, num_experts=6, experts_per_token=3, hidden=8, world_size=3, late_weights=late)

    def host(exchange: KernelExchange) -> list[int]:
        held = [exchange.symmetric_bytes]
        for early in (True, False):  # both ways of returning through the same memory
            weights = torch.full((4, 3), 0.5)
            handle = exchange.dispatch(
                torch.ones(4, 8).bfloat16(), torch.tensor([[0, 2, 4]] * 4), weights=weights if early else None
            )
            output = exchange.combine(handle, handle.rows, None if early else weights)
            assert torch.equal(output, torch.full((4, 8), 1.5).bfloat16())
            held.append(exchange.symmetric_bytes)
        return held

    for first, summed, pairs in ranks(config, host):
        assert first == summed
        assert (pairs > first) == (not late)
        assert pairs <= most_symmetric_bytes(config)


@pytest.mark.parametrize("seed", range(6))
def test_rows_summed_and_in_pairs_take_turns_in_the_same_memory(seed: int) -> None:
    """With messages late and reordered; the simulator checks every access."""
    config = Config(max_num_tokens=3, num_experts=6, experts_per_token=3, hidden=8, world_size=3, late_weights=True)

    def host(exchange: KernelExchange) -> None:
        for batch, early in enumerate((True, False, False, True, True, False)):
            tokens = torch.arange(3.0)[:, None].expand(3, 8).bfloat16() + 4 * exchange.config.rank + batch
            ids = (torch.arange(3) + torch.arange(3)[:, None] + batch) % 6
            weights = torch.tensor([[0.5, 0.25, 2.0]] * 3)
            handle = exchange.dispatch(tokens, ids, weights=weights if early else None)
            output = exchange.combine(handle, handle.rows, None if early else weights)
            assert torch.equal(output, tokens * 2.75)

    ranks(config, host, seed)


def test_making_and_closing_returns_all_memory() -> None:
    config = Config(max_num_tokens=2, num_experts=2, experts_per_token=1, hidden=8, world_size=2, num_buffer_sets=2)

    def run(runtime: Any) -> None:
        for _ in range(100):
            with KernelExchange(replace(config, rank=runtime.my_pe), runtime) as exchange:
                late = exchange._return_regions(exchange._sets[0], replace(exchange._layout, return_pairs=True))
                assert late[0].numel()
        assert runtime.simulation.layout.used_bytes == 0

    Simulation(2, 0).run(run)


@pytest.mark.parametrize(
    ("dtype", "hidden", "shift", "words"),
    [
        (torch.bfloat16, 8, 0, torch.int32),
        (torch.bfloat16, 7, 0, torch.int16),
        (torch.float8_e4m3fn, 8, 0, torch.int32),
        (torch.float8_e4m3fn, 6, 0, torch.int16),
        (torch.float8_e4m3fn, 7, 0, torch.int8),
        (torch.bfloat16, 8, 1, torch.int16),
        (torch.float32, 3, 1, torch.int32),
    ],
)
def test_rows_as_the_widest_words_that_fit(dtype: torch.dtype, hidden: int, shift: int, words: torch.dtype) -> None:
    tensor = torch.zeros(shift + 2 * hidden).to(dtype)[shift:].reshape(2, hidden)
    assert as_words(tensor).dtype == words
    assert as_words(tensor).data_ptr() == tensor.data_ptr()


@pytest.mark.parametrize(
    "kernel", [dispatch.dispatch_send, dispatch.dispatch_receive, combine.combine_send, combine.combine_receive]
)
def test_no_number_has_a_kernel_of_its_own(kernel: Any) -> None:
    """A batch of 1 or 16 tokens must not compile anew, least of all while a graph is captured."""
    numbers = [p for p in kernel.params if not p.is_constexpr and not p.name.endswith("_ptr")]
    assert numbers
    assert all(parameter.do_not_specialize for parameter in numbers)


@pytest.mark.parametrize("hidden", [7, 9, 136])
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e5m2", "float32"])
def test_rows_that_are_no_multiple_of_16_bytes(hidden: int, dtype: str) -> None:
    shape = replace(SHAPE, hidden=hidden, world_size=2, max_num_tokens=2)
    simulate([full(shape, in_dtype=dtype, scale_block=4, weights_early=True)])


@pytest.mark.parametrize("world_size", [5, 8])
@pytest.mark.parametrize("mode", ["per_rank", "per_expert"])
def test_more_ranks_than_choices(world_size: int, mode: str) -> None:
    simulate([Case(replace(SHAPE, world_size=world_size), (2,) * world_size, mode=mode, weights_early=True)])


def test_exchanges_of_changing_sizes_follow_one_another_on_one_heap() -> None:
    sizes = [(2, 8), (5, 40), (1, 16)]
    cases = [
        full(replace(SHAPE, world_size=2, max_num_tokens=tokens, hidden=hidden), weights_early=True, seed=number)
        for number, (tokens, hidden) in enumerate(sizes)
    ]

    def run(runtime: Any) -> list[Any]:
        seen = []
        for case in cases:
            with KernelExchange(case.config(runtime.my_pe), runtime) as exchange:
                seen.append(harness._observe_rank(runtime.my_pe, exchange, case, f"{opened.__module__}:opened"))
        return seen

    by_rank = Simulation(2, 0, heap_bytes=1 << 16, max_resident_programs=2).run(run)
    for number, case in enumerate(cases):
        harness.check(case, [seen[number] for seen in by_rank])


@pytest.mark.parametrize("mode", ["per_rank", "per_expert"])
def test_every_token_to_one_expert_fills_its_capacity_exactly(mode: str) -> None:
    case = full(SHAPE, mode=mode, routing="one_expert", weights_early=True)
    assert case.config().row_capacity == sum(case.num_tokens)
    simulate([case])
