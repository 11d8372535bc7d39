"""What an optimised TPU program does around its kernels, read from its HLO text.

XLA operations are costed by the bytes they must move through HBM, in the tiled layout that their shapes state: XLA's
own cycle estimate for plain converts and copies is several times too high. Loops count their known number of trips.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

_SHAPE = re.compile(r"(pred|[a-z]+\d+\w*)\[([\d,]*)\](\{[^}]*\})?")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-<>]+)[ (].*\{\s*$")
_INSTRUCTION = re.compile(r"\s*(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)")
_KERNEL_CALL = 'custom_call_target="tpu_custom_call"'
# Moves nothing, or is counted where its data is used. "-done" closes an asynchronous copy that its "-start" counted.
_FREE = {
    "parameter",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "constant",
    "custom-call",
    "after-all",
    "partition-id",
} | {
    "opt-barrier",
    "iota",
    "copy-done",
    "slice-done",
    "async-done",
    "dynamic-slice-done",
}
_READS_A_PART = {"slice", "dynamic-slice", "gather"}


@dataclass(frozen=True)
class XlaOperation:
    """One XLA operation outside the kernels, all its executions together.

    Attributes:
        name, opcode, shape: as the program states them.
        moved_bytes: through HBM.
        source: the traced operation it came from.
        overlaps: an asynchronous copy, e.g. of a kernel's operand to VMEM ahead of time; it runs beside other work.
    """

    name: str
    opcode: str
    moved_bytes: int
    shape: str
    source: str
    overlaps: bool = False


@dataclass(frozen=True)
class Program:
    """A compiled program.

    Attributes:
        kernels: HLO name of a kernel -> (StableHLO line it came from, launches).
        operations: the other operations, costliest first.
        notes: what could not be read, empty if all was.
    """

    kernels: dict[str, tuple[int, int]]
    operations: tuple[XlaOperation, ...]
    notes: tuple[str, ...]

    @property
    def xla_bytes(self) -> int:
        """Bytes that operations outside the kernels move while nothing else runs."""
        return sum(operation.moved_bytes for operation in self.operations if not operation.overlaps)

    @property
    def overlapping_bytes(self) -> int:
        """Bytes of asynchronous copies."""
        return sum(operation.moved_bytes for operation in self.operations if operation.overlaps)


def array_bytes(shape: str) -> int:
    """HBM bytes of an HLO shape, padding of its tiled layout included; arrays that XLA placed in VMEM are free."""
    return sum(_one_array_bytes(match) for match in _SHAPE.finditer(shape) if "S(1)" not in (match[3] or ""))


def _one_array_bytes(match: re.Match[str]) -> int:
    bits = 8 if match[1] == "pred" else int(re.findall(r"\d+", match[1])[0])
    extents = [int(extent) for extent in match[2].split(",") if extent]
    layout = match[3] or ""
    order_match = re.match(r"\{([\d,]*)", layout)
    order = [int(axis) for axis in order_match[1].split(",") if axis] if order_match else []
    tile = re.search(r"T\(([\d,]+)\)", layout)
    if tile:
        for extent, axis in zip(reversed([int(t) for t in tile[1].split(",")]), order, strict=False):
            extents[axis] = -(-extents[axis] // extent) * extent
    return math.prod(extents) * bits // 8


def read(text: str) -> Program:
    """Reads an optimised module."""
    computations, entry = _computations(text)
    reader = _Reader(computations)
    reader.walk(entry, 1)
    operations = sorted(reader.operations, key=lambda operation: -operation.moved_bytes)
    return Program(reader.kernels, tuple(operations), tuple(reader.notes))


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
    computations: dict[str, list[str]] = {}
    entry, current = "", ""
    for line in text.splitlines():
        start = None if line.startswith(" ") else _COMPUTATION.match(line)
        if start:
            current = start[2]
            computations[current] = []
            entry = current if start[1] else entry
        elif current and line.startswith("  "):
            computations[current].append(line)
    if not entry:
        raise ValueError("text: expected an HLO module with an ENTRY computation, got none")
    return computations, entry


class _Reader:
    def __init__(self, computations: dict[str, list[str]]) -> None:
        self.computations = computations
        self.kernels: dict[str, tuple[int, int]] = {}
        self.operations: list[XlaOperation] = []
        self.notes: list[str] = []

    def walk(self, computation: str, times: int) -> None:
        """Adds what one computation does, executed ``times`` times."""
        shapes: dict[str, str] = {}
        for line in self.computations[computation]:
            match = _INSTRUCTION.match(line)
            if not match:
                continue
            name, shape, opcode, rest = match.groups()
            shapes[name] = shape
            kernel_line = line if _KERNEL_CALL in line else self._kernel_inside(opcode, rest)
            if kernel_line:
                self._add_kernel(name, kernel_line, times)
            elif opcode == "while":
                self._walk_loop(name, line, times)
            elif opcode in ("call", "conditional"):
                for called in self._called(line):
                    self.walk(called, times)
                if opcode == "conditional":
                    self.notes.append(f"{name}: every branch of the conditional counts")
            elif opcode not in _FREE:
                self._add_operation(name, shape, opcode, rest, shapes, times)

    def _called(self, line: str) -> list[str]:
        found = re.search(r"(?:to_apply|calls|body|branch_computations)=\{?([^}\s]+(?:, %[\w.\-]+)*)", line)
        names = re.findall(r"%?([\w.\-]+)", found[1]) if found else []
        return [name for name in names if name in self.computations]

    def _kernel_inside(self, opcode: str, rest: str) -> str | None:
        """The kernel call that a fusion wraps, if it does."""
        called = re.search(r"calls=%?([\w.\-]+)", rest) if opcode == "fusion" else None
        inside = self.computations.get(called[1], []) if called else []
        return next((line for line in inside if _KERNEL_CALL in line), None)

    def _add_kernel(self, name: str, line: str, times: int) -> None:
        source = re.search(r"source_line=(\d+)", line)
        self.kernels[name] = (int(source[1]) if source else 0, self.kernels.get(name, (0, 0))[1] + times)

    def _walk_loop(self, name: str, line: str, times: int) -> None:
        body = re.search(r"body=%?([\w.\-]+)", line)
        trips = re.search(r'known_trip_count":\{"n":"(\d+)"', line)
        if not trips:
            self.notes.append(f"{name}: trip count unknown, the loop counts once")
        if body:
            self.walk(body[1], times * (int(trips[1]) if trips else 1))

    def _add_operation(self, name: str, shape: str, opcode: str, rest: str, shapes: dict[str, str], times: int) -> None:
        arguments = list(dict.fromkeys(re.findall(r"%([\w.\-]+)", rest.split("), ")[0])))
        overlaps = opcode.endswith("-start")
        if overlaps:  # between HBM and VMEM; its shape holds both sides, the smaller one is what moves
            parts = [_one_array_bytes(part) for part in _SHAPE.finditer(shape)]
            moved = min((part for part in parts if part > 64), default=0)
        elif opcode in _READS_A_PART:
            moved = 2 * array_bytes(shape)
        elif opcode == "dynamic-update-slice":
            moved = 2 * array_bytes(shapes.get(arguments[1], "")) if len(arguments) > 1 else 0
        else:
            moved = array_bytes(shape) + sum(self._reads(opcode, rest, shapes, arguments))
        source = re.search(r'op_name="([^"]*)"', rest)
        traced = source[1][-80:] if source else ""
        self.operations.append(XlaOperation(name, opcode, times * moved, shape[:80], traced, overlaps))

    def _reads(self, opcode: str, rest: str, shapes: dict[str, str], arguments: list[str]) -> Iterator[int]:
        """Bytes read of each argument; of one that a fusion only slices or gathers from, what it takes of it."""
        called = re.search(r"calls=%?([\w.\-]+)", rest) if opcode == "fusion" else None
        parts = self._parts(self.computations[called[1]]) if called and called[1] in self.computations else {}
        for number, argument in enumerate(arguments):
            whole = array_bytes(shapes.get(argument, ""))
            yield min(whole, parts.get(number, whole)) if whole else 0

    def _parts(self, body: list[str]) -> dict[int, int]:
        names: dict[str, int] = {}
        taken: Counter[int] = Counter()
        whole: set[int] = set()
        for line in body:
            match = _INSTRUCTION.match(line)
            if not match:
                continue
            name, shape, opcode, rest = match.groups()
            if opcode == "parameter":
                names[name] = int(rest.split(")")[0])
                continue
            for position, argument in enumerate(re.findall(r"%([\w.\-]+)", rest.split("), ")[0])):
                if argument not in names:
                    continue
                if opcode in _READS_A_PART and position == 0:
                    taken[names[argument]] += array_bytes(shape)
                else:
                    whole.add(names[argument])
        return {number: size for number, size in taken.items() if number not in whole}
