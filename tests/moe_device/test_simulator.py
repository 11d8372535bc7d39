"""The simulator passes right kernels under every schedule, and reports each kind of fault."""

import functools

import pytest
import torch
import triton
import triton.language as tl

from ops.moe_comm_gpu.device import primitives as dev
from ops.moe_comm_gpu.emulation.operations import ADD, Operation, change, count, drop, put_bytes, signal_before_data
from ops.moe_comm_gpu.emulation.ordering import (
    OutOfBoundsError,
    RaceError,
    SimulationError,
    UnwrittenReadError,
)
from ops.moe_comm_gpu.emulation.scheduler import DeadlockError, Policy
from ops.moe_comm_gpu.emulation.simulator import Simulation
from tests.moe_device import toys

SEEDS = range(8)
LATE = Policy(switch=0.5, deliver=0.0, order="newest", tear=1.0, stall=0.05)


def _receives(o: Operation) -> bool:
    return o.kind == "wait" and toys.OPERATIONS[o.operation] == "receive"


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_right_kernels_pass_under_every_schedule(ranks, direct):
    for seed in SEEDS:
        toys.check(Simulation(ranks, seed).run(functools.partial(toys.exchange, direct=direct)))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3, 5, 8])
def test_right_kernels_pass_under_many_schedules(ranks):
    for seed in range(200):
        toys.check(Simulation(ranks, seed).run(functools.partial(toys.exchange, direct=seed % 4 == 0)))


def test_a_seed_decides_the_whole_run():
    traces = []
    for _ in range(2):
        simulation = Simulation(3, seed=5)
        simulation.run(toys.exchange)
        traces.append(simulation.trace)
    assert traces[0] == traces[1]
    other = Simulation(3, seed=6)
    other.run(toys.exchange)
    assert other.trace != traces[0]


def test_operations_are_counted():
    simulation = Simulation(4, seed=1)
    simulation.run(toys.exchange)
    assert count(simulation.trace, "put") == 3 * 4 * 4
    assert count(simulation.trace, "signal") == 3 * 4 * 4
    assert count(simulation.trace, "put", lambda o: o.rank == 2 and o.label == "send" and o.call == 0) == 4
    assert put_bytes(simulation.trace, lambda o: o.rank == 0) == 3 * 4 * toys.BLOCK * 4


FAULTS = {
    "a wait is left out": (drop(lambda o: _receives(o) and o.rank == 1), (RaceError, UnwrittenReadError)),
    "a wait for the round before": (
        change(_receives, value=lambda o: o.value - 1),
        (RaceError, UnwrittenReadError, AssertionError),
    ),
    "a wait for the wrong sender": (
        change(lambda o: _receives(o) and o.rank == 0 and o.pe == 1, signal=lambda o: o.signal + 8),
        (RaceError, UnwrittenReadError),
    ),
    "a wait for one more than comes": (
        change(lambda o: _receives(o) and o.value == 3 and o.rank == 2, value=lambda o: o.value + 1),
        DeadlockError,
    ),
    "a signal before its data": (signal_before_data(lambda o: o.kind == "put"), RaceError),
    "a signal is lost": (drop(lambda o: o.kind == "signal" and o.rank == 1 and o.pe == 2), DeadlockError),
    "a put is lost": (drop(lambda o: o.kind == "put" and o.rank == 1 and o.pe == 0), DeadlockError),
    "a put to the wrong rank": (
        change(lambda o: o.kind == "put" and o.rank == 1 and o.pe == 0, pe=lambda _: 2),
        (RaceError, DeadlockError),
    ),
    "two senders share a slot": (
        change(lambda o: o.kind == "put" and o.rank == 1, destination=lambda o: o.destination - 4 * toys.BLOCK),
        (RaceError, UnwrittenReadError),
    ),
    "a put is too short": (
        change(lambda o: o.kind == "put" and o.rank == 1, num_bytes=lambda o: o.num_bytes - 4),
        (UnwrittenReadError, AssertionError),
    ),
    "a put runs over its slot": (
        change(lambda o: o.kind == "put" and o.rank == 0, num_bytes=lambda o: o.num_bytes + 4),
        SimulationError,
    ),
    "a signal set where others add": (
        change(lambda o: o.kind == "put" and o.call == 3 and o.rank == 0, op=lambda o: o.op - 1),
        DeadlockError,
    ),
    "the acknowledgements are not awaited": (
        drop(lambda o: o.kind == "wait" and o.operation == toys.OPERATIONS.index("acknowledge")),
        RaceError,
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_every_fault_is_caught_under_every_schedule(name):
    fault, errors = FAULTS[name]
    for seed in SEEDS:
        with pytest.raises(errors):
            toys.check(Simulation(3, seed, fault=fault).run(toys.exchange))


def test_a_race_names_both_accesses_and_the_seed():
    with pytest.raises(RaceError) as caught:
        Simulation(2, 11, policy=LATE).run(functools.partial(toys.exchange, acknowledge=False))
    assert "source[byte" in str(caught.value)
    assert "not ordered after" in str(caught.value)
    assert "send (launch" in str(caught.value)
    assert "seed 11" in caught.value.__notes__[0]


def test_a_deadlock_names_who_waits_for_what():
    fault, _ = FAULTS["a put is lost"]
    with pytest.raises(DeadlockError) as caught:
        Simulation(3, 0, fault=fault).run(toys.exchange)
    text = str(caught.value)
    assert "rank 0, receive (launch 1), program 1 waits for rank 0's arrived[byte 8]" in text
    assert "receive: waits for rank 1 (signal is 0, has to reach 1)" in text


def test_a_rank_that_never_calls_is_named():
    def host(runtime):
        if runtime.my_pe != 1:
            runtime.barrier()

    with pytest.raises(DeadlockError, match=r"barrier, which ranks \[1\] have not called"):
        Simulation(3).run(host)


def test_ranks_that_call_different_things_are_told():
    def host(runtime):
        runtime.allocate(64 if runtime.my_pe else 128, "buffer")

    with pytest.raises(SimulationError, match=r"allocate\(64.*allocate\(128|allocate\(128.*allocate\(64"):
        Simulation(2).run(host)


@triton.jit
def _touch(pointer, offset, write: tl.constexpr):
    if write:
        tl.store(pointer + offset, 1)
    else:
        tl.store(pointer, tl.load(pointer + offset))


@pytest.mark.parametrize("write", [False, True])
@pytest.mark.parametrize("symmetric", [False, True])
def test_accesses_out_of_bounds_are_reported(symmetric, write):
    def host(runtime):
        buffer = runtime.allocate(64, "buffer").view(torch.int32) if symmetric else torch.zeros(16, dtype=torch.int32)
        runtime.launch(_touch, (1,), buffer, 16, write=write)

    with pytest.raises(OutOfBoundsError):
        Simulation(1).run(host)


def test_memory_is_unusable_once_freed():
    def host(runtime):
        buffer = runtime.allocate(64, "buffer").view(torch.int32)
        runtime.free(buffer)
        runtime.launch(_touch, (1,), buffer, 0, write=True)

    with pytest.raises(OutOfBoundsError, match="not allocated"):
        Simulation(2).run(host)


def test_memory_that_was_never_written_is_reported():
    def host(runtime, zeroed):
        runtime.launch(_touch, (1,), runtime.allocate(64, "buffer", zeroed=zeroed).view(torch.int32), 0, write=False)

    Simulation(1).run(functools.partial(host, zeroed=True))
    with pytest.raises(UnwrittenReadError, match="buffer"):
        Simulation(1).run(functools.partial(host, zeroed=False))


@triton.jit
def _share(word, flag, watchdog, ordered: tl.constexpr):
    """Program 0 writes a local word that program 1 reads."""
    if tl.program_id(0) == 0:
        tl.store(word, 7)
        tl.atomic_add(flag, 1, sem="release")
    else:
        if ordered:
            dev.wait_ge(flag, 1, watchdog, 0, -1)
        tl.store(word + 1, tl.load(word))


@pytest.mark.parametrize("ordered", [True, False])
def test_programs_that_share_local_memory_are_checked(ordered):
    def host(runtime):
        word, flag = torch.zeros(2, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
        runtime.launch(_share, (2,), word, flag, runtime.watchdog, ordered=ordered)
        return word.tolist()

    for seed in SEEDS:
        if ordered:
            assert Simulation(1, seed).run(host) == [[7, 7]]
        else:
            with pytest.raises(RaceError, match="tensor argument"):
                Simulation(1, seed).run(host)


@triton.jit
def _last_wakes_the_others(flag, watchdog):
    if tl.program_id(0) == tl.num_programs(0) - 1:
        tl.atomic_add(flag, 1, sem="release")
    else:
        dev.wait_ge(flag, 1, watchdog, 0, -1)


def test_a_grid_larger_than_what_is_resident_deadlocks_when_its_programs_wait():
    def host(runtime):
        flag = torch.zeros(1, dtype=torch.int64)
        runtime.launch(_last_wakes_the_others, (4,), flag, runtime.watchdog)

    Simulation(1, max_resident_programs=4).run(host)
    with pytest.raises(DeadlockError, match="its peers"):
        Simulation(1, max_resident_programs=3).run(host)


@triton.jit
def _put_twice(source, inbox, signals, pe):
    dev.put_signal_nbi(inbox, source, 64, signals, 1, dev.SIGNAL_ADD, pe)
    dev.put_signal_nbi(inbox + 16, source, 64, signals + 1, 1, dev.SIGNAL_ADD, pe)


@triton.jit
def _wait_for_the_second_only(inbox, signals, out, watchdog):
    dev.wait_ge(signals + 1, 1, watchdog, 0, 0)
    tl.store(out, tl.load(inbox))


def test_puts_of_one_program_are_not_ordered():
    def host(runtime):
        source, inbox = (runtime.allocate(128, n).view(torch.int32) for n in ("source", "inbox"))
        signals = runtime.allocate(16, "signals").view(torch.int64)
        if runtime.my_pe == 0:
            runtime.launch(_put_twice, (1,), source, inbox, signals, 1)
        else:
            out = torch.zeros(1, dtype=torch.int32)
            runtime.launch(_wait_for_the_second_only, (1,), inbox, signals, out, runtime.watchdog)

    caught = 0
    for seed in SEEDS:
        try:
            Simulation(2, seed).run(host)
        except RaceError:
            caught += 1
    assert caught == len(SEEDS)


def test_errors_of_hosts_and_kernels_come_out_and_others_unwind():
    def host(runtime):
        try:
            if runtime.my_pe == 1:
                raise KeyError("of rank 1")
            runtime.barrier()
        finally:
            runtime.barrier()

    with pytest.raises(KeyError, match="of rank 1") as caught:
        Simulation(3).run(host)
    assert any("simulation of 3 ranks" in note for note in caught.value.__notes__)
    toys.check(Simulation(2).run(toys.exchange))


def test_hosts_gather_and_memory_errors_name_sizes():
    def host(runtime):
        assert runtime.all_gather(runtime.my_pe * 2) == [0, 2, 4]
        runtime.allocate(1 << 10, "first")
        runtime.allocate(1 << 12, "second")

    with pytest.raises(MemoryError, match=r"second needs 4096 bytes, 3072 of 4096 .* NVSHMEM_SYMMETRIC_SIZE"):
        Simulation(3, heap_bytes=1 << 12).run(host)


def test_heap_is_reused_after_many_cycles():
    def host(runtime):
        for size in range(1, 60):
            first, second = (runtime.allocate(size * 8, name) for name in ("first", "second"))
            assert not first.any()
            first.fill_(1)
            runtime.free(first)
            runtime.free(second)
        return runtime.simulation.layout.used_bytes

    assert Simulation(2, heap_bytes=1 << 12).run(host) == [0, 0]


def test_signal_operations_have_the_numbers_of_the_library():
    assert (ADD, dev.SIGNAL_SET.value) == (10, 9)
