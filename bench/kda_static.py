"""Static profiles of the KDA kernels against their targets: the part of ``bench.kda_tpu`` behind ``--static``."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import jax

from bench import kda_cases, kda_peer, timing
from bench.kda_cases import CASES, TARGETS, Case, Target
from bench.static_profile import report as profile_report
from bench.static_profile.profile import Report, profile

BASE_CASE = "seed-fixed"
_BACKWARD = r"backward"
_MB = 1e6


@dataclass(frozen=True)
class Options:
    """How cases are profiled.

    Attributes:
        jobs: compilations at a time.
        peer: another library to profile beside ours, None for none.
        row_major: whether arguments and results are row-major; if not, XLA's own layouts and the copies they cost.
    """

    jobs: int = 1
    peer: str | None = None
    row_major: bool = True


@dataclass(frozen=True)
class Profiled:
    """One case on one chip: its report, or why there is none; ``peer`` names the library if it is not ours."""

    case: Case
    chip: str
    report: Report | None
    error: str = ""
    peer: str | None = None


def profile_case(case: Case, chip: str, peer: str | None = None, row_major: bool = True) -> Report:
    """Compiles a case's program with our Pallas kernels, or with a peer's, for a chip."""
    from ops.kda_tpu.pallas.backend import with_options

    again = case.rematerialize
    if peer:
        attention = kda_peer.load(peer, again)
    else:
        attention = with_options(rematerialize_for_backward=again, backward=case.backward)
    program, arguments = kda_cases.program(attention, case), kda_cases.arguments(case, kda_cases.specs(case))
    return profile(program, arguments, chip, row_major=row_major)


def profile_all(names: Sequence[str], chips: Sequence[str], options: Options) -> Iterator[Profiled]:
    """Profiles every case on every chip and yields them in order as they are done."""
    libraries = (None, options.peer) if options.peer else (None,)
    runs = [(CASES[name], chip, library) for chip in chips for name in names for library in libraries]
    with ThreadPoolExecutor(max_workers=options.jobs) as pool:
        futures: list[Future[Report]] = [pool.submit(profile_case, *key, options.row_major) for key in runs]
        for (case, chip, library), future in zip(runs, futures, strict=True):
            error = future.exception()
            if isinstance(error, Exception):
                yield Profiled(case, chip, None, f"{type(error).__name__}: {str(error)[:2000]}", library)
            else:
                yield Profiled(case, chip, future.result(), peer=library)


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
    backward = report.matching(kda_peer.BACKWARD if profiled.peer else _BACKWARD)
    found = {
        "ms": report.ms,
        "backward kernels ms": sum(kernel.launches * kernel.ms for kernel in backward),
        "backward kernels MB": sum(kernel.launches * kernel.call.moved_bytes for kernel in backward) / _MB,
    }
    if base:
        found["times seed-fixed"] = report.ms / base.ms
        found["times a quarter of seed-fixed"] = 4 * report.ms / base.ms
    return found


def with_base(names: Sequence[str]) -> list[str]:
    """``names``, and before them the base case if a target of theirs is a ratio to it."""
    ratios = any(t.case in names and BASE_CASE in t.quantity for t in TARGETS)
    return [BASE_CASE, *names] if ratios and BASE_CASE not in names else list(names)


def target_rows(profiles: Iterable[Profiled], targets: Iterable[Target] = TARGETS) -> list[dict[str, object]]:
    """One row per target whose case was profiled: estimate, must, aim, peer, verdict."""
    profiles = list(profiles)
    by_key = {(p.case.name, p.chip): p for p in profiles if p.peer is None}
    peers = {(p.case.name, p.chip): p for p in profiles if p.peer is not None}
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
        beside = peers.get((target.case, target.chip))
        if beside is not None:
            rows[-1]["peer here"] = round(quantities(beside, None).get(target.quantity, float("nan")), 3)
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
    title = f"== {profiled.case.name}, {profiled.chip}{f', {profiled.peer}' if profiled.peer else ''}"
    if profiled.report is None:
        return f"{title}\nFAILED: {profiled.error}"
    return f"{title}\n{profile_report.table(profiled.report)}"


def json_records(profiled: Profiled) -> list[Mapping[str, object]]:
    """JSON records of one profile."""
    if profiled.report is None:
        key = {"case": profiled.case.name, "chip": profiled.chip, "library": profiled.peer}
        return [{"record": "failure", **key, "error": profiled.error}]
    return list(profile_report.records(profiled.report, case=profiled.case.name, library=profiled.peer))


def run(names: Sequence[str], chips: Sequence[str], path: str, options: Options) -> int:
    """Prints and writes the profiles; returns 1 if one of ours was refused or missed a "must", else 0."""
    layouts = "row-major arguments and results" if options.row_major else "XLA's layouts of arguments and results"
    about = timing.environment(kind=profile_report.DISCLAIMER, layouts=layouts)
    print(timing.header("KDA kernels, static profile", about), flush=True)
    profiles: list[Profiled] = []
    for profiled in profile_all(with_base(names), chips, options):
        profiles.append(profiled)
        print(f"\n{show(profiled)}", flush=True)
    rows = target_rows(profiles)
    print(f"\n== against the targets. {profile_report.DISCLAIMER}")
    print(timing.table(rows) if rows else "none of these cases has a target")
    records = [record for profiled in profiles for record in json_records(profiled)]
    written = timing.write_json_lines(path, about, [*records, *({"record": "target", **row} for row in rows)])
    print(f"written to {written}")
    refused = any(profiled.report is None for profiled in profiles if profiled.peer is None)
    return int(refused or any(row["reached"] == "MISSED" for row in rows))
