"""Dispatch and combine of a whole world in one process, in float64, with explicit gradients.

Written as the definition reads: for each expert, for each rank in order, for each token that the rank sends, for each
choice of the token, one row. Nothing here is fast, and nothing here is shared with the code that it is held against.

With ``rows[r]`` the row of choice j of token t::

    rows[r]          = tokens[t]
    output[t]        = sum_j weights[t, j] * expert_rows[r(t, j)]

    d_tokens[t]      = sum_j d_rows[r(t, j)]
    d_expert_rows[r] = weights[t, j] * d_output[t]
    d_weights[t, j]  = <expert_rows[r(t, j)], d_output[t]>

Ranks form groups of ``dp_size`` that hold the same tokens; member ``t % dp_size`` sends token t. Everything that
belongs to a group is given once per group. Dropped choices have an id of -1, or any other id that names no expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class World:
    """Ranks, their groups and where experts live.

    Attributes:
        world_size: R, ranks.
        expert_rank: the rank of each expert.
        dp_size: ranks of a group.
    """

    world_size: int
    expert_rank: tuple[int, ...]
    dp_size: int = 1

    @property
    def num_groups(self) -> int:
        """Groups of ranks that hold the same tokens."""
        return self.world_size // self.dp_size

    def experts_of(self, rank: int) -> list[int]:
        """Experts of a rank in the order of its slots."""
        return [expert for expert, owner in enumerate(self.expert_rank) if owner == rank]


@dataclass(frozen=True)
class Source:
    """Where the rows of one expert come from, in their order; arrays of equal length."""

    rank: NDArray[np.int64]
    token: NDArray[np.int64]
    choice: NDArray[np.int64]


def blocks(num_experts: int, world_size: int) -> tuple[int, ...]:
    """The default home of experts: ``ceil(E / R)`` a rank, in order; the last ranks may hold fewer or none."""
    size = (num_experts + world_size - 1) // world_size
    return tuple(expert // size for expert in range(num_experts))


def sources(world: World, ids: Sequence[Array]) -> list[Source]:
    """For each expert, the rank, token and choice of each of its rows.

    Args:
        world: ranks and experts.
        ids: for each group, the experts ``[T, J]`` of its tokens.
    """
    found: list[list[tuple[int, int, int]]] = [[] for _ in world.expert_rank]
    for rank in range(world.world_size):
        group, member = divmod(rank, world.dp_size)
        for token in range(member, len(ids[group]), world.dp_size):
            for choice, expert in enumerate(ids[group][token]):
                if 0 <= expert < len(world.expert_rank):
                    found[int(expert)].append((rank, token, choice))
    tables = [np.array(rows, dtype=np.int64).reshape(-1, 3) for rows in found]
    return [Source(table[:, 0], table[:, 1], table[:, 2]) for table in tables]


def dispatch(world: World, tokens: Sequence[Array], ids: Sequence[Array]) -> list[Array]:
    """The rows of every expert ``[n, D]``, bit for bit what their tokens hold.

    Args:
        world: ranks and experts.
        tokens: for each group ``[T, D]``, any dtype; also takes block scales ``[T, S]`` or weights.
        ids: for each group ``[T, J]``.
    """
    return [_gather(world, tokens, source) for source in sources(world, ids)]


def combine(world: World, expert_rows: Sequence[Array], ids: Sequence[Array], weights: Sequence[Array]) -> list[Floats]:
    """For each group the weighted sum ``[T, D]`` of what its tokens' rows became.

    Args:
        world: ranks and experts.
        expert_rows: for each expert ``[n, D]``.
        ids: for each group ``[T, J]``.
        weights: for each group ``[T, J]``.
    """
    hidden = expert_rows[0].shape[1]
    outputs = [np.zeros((len(group_ids), hidden)) for group_ids in ids]
    for rows, source in zip(expert_rows, sources(world, ids), strict=True):
        for row, rank, token, choice in zip(rows, source.rank, source.token, source.choice, strict=True):
            group = rank // world.dp_size
            outputs[group][token] += float(weights[group][token, choice]) * row.astype(np.float64)
    return outputs


def dispatch_gradient(world: World, d_rows: Sequence[Array], ids: Sequence[Array]) -> list[Floats]:
    """Gradient of :func:`dispatch` for each group's tokens ``[T, D]``, given that of each expert's rows ``[n, D]``."""
    return combine(world, d_rows, ids, [np.ones(group_ids.shape) for group_ids in ids])


def combine_gradient(
    world: World,
    expert_rows: Sequence[Array],
    ids: Sequence[Array],
    weights: Sequence[Array],
    d_outputs: Sequence[Array],
) -> tuple[list[Floats], list[Floats]]:
    """Gradients of :func:`combine`.

    Args:
        world: ranks and experts.
        expert_rows: for each expert ``[n, D]``.
        ids: for each group ``[T, J]``.
        weights: for each group ``[T, J]``.
        d_outputs: for each group ``[T, D]``, one cotangent for the whole group, whose ranks hold the same output.

    Returns:
        For each expert the gradient of its rows ``[n, D]``, and for each group that of its weights ``[T, J]``.
    """
    d_weights = [np.zeros(group_ids.shape) for group_ids in ids]
    d_expert_rows = []
    for rows, source in zip(expert_rows, sources(world, ids), strict=True):
        d_rows = np.zeros(rows.shape)
        for row, (rank, token, choice) in enumerate(zip(source.rank, source.token, source.choice, strict=True)):
            group = rank // world.dp_size
            d_output = d_outputs[group][token].astype(np.float64)
            d_rows[row] = float(weights[group][token, choice]) * d_output
            d_weights[group][token, choice] = rows[row].astype(np.float64) @ d_output
        d_expert_rows.append(d_rows)
    return d_expert_rows, d_weights


def first_rows(counts: Sequence[int], row_multiple: int) -> list[int]:
    """Where each expert of a rank begins in the contiguous layout, and the end: multiples of ``row_multiple``."""
    starts = [0]
    for count in counts:
        starts.append(starts[-1] + (count + row_multiple - 1) // row_multiple * row_multiple)
    return starts


def _gather(world: World, tokens: Sequence[Array], source: Source) -> Array:
    rows = np.zeros((len(source.token), *tokens[0].shape[1:]), dtype=tokens[0].dtype)
    for row, (rank, token) in enumerate(zip(source.rank, source.token, strict=True)):
        rows[row] = tokens[rank // world.dp_size][token]
    return rows
