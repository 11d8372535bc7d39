"""Where symmetric allocations lie: the same offset on every rank."""

from __future__ import annotations

from dataclasses import dataclass

ALIGNMENT = 256


@dataclass(frozen=True)
class Allocation:
    """One symmetric allocation: ``num_bytes`` at ``offset`` of every rank's heap."""

    offset: int
    num_bytes: int
    name: str


class HeapLayout:
    """First-fit allocator over the offsets ``[start, num_bytes)`` of a heap; holds no memory itself."""

    def __init__(self, num_bytes: int, start: int = 0) -> None:
        self.num_bytes = num_bytes
        self.start = start
        self._allocations: list[Allocation] = []  # by offset

    @property
    def used_bytes(self) -> int:
        """Bytes taken, with what alignment wastes."""
        return sum(_aligned(a.num_bytes) for a in self._allocations)

    def allocate(self, num_bytes: int, name: str) -> Allocation:
        """The first gap that is large enough.

        Raises:
            MemoryError: no gap is; names the bytes needed and available.
        """
        gap_start, position, largest = _aligned(self.start), 0, 0
        for position, following in enumerate([*self._allocations, None]):  # noqa: B007
            gap_end = self.num_bytes if following is None else following.offset
            largest = max(largest, gap_end - gap_start)
            if gap_start + num_bytes <= gap_end:
                break
            if following is not None:
                gap_start = following.offset + _aligned(following.num_bytes)
        else:
            raise MemoryError(
                f"symmetric heap: {name or 'allocation'} needs {num_bytes} bytes, {max(largest, 0)} of "
                f"{self.num_bytes} are available in one piece; set NVSHMEM_SYMMETRIC_SIZE to a larger size"
            )
        allocation = Allocation(gap_start, num_bytes, name)
        self._allocations.insert(position, allocation)
        return allocation

    def free(self, offset: int) -> Allocation:
        """Takes back the allocation at ``offset``.

        Raises:
            ValueError: there is none.
        """
        for position, allocation in enumerate(self._allocations):
            if allocation.offset == offset:
                return self._allocations.pop(position)
        raise ValueError(f"tensor: expected one that allocate returned and nobody freed, got heap offset {offset}")

    def describe(self, offset: int) -> str:
        """Names a byte of the heap by its allocation."""
        for a in self._allocations:
            if a.offset <= offset < a.offset + a.num_bytes:
                return f"{a.name or 'allocation'}[byte {offset - a.offset}]"
        return f"heap offset {offset} (not allocated)"


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
