"""Which memory access is ordered after which: a happens-before checker for programs, puts and signals.

Every program (and every rank's host) is a thread with a vector clock; a put is an event of its own, because knowing
what its issuer knew says nothing about whether it has arrived. Whoever acquires a signal learns what was released
with it: the issuer's clock, the puts the issuer knew to have arrived, and the put the signal belongs to. For every
granule of memory the checker keeps the last write and the reads since. An access that meets one it is not ordered
after is an error whatever the values happen to be, so a missing wait shows in any schedule that executes both sides,
and so does a source that is overwritten before its put has arrived.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from ops.moe_comm_gpu.emulation.floats import Array

# Values of a granule's last write that are no event.
UNALLOCATED, UNWRITTEN, ORIGIN = range(3)


class SimulationError(RuntimeError):
    """What the simulator found wrong; the message says who did what, and how to run it again."""


class RaceError(SimulationError):
    """Two accesses to one place, at least one of them a write, that nothing orders."""


class UnwrittenReadError(SimulationError):
    """A read of memory that was never written."""


class OutOfBoundsError(SimulationError):
    """An access outside every allocation and every tensor argument."""


@dataclass(slots=True)
class Knowledge:
    """What has happened as far as somebody knows: a vector clock, and the puts and signals that have arrived."""

    clock: Array
    arrived: int = 0

    def copy(self) -> Knowledge:
        """The same, to change."""
        return Knowledge(self.clock.copy(), self.arrived)

    def learn(self, other: Knowledge) -> None:
        """Adds what ``other`` knows."""
        np.maximum(self.clock, other.clock, out=self.clock)
        self.arrived |= other.arrived


@dataclass(slots=True)
class Actor:
    """A program or a rank's host: who accesses memory."""

    name: str
    thread: int
    knowledge: Knowledge
    event: int = 0  # its event since its last release, 0 for none yet


@dataclass(frozen=True, slots=True)
class _Event:
    name: str
    thread: int  # of a program's accesses between two releases; -1 for a put or a signal
    number: int  # its clock, or the put's bit
    atomic: bool = False


@dataclass
class _Region:
    base: int
    num_bytes: int
    shift: int  # log2 of the bytes of a granule
    describe: Callable[[int], str]
    users: int = 1
    last_write: Array = field(init=False)
    readers: Array = field(init=False)

    def __post_init__(self) -> None:
        granules = (self.num_bytes >> self.shift) + 1
        self.last_write = np.zeros(granules, np.int32)
        self.readers = np.zeros(granules, np.int32)


class Ordering:
    """Checks each access against those before it; ``num_threads`` bounds the vector clocks."""

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._events = [_Event("", -1, 0)] * (ORIGIN + 1)
        self._read_sets: list[frozenset[int]] = [frozenset()]
        self._read_set_ids: dict[frozenset[int], int] = {frozenset(): 0}
        self._bases: list[int] = []
        self._regions: list[_Region] = []  # at self._bases
        self._released: dict[int, Knowledge] = {}  # by signal address
        self._num_asynchronous = 0

    # --- memory ---------------------------------------------------------------------------------------------------

    def add_region(self, base: int, num_bytes: int, shift: int, describe: Callable[[int], str]) -> None:
        """Makes ``[base, base + num_bytes)`` known; a region may be added again by another user."""
        position = bisect.bisect_left(self._bases, base)
        if position < len(self._bases) and self._bases[position] == base:
            self._regions[position].users += 1
            return
        self._bases.insert(position, base)
        self._regions.insert(position, _Region(base, num_bytes, shift, describe))

    def remove_region(self, base: int) -> None:
        """Forgets the region, once each user has asked for it."""
        position = self._bases.index(base)
        self._regions[position].users -= 1
        if not self._regions[position].users:
            del self._bases[position], self._regions[position]

    def mark(self, base: int, num_bytes: int, state: int) -> None:
        """Sets memory to ``UNALLOCATED``, ``UNWRITTEN`` or ``ORIGIN`` (written before anybody ran)."""
        region = self._region(base)
        part = _granules(region, base, num_bytes)
        region.last_write[part] = state
        region.readers[part] = 0

    def _find(self, address: int) -> _Region | None:
        position = bisect.bisect_right(self._bases, address) - 1
        if position >= 0:
            region = self._regions[position]
            if address < region.base + region.num_bytes:
                return region
        return None

    def _region(self, address: int) -> _Region:
        region = self._find(address)
        if region is None:
            raise OutOfBoundsError(f"address {address:#x} lies in no allocation and no tensor argument")
        return region

    def _locate(self, actor: Actor, addresses: Array, item_bytes: int, what: str) -> tuple[_Region, Array]:
        if addresses.size == 1:
            low = int(addresses[0])
            high = low + item_bytes
        else:
            low, high = int(addresses.min()), int(addresses.max()) + item_bytes
        region = self._find(low)
        if region is None:
            raise OutOfBoundsError(f"{actor.name} {what} {low:#x}, outside every allocation and tensor argument")
        if high > region.base + region.num_bytes:
            over = high - region.base - region.num_bytes
            raise OutOfBoundsError(f"{actor.name} {what} {over} bytes past the end of {region.describe(low)}")
        granules = (addresses.astype(np.int64) - region.base) >> region.shift
        extra = (item_bytes - 1) >> region.shift
        if extra:
            granules = (granules[:, None] + np.arange(extra + 1)).reshape(-1)
        return region, granules

    # --- plain accesses -------------------------------------------------------------------------------------------

    def read(self, actor: Actor, addresses: Array, item_bytes: int) -> None:
        """A plain load of ``item_bytes`` at each of ``addresses``."""
        if addresses.size:
            region, granules = self._locate(actor, addresses, item_bytes, "reads")
            self._read(actor, actor.knowledge, self._current_event(actor), region, granules, "reads")

    def write(self, actor: Actor, addresses: Array, item_bytes: int) -> None:
        """A plain store of ``item_bytes`` at each of ``addresses``."""
        if addresses.size:
            region, granules = self._locate(actor, addresses, item_bytes, "writes")
            self._write(actor, actor.knowledge, self._current_event(actor), region, granules, "writes")

    def _read(
        self, actor: Actor, knowledge: Knowledge, event: int, region: _Region, granules: Array | slice, verb: str
    ) -> None:
        for write in _distinct(region.last_write[granules]):
            if write <= UNWRITTEN:
                at = self._place(region, granules, region.last_write, write)
                if write == UNALLOCATED:
                    raise OutOfBoundsError(f"{actor.name} {verb} {at}")
                raise UnwrittenReadError(f"{actor.name} {verb} {at}, which was never written")
            if not self._knows(knowledge, write):
                at = self._place(region, granules, region.last_write, write)
                raise RaceError(f"{actor.name} {verb} {at}, not ordered after {self._events[write].name}")
        readers = region.readers[granules]
        for old in _distinct(readers):
            members = self._read_sets[old]
            if event not in members:
                kept = [r for r in members if not self._knows(knowledge, r)]
                new = self._intern(frozenset((*kept, event)))
                readers[readers == old] = new
        region.readers[granules] = readers

    def _write(
        self, actor: Actor, knowledge: Knowledge, event: int, region: _Region, granules: Array | slice, verb: str
    ) -> None:
        for write in _distinct(region.last_write[granules]):
            if write == UNALLOCATED:
                raise OutOfBoundsError(f"{actor.name} {verb} {self._place(region, granules, region.last_write, write)}")
            if not self._knows(knowledge, write):
                at = self._place(region, granules, region.last_write, write)
                raise RaceError(f"{actor.name} {verb} {at}, not ordered after {self._events[write].name}")
        for readers in _distinct(region.readers[granules]):
            for reader in self._read_sets[readers]:
                if reader != event and not self._knows(knowledge, reader):
                    at = self._place(region, granules, region.readers, readers)
                    raise RaceError(
                        f"{actor.name} {verb} {at}, not ordered after a read by {self._events[reader].name}"
                    )
        region.last_write[granules] = event
        region.readers[granules] = 0

    # --- puts, signals, atomics -----------------------------------------------------------------------------------

    def put(self, actor: Actor, destination: int, source: int, num_bytes: int, name: str) -> Knowledge:
        """A put is issued: from now on it may read its source and write its destination.

        Returns:
            What its signal will release.
        """
        bit = self.new_bit()
        event = self._add_event(_Event(name, -1, bit))
        if num_bytes:
            for address, access, verb in ((source, self._read, "puts from"), (destination, self._write, "puts to")):
                region = self._region(address)
                access(actor, actor.knowledge, event, region, _granules(region, address, num_bytes), verb)
        released = self.release(actor)
        released.arrived |= 1 << bit
        return released

    def signal(self, actor: Actor) -> Knowledge:
        """A signal without data is issued; returns what it will release."""
        released = self.release(actor)
        released.arrived |= 1 << self.new_bit()
        return released

    def signal_arrives(self, address: int, released: Knowledge, replaces: bool, name: str) -> None:
        """The signal word changes: set (``replaces``) or added to."""
        region = self._region(address)
        granules = _granules(region, address, 8)
        for write in _distinct(region.last_write[granules]):
            if not self._events[write].atomic and not self._knows(released, write):
                raise RaceError(
                    f"{name} changes {region.describe(address)}, not ordered after {self._events[write].name}"
                )
        number = released.arrived.bit_length() - 1
        region.last_write[granules] = self._add_event(_Event(name, -1, number, atomic=True))
        if replaces or address not in self._released:
            self._released[address] = released
        else:
            self._released[address].learn(released)

    def acquire(self, actor: Actor, address: int) -> None:
        """``actor`` has seen the value at ``address`` and learns what was released with it."""
        released = self._released.get(address)
        if released is not None:
            actor.knowledge.learn(released)

    def atomic(self, actor: Actor, address: int, item_bytes: int, acquires: bool, releases: bool) -> None:
        """An atomic operation of a program on a word; always seen at once by everybody."""
        if acquires:
            self.acquire(actor, address)
        released = self.signal(actor) if releases else None
        region = self._region(address)
        granules = _granules(region, address, item_bytes)
        event = _Event(actor.name, -1, self.new_bit(), atomic=True)
        region.last_write[granules] = self._add_event(event)
        known = self._released.setdefault(address, self.new_knowledge())
        known.arrived |= 1 << event.number
        actor.knowledge.arrived |= 1 << event.number
        if released is not None:
            known.learn(released)

    def release(self, actor: Actor) -> Knowledge:
        """What ``actor`` knows and did up to now; what it does next is later than that."""
        released = actor.knowledge.copy()
        actor.knowledge.clock[actor.thread] += 1
        actor.event = 0
        return released

    def everything_arrived(self) -> int:
        """The ``arrived`` of somebody who knows that every put and signal so far has arrived."""
        return (1 << self._num_asynchronous) - 1

    # --- events ---------------------------------------------------------------------------------------------------

    def new_knowledge(self) -> Knowledge:
        """What somebody knows who has met nobody."""
        return Knowledge(np.zeros(self._num_threads, np.int64))

    def new_bit(self) -> int:
        """The number of a new put, signal or atomic operation."""
        self._num_asynchronous += 1
        return self._num_asynchronous - 1

    def _current_event(self, actor: Actor) -> int:
        if not actor.event:
            actor.event = self._add_event(_Event(actor.name, actor.thread, int(actor.knowledge.clock[actor.thread])))
        return actor.event

    def _add_event(self, event: _Event) -> int:
        self._events.append(event)
        return len(self._events) - 1

    def _knows(self, knowledge: Knowledge, event_id: int) -> bool:
        if event_id <= ORIGIN:
            return True
        event = self._events[event_id]
        if event.thread < 0:
            return bool(knowledge.arrived >> event.number & 1)
        return bool(knowledge.clock[event.thread] >= event.number)

    def _intern(self, readers: frozenset[int]) -> int:
        if readers not in self._read_set_ids:
            self._read_set_ids[readers] = len(self._read_sets)
            self._read_sets.append(readers)
        return self._read_set_ids[readers]

    def _place(self, region: _Region, granules: Array | slice, values: Array, wanted: int) -> str:
        """Names the first of the granules whose value is ``wanted``."""
        indices = np.arange(*granules.indices(len(values))) if isinstance(granules, slice) else granules
        first = int(indices[values[indices] == wanted][0])
        return region.describe(region.base + (first << region.shift))


def _granules(region: _Region, address: int, num_bytes: int) -> slice:
    first = (address - region.base) >> region.shift
    last = (address + num_bytes - 1 - region.base) >> region.shift
    return slice(first, last + 1)


def _distinct(values: Array) -> Iterable[int]:
    first = values[0]
    if (values == first).all():
        return (int(first),)
    return (int(v) for v in np.unique(values))
