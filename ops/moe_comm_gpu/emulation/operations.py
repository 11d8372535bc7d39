"""A record of each communication operation, for counting and for planting faults."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from ops.moe_comm_gpu.device.primitives import SIGNAL_ADD, SIGNAL_SET

SET, ADD = SIGNAL_SET.value, SIGNAL_ADD.value


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation of one program, as the kernel asked for it.

    Attributes:
        kind: ``"put"`` (with its signal), ``"signal"`` or ``"wait"``.
        rank: who does it.
        label: the launch's label, by default the kernel's name.
        call: how many kernels this rank had launched before.
        program: index of the program in its grid.
        signal: offset of the signal in the symmetric heap, in bytes (negative: not in the heap).
        value: what is set, added, or waited for.
        op: ``SET`` or ``ADD``; 0 for a wait.
        pe: the rank that is put to or signalled; for a wait, the awaited rank or -1.
        destination: offset of the destination in the heap; puts only.
        source: offset of the source in the heap; puts only.
        num_bytes: length of the copy; puts only.
        operation: the kernel's operation code; waits only.
        signal_first: a fault: the signal arrives before the data.
    """

    kind: str
    rank: int
    label: str
    call: int
    program: tuple[int, int, int]
    signal: int
    value: int
    op: int
    pe: int
    destination: int = -1
    source: int = -1
    num_bytes: int = 0
    operation: int = -1
    signal_first: bool = False


#: What happens instead of an operation: another one, or None for nothing at all.
Fault = Callable[[Operation], Operation | None]
Where = Callable[[Operation], bool]


def drop(where: Where) -> Fault:
    """A fault: operations that ``where`` picks do not happen (a wait returns at once)."""
    return lambda operation: None if where(operation) else operation


def change(where: Where, **fields: Callable[[Operation], int | bool]) -> Fault:
    """A fault: picked operations happen with other ``fields``, each computed from the operation as it was."""
    return lambda o: replace(o, **{name: f(o) for name, f in fields.items()}) if where(o) else o  # type: ignore[arg-type]


def signal_before_data(where: Where) -> Fault:
    """A fault: the signal of a picked put arrives before its data."""
    return change(where, signal_first=lambda _: True)


def count(trace: Iterable[Operation], kind: str, where: Where = lambda _: True) -> int:
    """Number of operations of one ``kind`` that ``where`` picks."""
    return sum(1 for o in trace if o.kind == kind and where(o))


def put_bytes(trace: Iterable[Operation], where: Where = lambda _: True) -> int:
    """Bytes of all picked puts."""
    return sum(o.num_bytes for o in trace if o.kind == "put" and where(o))
