"""Named shapes and seeded inputs of dispatch and combine, for tests and benches alike.

A payload tells its token: ``payload(id)`` is a row of small integers that every element type holds exactly, and
``payload_id`` reads the id back, so that a wrong row is not merely seen but named.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reference.moe import blocks

_BASE = 8  # digits 0 to 7 are exact even in e5m2
_DIGITS = 7


@dataclass(frozen=True)
class Shape:
    """Sizes of one exchange.

    Attributes:
        num_experts: E.
        experts_per_token: J.
        hidden: D.
        max_num_tokens: M, most tokens of a group.
        world_size: R.
        dp_size: ranks that hold the same tokens.
        expert_map: rank of each expert, or None for blocks.
    """

    num_experts: int
    experts_per_token: int
    hidden: int
    max_num_tokens: int
    world_size: int
    dp_size: int = 1
    expert_map: tuple[int, ...] | None = None

    @property
    def num_groups(self) -> int:
        """Groups of ranks that hold the same tokens."""
        return self.world_size // self.dp_size

    @property
    def expert_rank(self) -> tuple[int, ...]:
        """Rank of each expert."""
        return self.expert_map or blocks(self.num_experts, self.world_size)


SHAPES: dict[str, Shape] = {
    "published_small": Shape(8, 3, 512, 10, 4, dp_size=2),
    "published_large": Shape(64, 4, 1024, 20, 8, dp_size=4),
    "one_rank": Shape(4, 2, 32, 5, 1),
    "two_ranks": Shape(4, 2, 64, 4, 2),
    "all_replicated": Shape(6, 2, 40, 7, 4, dp_size=4),
    "uneven_experts": Shape(10, 3, 48, 6, 4),
    "fewer_experts_than_ranks": Shape(3, 2, 32, 5, 4),
    "redundant_experts": Shape(6, 2, 32, 5, 4, expert_map=(3, 0, 3, 1, 0, 3)),
    "six_of_eight": Shape(8, 6, 64, 4, 4),
    "hidden_136": Shape(8, 2, 136, 4, 2),
    "hidden_2880": Shape(8, 2, 2880, 4, 2),
    "hidden_3584": Shape(8, 2, 3584, 4, 2),
    "full_256": Shape(8, 4, 64, 256, 4),
    "decode_8": Shape(256, 8, 7168, 128, 8),
}


def global_ids(shape: Shape, group: int, num_tokens: int) -> NDArray[np.int64]:
    """Ids of a group's tokens, different for every token of the world."""
    return group * shape.max_num_tokens + np.arange(num_tokens, dtype=np.int64)


def payload(ids: NDArray[np.int64], hidden: int, layer: int = 0) -> NDArray[np.float32]:
    """Rows ``[T, D]`` that tell token and layer: base-8 digits, repeated along the row, each time round plus one.

    Args:
        ids: global token ids ``[T]``, below 8**5.
        hidden: D, at least 7.
        layer: number below 64, of the layer or call the token belongs to.
    """
    number = ids + layer * _BASE**5
    column = np.arange(hidden)
    digits = number[:, None] // _BASE ** (column % _DIGITS)
    return ((digits + column // _DIGITS) % _BASE).astype(np.float32)


def payload_id(row: NDArray[Any]) -> tuple[int, int]:
    """Token id and layer that a row of :func:`payload` begins with."""
    digits = [round(float(value)) % _BASE for value in row[:_DIGITS]]
    number = sum(digit * _BASE**place for place, digit in enumerate(digits))
    return number % _BASE**5, number // _BASE**5


def payload_scales(ids: NDArray[np.int64], num_scales: int) -> NDArray[np.float32]:
    """Block scales ``[T, S]`` that tell their token and block."""
    return (1 + ids[:, None] + np.arange(num_scales) / 64).astype(np.float32)


def random_ids(shape: Shape, num_tokens: int, seed: int, group: int = 0, dropped: float = 0.0) -> NDArray[np.int64]:
    """Distinct experts for each token ``[T, J]``, with a share of choices dropped (-1)."""
    rng = np.random.default_rng((seed, group, 0))
    scores = rng.random((num_tokens, shape.num_experts))
    ids = np.argsort(scores, axis=1)[:, : shape.experts_per_token].astype(np.int64)
    if ids.shape[1] < shape.experts_per_token:
        ids = np.pad(ids, ((0, 0), (0, shape.experts_per_token - ids.shape[1])), constant_values=-1)
    return np.where(rng.random(ids.shape) < dropped, -1, ids)


def random_weights(shape: Shape, num_tokens: int, seed: int, group: int = 0) -> NDArray[np.float32]:
    """Positive weights ``[T, J]`` that sum to one, as a router makes them."""
    rng = np.random.default_rng((seed, group, 1))
    weights = rng.random((num_tokens, shape.experts_per_token)) + 0.1
    return (weights / weights.sum(axis=1, keepdims=True)).astype(np.float32)


def random_floats(size: tuple[int, ...], seed: int) -> NDArray[np.float32]:
    """Standard normal numbers."""
    return np.random.default_rng(seed).standard_normal(size).astype(np.float32)
