"""The collective operations behind exchanges over torch.distributed, with named absentees; local for one rank."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ops.moe_comm_gpu.agreement import Ledger
from ops.moe_comm_gpu.contract import Config


@dataclass
class Traffic:
    """What a rank has sent to others so far, by :meth:`Ranks.all_to_all`."""

    num_bytes: int = 0
    num_messages: int = 0


class Ranks:
    """The ranks of one exchange.

    What is on the host goes through a gloo group of its own, so that it has its own timeout and never meets the
    caller's traffic. What is on GPUs goes through the caller's group; by then every rank has arrived.

    Args:
        config: of the exchange.
        group: the caller's process group, None for the default one; not needed for a world of one.

    Raises:
        TimeoutError, ValueError, RuntimeError: as :class:`Ledger`.
    """

    def __init__(self, config: Config, group: Any = None) -> None:
        self.config = config
        self.traffic = Traffic()
        self._failure: Exception | None = None
        self._ledger: Ledger | None = None
        self._host: Any = None
        self._group = group
        if config.world_size > 1:
            self._ledger = Ledger(config, group)
            store = self._ledger.store("gloo")
            self._call = "making the exchange"
            timeout = timedelta(seconds=config.timeout_s)
            # Not dist.new_group, which either needs every rank of the world or names groups so that names come back.
            self._host = self._guarded(lambda: dist.ProcessGroupGloo(store, config.rank, config.world_size, timeout))

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
        gathered = numbers.new_empty(self.config.world_size, len(numbers))
        if self._host is None:
            return numbers[None]
        self._guarded(lambda: self._host.allgather([list(gathered)], [numbers]).wait())
        return gathered

    def gather_objects(self, thing: Any) -> list[Any]:
        """Every rank's object, pickled: for small things and for tests."""
        data = torch.frombuffer(bytearray(pickle.dumps(thing)), dtype=torch.uint8)
        sizes = self.gather(torch.tensor([len(data)]))[:, 0].tolist()
        padded = data.new_zeros(max(sizes))
        padded[: len(data)] = data
        return [pickle.loads(row[:size].numpy()) for row, size in zip(self.gather(padded), sizes, strict=True)]

    def all_to_all(self, rows: Tensor, sent: list[int], received: list[int]) -> Callable[[], Tensor]:
        """Starts to send rows of bytes and to receive others; the function it returns waits for them.

        Args:
            rows: uint8 ``[n, width]``, the rows for rank 0, then for rank 1, ...
            sent: number of rows for each rank.
            received: number of rows from each rank.
        """
        if self._host is None:
            return lambda: rows
        arrived = rows.new_empty(sum(received), rows.shape[1])
        to_others = [count for rank, count in enumerate(sent) if count and rank != self.config.rank]
        self.traffic.num_bytes += sum(to_others) * rows.shape[1]
        self.traffic.num_messages += len(to_others)
        if rows.is_cuda:
            work = self._guarded(
                lambda: dist.all_to_all_single(arrived, rows, received, sent, group=self._group, async_op=True)
            )
        else:
            work = self._guarded(lambda: self._host.alltoall_base(arrived, rows, received, sent))

        def wait() -> Tensor:
            self._guarded(work.wait)
            return arrived

        return wait

    def close(self) -> None:
        """Gives the host's process group back."""
        self._host = None

    def _guarded(self, operation: Callable[[], Any]) -> Any:
        try:
            return operation()
        except RuntimeError as cause:
            assert self._ledger is not None
            self._failure = self._ledger.explain(self._call, cause)
            raise self._failure from cause
