"""The emulation: several processes, one heap; errors and timeouts come out with the rank they belong to."""

import ctypes
import functools
import os
import time

import pytest
import torch
import triton
import triton.language as tl

from ops.moe_comm_gpu.device import primitives as dev
from ops.moe_comm_gpu.device import watchdog
from ops.moe_comm_gpu.device.watchdog import WaitTimeoutError
from ops.moe_comm_gpu.emulation import launcher
from ops.moe_comm_gpu.emulation.launcher import run_processes
from ops.moe_comm_gpu.emulation.operations import count, drop
from ops.moe_comm_gpu.emulation.processes import create_heap_file
from tests.moe_device import toys

run_small = functools.partial(run_processes, heap_bytes=1 << 20)


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("ranks", [1, 4])
def test_right_kernels_pass(ranks, direct):
    toys.check(run_small(ranks, functools.partial(toys.exchange, direct=direct)))


def test_eight_ranks_pass_in_little_time():
    start = time.monotonic()
    toys.check(run_small(8, functools.partial(toys.exchange, rounds=1)), rounds=1)
    assert time.monotonic() - start < 60


@triton.jit
def _chain(word, watchdog):
    """Program p waits until all later programs have counted: right only if programs take turns."""
    program, last = tl.program_id(0), tl.num_programs(0) - 1
    dev.wait_ge(word, last - program, watchdog, 0, -1)
    tl.atomic_add(word, 1, sem="release")


def test_programs_that_wait_for_later_ones_take_turns():
    def host(runtime):
        word = torch.zeros(1, dtype=torch.int64)
        runtime.launch(_chain, (6,), word, runtime.watchdog)
        return int(word)

    assert run_small(1, host, max_resident_programs=6) == [6]
    with pytest.raises(WaitTimeoutError):
        run_small(1, host, max_resident_programs=5, timeout_s=0.3)


@triton.jit
def _add_everywhere(word, times):
    for _ in range(times):
        for pe in range(dev.n_pes()):
            dev.signal(word, 1, dev.SIGNAL_ADD, pe)


def test_signals_of_several_processes_add_up():
    def host(runtime):
        word = runtime.allocate(8, "word").view(torch.int64)
        runtime.launch(_add_everywhere, (1,), word, 200)
        runtime.barrier()
        return int(word)

    assert run_small(4, host) == [800] * 4


def test_a_lost_signal_times_out_and_names_rank_operation_and_sender():
    def host(runtime):
        source, inbox = (runtime.allocate(2 * 4 * toys.BLOCK, n).view(torch.int32) for n in ("source", "inbox"))
        arrived, acknowledged = (runtime.allocate(16, n).view(torch.int64) for n in ("arrived", "acknowledged"))
        runtime.set_operations(toys.OPERATIONS)
        runtime.launch(toys.send, (2,), source, inbox, arrived, 1, BLOCK=toys.BLOCK, direct=False)
        if runtime.my_pe == 0:
            out, block = torch.zeros(2, toys.BLOCK, dtype=torch.int32), runtime.watchdog
            runtime.set_timeout(0.5)
            runtime.launch(toys.receive, (2,), inbox, arrived, acknowledged, out, 1, block, BLOCK=toys.BLOCK)

    lost = drop(lambda o: o.kind == "put" and o.rank == 1 and o.pe == 0)
    with pytest.raises(WaitTimeoutError, match=r"rank 0: receive, program \(1, 0, 0\): receive: waits for rank 1 "):
        run_small(2, host, fault=lost)


def test_a_rank_that_never_comes_is_named():
    def host(runtime):
        if runtime.my_pe == 1:
            time.sleep(60)  # ended by the first error
        elif runtime.my_pe == 0:
            barriers_of_rank_2 = ctypes.c_int64.from_address(runtime.base + 2 * runtime.stride)
            while barriers_of_rank_2.value < 2:  # one at the start, one in allocate: it has come, however slowly
                time.sleep(0.01)
            runtime.set_timeout(0.5)
        runtime.allocate(8, "buffer")

    with pytest.raises(WaitTimeoutError, match=r"rank 0: allocate: ranks \[1\] did not come within 0.5 s"):
        run_small(3, host)


def test_operations_are_counted():
    def host(runtime):
        toys.exchange(runtime)
        return count(runtime.trace, "put"), count(runtime.trace, "signal"), count(runtime.trace, "wait")

    assert run_small(2, host, trace=True) == [(6, 6, 12)] * 2


def test_hosts_gather_allocate_and_free():
    def host(runtime):
        assert runtime.all_gather({"rank": runtime.my_pe}) == [{"rank": 0}, {"rank": 1}]
        for _ in range(20):
            buffers = [runtime.allocate(100_000, name) for name in ("first", "second")]
            assert not any(b.any() for b in buffers)
            for buffer in buffers:
                buffer.fill_(1)
                runtime.free(buffer)
        assert runtime.used_bytes == 0
        with pytest.raises(MemoryError, match=r"needs 2097152 bytes, .* NVSHMEM_SYMMETRIC_SIZE"):
            runtime.allocate(2 << 20, "too large")
        with pytest.raises(ValueError, match="allocate: every rank has to make the same call"):
            runtime.allocate(8 * (1 + runtime.my_pe), "uneven")
        return True

    assert run_small(2, host) == [True, True]


@triton.jit
def _signal_outside(word):
    dev.signal(word, 1, dev.SIGNAL_ADD, 0)


def test_addresses_outside_the_heap_and_unknown_ranks_are_refused():
    def outside(runtime):
        runtime.launch(_signal_outside, (1,), torch.zeros(1, dtype=torch.int64))

    with pytest.raises(IndexError, match="is not in the symmetric heap"):
        run_small(1, outside)

    def unknown(runtime):
        runtime.on_rank(runtime.start, 2)

    with pytest.raises(IndexError, match="expected 0 to 0, got 2"):
        run_small(1, unknown)


def test_errors_and_dead_processes_are_reported_and_no_file_is_left(monkeypatch):
    files = []

    def create(*sizes):
        files.append(create_heap_file(*sizes))
        return files[-1]

    monkeypatch.setattr(launcher, "create_heap_file", create)

    def wrong(runtime):
        raise ArithmeticError(f"of rank {runtime.my_pe}")

    def dead(runtime):
        os._exit(1)

    with pytest.raises(ArithmeticError, match="of rank"):
        run_small(2, wrong)
    with pytest.raises(RuntimeError, match="ended without a result"):
        run_small(2, dead)
    assert len(files) == 2
    assert not any(os.path.exists(path) for path in files)


def test_the_record_of_an_expired_wait_becomes_an_error():
    block = [0] * watchdog.NUM_WORDS
    assert watchdog.timeout_error(3, block, toys.OPERATIONS) is None
    block[: watchdog.SEEN + 1] = [2_500_000_000, 1, 1, 5, 8, 7]
    assert str(watchdog.timeout_error(3, block, toys.OPERATIONS)).startswith(
        "rank 3: acknowledge: waits for rank 5 (signal is 7, has to reach 8); gave up after 2.5 s."
    )
