"""The exchange on GPUs: the kernels over NVSHMEM."""

from __future__ import annotations

from typing import Any, ClassVar

from ops.moe_comm_gpu.agreement import Ledger
from ops.moe_comm_gpu.contract import Config
from ops.moe_comm_gpu.kernel_exchange import KernelExchange
from ops.moe_comm_gpu.nvshmem.host import NvshmemRuntime


class Exchange(KernelExchange):
    """Dispatch and combine with kernels that send by themselves.

    Args:
        config: of the exchange.
        group: torch.distributed process group of its ``world_size`` ranks; None for the default one. A world of one
            takes none. Each process uses its current CUDA device, and NVSHMEM with one group of ranks only.
        num_programs: programs of each kernel, at most as many as the GPU has multiprocessors; None takes all of them.
        direct: write to other ranks with plain stores in place of puts; every rank must be within NVLink's reach.

    Raises:
        RuntimeError: NVSHMEM cannot run here; says why.
        ValueError: the ranks' configurations differ, or ``direct`` is not possible.
        MemoryError: the symmetric heap is too small.
        TimeoutError: a rank did not come.
    """

    name: ClassVar[str] = "nvshmem"

    def __init__(
        self, config: Config, group: Any = None, *, num_programs: int | None = None, direct: bool = False
    ) -> None:
        ledger = Ledger(config, group) if config.world_size > 1 else None
        runtime = NvshmemRuntime(ledger, config.timeout_s)
        super().__init__(
            config,
            runtime,
            ledger=ledger,
            num_programs=num_programs,
            direct=direct,
            quantise_in_kernel=runtime.capability >= 89,
        )
        if direct and not runtime.reaches_all(self._sets[0].memory):
            self.close()
            raise ValueError(
                "direct: expected False, because some rank's memory is out of reach of plain stores, got True; "
                "leave it out to send with puts"
            )
