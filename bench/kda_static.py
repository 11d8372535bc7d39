"""Static profiles of the KDA kernels against their targets: the part of ``bench.kda_tpu`` behind ``--static``."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import jax

from bench import kda_cases, timing
from bench.kda_cases import CASES, TARGETS, Case, Target
from bench.static_profile import report as profile_report
from bench.static_profile.profile import Report, profile

BASE_CASE = "seed-fixed"
_BACKWARD = r"backward"
_MB = 1e6


@dataclass(frozen=True)
class Profiled:
    """One case on one chip: its report, or why there is none."""

    case: Case
    chip: str
    report: Report | None
    error: str = ""


def profile_case(case: Case, chip: str) -> Report:
    """Compiles a case's program with the Pallas kernels for a chip."""
    from ops.kda_tpu.pallas.backend import with_options

    attention = with_options(rematerialize_for_backward=case.rematerialize)
    return profile(kda_cases.program(attention, case), kda_cases.arguments(case, kda_cases.specs(case)), chip)


def profile_all(names: Sequence[str], chips: Sequence[str], jobs: int = 1) -> Iterator[Profiled]:
    """Profiles every case on every chip, ``jobs`` at a time, and yields them in order as they are done."""

    def run(case: Case, chip: str) -> Report:
        return profile_case(case, chip)

    with ThreadPoolExecutor(max_workers=jobs) as pool:
        futures: list[tuple[Case, str, Future[Report]]] = [
            (CASES[name], chip, pool.submit(run, CASES[name], chip)) for chip in chips for name in names
        ]
        for case, chip, future in futures:
            error = future.exception()
            if isinstance(error, Exception):
                yield Profiled(case, chip, None, f"{type(error).__name__}: {str(error)[:2000]}")
            else:
                yield Profiled(case, chip, future.result())


def residual_bytes(case: Case) -> int:
    """Bytes the forward of a step leaves for the backward beside the operator's inputs."""

    def saved(arrays: kda_cases.Arrays) -> Any:
        from ops.kda_tpu.pallas.backend import kimi_delta_attention

        return jax.vjp(lambda a: kda_cases.run_forward(kimi_delta_attention, case, a), arrays)[1]

    inputs = kda_cases.specs(case)
    leaves = jax.tree.leaves(jax.eval_shape(saved, inputs))
    given = [(spec.shape, spec.dtype) for spec in inputs.values()]
    total = 0
    for leaf in leaves:
        if (leaf.shape, leaf.dtype) in given:  # an input, kept alive rather than saved
            given.remove((leaf.shape, leaf.dtype))
        else:
            total += math.prod(leaf.shape) * leaf.dtype.itemsize
    return total


def quantities(profiled: Profiled, base: Report | None) -> dict[str, float]:
    """The figures of a profile that targets may speak of."""
    report = profiled.report
    if report is None:
        return {}
    backward = report.matching(_BACKWARD)
    found = {
        "ms": report.ms,
        "backward kernels ms": sum(kernel.launches * kernel.ms for kernel in backward),
        "backward kernels MB": sum(kernel.launches * kernel.call.moved_bytes for kernel in backward) / _MB,
    }
    if base:
        found["times seed-fixed"] = report.ms / base.ms
        found["times a quarter of seed-fixed"] = 4 * report.ms / base.ms
    return found


def target_rows(profiles: Iterable[Profiled], targets: Iterable[Target] = TARGETS) -> list[dict[str, object]]:
    """One row per target whose case was profiled: estimate, must, aim, peer, verdict."""
    by_key = {(p.case.name, p.chip): p for p in profiles}
    rows: list[dict[str, object]] = []
    for target in targets:
        if target.chip is None:
            if any(name == target.case for name, _ in by_key):
                rows.append(_row(target, residual_bytes(replace(CASES[target.case], heads=32)) / _MB))
            continue
        profiled = by_key.get((target.case, target.chip))
        if profiled is None:
            continue
        base = by_key.get((BASE_CASE, target.chip))
        figures = quantities(profiled, base.report if base else None)
        if profiled.report is None or target.quantity in figures:
            rows.append(_row(target, figures.get(target.quantity)))
    return rows


def _row(target: Target, value: float | None) -> dict[str, object]:
    verdict = "-"
    if value is None:
        verdict = "failed"
    elif target.must is not None:
        verdict = "MISSED" if value > target.must else "aim" if target.aim and value <= target.aim else "must"
    return {
        "case": target.case,
        "chip": target.chip,
        "quantity": target.quantity,
        "estimate": None if value is None else round(value, 3),
        "must": target.must,
        "aim": target.aim,
        "peer": target.peer,
        "reached": verdict,
    }


def show(profiled: Profiled) -> str:
    """The table of one profile under its title."""
    title = f"== {profiled.case.name}, {profiled.chip}"
    if profiled.report is None:
        return f"{title}\nFAILED: {profiled.error}"
    return f"{title}\n{profile_report.table(profiled.report)}"


def json_records(profiled: Profiled) -> list[Mapping[str, object]]:
    """JSON records of one profile."""
    if profiled.report is None:
        return [{"record": "failure", "case": profiled.case.name, "chip": profiled.chip, "error": profiled.error}]
    return list(profile_report.records(profiled.report, case=profiled.case.name))


def run(names: Sequence[str], chips: Sequence[str], jobs: int, path: str) -> int:
    """Prints and writes the profiles; returns 1 if a program was refused or a "must" was missed, else 0."""
    about = timing.environment(kind=profile_report.DISCLAIMER)
    print(timing.header("KDA kernels, static profile", about), flush=True)
    profiles: list[Profiled] = []
    for profiled in profile_all(names, chips, jobs):
        profiles.append(profiled)
        print(f"\n{show(profiled)}", flush=True)
    rows = target_rows(profiles)
    print(f"\n== against the targets. {profile_report.DISCLAIMER}")
    print(timing.table(rows) if rows else "none of these cases has a target")
    records = [record for profiled in profiles for record in json_records(profiled)]
    written = timing.write_json_lines(path, about, [*records, *({"record": "target", **row} for row in rows)])
    print(f"written to {written}")
    return int(any(profiled.report is None for profiled in profiles) or any(r["reached"] == "MISSED" for r in rows))
