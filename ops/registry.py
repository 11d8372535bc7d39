"""Choosing a backend for an operator.

A row of the table is data: which modules it needs, where its callable lives, what to install. Nothing is imported
until a row is selected, so ``import ops.registry`` needs the standard library only and probing never touches a device.

    >>> from ops import registry
    >>> attention = registry.select("kda")                  # first usable row, in the table's order
    >>> attention = registry.select("kda", backend="scan")  # exactly this one, or an error that says why not

The order of choice is: the argument, then the environment (``OPS_KDA_BACKEND``, ``OPS_MOE_COMM_BACKEND``), then the
first row that is usable by itself. A named backend never falls back to another one.

``python -m ops.registry`` prints the table for this machine.
"""

from __future__ import annotations

import difflib
import glob
import importlib
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path
from typing import Any

ENTRY_POINT_GROUP = "accelerator_ops.backends"


@dataclass(frozen=True)
class Backend:
    """One row: a way to run one operator.

    Attributes:
        op: operator name, ``"kda"`` or ``"moe_comm"``.
        name: backend name, unique within the operator.
        target: ``"module:attribute"`` of the callable that :func:`select` returns.
        requires: top-level modules that must be installed.
        extra: the extra of this distribution that installs them.
        hardware: ``"tpu"``, ``"nvidia"`` or None for anywhere.
        off_hardware: what happens when named without that hardware; empty if it cannot run then.
        on_request: why it is never chosen by itself; empty if it may be.
        probe: optional ``"module:function"``, called once the modules are there; returns None or why it cannot run.
        summary: one line for the table.
    """

    op: str
    name: str
    target: str
    requires: tuple[str, ...] = ()
    extra: str | None = None
    hardware: str | None = None
    off_hardware: str = ""
    on_request: str = ""
    probe: str | None = None
    summary: str = ""


@dataclass(frozen=True)
class Status:
    """What :func:`backends` found out about one row on this machine.

    Attributes:
        backend: the row.
        state: ``"usable"``, ``"on request"`` (runs only when named) or ``"unavailable"``.
        reason: why it is not plainly usable; empty if it is.
        remedy: what to install or change; empty if nothing can be done here.
    """

    backend: Backend
    state: str
    reason: str = ""
    remedy: str = ""

    @property
    def usable(self) -> bool:
        """Whether :func:`select` can return it, by itself or when named."""
        return self.state != "unavailable"


class UnknownBackendError(ValueError):
    """No operator or backend has this name."""


class BackendUnavailableError(RuntimeError):
    """The backend exists but cannot run here; the message says why and what to do."""


_INTERPRETED = "runs in Pallas interpret mode: right, but slow"

_TABLE: tuple[Backend, ...] = (
    Backend(
        "kda", "pallas_tpu", "ops.kda_tpu.pallas.backend:kimi_delta_attention", ("jax",), "kda-tpu",
        hardware="tpu", off_hardware=_INTERPRETED, summary="Pallas TPU kernels, forward and backward",
    ),
    Backend(
        "kda", "xla", "ops.kda_tpu.xla:kimi_delta_attention", ("jax",), "kda",
        summary="chunked, explicit backward, on CPU, GPU and TPU",
    ),
    Backend(
        "kda", "scan", "ops.kda_tpu.scan:kimi_delta_attention", ("jax",), "kda",
        summary="token by token, differentiable any number of times",
    ),
    Backend(
        "kda", "reference", "ops.kda_tpu.oracle:kimi_delta_attention", ("numpy",), None,
        summary="numpy float64, slow, the oracle",
    ),
    Backend(
        "moe_comm", "nvshmem", "ops.moe_comm_gpu.nvshmem.backend:Exchange", ("torch", "triton", "nvshmem"), "moe-gpu",
        hardware="nvidia", probe="ops.moe_comm_gpu.nvshmem.probe:probe", summary="Triton kernels over NVSHMEM",
    ),
    Backend(
        "moe_comm", "nvshmem_emulated", "ops.moe_comm_gpu.emulation_backend:Exchange", ("torch", "triton"), "moe",
        on_request="emulates the GPU kernels on a CPU, for tests", summary="the same kernels, processes, shared memory",
    ),
    Backend(
        "moe_comm", "torch", "ops.moe_comm_gpu.torch_backend:Exchange", ("torch",), "moe",
        summary="torch.distributed: gloo on CPUs, NCCL on GPUs",
    ),
    Backend(
        "moe_comm", "reference", "ops.moe_comm_gpu.oracle:Exchange", ("torch",), "moe",
        summary="gathers everything and asks the numpy oracle",
    ),
)  # fmt: skip

_rows: list[Backend] = list(_TABLE)
_entry_points_read = False


def environment_variable(op: str) -> str:
    """Name of the variable that picks the backend of ``op``, e.g. ``OPS_KDA_BACKEND``."""
    return f"OPS_{op.upper()}_BACKEND"


def register(backend: Backend, *, before: str | None = None) -> None:
    """Adds a row, at the end of its operator's order or ahead of the row named ``before``.

    A package can do the same without being imported: an entry point of the group ``accelerator_ops.backends`` named
    ``"<op>.<backend>"`` whose value is the ``"module:attribute"`` of the callable becomes a row at the end.

    Raises:
        ValueError: the name is taken, the target is not ``"module:attribute"``, or ``before`` is unknown.
    """
    _read_entry_points()
    if any((row.op, row.name) == (backend.op, backend.name) for row in _rows):
        raise ValueError(f"backend: {backend.op!r} has a row named {backend.name!r} already; choose another name")
    if backend.target.count(":") != 1:
        raise ValueError(f'backend.target: expected "module:attribute", got {backend.target!r}')
    _rows.insert(len(_rows) if before is None else _rows.index(_find(backend.op, before)), backend)


def backends(op: str) -> list[Status]:
    """Every row of ``op`` in the order of choice, with whether it can run here.

    Never raises for a row, loads no framework by itself and initialises no device.

    Raises:
        UnknownBackendError: no such operator.
    """
    return [_status(row) for row in _rows_of(op)]


def choose(op: str, backend: str | None = None) -> Backend:
    """The row that :func:`select` would take; imports nothing of it.

    Args:
        op: ``"kda"`` or ``"moe_comm"``.
        backend: a row's name; None takes the environment's choice, or else the first row usable by itself.

    Raises:
        UnknownBackendError: no such operator or backend; the message lists the known ones.
        BackendUnavailableError: the named backend cannot run here, or none can.
    """
    variable = environment_variable(op)
    name = backend if backend is not None else os.environ.get(variable) or None
    if name is not None:
        row = _find(op, name, "" if backend is not None else f" (from {variable})")
        status = _status(row)
        if not status.usable:
            raise BackendUnavailableError(f"backend {name!r} of {op!r} cannot run here: {_explain(status)}")
        return row
    statuses = backends(op)
    for status in statuses:
        if status.state == "usable":
            return status.backend
    rows = "".join(f"\n  {status.backend.name}: {_explain(status)}" for status in statuses)
    raise BackendUnavailableError(f"no backend of {op!r} is usable here:{rows}")


def select(op: str, backend: str | None = None) -> Callable[..., Any]:
    """Returns the callable of a backend of ``op``; arguments and errors are those of :func:`choose`.

    Raises:
        BackendUnavailableError: also if the backend fails to import; its own error is the cause.
    """
    return _load(choose(op, backend))


def _rows_of(op: str) -> list[Backend]:
    _read_entry_points()
    rows = [row for row in _rows if row.op == op]
    if not rows:
        raise UnknownBackendError(f"op: {_unknown(op, sorted({row.op for row in _rows}))}")
    return rows


def _find(op: str, name: str, origin: str = "") -> Backend:
    rows = {row.name: row for row in _rows_of(op)}
    if name not in rows:
        raise UnknownBackendError(f"backend of {op!r}{origin}: {_unknown(name, list(rows))}")
    return rows[name]


def _unknown(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return f"expected one of {', '.join(map(repr, known))}, got {name!r}{hint}"


def _explain(status: Status) -> str:
    return "; ".join(part for part in (status.reason, status.remedy) if part) or status.state


def _read_entry_points() -> None:
    global _entry_points_read
    if _entry_points_read:
        return
    _entry_points_read = True
    for point in metadata.entry_points(group=ENTRY_POINT_GROUP):
        op, _, name = point.name.partition(".")
        taken = any((row.op, row.name) == (op, name) for row in _rows)
        package = point.dist.name if point.dist else "another package"
        if name and not taken and point.value.count(":") == 1:
            _rows.append(Backend(op, name, point.value, on_request=f"from {package}"))
        else:
            expected = 'expected "<op>.<backend> = module:attribute" with a name not taken yet'
            warnings.warn(
                f"entry point {point.name!r} of {package} is ignored: {expected}", RuntimeWarning, stacklevel=4
            )


def _installed(module: str) -> bool:
    try:
        return util.find_spec(module) is not None
    except (ImportError, ValueError, AttributeError):
        return False


def _status(row: Backend) -> Status:
    if row.target.startswith("ops.") and not _installed(row.target.partition(":")[0]):
        return Status(row, "unavailable", "not part of this version")
    missing = [module for module in row.requires if not _installed(module)]
    if missing:
        remedy = _remedy(row, missing)
        return Status(row, "unavailable", f"{', '.join(missing)} not installed", remedy)
    if row.hardware is not None:
        absent = _HARDWARE[row.hardware]()
        if absent and not row.off_hardware:
            return Status(row, "unavailable", absent)
        if absent:
            return Status(row, "on request", f"{absent}; {row.off_hardware}")
    if row.probe is not None:
        try:
            reason = _attribute(row.probe)()
        except Exception as error:  # noqa: BLE001 - whatever a probe meets is the row's reason, never the caller's crash
            reason = f"probe failed: {type(error).__name__}: {error}"
        if reason:
            return Status(row, "unavailable", reason)
    if row.on_request:
        return Status(row, "on request", row.on_request)
    return Status(row, "usable")


def _remedy(row: Backend, missing: list[str]) -> str:
    if row.extra is None:
        return f"install {' '.join(missing)}"
    return f'install the extra "{row.extra}" of accelerator-ops, from a clone: pip install ".[{row.extra}]"'


def _attribute(target: str) -> Any:
    module, _, attribute = target.partition(":")
    return getattr(importlib.import_module(module), attribute)


def _load(row: Backend) -> Callable[..., Any]:
    try:
        loaded: Callable[..., Any] = _attribute(row.target)
    except Exception as error:
        name = getattr(error, "name", None) or ""
        if isinstance(error, ModuleNotFoundError) and name.partition(".")[0] in row.requires:
            missing = Status(row, "unavailable", f"{name} not installed", _remedy(row, [name]))
            raise BackendUnavailableError(f"backend {row.name!r} of {row.op!r}: {_explain(missing)}") from error
        raise BackendUnavailableError(
            f"backend {row.name!r} of {row.op!r} is installed but broken: importing {row.target} raised "
            f"{type(error).__name__}: {error}"
        ) from error
    return loaded


_GOOGLE = "0x1ae0"  # PCI vendor of a TPU that the kernel hands out through VFIO


def _no_tpu() -> str:
    platforms = os.environ.get("JAX_PLATFORMS", "")
    if platforms and "tpu" not in platforms.split(","):
        return f"JAX_PLATFORMS={platforms} leaves the TPU out"
    if not _installed("libtpu"):
        return "libtpu not installed"
    if glob.glob("/dev/accel[0-9]*"):
        return ""
    vendors = glob.glob("/sys/bus/pci/devices/*/vendor")
    found = glob.glob("/dev/vfio/[0-9]*") and any(Path(file).read_text().strip() == _GOOGLE for file in vendors)
    return "" if found else "no TPU on this machine"


def _no_nvidia() -> str:
    return "" if os.path.exists("/proc/driver/nvidia/version") else "no NVIDIA driver on this machine"


_HARDWARE: dict[str, Callable[[], str]] = {"tpu": _no_tpu, "nvidia": _no_nvidia}


def _main() -> None:
    _read_entry_points()
    statuses = [status for op in dict.fromkeys(row.op for row in _rows) for status in backends(op)]
    lines = [("op", "backend", "state", "why, and what to do")]
    for status in statuses:
        why = _explain(status) if status.reason else status.backend.summary
        lines.append((status.backend.op, status.backend.name, status.state, why))
    widths = [max(len(line[column]) for line in lines) for column in range(3)]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=False)) + "  " + line[3])


if __name__ == "__main__":
    _main()
