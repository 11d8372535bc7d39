"""Planted faults: the protocol with one operation wrong must not pass, in any of its usual ways of going wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from ops.moe_comm_gpu.emulation import operations
from ops.moe_comm_gpu.emulation.operations import SET, Fault, Operation, change, drop
from ops.moe_comm_gpu.emulation.simulator import SimulationError
from ops.moe_comm_gpu.kernels.common import Wait
from ops.moe_comm_gpu.kernels.layout import WORD_BYTES, Layout
from reference.moe_cases import Shape
from tests.moe.strategies import Case
from tests.moe_kernels.worlds import simulate

SHAPE = Shape(num_experts=6, experts_per_token=2, hidden=8, max_num_tokens=3, world_size=3)
CASE = Case(SHAPE, num_tokens=(3, 2, 3), weights_early=True)
ROUNDS = [replace(CASE, seed=2 * number) for number in range(2)]
# Ranks 0 and 1 have no rows for one another in the second round: only the barrier holds them together.
APART = [replace(ROUNDS[0]), replace(CASE, routing="one_expert"), replace(CASE, seed=4)]
SEEDS = range(12)
EPOCH = 1 << 32


def _layout(mode: str) -> Layout:
    return Layout.of(replace(CASE, mode=mode).config())


def _waits(code: Wait) -> Callable[[Operation], bool]:
    return lambda o: o.kind == "wait" and o.operation == code


def _rows_sent(o: Operation) -> bool:
    return o.kind == "put" and o.label == "dispatch send"


def _rows_returned(o: Operation) -> bool:
    return o.kind == "put" and o.label == "combine send"


def _counts(o: Operation) -> bool:
    return o.kind == "signal" and o.label == "dispatch send"


def _flags(o: Operation) -> bool:
    return o.kind == "signal" and o.label == "combine send"


def _of_rank_1(where: Callable[[Operation], bool]) -> Callable[[Operation], bool]:
    return lambda o: where(o) and o.rank == 1


def _of_second_round(where: Callable[[Operation], bool]) -> Callable[[Operation], bool]:
    return lambda o: where(o) and o.call >= 4


def _shared_slot(mode: str) -> Fault:
    """Rank 1 writes its rows where rank 0 writes: one region of ``share`` rows earlier."""
    layout = _layout(mode)
    return change(_of_rank_1(_rows_sent), destination=lambda o: o.destination - layout.share * layout.row_bytes)


def _neighbours_counter(mode: str) -> Fault:
    return change(_of_rank_1(_rows_sent), signal=lambda o: o.signal - WORD_BYTES)


def _neighbours_return(mode: str) -> Fault:
    layout = _layout(mode)
    return change(_rows_returned, destination=lambda o: o.destination ^ _lowest_bit(layout.return_bytes))


def _lowest_bit(number: int) -> int:
    return number & -number


FAULTS: dict[str, Callable[[str], Fault]] = {
    "no wait for counts": lambda mode: drop(_waits(Wait.COUNT)),
    "no wait for rows": lambda mode: drop(_waits(Wait.ROWS)),
    "no wait for the other programs": lambda mode: drop(_waits(Wait.PROGRAMS)),
    "no wait for returned rows": lambda mode: drop(_waits(Wait.RETURNS)),
    "barrier left out": lambda mode: drop(_waits(Wait.FLAG)),
    "barrier of the epoch before": lambda mode: change(_waits(Wait.FLAG), value=lambda o: o.value - 1),
    "counts of the epoch before": lambda mode: change(_waits(Wait.COUNT), value=lambda o: o.value - EPOCH),
    "one row too few awaited": lambda mode: change(_waits(Wait.ROWS), value=lambda o: o.value - 1),
    "one returned row too few awaited": lambda mode: change(_waits(Wait.RETURNS), value=lambda o: o.value - 1),
    "other programs awaited a round early": lambda mode: change(_waits(Wait.PROGRAMS), value=lambda o: o.value - 1),
    "count one too high": lambda mode: change(_of_rank_1(_counts), value=lambda o: o.value + 1),
    "count one too low": lambda mode: change(_of_rank_1(_counts), value=lambda o: o.value - 1),
    "count of the next epoch": lambda mode: change(_of_second_round(_counts), value=lambda o: o.value + EPOCH),
    "count never sent": lambda mode: drop(_of_rank_1(_counts)),
    "count sent to the wrong rank": lambda mode: change(_of_rank_1(_counts), pe=lambda o: (o.pe + 1) % 3),
    "slot shared by two senders": _shared_slot,
    "arrivals counted for another sender": _neighbours_counter,
    "row sent to the wrong rank": lambda mode: change(_of_rank_1(_rows_sent), pe=lambda o: (o.pe + 1) % 3),
    "row lost": lambda mode: drop(_of_rank_1(_rows_sent)),
    "row cut short": lambda mode: change(_rows_sent, num_bytes=lambda o: o.num_bytes - 16),
    "signal before data": lambda mode: operations.signal_before_data(_rows_sent),
    "arrival set, not added": lambda mode: change(_rows_sent, op=lambda o: SET),
    "arrival counted twice": lambda mode: change(_of_rank_1(_rows_sent), value=lambda o: 2),
    "flag never set": lambda mode: drop(_of_rank_1(_flags)),
    "flag of the next epoch": lambda mode: change(_flags, value=lambda o: o.value + 1),
    "result signalled before data": lambda mode: operations.signal_before_data(_rows_returned),
    "result in another place": _neighbours_return,
    "result counted for another token": lambda mode: change(_rows_returned, signal=lambda o: o.signal ^ WORD_BYTES),
    "result lost": lambda mode: drop(_of_rank_1(_rows_returned)),
    "result cut short": lambda mode: change(_rows_returned, num_bytes=lambda o: o.num_bytes // 2),
}
NEED_APART = {"barrier left out", "barrier of the epoch before", "flag of the next epoch"}


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("mode", ["per_rank", pytest.param("per_expert", marks=pytest.mark.slow)])
def test_planted_fault_is_caught(mode: str, name: str) -> None:
    rounds = [replace(case, mode=mode) for case in (APART if name in NEED_APART else ROUNDS)]
    caught = []
    for seed in SEEDS:
        fault = FAULTS[name](mode)
        try:
            simulate(rounds, seed, fault=fault)
        except (SimulationError, AssertionError, ValueError) as error:  # ValueError: the exchange itself noticed
            caught.append(f"seed {seed}: {type(error).__name__}: {error}")
            break
    assert caught, f"{name}: passed with seeds {list(SEEDS)}"


@pytest.mark.parametrize("mode", ["per_rank", "per_expert"])
def test_without_a_fault_the_same_rounds_pass(mode: str) -> None:
    for rounds in (ROUNDS, APART):
        for seed in SEEDS[:2]:
            simulate([replace(case, mode=mode) for case in rounds], seed)
