"""One process per rank and one shared file as the symmetric heap: the kernels end to end on any CPU machine.

Rank r's heap is the r-th part of the file, so a peer's copy of an address is ``address + (pe - rank) * stride``. Puts
copy at once and signals are real atomic operations between the processes; what a network may delay and reorder is the
simulator's business. Programs of one grid that wait for one another run in turns, as many as may be resident.

    path = create_heap_file(n_pes, heap_bytes)            # on one rank; tell the others
    runtime = EmulatedRuntime(rank, n_pes, path)          # on every rank; the file's name is gone afterwards
"""

from __future__ import annotations

import ctypes
import mmap
import os
import pickle
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton.runtime.interpreter as ti

from ops.moe_comm_gpu.device import hooks, watchdog
from ops.moe_comm_gpu.emulation import interpreter, tasks
from ops.moe_comm_gpu.emulation.heap import HeapLayout
from ops.moe_comm_gpu.emulation.operations import ADD, SET, Fault, Operation

DEFAULT_HEAP_BYTES = 64 << 20
#: Start of each rank's part: a word that counts its barriers, the length of its message, and the message.
_BARRIER, _LENGTH, _MESSAGE, _CONTROL_BYTES = 0, 8, 16, 1 << 18
_POLL_S = (0.0, 0.00005, 0.0005)


def create_heap_file(n_pes: int, heap_bytes: int = DEFAULT_HEAP_BYTES) -> str:
    """Makes the file that ``n_pes`` ranks share, each with ``heap_bytes`` of heap; returns its path.

    It takes memory only as it is used. It lies in shared memory where that is large enough, else among the temporary
    files; the ranks remove it once all have opened it.
    """
    size = n_pes * (_CONTROL_BYTES + heap_bytes)
    shared = Path("/dev/shm")
    roomy = shared.is_dir() and os.access(shared, os.W_OK) and shutil.disk_usage(shared).free >= size
    descriptor, path = tempfile.mkstemp(prefix="moe_comm_heap_", dir=shared if roomy else None)
    os.ftruncate(descriptor, size)
    os.close(descriptor)
    return path


class EmulatedRuntime:
    """One rank of the emulation; a :class:`~ops.moe_comm_gpu.device.runtime.Runtime`.

    Args:
        rank: this rank.
        n_pes: number of ranks.
        path: what ``create_heap_file`` returned.
        timeout_s: limit of each wait, in kernels and between hosts.
        max_resident_programs: programs of one grid that run in turns.
        fault: changes operations, see :mod:`ops.moe_comm_gpu.emulation.operations`.

    Attributes:
        trace: every communication operation of this rank so far, if ``trace=True`` was given.
    """

    def __init__(
        self,
        rank: int,
        n_pes: int,
        path: str,
        *,
        timeout_s: float = 60.0,
        max_resident_programs: int = 8,
        trace: bool = False,
        fault: Fault | None = None,
    ) -> None:
        self.my_pe, self.n_pes = rank, n_pes
        self.device = torch.device("cpu")
        self.max_resident_programs = max_resident_programs
        self.watchdog = torch.zeros(watchdog.NUM_WORDS, dtype=torch.int64)
        self.trace: list[Operation] = []
        self._traced, self._fault = trace, fault
        self._operations: Sequence[str] = ()
        self.set_timeout(timeout_s)
        with open(path, "r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        self._memory = torch.frombuffer(self._map, dtype=torch.uint8)
        self.stride = len(self._map) // n_pes
        self.base = self._memory.data_ptr()
        self.start = self.base + rank * self.stride  # of this rank's part
        self._layout = HeapLayout(self.stride, start=_CONTROL_BYTES)
        self._barriers = self._launches = 0
        self._programs: _Programs | None = None
        self._meet("attach")
        if rank == 0:
            os.unlink(path)

    # --- memory ---------------------------------------------------------------------------------------------------

    def allocate(self, num_bytes: int, name: str = "", *, zeroed: bool = True) -> torch.Tensor:
        """Symmetric memory; see :class:`~ops.moe_comm_gpu.device.runtime.Runtime`."""
        self._agree("allocate", (num_bytes, name, zeroed))
        offset = self._layout.allocate(num_bytes, name).offset
        first = self.my_pe * self.stride + offset
        tensor = self._memory[first : first + num_bytes]
        tensor.fill_(0 if zeroed else 0xFF)
        self._meet(f"allocate {name}")
        return tensor

    def free(self, tensor: torch.Tensor) -> None:
        """Releases symmetric memory on every rank."""
        offset = tensor.data_ptr() - self.start
        self._agree("free", offset)
        self._layout.free(offset)

    @property
    def used_bytes(self) -> int:
        """Bytes of the heap that are allocated."""
        return self._layout.used_bytes

    def on_rank(self, address: int, pe: int, num_bytes: int = 1) -> int:
        """The address on rank ``pe`` of this rank's symmetric ``address``.

        Raises:
            IndexError: the address is not in the symmetric heap, or there is no such rank.
        """
        if not 0 <= pe < self.n_pes:
            raise IndexError(f"rank {self.my_pe}: pe: expected 0 to {self.n_pes - 1}, got {pe}")
        if not self.start + _CONTROL_BYTES <= address <= self.start + self.stride - num_bytes:
            raise IndexError(f"rank {self.my_pe}: {address:#x} (+{num_bytes} bytes) is not in the symmetric heap")
        return address + (pe - self.my_pe) * self.stride

    # --- kernels --------------------------------------------------------------------------------------------------

    def launch(
        self, kernel: Any, grid: tuple[int, ...], *args: Any, num_warps: int = 4, label: str = "", **constexprs: Any
    ) -> None:
        """Runs a kernel to its end; see :class:`~ops.moe_comm_gpu.device.runtime.Runtime`.

        Raises:
            WaitTimeoutError: a wait took too long.
        """
        call, self._launches = self._launches, self._launches + 1
        with interpreter.language():
            arguments = interpreter.bind(kernel, args, constexprs)
            body = interpreter.rewritten(kernel)
            name = label or kernel.fn.__name__
            self._programs = _Programs(self, (*grid, 1, 1)[:3], lambda: body(**arguments), name, call)
            try:
                self._programs.run()
            finally:
                self._programs = None
                hooks.set_current(None)

    def synchronize(self) -> None:
        """Nothing to do: a launch returns when its kernel has run."""

    def record(self, operation: Operation) -> Operation | None:
        """Notes an operation and returns what is to happen instead."""
        if self._traced:
            self.trace.append(operation)
        return operation if self._fault is None else self._fault(operation)

    def describe_wait(self, operation: int, awaited: int, target: int, seen: int) -> str:
        """What a wait waits for."""
        return watchdog.describe(self._operations, operation, awaited, target, seen)

    # --- hosts ----------------------------------------------------------------------------------------------------

    def barrier(self) -> None:
        """Returns when every rank has called it."""
        self._meet("barrier")

    def all_gather(self, value: Any, what: str = "all_gather") -> list[Any]:
        """Each rank's ``value``, by rank."""
        message = pickle.dumps(value)
        if _MESSAGE + len(message) > _CONTROL_BYTES:
            raise ValueError(f"value: expected at most {_CONTROL_BYTES - _MESSAGE} bytes pickled, got {len(message)}")
        ctypes.c_int64.from_address(self.start + _LENGTH).value = len(message)
        ctypes.memmove(self.start + _MESSAGE, message, len(message))
        self._meet(what)
        values = []
        for rank in range(self.n_pes):
            part = self.base + rank * self.stride
            length = ctypes.c_int64.from_address(part + _LENGTH).value
            values.append(pickle.loads(ctypes.string_at(part + _MESSAGE, length)))
        self._meet(what)  # nobody overwrites a message that is still read
        return values

    def set_operations(self, names: Sequence[str]) -> None:
        """Names of the operation codes, for error messages."""
        self._operations = names

    def set_timeout(self, seconds: float) -> None:
        """Limit of each wait from now on; 0 for none."""
        self.watchdog[watchdog.TIMEOUT_NS] = int(seconds * 1e9)

    def _agree(self, call: str, value: Any) -> None:
        values = self.all_gather((call, value), call)
        if any(v != (call, value) for v in values):
            raise ValueError(f"{call}: every rank has to make the same call, got {dict(enumerate(values))}")

    def _meet(self, what: str) -> None:
        """A barrier: each rank counts its own and waits until all have counted as far."""
        self._barriers += 1
        change_signal(self.start + _BARRIER, self._barriers, SET)
        words = [ctypes.c_int64.from_address(self.base + r * self.stride + _BARRIER) for r in range(self.n_pes)]
        limit_s = int(self.watchdog[watchdog.TIMEOUT_NS]) / 1e9
        start, polls = time.monotonic(), 0
        while missing := [rank for rank, word in enumerate(words) if word.value < self._barriers]:
            _pause(polls)
            polls += 1
            if limit_s and time.monotonic() - start > limit_s:
                raise watchdog.absence_error(self.my_pe, what, missing, limit_s)


def change_signal(address: int, value: int, op: int) -> None:
    """Sets or adds to a signal, atomically between processes."""
    kind = ti._interpreter.RMW_OP.ADD if op == ADD else ti._interpreter.RMW_OP.XCHG
    ti._interpreter.atomic_rmw(
        kind,
        np.array([address], np.uint64),
        np.array([value], np.uint64),
        np.array([True]),
        ti._interpreter.MEM_SEMANTIC.ACQUIRE_RELEASE,
    )


def _first_late(flags: int, target: int, number: int) -> int:
    """The first of the ranks whose flag, a word from the address ``flags`` on, is lower than ``target``; or -1."""
    words = (ctypes.c_int64.from_address(flags + 8 * rank) for rank in range(number))
    return watchdog.first_late((word.value for word in words), target)


def _pause(polls: int) -> None:
    """Waits a little, the longer the more often it has been called in vain."""
    if polls < 50:
        time.sleep(_POLL_S[0])
    else:
        time.sleep(_POLL_S[1] if polls < 1000 else _POLL_S[2])


class _Abort(BaseException):
    """Unwinds a program after another one has failed."""


class _Program:
    """A program that has started; also its device primitives."""

    def __init__(self, programs: _Programs, index: tuple[int, int, int]) -> None:
        self.programs, self.index = programs, index
        self.runtime = programs.runtime
        self.baton = tasks.Baton()
        self.ready: Callable[[], bool] | None = None  # of a waiting program
        self.deadline: float | None = None
        self.waits_for: Callable[[], str] = str

    def my_pe(self) -> int:
        return self.runtime.my_pe

    def n_pes(self) -> int:
        return self.runtime.n_pes

    def peer_address(self, address: int, pe: int) -> int:
        return self.runtime.on_rank(address, pe)

    def _record(self, kind: str, **fields: Any) -> Operation | None:
        programs = self.programs
        return self.runtime.record(
            Operation(kind, self.runtime.my_pe, programs.label, programs.call, self.index, **fields)
        )

    def put_signal(
        self, destination: int, source: int, num_bytes: int, signal: int, value: int, op: int, pe: int
    ) -> None:
        runtime, start = self.runtime, self.runtime.start
        places = {"destination": destination - start, "source": source - start, "signal": signal - start}
        o = self._record("put", num_bytes=num_bytes, value=value, op=op, pe=pe, **places)
        if o is None:
            return
        signal_address = runtime.on_rank(start + o.signal, o.pe, 8)
        if o.signal_first:
            change_signal(signal_address, o.value, o.op)
        if o.num_bytes:
            source = runtime.on_rank(start + o.source, runtime.my_pe, o.num_bytes)
            ctypes.memmove(runtime.on_rank(start + o.destination, o.pe, o.num_bytes), source, o.num_bytes)
        if not o.signal_first:
            change_signal(signal_address, o.value, o.op)

    def signal(self, signal: int, value: int, op: int, pe: int) -> None:
        o = self._record("signal", signal=signal - self.runtime.start, value=value, op=op, pe=pe)
        if o is not None:
            change_signal(self.runtime.on_rank(self.runtime.start + o.signal, o.pe, 8), o.value, o.op)

    def wait_ge(
        self,
        signal: int,
        target: int,
        timeout_ns: int,
        operation: int,
        awaited: int,
        flags: tuple[int, int, int] | None,
    ) -> int:
        start = self.runtime.start
        o = self._record("wait", signal=signal - start, value=target, op=0, pe=awaited, operation=operation)
        if o is not None:
            signal, target = start + o.signal, o.value
        word = ctypes.c_int64.from_address(signal)
        if o is not None and word.value < target:
            self.deadline = time.monotonic() + timeout_ns / 1e9 if timeout_ns else None
            self.waits_for = lambda: self.runtime.describe_wait(
                operation, awaited if flags is None else _first_late(*flags), target, word.value
            )
            self.programs.block(self, lambda: word.value >= target)
        change_signal(signal, 0, ADD)  # acquires, where reading a word does not by itself
        return word.value


class _Programs:
    """All programs of one launch: run in turns, switching where one has to wait."""

    def __init__(
        self, runtime: EmulatedRuntime, grid: tuple[int, ...], body: Callable[[], None], label: str, call: int
    ) -> None:
        self.runtime, self.grid, self.body, self.label, self.call = runtime, grid, body, label, call
        self._pending = deque((x, y, z) for x in range(grid[0]) for y in range(grid[1]) for z in range(grid[2]))
        self._waiting: list[_Program] = []
        self._error: BaseException | None = None
        self._main = tasks.Baton()

    def run(self) -> None:
        """Runs all of them; raises the first error after unwinding the others."""
        polls = 0
        while self._waiting or (self._pending and self._error is None):
            program = self._next_ready()
            if program is not None:
                self._waiting.remove(program)
                program.baton.give()
            elif self._pending and self._error is None and len(self._waiting) < self.runtime.max_resident_programs:
                tasks.start(self._work)
            else:
                _pause(polls)
                polls += 1
                continue
            polls = 0
            self._main.wait()
        if self._error is not None:
            raise self._error

    def _next_ready(self) -> _Program | None:
        now = time.monotonic()
        for program in self._waiting:
            assert program.ready is not None
            if self._error is not None or program.ready():
                return program
            if program.deadline is not None and now > program.deadline:
                limit_s = int(self.runtime.watchdog[watchdog.TIMEOUT_NS]) / 1e9
                self._error = watchdog.WaitTimeoutError(
                    f"rank {self.runtime.my_pe}: {self.label}, program {program.index}: {program.waits_for()}; "
                    f"gave up after {limit_s:g} s. Check that every rank makes the same calls, or raise the timeout."
                )
                return program
        return None

    def _work(self) -> None:
        """The life of a thread: runs programs as long as there are some to start."""
        while self._pending and self._error is None:
            program = _Program(self, self._pending.popleft())
            self._enter(program)
            try:
                self.body()
            except _Abort:
                pass
            except BaseException as error:  # noqa: BLE001 - whatever it is, run() raises it
                error.add_note(f"rank {self.runtime.my_pe}, {self.label}, program {program.index}")
                self._error = self._error or error
        self._main.give()

    def _enter(self, program: _Program) -> None:
        hooks.set_current(program)
        interpreter.set_program(program.index, self.grid)

    def block(self, program: _Program, ready: Callable[[], bool]) -> None:
        """Lets others go on until ``ready()``."""
        program.ready = ready
        self._waiting.append(program)
        self._main.give()
        program.baton.wait()
        self._enter(program)
        if self._error is not None:
            raise _Abort
