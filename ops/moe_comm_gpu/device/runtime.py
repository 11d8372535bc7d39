"""What the host side needs from whatever runs the kernels: a GPU with NVSHMEM, the simulator or the emulation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch


class NotEnqueuedError(RuntimeError):
    """A launch or allocation was refused before anything was enqueued; what uses the runtime can go on."""


def host_visible_words(number: int, device: torch.device) -> torch.Tensor:
    """Words, zero, that kernels on ``device`` write and the host reads without waiting for them."""
    return torch.zeros(number, dtype=torch.int64, pin_memory=device.type == "cuda")


class Runtime(Protocol):
    """One rank's view of a set of ranks with symmetric memory.

    Attributes:
        my_pe: this rank.
        n_pes: number of ranks.
        device: where tensors that are passed to kernels live.
        max_resident_programs: most programs of one grid that run at the same time; no larger grid may wait.
        watchdog: this rank's watchdog block, int64, to pass to kernels that wait.
    """

    my_pe: int
    n_pes: int
    device: torch.device
    max_resident_programs: int
    watchdog: torch.Tensor

    def allocate(self, num_bytes: int, name: str = "", *, zeroed: bool = True) -> torch.Tensor:
        """Symmetric memory: uint8 of shape (num_bytes,), 256-byte aligned, there on every rank before any returns.

        Every rank calls with the same arguments in the same order. ``name`` appears in error messages. Unless
        ``zeroed`` the contents are undefined, and the simulator reports a kernel that reads them unwritten.

        Raises:
            MemoryError: the heap is too small; names the bytes needed and available and the variable to set.
        """

    def free(self, tensor: torch.Tensor) -> None:
        """Releases what :meth:`allocate` returned, on every rank, in the same order."""

    def launch(
        self, kernel: Any, grid: tuple[int, ...], *args: Any, num_warps: int = 4, label: str = "", **constexprs: Any
    ) -> None:
        """Runs ``kernel`` (a ``@triton.jit`` function) over ``grid``, after what this rank launched before.

        On a GPU it is only enqueued. ``args`` are tensors and numbers, ``constexprs`` the compile-time arguments;
        ``label`` names the call in error messages.
        """

    def synchronize(self) -> None:
        """Returns when everything this rank launched has run; raises the error of an expired wait."""

    def barrier(self) -> None:
        """Returns when every rank has called it and all memory operations issued before are complete.

        Raises:
            WaitTimeoutError: a rank did not come; names it.
        """

    def all_gather(self, value: Any, what: str = "all_gather") -> list[Any]:
        """Each rank's ``value`` (small, picklable), by rank; for the checks before anything is sent.

        Raises:
            WaitTimeoutError: a rank did not come; names it, and ``what`` it was awaited for.
        """

    def set_operations(self, names: Sequence[str]) -> None:
        """Names of the operation codes that kernels pass to ``wait_ge``, for error messages."""

    def set_timeout(self, seconds: float) -> None:
        """Limit of each wait from now on; 0 for none."""
