"""The exchange on the emulation: the GPU's kernels, on any CPU machine, with a process for each rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from ops.moe_comm_gpu.agreement import Ledger, Meetings
from ops.moe_comm_gpu.contract import Config
from ops.moe_comm_gpu.emulation.processes import EmulatedRuntime, create_heap_file
from ops.moe_comm_gpu.kernel_exchange import KernelExchange, most_symmetric_bytes
from ops.moe_comm_gpu.kernels.heap import heap_bytes_wanted

_SLACK_BYTES = 1 << 20


class Exchange(KernelExchange):
    """Dispatch and combine with the kernels of the GPU under Triton's interpreter; right, and slow.

    Args:
        config: of the exchange.
        group: torch.distributed process group of its ``world_size`` ranks; None for the default one. A world of one
            needs none.
        num_programs: programs of each kernel; they run in turns, so fewer are faster.
        direct: write to other ranks with plain stores in place of puts.
        heap_bytes: size of each rank's symmetric heap; None takes ``NVSHMEM_SYMMETRIC_SIZE``, or else what is needed.
    """

    name: ClassVar[str] = "nvshmem_emulated"
    always_agrees: ClassVar[bool] = True

    def __init__(
        self,
        config: Config,
        group: Any = None,
        *,
        num_programs: int = 2,
        direct: bool = False,
        heap_bytes: int | None = None,
    ) -> None:
        ledger = Ledger(config, group) if config.world_size > 1 else None
        if heap_bytes is None:
            heap_bytes = heap_bytes_wanted() or most_symmetric_bytes(config) + _SLACK_BYTES
        path = create_heap_file(config.world_size, heap_bytes) if config.rank == 0 else ""
        try:
            if ledger is not None:
                meetings = Meetings(ledger.store("heap"), ledger.rank, ledger.world_size)
                path = meetings.gather(path, "making the exchange", ledger.timeout_s)[0]
            runtime = EmulatedRuntime(config.rank, config.world_size, path, timeout_s=config.timeout_s)
            super().__init__(config, runtime, ledger=ledger, num_programs=num_programs, direct=direct)
        finally:
            if config.rank == 0:
                Path(path).unlink(missing_ok=True)
