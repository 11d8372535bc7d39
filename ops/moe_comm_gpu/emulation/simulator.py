"""All ranks in one process under a seeded scheduler: the test bench of the protocol.

Each rank's host function and each program of each kernel is a task; at every communication operation the scheduler
may let another task go on, or let a message make its next step. Puts and signals arrive late and in any order that the
memory model of :mod:`ops.moe_comm_gpu.device.primitives` allows: nothing but a put's data and its own signal is
ordered. Ranks stall. Memory is checked by :mod:`ops.moe_comm_gpu.emulation.ordering`, in granules of four bytes of the
heap. When every task waits and nothing is in flight, the run ends at once with what each one waits for. The same seed
gives the same run.

    simulation = Simulation(n_pes=4, seed=7)
    results = simulation.run(lambda runtime: my_rank(runtime))    # once per rank, with a Runtime of its own

A launch returns when its kernel has run, as if each host synchronised at once; what a host function itself does to
tensors is not checked.
"""

from __future__ import annotations

import ctypes
import functools
import random
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ops.moe_comm_gpu.device import hooks, watchdog
from ops.moe_comm_gpu.emulation import interpreter
from ops.moe_comm_gpu.emulation.floats import Array
from ops.moe_comm_gpu.emulation.heap import HeapLayout
from ops.moe_comm_gpu.emulation.operations import ADD, Fault, Operation
from ops.moe_comm_gpu.emulation.ordering import (
    ORIGIN,
    UNALLOCATED,
    UNWRITTEN,
    Actor,
    Knowledge,
    Ordering,
    OutOfBoundsError,
    SimulationError,
)
from ops.moe_comm_gpu.emulation.scheduler import Message, Policy, Scheduler, Task

MASK_64 = (1 << 64) - 1


@dataclass(eq=False)
class _Collective:
    kind: str
    values: dict[int, Any] = field(default_factory=dict)


class Simulation:
    """One run of ``n_pes`` ranks.

    Args:
        n_pes: number of ranks.
        seed: decides everything that is left open.
        heap_bytes: size of each rank's symmetric heap.
        max_resident_programs: programs of one grid that run at the same time.
        fault: changes operations, see :mod:`ops.moe_comm_gpu.emulation.operations`.
        policy: how to schedule; drawn from the seed by default.
        max_threads: programs of a grid that are told apart when accesses are checked.

    Attributes:
        trace: every communication operation so far, before the fault.
    """

    def __init__(
        self,
        n_pes: int,
        seed: int = 0,
        *,
        heap_bytes: int = 1 << 20,
        max_resident_programs: int = 8,
        fault: Fault | None = None,
        policy: Policy | None = None,
        max_threads: int = 64,
    ) -> None:
        self.n_pes, self.seed = n_pes, seed
        self.heap_bytes, self.max_resident_programs = heap_bytes, max_resident_programs
        self.trace: list[Operation] = []
        self.operation_names: list[Sequence[str]] = [()] * n_pes
        self._fault = fault
        self._rng = random.Random(seed)
        self.scheduler = Scheduler(
            n_pes, self._rng, policy or Policy.draw(self._rng), self._enter, f"simulation of {n_pes} ranks, seed {seed}"
        )
        self._max_threads = max_threads
        self.ordering = Ordering(n_pes * (1 + max_threads))
        self.heap = torch.zeros(n_pes * heap_bytes + 256, dtype=torch.uint8)
        self.base = -(-self.heap.data_ptr() // 256) * 256
        self.layout = HeapLayout(heap_bytes)
        self.ordering.add_region(self.base, n_pes * heap_bytes, 2, self._describe)
        self._threads_used: dict[int, int] = defaultdict(int)  # thread -> its last clock
        self._collectives: list[_Collective] = []

    # --- running --------------------------------------------------------------------------------------------------

    def run(self, host: Callable[[SimulatedRuntime], Any]) -> list[Any]:
        """Calls ``host`` once per rank, each with its runtime; returns the results by rank.

        Raises:
            SimulationError: something was wrong; a subclass says what. Other errors of ``host`` or of a kernel are
                raised as they are. Either has the seed and the failing task in its notes.
        """
        results: list[Any] = [None] * self.n_pes

        def body(runtime: SimulatedRuntime) -> None:
            results[runtime.my_pe] = host(runtime)

        for rank in range(self.n_pes):
            runtime = SimulatedRuntime(self, rank)
            actor = self._actor(f"rank {rank}", rank * (1 + self._max_threads), self.ordering.new_knowledge())
            task = Task(f"rank {rank}", rank, functools.partial(body, runtime), actor)
            runtime.task = task
            self.scheduler.add(task)
        with interpreter.language():
            interpreter.builder.observer = _Observer(self)
            try:
                self.scheduler.run()
            finally:
                interpreter.builder.observer = None
                hooks.set_current(None)
        return results

    def _actor(self, name: str, thread: int, knowledge: Knowledge) -> Actor:
        self._threads_used[thread] = number = max(self._threads_used[thread], int(knowledge.clock[thread])) + 1
        knowledge.clock[thread] = number
        return Actor(name, thread, knowledge)

    def _enter(self, task: Task) -> None:
        hooks.set_current(_Hooks(self, task))
        interpreter.set_program(task.index, task.grid)

    # --- memory and messages --------------------------------------------------------------------------------------

    def word(self, address: int) -> ctypes.c_uint64:
        """The signal at ``address``."""
        return ctypes.c_uint64.from_address(address)

    def offset(self, address: int) -> int:
        """Offset of ``address`` in the heap of its rank; -1 outside."""
        inside = self.base <= address < self.base + self.n_pes * self.heap_bytes
        return (address - self.base) % self.heap_bytes if inside else -1

    def on_rank(self, address: int, rank: int, pe: int, what: str) -> int:
        """The address on ``pe`` of what lies at ``address`` of ``rank``."""
        if not 0 <= pe < self.n_pes:
            raise OutOfBoundsError(f"{what}: rank {pe} of {self.n_pes}")
        low = self.base + rank * self.heap_bytes
        if not low <= address < low + self.heap_bytes:
            raise OutOfBoundsError(f"{what}: {address:#x} is not in the symmetric heap of rank {rank}")
        return address + (pe - rank) * self.heap_bytes

    def _describe(self, address: int) -> str:
        rank, offset = divmod(address - self.base, self.heap_bytes)
        return f"rank {rank}'s {self.layout.describe(offset)}"

    def describe(self, address: int) -> str:
        """Names a symmetric address."""
        return self._describe(address) if self.offset(address) >= 0 else f"local word {address:#x}"

    def perform(self, task: Task, operation: Operation) -> Operation | None:
        """Records the operation and returns what is to happen instead."""
        self.trace.append(operation)
        return operation if self._fault is None else self._fault(operation)

    def put(self, task: Task, o: Operation) -> None:
        """Sends a put on its way."""
        rank_base = self.base + o.rank * self.heap_bytes
        what = f"put by {task.name}"
        source = rank_base + o.source
        destination = self.on_rank(rank_base + o.destination, o.rank, o.pe, what)
        released = self.ordering.put(task.actor, destination, source, o.num_bytes, what)
        steps: deque[Callable[[], object]] = deque()
        parts = [(0, o.num_bytes)]
        if o.num_bytes > 16 and self._rng.random() < self.scheduler.policy.tear:
            cut = 16 * self._rng.randrange(1, -(-o.num_bytes // 16))
            parts = [(0, cut), (cut, o.num_bytes - cut)]
            self._rng.shuffle(parts)
        for start, length in parts:
            if length:
                steps.append(functools.partial(ctypes.memmove, destination + start, source + start, length))
        arrival = self._signal_step(task, o, released)
        (steps.appendleft if o.signal_first else steps.append)(arrival)
        if o.signal_first:  # the data are then not covered by the signal
            released.arrived &= ~(1 << released.arrived.bit_length() - 1)
            released.arrived |= 1 << self.ordering.new_bit()
        self.scheduler.in_flight.append(Message(o.pe, steps))

    def signal(self, task: Task, o: Operation) -> None:
        """Sends a signal on its way."""
        arrival = self._signal_step(task, o, self.ordering.signal(task.actor))
        self.scheduler.in_flight.append(Message(o.pe, deque((arrival,))))

    def _signal_step(self, task: Task, o: Operation, released: Knowledge) -> Callable[[], None]:
        what = f"{o.kind} by {task.name}"
        address = self.on_rank(self.base + o.rank * self.heap_bytes + o.signal, o.rank, o.pe, what)

        def arrive() -> None:
            word = self.word(address)
            self.ordering.signal_arrives(address, released, o.op != ADD, what)
            word.value = (word.value + o.value if o.op == ADD else o.value) & MASK_64
            self.scheduler.wake(address)

        return arrive

    # --- what hosts do --------------------------------------------------------------------------------------------

    def collective(self, task: Task, number: int, kind: str, value: Any, effect: Callable[[], None]) -> list[Any]:
        """All ranks meet; the last one to come causes ``effect``. Returns each rank's value."""
        if number == len(self._collectives):
            self._collectives.append(_Collective(kind))
        entry = self._collectives[number]
        if entry.kind != kind:
            raise SimulationError(f"{task.name} calls {kind} where other ranks call {entry.kind}")
        entry.values[task.rank] = value
        if len(entry.values) == self.n_pes:
            effect()
            self.scheduler.wake(entry)

        def missing() -> str:
            absent = [rank for rank in range(self.n_pes) if rank not in entry.values]
            return f"{kind}, which ranks {absent} have not called"

        self.scheduler.block(task, entry, lambda: len(entry.values) == self.n_pes, missing)
        return [entry.values[rank] for rank in range(self.n_pes)]

    def meet(self) -> None:
        """The effect of a barrier: everything has arrived, and every host knows what every other one does."""
        self.scheduler.flush()
        together = self.ordering.new_knowledge()
        hosts = [t for t in self.scheduler.tasks if t.label == "host"]
        for host in hosts:
            together.learn(host.actor.knowledge)
        together.arrived |= self.ordering.everything_arrived()
        for host in hosts:
            host.actor.knowledge.learn(together)

    def launch(
        self, host: Task, kernel: Any, grid: tuple[int, ...], arguments: dict[str, Any], label: str, call: int
    ) -> None:
        """Runs all programs of a kernel, at most ``max_resident_programs`` at a time."""
        full = (*grid, 1, 1)[:3]
        indices = [(x, y, z) for x in range(full[0]) for y in range(full[1]) for z in range(full[2])]
        left, pending = set(indices), deque(enumerate(indices))
        programs: list[Task] = []

        def next_program() -> None:
            number, index = pending.popleft()
            thread = host.rank * (1 + self._max_threads) + 1 + number % self._max_threads
            name = f"rank {host.rank}, {label} (launch {call}), program {index[0] if grid[1:] == () else index}"
            actor = self._actor(name, thread, host.actor.knowledge.copy())

            def body() -> None:
                interpreter.rewritten(kernel)(**arguments)
                left.remove(index)
                if pending:
                    next_program()
                if not left:
                    self.scheduler.wake(id(programs))

            task = Task(name, host.rank, body, actor, index, full, label, call, host)
            programs.append(task)
            self.scheduler.add(task)

        for _ in range(min(len(indices), self.max_resident_programs)):
            next_program()
        self.scheduler.block(host, id(programs), lambda: not left, lambda: f"{label} (launch {call}) to end")
        for task in programs:
            host.actor.knowledge.learn(task.actor.knowledge)


class SimulatedRuntime:
    """One rank's view of a :class:`Simulation`; a :class:`~ops.moe_comm_gpu.device.runtime.Runtime`."""

    def __init__(self, simulation: Simulation, rank: int) -> None:
        self.my_pe, self.n_pes = rank, simulation.n_pes
        self.device = torch.device("cpu")
        self.max_resident_programs = simulation.max_resident_programs
        self.watchdog = torch.zeros(watchdog.NUM_WORDS, dtype=torch.int64)
        self.simulation = simulation
        self.task: Task
        self._launches = self._collectives = 0

    def _meet(self, kind: str, value: Any, effect: Callable[[], None]) -> list[Any]:
        self.simulation.scheduler.operate(self.task)
        number, self._collectives = self._collectives, self._collectives + 1
        return self.simulation.collective(self.task, number, kind, value, effect)

    def allocate(self, num_bytes: int, name: str = "", *, zeroed: bool = True) -> torch.Tensor:
        """Symmetric memory; see :class:`~ops.moe_comm_gpu.device.runtime.Runtime`."""
        simulation = self.simulation
        offsets: list[int] = []
        kind = f"allocate({num_bytes}, {name!r}, zeroed={zeroed})"

        def effect() -> None:
            offsets.append(simulation.layout.allocate(num_bytes, name).offset)
            for rank in range(simulation.n_pes):
                start = simulation.base + rank * simulation.heap_bytes + offsets[0]
                ctypes.memset(start, 0 if zeroed else 0xFF, num_bytes)
                if num_bytes:
                    simulation.ordering.mark(start, num_bytes, ORIGIN if zeroed else UNWRITTEN)

        entries = self._meet(kind, offsets, effect)
        offset = next(o[0] for o in entries if o)
        start = simulation.base - simulation.heap.data_ptr() + self.my_pe * simulation.heap_bytes + offset
        return simulation.heap[start : start + num_bytes]

    def free(self, tensor: torch.Tensor) -> None:
        """Releases symmetric memory on every rank."""
        simulation = self.simulation
        offset = simulation.offset(tensor.data_ptr())

        def effect() -> None:
            simulation.scheduler.flush()
            allocation = simulation.layout.free(offset)
            for rank in range(simulation.n_pes):
                start = simulation.base + rank * simulation.heap_bytes + offset
                if allocation.num_bytes:
                    simulation.ordering.mark(start, allocation.num_bytes, UNALLOCATED)

        self._meet(f"free({simulation.layout.describe(offset)})", None, effect)

    def launch(
        self, kernel: Any, grid: tuple[int, ...], *args: Any, num_warps: int = 4, label: str = "", **constexprs: Any
    ) -> None:
        """Runs a kernel to its end; see :class:`~ops.moe_comm_gpu.device.runtime.Runtime`."""
        simulation, ordering = self.simulation, self.simulation.ordering
        simulation.scheduler.operate(self.task)
        arguments = interpreter.bind(kernel, args, constexprs)
        local = [t for t in (*args, *constexprs.values()) if isinstance(t, torch.Tensor) and t.numel()]
        local = [t for t in local if simulation.offset(t.data_ptr()) < 0]
        for tensor in local:
            storage = tensor.untyped_storage()
            shift = min(2, tensor.element_size().bit_length() - 1)
            ordering.add_region(storage.data_ptr(), storage.nbytes(), shift, _describe_local(storage.data_ptr()))
            ordering.mark(storage.data_ptr(), storage.nbytes(), ORIGIN)
        call, self._launches = self._launches, self._launches + 1
        simulation.launch(self.task, kernel, grid, arguments, label or kernel.fn.__name__, call)
        for tensor in local:
            ordering.remove_region(tensor.untyped_storage().data_ptr())

    def synchronize(self) -> None:
        """Nothing to do: a launch returns when its kernel has run."""

    def barrier(self) -> None:
        """Returns when every rank has called it and everything has arrived."""
        self._meet("barrier", None, self.simulation.meet)

    def all_gather(self, value: Any, what: str = "all_gather") -> list[Any]:
        """Each rank's value, by rank."""
        return self._meet("all_gather", value, lambda: None)

    def set_operations(self, names: Sequence[str]) -> None:
        """Names of the operation codes, for error messages."""
        self.simulation.operation_names[self.my_pe] = names

    def set_timeout(self, seconds: float) -> None:
        """Kept for the kernels; nothing times out here, a deadlock is reported at once."""
        self.watchdog[watchdog.TIMEOUT_NS] = int(seconds * 1e9)


def _describe_local(base: int) -> Callable[[int], str]:
    return lambda address: f"a tensor argument[byte {address - base}]"


class _Hooks:
    """The device primitives of one task."""

    def __init__(self, simulation: Simulation, task: Task) -> None:
        self._simulation, self._task = simulation, task

    def my_pe(self) -> int:
        return self._task.rank

    def n_pes(self) -> int:
        return self._simulation.n_pes

    def peer_address(self, address: int, pe: int) -> int:
        return self._simulation.on_rank(address, self._task.rank, pe, f"peer_ptr in {self._task.name}")

    def _operation(self, kind: str, **fields: Any) -> Operation | None:
        task = self._task
        operation = Operation(kind, task.rank, task.label, task.call, task.index, **fields)
        return self._simulation.perform(task, operation)

    def _local(self, address: int, what: str) -> int:
        """The offset of an address that has to lie in this rank's heap."""
        simulation = self._simulation
        return simulation.offset(simulation.on_rank(address, self._task.rank, self._task.rank, what))

    def put_signal(
        self, destination: int, source: int, num_bytes: int, signal: int, value: int, op: int, pe: int
    ) -> None:
        what = f"put by {self._task.name}"
        fields = {
            "destination": self._local(destination, what),
            "source": self._local(source, what),
            "signal": self._local(signal, what),
        }
        operation = self._operation("put", num_bytes=num_bytes, value=value, op=op, pe=pe, **fields)
        if operation is not None:
            self._simulation.put(self._task, operation)
        self._simulation.scheduler.operate(self._task)

    def signal(self, signal: int, value: int, op: int, pe: int) -> None:
        offset = self._local(signal, f"signal by {self._task.name}")
        operation = self._operation("signal", signal=offset, value=value, op=op, pe=pe)
        if operation is not None:
            self._simulation.signal(self._task, operation)
        self._simulation.scheduler.operate(self._task)

    def wait_ge(
        self,
        signal: int,
        target: int,
        timeout_ns: int,
        operation: int,
        awaited: int,
        flags: tuple[int, int, int] | None,
    ) -> int:
        simulation, task = self._simulation, self._task
        offset = simulation.offset(signal)
        o = self._operation("wait", signal=offset, value=target, op=0, pe=awaited, operation=operation)
        simulation.scheduler.operate(task)
        word = simulation.word(signal)
        if o is not None:
            target = o.value
            if o.signal != offset:
                signal = signal + o.signal - offset
                word = simulation.word(signal)
            names = simulation.operation_names[task.rank]

            def describe() -> str:
                late = awaited if flags is None else self._first_late(*flags)
                return f"{simulation.describe(signal)}: " + watchdog.describe(
                    names, operation, late, target, word.value
                )

            simulation.scheduler.block(task, signal, lambda: word.value >= target, describe)
            simulation.ordering.acquire(task.actor, signal)
        return word.value

    def _first_late(self, flags: int, target: int, number: int) -> int:
        words = (self._simulation.word(flags + 8 * rank) for rank in range(number))
        return watchdog.first_late((word.value for word in words), target)


class _Observer:
    """Passes the programs' memory accesses to the checker."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation, self._ordering = simulation, simulation.ordering

    @property
    def _actor(self) -> Actor:
        task = self._simulation.scheduler.running
        assert task is not None
        return task.actor

    def load(self, addresses: Array, item_bytes: int) -> None:
        self._ordering.read(self._actor, addresses, item_bytes)

    def store(self, addresses: Array, item_bytes: int) -> None:
        self._ordering.write(self._actor, addresses, item_bytes)

    def before_atomic(self, addresses: Array, item_bytes: int) -> None:
        task = self._simulation.scheduler.running
        assert task is not None
        self._simulation.scheduler.operate(task)

    def after_atomic(self, addresses: Array, item_bytes: int, acquires: bool, releases: bool) -> None:
        for address in np.unique(addresses):
            self._ordering.atomic(self._actor, int(address), item_bytes, acquires, releases)
            self._simulation.scheduler.wake(int(address))
