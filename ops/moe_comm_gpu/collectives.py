"""The collective operations behind exchanges over torch.distributed, with named absentees; local for one rank."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ops.moe_comm_gpu.agreement import Ledger
from ops.moe_comm_gpu.contract import Config


class Ranks:
    """The ranks of one exchange: a process group of its own, so that its traffic never meets the caller's.

    Args:
        config: of the exchange.
        group: the caller's process group, None for the default one; not needed for a world of one.

    Raises:
        TimeoutError, ValueError, RuntimeError: as :class:`Ledger`.
    """

    def __init__(self, config: Config, group: Any = None) -> None:
        self.config = config
        self._failure: Exception | None = None
        self._ledger: Ledger | None = None
        self._group: Any = None
        if config.world_size > 1:
            self._ledger = Ledger(config, group)
            cuda = torch.cuda.is_available() and dist.is_nccl_available()
            self._group = dist.new_group(
                self._ledger.ranks,
                timeout=timedelta(seconds=config.timeout_s),
                backend="cpu:gloo,cuda:nccl" if cuda else "gloo",
                use_local_synchronization=True,
            )

    def arrive(self, call: str) -> None:
        """Notes the beginning of a call; everything up to the next is part of it."""
        if self._failure is not None:
            raise RuntimeError(f"{call}: this exchange failed before and can only be closed: {self._failure}")
        if self._ledger is not None:
            self._ledger.arrive(call)
        self._call = call

    def refuse(self, reason: str) -> None:
        """Notes why this rank refuses the call it has arrived at."""
        if self._ledger is not None:
            self._ledger.refuse(reason)

    def raise_refusals(self, ranks: list[int]) -> None:
        """Raises the reason of a rank that refused."""
        assert self._ledger is not None
        self._ledger.raise_refusals(ranks)

    def gather(self, numbers: Tensor) -> Tensor:
        """Every rank's integers ``[R, n]``, from each one's ``[n]``, on the host."""
        if self._group is None:
            return numbers[None]
        gathered = numbers.new_empty(self.config.world_size * len(numbers))
        # all_gather_into_tensor is deprecated where all_gather_single exists
        gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
        self._guarded(lambda: gather(gathered, numbers, group=self._group))
        return gathered.reshape(self.config.world_size, -1)

    def gather_objects(self, thing: Any) -> list[Any]:
        """Every rank's object, pickled: for small things and for tests."""
        if self._group is None:
            return [thing]
        things = [None] * self.config.world_size
        self._guarded(lambda: dist.all_gather_object(things, thing, group=self._group))
        return things

    def all_to_all(self, rows: Tensor, sent: list[int], received: list[int]) -> Callable[[], Tensor]:
        """Starts to send rows of bytes and to receive others; the function it returns waits for them.

        Args:
            rows: uint8 ``[n, width]``, the rows for rank 0, then for rank 1, ...
            sent: number of rows for each rank.
            received: number of rows from each rank.
        """
        if self._group is None:
            return lambda: rows
        arrived = rows.new_empty(sum(received), rows.shape[1])
        work = self._guarded(
            lambda: dist.all_to_all_single(arrived, rows, received, sent, group=self._group, async_op=True)
        )

        def wait() -> Tensor:
            self._guarded(work.wait)
            return arrived

        return wait

    def close(self) -> None:
        """Gives the process group back."""
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group = None

    def _guarded(self, operation: Callable[[], Any]) -> Any:
        try:
            return operation()
        except RuntimeError as cause:
            assert self._ledger is not None
            self._failure = self._ledger.explain(self._call, cause)
            raise self._failure from cause
