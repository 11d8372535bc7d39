"""The static profile as text and as JSON records."""

from __future__ import annotations

from bench import timing
from bench.static_profile.profile import KernelReport, Report

DISCLAIMER = "Estimates from the TPU compiler's schedule and byte counts. Nothing here was measured."
_UNIT_COLUMNS = {"MATMUL": "MXU%", "MATPUSH": "PUSH%", "XLU": "XLU%", "VALU": "VALU%", "EUP": "EUP%"} | {
    "VLOAD": "LD%",
    "VSTORE": "ST%",
}
_MB = 1e6
_LISTED_OPERATIONS = 8


def kernel_record(kernel: KernelReport) -> dict[str, object]:
    """One kernel's figures, the same in the table and in the JSON lines."""
    vmem = kernel.schedule.vmem
    return {
        "kernel": kernel.name,
        "runs": kernel.launches,
        "steps": kernel.call.steps,
        "bundles/step": kernel.bundles_per_step,
        "cycles/step": kernel.cycles_per_step,
        "ms": round(kernel.ms, 4),
        "bound": kernel.bound,
        "core ms": round(kernel.core_ms, 4),
        "HBM ms": round(kernel.hbm_ms, 4),
        "matrix ms": round(kernel.matrix_ms, 4),
        **{column: round(100 * kernel.utilization(unit)) for unit, column in _UNIT_COLUMNS.items()},
        "spills": kernel.issued("VSTORE:SPILL"),
        "fills": kernel.issued("VLOAD:FILL"),
        "MB": round(kernel.call.moved_bytes / _MB, 1),
        "least MB": round(kernel.call.least_bytes / _MB, 1),
        "VMEM MiB": round(vmem.total / 2**20, 1) if vmem else None,
    }


def records(report: Report, **extra: object) -> list[dict[str, object]]:
    """JSON records of a report: the whole program, each kernel with its operands, the XLA operations."""
    common = {"chip": report.chip.name, "estimate": "compiler schedule, not measured", **extra}
    whole = {
        **common,
        "record": "program",
        "ms": report.ms,
        "kernel_ms": report.kernel_ms,
        "xla_ms": report.xla_ms,
        "exposed_ms": report.exposed_ms,
        "xla_bytes": report.program.xla_bytes,
        "overlapping_bytes": report.program.overlapping_bytes,
        "least_bytes": report.least_bytes,
        "trace_seconds": report.trace_seconds,
        "compile_seconds": report.compile_seconds,
        "memory": report.memory,
        "versions": report.versions,
        "notes": report.program.notes,
    }
    kernels = [
        {
            **common,
            "record": "kernel",
            **kernel_record(kernel),
            "grid": kernel.call.grid,
            "cycles": kernel.cycles,
            "operands": [vars(operand) for operand in kernel.call.operands],
            "vmem": vars(kernel.schedule.vmem) if kernel.schedule.vmem else None,
            "notes": kernel.notes,
        }
        for kernel in report.kernels
    ]
    operations = [{**common, "record": "xla", **vars(operation)} for operation in report.program.operations]
    return [whole, *kernels, *operations]


def table(report: Report) -> str:
    """A report as text: one row per kernel, then the XLA operations and the sum."""
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    lines = [f"{report.chip.name} ({versions}). {DISCLAIMER}"]
    if report.kernels:
        lines.append(timing.table([kernel_record(kernel) for kernel in report.kernels]))
    lines.append(
        f"kernels {report.kernel_ms:.3f} ms + XLA operations {report.xla_ms:.3f} ms "
        f"({report.program.xla_bytes / _MB:.0f} MB) + exposed copies {report.exposed_ms:.3f} ms (of "
        f"{report.program.overlapping_bytes / _MB:.0f} MB beside the kernels) = {report.ms:.3f} ms"
    )
    lines.append(
        f"every argument and result once: {report.least_bytes / _MB:.0f} MB, "
        f"{report.chip.hbm_ms(report.least_bytes):.3f} ms; "
        f"traced in {report.trace_seconds:.1f} s, compiled in {report.compile_seconds:.1f} s; "
        f"temporaries {report.memory.get('temp', 0) / _MB:.0f} MB"
    )
    moving = [o for o in report.program.operations if o.moved_bytes > 0.005 * _MB and not o.overlaps]
    if moving:
        shown = ", ".join(f"{o.name} {o.moved_bytes / _MB:.2f} MB" for o in moving[:_LISTED_OPERATIONS])
        lines.append(f"XLA: {shown}{', ...' if len(moving) > _LISTED_OPERATIONS else ''}")
    notes = [f"{kernel.name}: {note}" for kernel in report.kernels for note in kernel.notes]
    lines += [f"note: {note}" for note in (*notes, *report.program.notes)]
    return "\n".join(lines)
