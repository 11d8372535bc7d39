"""Timing that survives a noisy machine, and its report.

Variants are timed in turn, round after round, so that a slow minute hits all of them; two variants are compared by the
median of the ratios *within* each round, not by the ratio of their medians. A benchmark checks its results before it
times them, prints a table, and writes the same figures as JSON lines.

    >>> timings = interleave({"a": run_a, "b": run_b}, repeats=20)                              # doctest: +SKIP
    >>> print(table([timing_row(timing) for timing in timings.values()]))                       # doctest: +SKIP
    >>> print(ratio(timings["a"], timings["b"]).median)                                         # doctest: +SKIP
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

DISTRIBUTIONS = ("accelerator-ops", "numpy", "jax", "jaxlib", "libtpu", "torch", "triton", "nvshmem4py-cu13")


@dataclass(frozen=True)
class Spread:
    """Median and the tenth and ninetieth percentile of a sample."""

    median: float
    p10: float
    p90: float

    @classmethod
    def of(cls, sample: Sequence[float]) -> Spread:
        """The spread of ``sample``, which must not be empty."""
        if not sample:
            raise ValueError("sample: expected at least one value, got none")
        if len(sample) == 1:
            return cls(sample[0], sample[0], sample[0])
        tenths = statistics.quantiles(sample, n=10, method="inclusive")
        return cls(statistics.median(sample), tenths[0], tenths[-1])


@dataclass(frozen=True)
class Timing:
    """What one variant took, round by round.

    Attributes:
        name: the variant.
        seconds: one wall-clock time per round; round ``i`` of every variant ran next to each other.
        warmup_seconds: the first call, compilation included.
    """

    name: str
    seconds: tuple[float, ...]
    warmup_seconds: float

    @property
    def spread(self) -> Spread:
        """Median, p10 and p90 over the rounds, in seconds."""
        return Spread.of(self.seconds)


def interleave(
    variants: Mapping[str, Callable[[], object]],
    *,
    repeats: int = 20,
    warmup: int = 2,
    wait: Callable[[Any], object] = lambda result: result,
    budget_seconds: float | None = None,
) -> dict[str, Timing]:
    """Times every variant ``repeats`` times, one call of each per round.

    Args:
        variants: name -> callable without arguments.
        repeats: rounds that count, at least 1.
        warmup: calls of each variant before the first round, at least 1; the first one is reported by itself.
        wait: called with each result before the clock stops, e.g. ``jax.block_until_ready``.
        budget_seconds: stop after the round that exceeds it; None for never.

    Returns:
        name -> :class:`Timing`, in the order of ``variants``, all with the same number of rounds.

    Raises:
        ValueError: ``repeats`` or ``warmup`` below 1.
    """
    for argument, value in (("repeats", repeats), ("warmup", warmup)):
        if value < 1:
            raise ValueError(f"{argument}: expected at least 1, got {value}")

    def timed(call: Callable[[], object]) -> float:
        start = time.perf_counter()
        wait(call())
        return time.perf_counter() - start

    first = {}
    for name, call in variants.items():
        first[name], *_ = [timed(call) for _ in range(warmup)]
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    begun = time.perf_counter()
    for _ in range(repeats):
        for name, call in variants.items():
            seconds[name].append(timed(call))
        if budget_seconds is not None and time.perf_counter() - begun > budget_seconds:
            break
    return {name: Timing(name, tuple(seconds[name]), first[name]) for name in variants}


def ratio(numerator: Timing, denominator: Timing) -> Spread:
    """Spread of ``numerator / denominator``, taken round by round.

    Raises:
        ValueError: the two were not timed in the same rounds.
    """
    if len(numerator.seconds) != len(denominator.seconds):
        raise ValueError(
            f"denominator: expected {len(numerator.seconds)} rounds as {numerator.name!r} has, "
            f"got {len(denominator.seconds)} of {denominator.name!r}; time both in one interleave() call"
        )
    return Spread.of([a / b for a, b in zip(numerator.seconds, denominator.seconds, strict=True)])


def timing_row(timing: Timing, **extra: object) -> dict[str, object]:
    """A record of one timing in milliseconds, for :func:`table` and :func:`write_json_lines`."""
    spread = timing.spread
    return {
        "name": timing.name,
        "median_ms": spread.median * 1e3,
        "p10_ms": spread.p10 * 1e3,
        "p90_ms": spread.p90 * 1e3,
        "rounds": len(timing.seconds),
        "first_call_s": timing.warmup_seconds,
        **extra,
    }


def environment(**extra: object) -> dict[str, object]:
    """Where and with what a benchmark ran: machine, cores, load, versions of what is installed."""
    versions = {}
    for name in DISTRIBUTIONS:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": f"{_cpu_model()}, {_usable_cores()} cores",
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "versions": versions,
        **extra,
    }


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    for line in cpuinfo.read_text().splitlines() if cpuinfo.exists() else []:
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def header(title: str, about: Mapping[str, object]) -> str:
    """The lines that stand above a table: the title and :func:`environment`."""
    lines = [title]
    for key, value in about.items():
        if isinstance(value, Mapping):
            value = ", ".join(f"{name} {version}" for name, version in value.items())
        lines.append(f"  {key}: {value}")
    return "\n".join(lines)


def table(rows: Sequence[Mapping[str, object]], columns: Sequence[str] | None = None) -> str:
    """Records as aligned text; the columns are those of all records, in order of appearance, unless given."""
    columns = columns or list(dict.fromkeys(key for row in rows for key in row))
    cells = [[_cell(row.get(column)) for column in columns] for row in rows]
    width = [
        max(len(text) for text in (column, *column_cells))
        for column, *column_cells in zip(columns, *cells, strict=True)
    ]
    number = [all(isinstance(row.get(c), int | float | type(None)) for row in rows) for c in columns]

    def line(texts: Iterable[str]) -> str:
        return "  ".join(
            text.rjust(w) if right else text.ljust(w) for text, w, right in zip(texts, width, number, strict=True)
        ).rstrip()

    return "\n".join([line(columns), *map(line, cells)])


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}"
    return str(value)


def write_json_lines(path: str | Path, about: Mapping[str, object], rows: Iterable[Mapping[str, object]]) -> Path:
    """Writes one JSON object a line: the environment first, then every record; creates the folder."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        for record in ({"environment": about}, *rows):
            file.write(json.dumps(record, default=str) + "\n")
    return path
