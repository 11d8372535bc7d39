"""What ranks tell one another beside the data: their configuration, how far they are, why they refuse.

It goes through the key-value store of the process group, where writing costs tens of microseconds and needs no other
rank. So every call can note its arrival, and a wait that ends without result can say who is missing.
"""

from __future__ import annotations

import hashlib
import json
import math
import pickle
import time
from collections import defaultdict
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ops.moe_comm_gpu.contract import Config, check_same_fields
from ops.moe_comm_gpu.device import watchdog

_C10D: Any = dist.distributed_c10d
_opened: defaultdict[str, int] = defaultdict(int)  # exchanges made so far by this process, per set of ranks


class PeerError(ValueError):
    """Another rank refused the call; the message holds its reason."""


class Ledger:
    """One exchange's page in the store.

    Args:
        config: this rank's; ``timeout_s`` bounds the wait for the other ranks' pages.
        group: torch.distributed process group of all ``world_size`` ranks, or None for the default one.

    Raises:
        TimeoutError: a rank did not make its exchange in time; names it.
        ValueError: a rank's configuration differs; every rank raises.
    """

    def __init__(self, config: Config, group: Any = None) -> None:
        check_group(config, group)
        self.rank, self.world_size, self.timeout_s = config.rank, config.world_size, config.timeout_s
        self.ranks = dist.get_process_group_ranks(group)
        self._store = _store_of(group)
        members = hashlib.sha1(repr(self.ranks).encode()).hexdigest()[:12]
        self._page = f"moe_comm/{members}/{_opened[members]}"
        previous = f"moe_comm/{members}/{_opened[members] - 1}"
        self.calls = 0
        own = config.shared_fields()
        self._store.set(self._key("config"), json.dumps(own))
        self._await_everyone()
        _opened[members] += 1  # not before, so that a rank which gave up waiting can try again
        fields = [json.loads(self._store.get(self._key("config", rank))) for rank in range(self.world_size)]
        check_same_fields(fields, self.rank)
        for entry in ("config", "call", "refusal"):  # every rank is past its previous exchange's beginning by now
            self._store.delete_key(f"{previous}/{entry}/{self.rank}")

    def arrive(self, call: str) -> None:
        """Notes that this rank has come to its next call."""
        self.calls += 1
        self._store.set(self._key("call"), json.dumps([self.calls, call]))

    def store(self, name: str) -> Any:
        """A part of the store for the use of this exchange alone."""
        return _C10D.PrefixStore(f"{self._page}/{name}", self._store)

    def refuse(self, reason: str) -> None:
        """Notes why this rank does not take part in the call it has just arrived at."""
        self._store.set(self._key("refusal"), json.dumps([self.calls, reason]))

    def raise_refusals(self, ranks: list[int]) -> None:
        """Raises the reason of the first of the ranks that refused the present call.

        Raises:
            PeerError: always.
        """
        _, reason = self._read("refusal", ranks[0]) or (0, "for an unknown reason")
        raise PeerError(f"rank {ranks[0]} refused this call, so no rank sent anything: {reason}")

    def absentees(self, call: str) -> Exception | None:
        """The error that the other ranks' absence from the present call stands for; None if all have come to it."""
        seen = {rank: self._read("call", rank) for rank in range(self.world_size) if rank != self.rank}
        late = [rank for rank, at in seen.items() if at is None or at[0] < self.calls]
        if late:
            where = ", ".join(f"rank {rank} ({_whereabouts(seen[rank])})" for rank in late)
            return TimeoutError(f"{call}, call {self.calls}: did not arrive within {self.timeout_s:g} s: {where}")
        astray = [rank for rank, at in seen.items() if at is not None and at[0] == self.calls and at[1] != call]
        if astray:
            where = ", ".join(f"rank {rank} ({_whereabouts(seen[rank])})" for rank in astray)
            return RuntimeError(
                f"{call}, call {self.calls}: every rank must make the same calls in the same order: {where}"
            )
        return None

    def explain(self, call: str, cause: Exception) -> Exception:
        """The error for a transfer that failed: who is missing or elsewhere, as far as the store knows."""
        try:
            absent = self.absentees(call)
        except Exception as error:  # noqa: BLE001 - the store dies with the process that holds it
            return TimeoutError(f"{call}: {cause}; the process that holds the store is gone as well ({error})")
        return absent or RuntimeError(
            f"{call}, call {self.calls}: every rank arrived, but the transfer failed: {cause}"
        )

    def _await_everyone(self) -> None:
        keys = [self._key("config", rank) for rank in range(self.world_size)]
        missing = _missing_ranks(self._store, keys, self.timeout_s)
        if missing:
            absent = ", ".join(f"rank {rank}" for rank in missing)
            raise TimeoutError(f"making the exchange: did not arrive within {self.timeout_s:g} s: {absent}")

    def _key(self, entry: str, rank: int | None = None) -> str:
        return f"{self._page}/{entry}/{self.rank if rank is None else rank}"

    def _read(self, entry: str, rank: int) -> Any:
        key = self._key(entry, rank)
        return json.loads(self._store.get(key)) if self._store.check([key]) else None


class Meetings:
    """Where hosts wait for one another: every rank brings a small value and gets everyone's.

    Args:
        store: for these meetings alone.
        rank: this rank.
        world_size: number of ranks.
    """

    def __init__(self, store: Any, rank: int, world_size: int) -> None:
        self._store, self.rank, self.world_size = store, rank, world_size
        self._number = 0

    def gather(self, value: Any, what: str, timeout_s: float) -> list[Any]:
        """Each rank's ``value``, by rank.

        Args:
            value: small, picklable.
            what: the ranks meet for, for the error.
            timeout_s: limit; 0 for none.

        Raises:
            WaitTimeoutError: a rank did not come in time; names it.
        """
        self._number += 1
        self._store.set(f"{self._number}/{self.rank}", pickle.dumps(value))
        keys = [f"{self._number}/{rank}" for rank in range(self.world_size)]
        missing = _missing_ranks(self._store, keys, timeout_s)
        if missing:
            raise watchdog.absence_error(self.rank, what, missing, timeout_s)
        together = self._store.has_extended_api()
        values = self._store.multi_get(keys) if together else [self._store.get(key) for key in keys]
        if self._number > 1:  # whoever came to this meeting has read what was brought to the last one
            self._store.delete_key(f"{self._number - 1}/{self.rank}")
        return [pickle.loads(value) for value in values]


def _missing_ranks(store: Any, keys: Sequence[str], timeout_s: float) -> list[int]:
    """The ranks whose key is not there after ``timeout_s``, or never if that is 0.

    Raises:
        RuntimeError: the store itself fails.
    """
    # Stores take whole milliseconds and would round down, to a wait that ends before the deadline.
    limit = timedelta(milliseconds=math.ceil(1e3 * timeout_s)) if timeout_s else timedelta(days=365)
    deadline = time.monotonic() + limit.total_seconds()
    try:
        store.wait(list(keys), limit)  # one message, however many ranks there are
    except RuntimeError:  # kinds of stores have kinds of errors for a wait that ends
        if time.monotonic() < deadline:
            raise
        return [rank for rank, key in enumerate(keys) if not store.check([key])]
    return []


def check_group(config: Config, group: Any) -> None:
    """Whether the process group is the one that the configuration speaks of.

    Raises:
        RuntimeError: torch.distributed is not initialised.
        ValueError: other world size or rank.
    """
    if not dist.is_initialized():
        raise RuntimeError(
            f"world_size: {config.world_size} ranks need torch.distributed; "
            f"call torch.distributed.init_process_group first"
        )
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    if size != config.world_size:
        raise ValueError(f"world_size: expected the process group's size {size}, got {config.world_size}")
    if rank != config.rank:
        raise ValueError(f"rank: expected this process's rank in the group, {rank}, got {config.rank}")


def _whereabouts(at: Any) -> str:
    return "has made no call yet" if at is None else f"last seen at {at[1]}, call {at[0]}"


def _store_of(group: Any) -> Any:
    """The store through which the ranks of the group found one another."""
    if group is None or group is dist.group.WORLD:
        return _C10D._get_default_store()
    return _C10D._world.pg_map[group][1]
