"""The static profile of a function: compiled for a chip, every kernel's schedule and traffic, the XLA work around them.

>>> report = profile(step, (jax.ShapeDtypeStruct((8192, 256), "float32"),), "v6e")          # doctest: +SKIP
>>> print(table(report))                                                                    # doctest: +SKIP
"""

from __future__ import annotations

import math
import re
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import numpy as np

from bench.static_profile import compiler, hlo, traffic
from bench.static_profile.chips import Chip, chip_named, tracing_for
from bench.static_profile.schedule import UNITS, Loop, Schedule, read_schedule

_KERNEL_NAME = re.compile(r'kernel_name = "([^"]*)"')
_TENSOR = re.compile(r"tensor<([^<>]*)>")
_PIPELINE_TURNS = 2  # of the grid loop beyond its steps, to fill and drain the double buffers
_Identity = tuple[str, tuple[str, ...]]


@dataclass(frozen=True)
class KernelReport:
    """One Pallas kernel of a program; all figures are of one launch unless said otherwise.

    Attributes:
        chip: what it was compiled for.
        call: the kernel in the traced program, with its HBM traffic.
        launches: how often the program runs it.
        schedule: what the compiler made of it.
        notes: assumptions behind the figures.
    """

    chip: Chip
    call: traffic.PallasCall
    launches: int
    schedule: Schedule
    notes: tuple[str, ...]

    @property
    def name(self) -> str:
        """The kernel's name."""
        return self.call.name

    @property
    def grid_loop(self) -> Loop:
        """The loop over grid steps: the costliest outermost loop; all code where there is none."""
        outer = self.schedule.outside.inner
        return max(outer, key=lambda loop: loop.turn("cycles")) if outer and self.call.grid else self.schedule.outside

    @property
    def steps_per_core(self) -> int:
        """Grid steps that one core runs; where a device has two, what the compiler's loop bound says."""
        if not self.grid_loop.depth:
            return 1
        if self.chip.cores == 1 or self.grid_loop.trips is None:
            return self.call.steps
        return min(self.call.steps, max(1, self.grid_loop.trips - _PIPELINE_TURNS))

    @property
    def cycles_per_step(self) -> int:
        """Cycles of one grid step, stalls and inner loops included."""
        return self.grid_loop.turn("cycles")

    @property
    def bundles_per_step(self) -> int:
        """Instruction bundles of one grid step as executed, inner loops included."""
        return self.grid_loop.turn("bundles")

    @property
    def cycles(self) -> int:
        """Cycles of a launch on one core: the grid loop, other loops, and what is outside."""
        outside, grid_loop = self.schedule.outside, self.grid_loop
        if grid_loop is outside:
            return outside.turn("cycles")
        others = sum((loop.trips or 1) * loop.turn("cycles") for loop in outside.inner if loop is not grid_loop)
        return outside.cycles + others + self.steps_per_core * self.cycles_per_step

    @property
    def core_ms(self) -> float:
        """Milliseconds of the schedule."""
        return self.chip.core_ms(self.cycles)

    @property
    def hbm_ms(self) -> float:
        """Milliseconds of the HBM traffic at full bandwidth."""
        return self.chip.hbm_ms(self.call.moved_bytes)

    @property
    def matrix_ms(self) -> float:
        """Milliseconds of the matrix products alone, at the peak of the matrix units, float32 passes counted."""
        flop = self.call.dot_passes_flop * self.call.steps
        return self.chip.core_ms(flop / (self.chip.bf16_flop_per_cycle * (self.call.steps / self.steps_per_core)))

    @property
    def ms(self) -> float:
        """Estimated milliseconds of a launch: the larger of schedule and traffic."""
        return max(self.core_ms, self.hbm_ms)

    @property
    def bound(self) -> str:
        """What the estimate comes from: ``"HBM"`` or the busiest unit of the schedule."""
        if self.hbm_ms >= self.core_ms:
            return "HBM"
        return max(UNITS, key=self.utilization)

    def utilization(self, unit: str) -> float:
        """Share of a unit's slots in use over one grid step."""
        slots = self.schedule.capacity.get(unit, 0) * self.cycles_per_step
        return self.grid_loop.turn("slots", unit) / slots if slots else 0.0

    def issued(self, unit: str) -> int:
        """Operations issued in one grid step, e.g. ``"VSTORE:SPILL"`` or ``"VLOAD:FILL"``."""
        return self.grid_loop.turn("issued", unit)


@dataclass(frozen=True)
class Report:
    """The static profile of one program.

    Attributes:
        chip: what it was compiled for.
        kernels: in the order of the traced program.
        program: the compiled program's XLA operations.
        least_bytes: arguments and results of the program once, unpadded.
        trace_seconds, compile_seconds: wall-clock time of the two.
        memory: bytes of temporaries, arguments, outputs, code.
        versions: of jax and libtpu.
    """

    chip: Chip
    kernels: tuple[KernelReport, ...]
    program: hlo.Program
    least_bytes: int
    trace_seconds: float
    compile_seconds: float
    memory: dict[str, int]
    versions: dict[str, str]

    @property
    def kernel_ms(self) -> float:
        """Estimated milliseconds of all launches of all kernels."""
        return sum(kernel.launches * kernel.ms for kernel in self.kernels)

    @property
    def xla_ms(self) -> float:
        """Milliseconds of the synchronous XLA operations by the bytes they move."""
        return self.chip.hbm_ms(self.program.xla_bytes)

    @property
    def exposed_ms(self) -> float:
        """Milliseconds of asynchronous copies that find no room beside kernels that the core bounds."""
        room = sum(kernel.launches * (kernel.ms - kernel.hbm_ms) for kernel in self.kernels)
        return max(0.0, self.chip.hbm_ms(self.program.overlapping_bytes) - room)

    @property
    def ms(self) -> float:
        """Estimated milliseconds of the program: kernels, XLA operations, copies that nothing hides."""
        return self.kernel_ms + self.xla_ms + self.exposed_ms

    def matching(self, pattern: str) -> tuple[KernelReport, ...]:
        """The kernels whose name matches a regular expression somewhere."""
        return tuple(kernel for kernel in self.kernels if re.search(pattern, kernel.name))


def lower(function: Callable[..., Any], arguments: Sequence[Any], chip: Chip) -> tuple[Any, str]:
    """Traces ``function`` as if on ``chip``; returns its closed jaxpr and its StableHLO text."""
    jitted = function if hasattr(function, "trace") else jax.jit(function)
    with tracing_for(chip):
        traced = jitted.trace(*arguments)
        return traced.jaxpr, traced.lower(lowering_platforms=("tpu",)).as_text()


def compile_for(
    function: Callable[..., Any], arguments: Sequence[Any], chip: str, *, timeout_seconds: float = 600.0
) -> compiler.Compiled:
    """Compiles ``function(*arguments)`` ahead of time for a chip, without profiling it.

    Raises:
        CompilationError: the compiler refused it, crashed or ran out of time.
    """
    target = chip_named(chip)
    _, text = lower(function, arguments, target)
    with tempfile.TemporaryDirectory(prefix="static_profile_") as work:
        return compiler.compile_text(text, target, Path(work), dump=False, timeout_seconds=timeout_seconds)


def profile(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    chip: str,
    *,
    timeout_seconds: float = 1800.0,
    row_major: bool = True,
) -> Report:
    """Compiles ``function(*arguments)`` for ``chip`` and reads the schedule of every Pallas kernel in it.

    Args:
        function: plain or jitted.
        arguments: arrays or ``jax.ShapeDtypeStruct``. An array counts as a known value: tables that follow from it are
            evaluated to count block copies (segment ids, for example, should be given as arrays).
        chip: key of :data:`bench.static_profile.chips.CHIPS`.
        timeout_seconds: for the compiler.
        row_major: arguments and results are row-major, as neighbouring operations would hand them to a kernel; if
            false XLA chooses, and copies to what the kernels need count.

    Returns:
        The report; nothing in it was measured.

    Raises:
        CompilationError: the compiler refused the program, crashed or ran out of time.
        ValueError: unknown chip, or kernels that cannot be told apart.
    """
    target = chip_named(chip)
    start = time.perf_counter()
    closed, text = lower(function, arguments, target)
    trace_seconds = time.perf_counter() - start
    calls = traffic.pallas_calls(closed, jax.tree.leaves(arguments), target)
    with tempfile.TemporaryDirectory(prefix="static_profile_") as work:
        compiled = compiler.compile_text(
            text, target, Path(work), dump=True, timeout_seconds=timeout_seconds, row_major=row_major
        )
        program = hlo.read(compiled.hlo)
        kernels = _kernel_reports(target, calls, program, compiled)
    return Report(
        chip=target,
        kernels=kernels,
        program=program,
        least_bytes=sum(_plain_bytes(aval) for aval in (*closed.in_avals, *closed.out_avals)),
        trace_seconds=round(trace_seconds, 2),
        compile_seconds=compiled.seconds,
        memory=compiled.memory,
        versions={name: metadata.version(name) for name in ("jax", "libtpu")},
    )


def _plain_bytes(aval: Any) -> int:
    return math.prod(aval.shape) * np.dtype(aval.dtype).itemsize


def _kernel_reports(
    chip: Chip, calls: Sequence[traffic.PallasCall], program: hlo.Program, compiled: compiler.Compiled
) -> tuple[KernelReport, ...]:
    """Joins the traced kernels with their compiled form, whose HLO locations are lines of the StableHLO text."""
    if compiled.dump is None:
        raise ValueError("compiled: expected dumps, got none; compile with dump=True")
    lines = compiled.stablehlo.splitlines()
    compiled_as: dict[_Identity, list[str]] = {}
    for hlo_name, (line, _) in program.kernels.items():
        compiled_as.setdefault(_identity(lines[line - 1]), []).append(hlo_name)
    reports = []
    for call in calls:
        copies = compiled_as.pop((call.name, call.results), [])
        if copies:  # if not, XLA found its results unused
            read = read_schedule(compiled.dump, copies[0])
            launches = sum(program.kernels[copy][1] for copy in copies)
            reports.append(KernelReport(chip, call, launches, read, (*_resolve_trips(call, read), *call.notes)))
    if compiled_as:
        raise ValueError(f"kernels of the compiled program that the traced one lacks: {sorted(compiled_as)}")
    return tuple(reports)


def _identity(stablehlo_line: str) -> _Identity:
    """Name and result types of the kernel that a line of StableHLO calls."""
    name = _KERNEL_NAME.search(stablehlo_line)
    results = stablehlo_line.rpartition("->")[2]
    return name[1] if name else "", tuple(_TENSOR.findall(results))


def _resolve_trips(call: traffic.PallasCall, read: Schedule) -> tuple[str, ...]:
    """Fills in trip counts that the schedule does not show from the traced kernel; notes what stays unknown."""
    notes = [] if read.stalls_known else ["stalls could not be attributed; cycles are bundles"]
    loops = [loop for loop in read.outside.nested() if loop.depth > (1 if call.grid else 0)]
    if len(loops) == len(call.loop_trips):
        for loop, trips in zip(loops, call.loop_trips, strict=True):
            loop.trips = loop.trips or trips
    unresolved = sum(loop.trips is None for loop in loops)
    if unresolved:
        notes.append(
            f"{unresolved} inner loop(s) with an unknown trip count, counted as one trip (the compiler copies small "
            "operands that it keeps in VMEM in such loops)"
        )
    return tuple(notes)
