"""The grid steps of the kernels: which tile of rows and which state slot each one works on.

A tile is ``rows`` consecutive tokens of one batch row. A tile that several segments share is visited once for each of
them, in turn, and the rows of the others are masked to no-op tokens in the kernel. So every step belongs to one slot,
the state is a single one, segments may begin at any token and nothing is gathered or aligned.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepTable:
    """Grid steps in order, int32 [B, S] each; the backward walks them from the last to the first.

    Attributes:
        tile: tile the step reads and writes; nondecreasing along S, every tile occurs.
        slot: state slot it belongs to, 0-based, nondecreasing along S. A tile of nothing but padding belongs to the
            slot before it (or to the first one there is). A slot that never occurs has no tokens.
        segment: segment id whose rows take part, ``slot + 1``; -1 in surplus steps, which repeat the last tile and slot
            and in which no row takes part.
        is_first: 1 in the first step of a slot: its initial state is loaded.
        is_last: 1 in the last step of a slot: its state is final.
        fresh: 1 in the first visit of a tile: what the output blocks hold before is undefined.
        settled: 1 in the last visit of a tile (the first one of the reverse walk).
    """

    tile: jax.Array
    slot: jax.Array
    segment: jax.Array
    is_first: jax.Array
    is_last: jax.Array
    fresh: jax.Array
    settled: jax.Array

    @property
    def num_steps(self) -> int:
        """Steps of a batch row, S."""
        return self.tile.shape[1]

    def flat(self) -> tuple[jax.Array, ...]:
        """The arrays in field order, each as [B * S], for scalar prefetch."""
        return tuple(getattr(self, field.name).reshape(-1) for field in fields(self))


def padded_length(num_tokens: int, rows: int) -> int:
    """Tokens rounded up to whole tiles, at least one."""
    return max(1, -(-num_tokens // rows)) * rows


def pad_segment_ids(segment_ids: jax.Array | None, batch: int, num_tokens: int, rows: int) -> jax.Array:
    """Segment ids [B, Tp] of whole tiles: rows behind the last token are padding (0), no ids means all ones."""
    if segment_ids is None:
        segment_ids = jnp.ones((batch, num_tokens), jnp.int32)
    return jnp.pad(segment_ids.astype(jnp.int32), ((0, 0), (0, padded_length(num_tokens, rows) - num_tokens)))


def plan(segment_ids: jax.Array | None, num_segments: int, batch: int, num_tokens: int, rows: int) -> StepTable:
    """Lays out the grid steps.

    Args:
        segment_ids: int [B, T], 1-based and nondecreasing along a row but for zeros (padding); None: one segment.
        num_segments: state slots N; ids are at most N.
        batch: batch rows B.
        num_tokens: tokens T of a row.
        rows: tokens of a tile.

    Returns:
        S = tiles + N - 1 steps (tiles without ids): a tile has one visit and one more for each segment that begins in
        it behind another. May be traced.
    """
    tiles = padded_length(num_tokens, rows) // rows
    if segment_ids is None:
        tile = jnp.broadcast_to(jnp.arange(tiles, dtype=jnp.int32), (batch, tiles))
        return _table(tile, jnp.zeros_like(tile), jnp.ones_like(tile))
    ids = pad_segment_ids(segment_ids, batch, num_tokens, rows).reshape(batch, tiles, rows)
    slots = jnp.arange(num_segments, dtype=jnp.int32)
    present = jnp.any(ids[..., None] == slots + 1, axis=2)
    newest = jax.lax.cummax(jnp.max(ids, axis=2), axis=1) - 1
    earliest = jnp.min(jnp.where(present, slots, num_segments), axis=(1, 2), keepdims=True)[..., 0]
    carried = jnp.where(newest >= 0, newest, jnp.where(earliest < num_segments, earliest, 0))
    empty = ~jnp.any(present, axis=2, keepdims=True)
    visits = (present | (empty & (slots == carried[..., None]))).reshape(batch, tiles * num_segments)
    order = jnp.cumsum(visits.astype(jnp.int32), axis=1)
    step = jnp.arange(tiles + num_segments - 1, dtype=jnp.int32)
    surplus = step >= order[:, -1:]
    rank = jnp.minimum(step, order[:, -1:] - 1)
    index = jnp.sum(order[:, None, :] <= rank[..., None], axis=2, dtype=jnp.int32)
    slot = index % num_segments
    return _table(index // num_segments, slot, jnp.where(surplus, -1, slot + 1))


def _table(tile: jax.Array, slot: jax.Array, segment: jax.Array) -> StepTable:
    edge = jnp.ones_like(tile[:, :1])
    begins = [jnp.concatenate([edge, (x[:, 1:] != x[:, :-1]).astype(jnp.int32)], axis=1) for x in (slot, tile)]
    ends = [jnp.concatenate([x[:, 1:], edge], axis=1) for x in begins]
    return StepTable(tile, slot, segment, begins[0], ends[0], begins[1], ends[1])
