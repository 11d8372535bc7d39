"""The schedule of one kernel, read from the dumps of libtpu's low-level compiler.

Two dumps are combined. ``final_bundles`` lists the VLIW bundles with their loop depth (one ``>`` a level) and names the
test that ends each loop. The per-bundle utilisation lists how many of each unit's slots are in use: the ``pre-delay``
file has one row per cycle, stalls included, the ``final`` one a row per bundle. Aligning the two gives every bundle its
cycles.

Two limits: code under ``pl.when`` counts as executed at every step, and waiting for a copy does not show.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

UNITS = ("MATMUL", "MATPUSH", "XLU", "VALU", "VPOP", "EUP", "VLOAD", "VSTORE", "SALU")
_BUNDLE = re.compile(r"^\s*(0x[0-9a-f]+|0)\s+([A-Z]{2})?\s*:\s*((?:>\s*)*)\{(.*)")
_EXIT_TEST = re.compile(r"= scmp\.ge\.\w+(?:\.totalorder)? (%\w+), (\d+) /\* loop exit test")
# MATMUL, MATPUSH and XLU rows mark a unit as busy over several cycles; the other columns are issued operations.
_FIRST_ISSUE_COLUMN = 3
_RESYNC_WINDOW = 40


@dataclass(frozen=True)
class Bundle:
    """One VLIW instruction: its loop depth, control label (LH, LB, LE, PB, PF, CT) and text."""

    depth: int
    label: str
    text: str


@dataclass
class Loop:
    """A loop of the schedule, or the code outside all loops (depth 0).

    Attributes:
        depth: nesting, 1 for the outermost loop.
        bundles, cycles: of one turn, loops inside excluded; cycles include stalls.
        slots: unit -> slots used in one turn, from the per-cycle rows.
        issued: unit -> operations issued in one turn, from the per-bundle rows.
        trips: constant of the exit test over the step of its counter; None where the schedule shows none.
        inner: the loops inside, in program order.
    """

    depth: int
    bundles: int = 0
    cycles: int = 0
    slots: dict[str, int] = field(default_factory=dict)
    issued: dict[str, int] = field(default_factory=dict)
    trips: int | None = None
    inner: list[Loop] = field(default_factory=list)

    def nested(self) -> Iterator[Loop]:
        """The loop itself and all inside it, outer before inner."""
        yield self
        for loop in self.inner:
            yield from loop.nested()

    def turn(self, quantity: str, unit: str | None = None) -> int:
        """``bundles``, ``cycles``, ``slots`` or ``issued`` of one turn, the loops inside with all their trips."""
        value = getattr(self, quantity)
        own = value.get(unit, 0) if unit else value
        return own + sum((loop.trips or 1) * loop.turn(quantity, unit) for loop in self.inner)


@dataclass(frozen=True)
class Vmem:
    """VMEM of one kernel in bytes, by use."""

    total: int
    windows: int
    scratch: int
    spills: int
    other: int


@dataclass(frozen=True)
class Schedule:
    """What the compiler made of one kernel.

    Attributes:
        outside: the code outside all loops, with the loops inside it.
        capacity: unit -> slots a cycle.
        stalls_known: whether the stalls could be attributed; if not, cycles are bundles.
        vmem: None where the compiler wrote no report.
    """

    outside: Loop
    capacity: dict[str, int]
    stalls_known: bool
    vmem: Vmem | None


def read_schedule(dump: Path, hlo_name: str) -> Schedule:
    """The schedule of the kernel that the compiled program calls ``hlo_name``.

    Raises:
        FileNotFoundError: the dump has no schedule of it.
    """
    bundles = _read_bundles(_dumped(dump, hlo_name, "final_bundles.txt"))
    names, capacity, final = _read_rows(_dumped(dump, hlo_name, "final_hlo-static-per-bundle-utilization.txt"))
    _, _, cycles = _read_rows(_dumped(dump, hlo_name, "pre-delay_hlo-static-per-bundle-utilization.txt"))
    count = min(len(bundles), len(final))
    bundles, final = bundles[:count], final[:count]
    owner = _owners(final, cycles)
    stalls_known = owner is not None
    if owner is None:
        cycles, owner = final, list(range(count))
    outside, loop_of = _loops(bundles)
    for index, loop in enumerate(loop_of):
        loop.bundles += 1
        _add(loop.issued, names, final[index])
    for row, index in zip(cycles, owner, strict=True):
        loop_of[index].cycles += 1
        _add(loop_of[index].slots, names, row)
    return Schedule(outside, capacity, stalls_known, _read_vmem(dump, hlo_name))


def _dumped(dump: Path, hlo_name: str, label: str) -> Path:
    pattern = re.compile(rf"^\d+-{re.escape(hlo_name)}-\d+-{re.escape(label)}$")
    found = sorted(path for path in dump.iterdir() if pattern.match(path.name))
    if not found:
        raise FileNotFoundError(f"no {label} of kernel {hlo_name!r} in {dump}")
    return found[-1]


def _read_bundles(path: Path) -> list[Bundle]:
    bundles: list[Bundle] = []
    depth = 0
    with path.open(errors="replace") as file:
        for line in file:
            match = _BUNDLE.match(line)
            if not match:
                continue
            if match[3] or not match[4].lstrip().startswith("}"):  # an empty bundle is printed without its loop marks
                depth = match[3].count(">")
            bundles.append(Bundle(depth, match[2] or "", match[4]))
    return bundles


def _read_rows(path: Path) -> tuple[list[str], dict[str, int], list[tuple[int, ...]]]:
    lines = path.read_text().splitlines()
    head = next(number for number, line in enumerate(lines) if line.startswith("MATMUL"))
    names = [name.strip() for name in lines[head].split(",")]
    capacity = dict(zip(names, map(int, lines[head + 1].split()), strict=True))
    start = next(number for number, line in enumerate(lines) if line.startswith("== UTILIZATION"))
    return names, capacity, [tuple(map(int, line.split())) for line in lines[start + 1 :] if line.strip()]


def _add(totals: dict[str, int], names: Sequence[str], row: Sequence[int]) -> None:
    for name, used in zip(names, row, strict=True):
        if used:
            totals[name] = totals.get(name, 0) + used


def _owners(final: Sequence[tuple[int, ...]], cycles: Sequence[tuple[int, ...]]) -> list[int] | None:
    """For every cycle the bundle it belongs to, or None if the two dumps do not match.

    Rows that issue something occur in both files in the same order, but for a few that the delay converter moved. They
    are matched greedily, looking ahead where they differ; cycles in between are dealt out to the bundles in between.
    """
    final_issues = [index for index, row in enumerate(final) if any(row[_FIRST_ISSUE_COLUMN:])]
    cycle_issues = [index for index, row in enumerate(cycles) if any(row[_FIRST_ISSUE_COLUMN:])]
    left = [final[index][_FIRST_ISSUE_COLUMN:] for index in final_issues]
    right = [cycles[index][_FIRST_ISSUE_COLUMN:] for index in cycle_issues]
    matches: list[tuple[int, int]] = []
    i = j = misses = 0
    while i < len(left) and j < len(right):
        if left[i] == right[j]:
            matches.append((final_issues[i], cycle_issues[j]))
            i, j = i + 1, j + 1
            continue
        misses += 1
        skip = _resync(left, right, i, j)
        if skip is None:
            break
        i, j = i + skip[0], j + skip[1]
    if misses > 0.05 * max(1, len(left)) or i < len(left) - _RESYNC_WINDOW:
        return None
    owner = [0] * len(cycles)
    bundle = cycle = 0
    for matched_bundle, matched_cycle in [*matches, (len(final), len(cycles))]:
        for index in range(cycle, matched_cycle):
            between = matched_bundle - bundle
            owner[index] = min(bundle + index - cycle, matched_bundle - 1) if between else max(0, bundle - 1)
        if matched_cycle < len(cycles):
            owner[matched_cycle] = matched_bundle
        bundle, cycle = matched_bundle + 1, matched_cycle + 1
    return owner


def _resync(left: Sequence[object], right: Sequence[object], i: int, j: int) -> tuple[int, int] | None:
    """The smallest skips after which five rows in a row agree."""
    for total in range(1, 2 * _RESYNC_WINDOW):
        for skip in range(max(0, total - _RESYNC_WINDOW), min(total, _RESYNC_WINDOW) + 1):
            a, b = i + skip, j + total - skip
            if left[a : a + 5] == right[b : b + 5]:
                return skip, total - skip
    return None


def _loops(bundles: Sequence[Bundle]) -> tuple[Loop, list[Loop]]:
    """The tree of loops, and for every bundle the innermost loop it is in."""
    stack = [Loop(0)]
    closed: set[int] = set()  # loops whose back branch was seen: a new loop label at the same depth starts another one
    loop_of: list[Loop] = []
    texts: dict[int, list[str]] = {}
    for bundle in bundles:
        while bundle.depth < stack[-1].depth:
            stack.pop()
        if (
            bundle.depth
            and bundle.depth == stack[-1].depth
            and bundle.label in ("LB", "LH")
            and id(stack[-1]) in closed
        ):
            stack.pop()
        while bundle.depth > stack[-1].depth:
            loop = Loop(stack[-1].depth + 1)
            stack[-1].inner.append(loop)
            stack.append(loop)
        texts.setdefault(id(stack[-1]), []).append(bundle.text)
        loop_of.append(stack[-1])
        if "/* loop exit test */" in bundle.text:
            closed.add(id(stack[-1]))
    for loop in stack[0].nested():
        loop.trips = _trips(texts.get(id(loop), [])) if loop.depth else 1
    return stack[0], loop_of


def _trips(texts: Sequence[str]) -> int | None:
    """Trips of a loop that counts from 0 up to a constant."""
    text = "\n".join(texts)
    test = _EXIT_TEST.search(text)
    if not test:
        return None
    counter, bound = test[1], int(test[2])
    step = re.search(rf"{re.escape(counter)} = sadd\.s32 (\d+), ", text)
    return -(-bound // int(step[1])) if step else None


def _read_vmem(dump: Path, hlo_name: str) -> Vmem | None:
    for path in sorted(dump.glob("*vmem_report.html"), reverse=True):
        text = path.read_text(errors="replace")
        start = text.find("const DATA =")
        if start < 0:
            continue
        data = json.JSONDecoder().raw_decode(text[start + len("const DATA =") :].lstrip())[0]
        entry = data.get("hlo_breakdowns", {}).get(hlo_name)
        if entry:
            return _vmem(entry)
    return None


def _vmem(entry: dict) -> Vmem:
    sizes = {"windows": 0, "scratch": 0, "spills": 0, "other": 0}
    for block in entry["blocks"]:
        for allocation in block["allocations"]:
            tag = allocation.get("tag", "")
            spill, window, scratch = tag == "SPILL", "window allocation" in tag, "scratch" in tag
            use = "spills" if spill else "windows" if window else "scratch" if scratch else "other"
            sizes[use] += allocation["size"]
    return Vmem(total=entry["total_size"], **sizes)
