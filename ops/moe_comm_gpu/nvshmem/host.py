"""NVSHMEM's host side: initialisation, symmetric memory, launches, errors. A :class:`Runtime` for GPUs.

    ledger = Ledger(config, group)    # on every rank, after torch.distributed is initialised and a device is set
    runtime = NvshmemRuntime(ledger)
    ...
    finalise()                        # on every rank, when nothing uses NVSHMEM any more

NVSHMEM is one per process: the first runtime initialises it for its ranks, later ones of the same ranks share it.

Its collectives (initialisation, allocation, release, barrier) have no limit of their own. So the hosts meet through the
ledger's store before each of them, with a limit and an error that names who is missing: only a rank that ends between
that and the collective can still leave the others waiting.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import triton

from ops.moe_comm_gpu.agreement import Ledger, Meetings
from ops.moe_comm_gpu.device import watchdog
from ops.moe_comm_gpu.device.runtime import NotEnqueuedError, host_visible_words
from ops.moe_comm_gpu.device.watchdog import timeout_error
from ops.moe_comm_gpu.kernels.common import MAX_REGISTERS
from ops.moe_comm_gpu.kernels.heap import VARIABLE, heap_bytes_wanted
from ops.moe_comm_gpu.nvshmem import probe

#: Symmetric memory that NVSHMEM sets aside by itself when nothing else is asked for.
_DEFAULT_HEAP_BYTES = 1 << 30
#: What a module that calls NVSHMEM's device library defines: the variable that it is bound through.
_DEVICE_STATE = b"nvshmemi_device_state_d"

_initialised_for: tuple[int, tuple[int, ...]] | None = None  # this rank of which ranks of torch.distributed's world
_uneven = False  # an allocation succeeded on some ranks only, so the heaps are no longer symmetric
_used_bytes = 0
_finalised = False


class NvshmemRuntime:
    """One rank of a process group, on this process's current CUDA device; see :class:`Runtime`.

    Args:
        ledger: of the ranks; None for a world of one, whatever torch.distributed's world is.
        timeout_s: limit of each wait, of kernels and of hosts.

    Raises:
        RuntimeError: NVSHMEM cannot run here, or is initialised for other ranks already.
        WaitTimeoutError: a rank did not come; names it.
    """

    def __init__(self, ledger: Ledger | None = None, timeout_s: float = 60.0) -> None:
        reason = probe.probe()
        if reason is not None:
            raise RuntimeError(f"nvshmem: {reason}")
        self._meetings: Meetings | None = None
        if ledger is None:
            self.my_pe, self.n_pes = 0, 1
            ranks = [dist.get_rank() if dist.is_initialized() else 0]
        else:
            self.my_pe, self.n_pes, ranks = ledger.rank, ledger.world_size, ledger.ranks
            self._meetings = Meetings(ledger.store("hosts"), self.my_pe, self.n_pes)
        self.device = torch.device("cuda", torch.cuda.current_device())
        properties = torch.cuda.get_device_properties(self.device)
        # One program a multiprocessor fits whatever its registers and shared memory; the launch is cooperative besides.
        self.max_resident_programs = int(properties.multi_processor_count)
        library = probe.find_library()
        self.capability = 10 * properties.major + properties.minor
        self._libraries = {"nvshmem": str(library.device_library(self.capability))}
        self.watchdog = host_visible_words(watchdog.NUM_WORDS, self.device)
        self._operations: Sequence[str] = ()
        self._launched: set[Any] = set()
        self.set_timeout(timeout_s)
        _initialise(self.my_pe, tuple(ranks), self.device, self.all_gather)

    def allocate(self, num_bytes: int, name: str = "", *, zeroed: bool = True) -> torch.Tensor:
        """Symmetric memory; see :class:`Runtime`.

        Raises:
            MemoryError: the heap is too small on some rank; every rank raises.
            RuntimeError: an earlier allocation succeeded on some ranks only.
        """
        global _used_bytes, _uneven
        name = name or "symmetric memory"
        _refuse_capture(f"allocation of {name}")
        if _uneven:
            raise RuntimeError(
                f"{name}: an earlier allocation succeeded on some ranks only, so symmetric addresses differ; start new "
                f"processes, with a larger {VARIABLE}"
            )
        available = available_bytes()
        fits = available is None or num_bytes <= available
        refusing = self._ranks_without(fits, f"allocation of {name}")
        tensor, cause = None, None
        if not refusing:
            try:
                tensor = _core().tensor((num_bytes,), dtype=torch.uint8)
            except Exception as error:  # noqa: BLE001 - NVSHMEM's errors have no common base but this
                cause = error
            refusing = self._ranks_without(tensor is not None, f"allocation of {name}")
            _uneven = 0 < len(refusing) < self.n_pes  # releasing it would need the ranks that have nothing to release
        if refusing:
            raise MemoryError(
                f"symmetric heap: {name} needs {num_bytes} bytes, {_in_words(available)} are available on rank "
                f"{self.my_pe} ({_used_bytes} are in use), and there is no room on ranks {refusing}; set {VARIABLE} to "
                f"at least {_used_bytes + num_bytes}"
            ) from cause
        assert tensor is not None
        _used_bytes += num_bytes
        if zeroed:
            tensor.zero_()
        self.barrier()
        result: torch.Tensor = tensor
        return result

    def free(self, tensor: torch.Tensor) -> None:
        """Releases symmetric memory on every rank."""
        global _used_bytes
        torch.cuda.synchronize(self.device)
        _core().free_tensor(tensor)
        _used_bytes -= tensor.numel()

    def launch(
        self, kernel: Any, grid: tuple[int, ...], *args: Any, num_warps: int = 4, label: str = "", **constexprs: Any
    ) -> None:
        """Enqueues a kernel on the current stream; see :class:`Runtime`."""
        self._raise_timeout()
        variant = (kernel, num_warps, tuple(map(_kind, args)), tuple(constexprs.items()))
        if variant not in self._launched:
            _refuse_capture(f"{label or kernel.fn.__name__} for the first time")
        kernel[grid](
            *args,
            num_warps=num_warps,
            maxnreg=MAX_REGISTERS,
            launch_cooperative_grid=True,
            extern_libs=self._libraries,
            **constexprs,
        )
        self._launched.add(variant)

    def synchronize(self) -> None:
        """Waits for all that is enqueued.

        Raises:
            WaitTimeoutError: a wait inside a kernel took too long.
            NotEnqueuedError: a CUDA graph is captured, which waiting would spoil.
        """
        _refuse_capture("waiting for the GPU")
        try:
            torch.cuda.synchronize(self.device)
        except RuntimeError as error:
            self._raise_timeout(error)
            raise
        self._raise_timeout()

    def barrier(self) -> None:
        """Returns when every rank has called it and all its operations are complete; see :class:`Runtime`.

        Raises:
            WaitTimeoutError: a wait inside a kernel took too long here, or a rank did not come; names it.
        """
        self.synchronize()
        self.all_gather(None, "barrier")
        _core().barrier_all(_Stream(torch.cuda.current_stream(self.device).cuda_stream))
        self.synchronize()

    def all_gather(self, value: Any, what: str = "all_gather") -> list[Any]:
        """Each rank's ``value``, by rank; see :class:`Runtime`."""
        if self._meetings is None:
            return [value]
        return self._meetings.gather(value, what, int(self.watchdog[watchdog.TIMEOUT_NS]) / 1e9)

    def _ranks_without(self, mine: bool, what: str) -> list[int]:
        return [rank for rank, has in enumerate(self.all_gather(mine, what)) if not has]

    def set_operations(self, names: Sequence[str]) -> None:
        """Names of the operation codes, for error messages."""
        self._operations = names

    def set_timeout(self, seconds: float) -> None:
        """Limit of each wait from now on; 0 for none."""
        self.watchdog[watchdog.TIMEOUT_NS] = int(seconds * 1e9)

    def reaches_all(self, tensor: torch.Tensor) -> bool:
        """Whether every rank's copy of a symmetric tensor can be read and written with plain loads and stores."""
        bindings = importlib.import_module("nvshmem.bindings")
        mine = all(bindings.ptr(tensor.data_ptr(), pe) for pe in range(self.n_pes))
        return all(self.all_gather(mine, "making the exchange"))

    def _raise_timeout(self, cause: BaseException | None = None) -> None:
        error = timeout_error(self.my_pe, self.watchdog.tolist(), self._operations)
        if error is not None:
            raise error from cause


def finalise() -> None:
    """Ends NVSHMEM in this process; every rank calls it, after everything that was allocated is freed."""
    global _initialised_for, _finalised
    if _initialised_for is None:
        return
    torch.cuda.synchronize()
    triton.knobs.runtime.kernel_load_end_hook.remove(bind_module)
    _core().finalize()
    _initialised_for, _finalised = None, True


def bind_module(module: Any, function: Any, name: str, metadata_group: dict[str, str], hash: str) -> None:
    """Gives a freshly loaded module NVSHMEM's device state, if it calls the device library.

    A hook of Triton (``kernel_load_end_hook``): runs once for each loaded module, before its first launch.

    Raises:
        RuntimeError: NVSHMEM is not initialised, where binding would end the process; or it refuses; or there is no
            machine code to tell whether the module needs it.
    """
    if not _calls_device_library(name, metadata_group):
        return
    if _initialised_for is None or not _status_is_initialised():
        raise RuntimeError(f"{name}: calls NVSHMEM before it is initialised; make an NvshmemRuntime first")
    status = importlib.import_module("nvshmem.bindings").cumodule_init(int(module))
    if status:
        raise RuntimeError(f"{name}: NVSHMEM could not bind its state to the module (status {status})")


def available_bytes() -> int | None:
    """Symmetric memory that is left, as far as settings tell; None if it grows with demand."""
    wanted = heap_bytes_wanted()
    if wanted is None and os.environ.get("NVSHMEM_DISABLE_CUDA_VMM", "0") in ("", "0"):
        return None  # the heap maps more of the GPU's memory as it is asked for
    return (wanted or _DEFAULT_HEAP_BYTES) - _used_bytes


class _Stream:
    """A CUDA stream for nvshmem4py, which takes nothing else."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        """Version of the protocol and handle."""
        return 0, self._handle


def _refuse_capture(what: str) -> None:
    """Neither compiling a kernel nor allocating can be part of a graph."""
    if torch.cuda.is_current_stream_capturing():
        raise NotEnqueuedError(
            f"{what}, while a CUDA graph is captured; make the same dispatch and combine once before the capture"
        )


def _kind(argument: Any) -> Any:
    """What Triton compiles anew for: an argument's type, and of an address whether it is a multiple of 16.

    Kernels ask it not to look at the values of numbers.
    """
    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    return type(argument)


def _core() -> Any:
    return importlib.import_module("nvshmem.core")


def _initialise(rank: int, ranks: tuple[int, ...], device: torch.device, all_gather: Any) -> None:
    """Initialises NVSHMEM with a unique id that rank 0 makes and all ranks get."""
    global _initialised_for
    if _initialised_for is not None:
        if _initialised_for != (rank, ranks):
            raise RuntimeError(
                f"group: NVSHMEM is initialised for rank {_initialised_for[0]} of the ranks {_initialised_for[1]} of "
                f"torch.distributed in this process, got rank {rank} of {ranks}; use the same process group, or a new "
                f"process"
            )
        return
    if _finalised:
        # Loaded kernels keep the state of the NVSHMEM that is gone, and Triton does not load them again.
        raise RuntimeError("nvshmem: finalised in this process already; start a new process to use it again")
    core = _core()
    cuda_device = _current_device(device.index)
    mine = core.get_unique_id(empty=rank != 0)
    payload = all_gather(mine._data.tobytes() if rank == 0 else None, "initialisation of NVSHMEM")[0]
    unique_id = mine if rank == 0 else _unique_id_from(core, payload)
    core.init(device=cuda_device, uid=unique_id, rank=rank, nranks=len(ranks), initializer_method="uid")
    # init reports success even without a usable GPU; only its status tells.
    if not all(all_gather(_status_is_initialised(), "initialisation of NVSHMEM")):
        raise RuntimeError(
            f"nvshmem: rank {rank}: init returned, but NVSHMEM's status is {int(core.init_status())}, expected 2 to 4; "
            f"run with NVSHMEM_DEBUG=INFO to see why"
        )
    _initialised_for = (rank, ranks)
    triton.knobs.runtime.kernel_load_end_hook.add(bind_module)


def _current_device(index: int | None) -> Any:
    """The device as nvshmem4py takes it, made current."""
    device = importlib.import_module("cuda.core").Device(index)
    device.set_current()
    return device


def _unique_id_from(core: Any, payload: bytes) -> Any:
    import numpy as np

    unique_id = core.get_unique_id(empty=True)
    unique_id._data.view(np.int8)[:] = np.frombuffer(payload, dtype=np.int8)
    return unique_id


def _status_is_initialised() -> bool:
    return 2 <= int(_core().init_status()) <= 4


def _calls_device_library(kernel: str, metadata_group: dict[str, str]) -> bool:
    """Whether the machine code of a compiled kernel defines NVSHMEM's device state; all that Triton always keeps."""
    paths = [path for name, path in metadata_group.items() if name.endswith(".cubin")]
    if len(paths) != 1:
        raise RuntimeError(
            f"{kernel}: expected one .cubin among what Triton kept of it, to see whether it calls NVSHMEM, got "
            f"{sorted(metadata_group)}"
        )
    return _DEVICE_STATE in Path(paths[0]).read_bytes()


def _in_words(number: int | None) -> str:
    return "fewer" if number is None else str(max(number, 0))
