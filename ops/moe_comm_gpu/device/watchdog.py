"""The watchdog block: how long a wait may take, and who was awaited when it took longer.

One block of int64 per rank, in memory that both the device and the host can read without synchronising (pinned host
memory on a GPU). The host writes the limit; a wait on a GPU that exceeds it writes the record and traps, so nothing
computed from data that never came can be used; the host then decodes the record into a :class:`WaitTimeoutError`.
The limit is read by the device at each wait that does not succeed at once, so it may change under a captured graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

#: Words of the block, in int64.
TIMEOUT_NS, EXPIRED, OPERATION, AWAITED, TARGET, SEEN = range(6)
NUM_WORDS = 8


class WaitTimeoutError(TimeoutError):
    """A wait took longer than its limit; the message names the rank, the operation and what was awaited."""


def describe(operations: Sequence[str], operation: int, awaited: int, target: int, seen: int) -> str:
    """What a wait waits for, in words.

    Args:
        operations: names of the kernels' operation codes, in their order.
        operation: the code that the kernel passed to ``wait_ge``.
        awaited: the rank whose signal is awaited, or -1 when any rank may be meant.
        target: the value the signal has to reach.
        seen: the value it had.
    """
    name = operations[operation] if 0 <= operation < len(operations) else f"operation {operation}"
    source = f"rank {awaited}" if awaited >= 0 else "its peers"
    return f"{name}: waits for {source} (signal is {seen}, has to reach {target})"


def absence_error(rank: int, what: str, missing: Sequence[int], limit_s: float) -> WaitTimeoutError:
    """The error of a host of ``rank`` that waited for the hosts of other ranks."""
    return WaitTimeoutError(
        f"rank {rank}: {what}: ranks {list(missing)} did not come within {limit_s:g} s; "
        "check that every rank makes the same calls, or raise the timeout"
    )


def first_late(flags: Iterable[int], target: int) -> int:
    """The first rank whose flag is lower than ``target``; -1 if there is none."""
    return next((rank for rank, flag in enumerate(flags) if flag < target), -1)


def timeout_error(rank: int, block: Sequence[int], operations: Sequence[str]) -> WaitTimeoutError | None:
    """The error that the record in ``block`` stands for, or None while no wait of ``rank`` has expired."""
    if not block[EXPIRED]:
        return None
    waited = describe(operations, block[OPERATION], block[AWAITED], block[TARGET], block[SEEN])
    return WaitTimeoutError(
        f"rank {rank}: {waited}; gave up after {block[TIMEOUT_NS] / 1e9:g} s. "
        "Check that every rank makes the same calls, or raise the timeout."
    )
