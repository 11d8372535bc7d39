"""Chunks of 64 tokens for the XLA path: layout, segments, decay factors, the triangular inverse.

Inside, arrays are ``[S, H, B, C, D]``: S chunks first (the sequential axis), then heads H and batch rows B, the C = 64
tokens of a chunk, and D key or value channels. Everything is float32. What does not depend on the state is computed for
a group of chunks at a time, so that what lies between stays in a CPU's cache.

A chunk's pairs of tokens (i, j), j < i, are covered by a binary tree: for m = 1, 2, 4, .. 32 every block of 2m tokens
pairs its upper half (i) with its lower half (j). With R the last token of the lower half, the decay between them is

    exp(g_{j+1} + .. + g_i) = prefix_i suffix_j
    prefix_i = exp(g_{R+1} + .. + g_i)          suffix_j = exp(g_{j+1} + .. + g_R)

and no factor exceeds 1, whatever the gate. Both factors of 2m tokens are products of those of m tokens, so one exp per
gate is all, nothing is ever divided, and a token's result never depends on a later one, not even by rounding.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp

from ops.kda_tpu import gates
from ops.kda_tpu.contract import Problem

CHUNK = 64
LEVELS = (1, 2, 4, 8, 16, 32)
LOWER, UPPER = 0, 1
#: Smallest write strength; the gradient divides by it. It changes a state by less than one float32 rounding.
SMALLEST_BETA = 2.0**-50


#: Chunks, over all heads and batch rows, in flight at once: on a CPU what its cache holds, elsewhere what fills it.
_IN_FLIGHT = {"cpu": 16}
_IN_FLIGHT_ELSEWHERE = 8192

Result = TypeVar("Result")


@dataclasses.dataclass(frozen=True)
class Grouping:
    """How the chunks of a problem are cut into groups of equal size; the last group is filled up with padding.

    Attributes:
        num_groups: groups, one after the other.
        group_chunks: chunks in a group.
    """

    num_groups: int
    group_chunks: int

    @property
    def num_chunks(self) -> int:
        """S, the chunks of all groups."""
        return self.num_groups * self.group_chunks

    def over(self, function: Callable[[jax.Array], Result]) -> Result:
        """``function(group)`` for every group; its results, [group_chunks, ...] each, one behind the other."""
        if self.num_groups == 1:
            return function(jnp.int32(0))
        results = jax.lax.map(function, jnp.arange(self.num_groups))
        return jax.tree.map(lambda x: x.reshape(self.num_chunks, *x.shape[2:]), results)

    def tokens(self, x: jax.Array, group: jax.Array) -> jax.Array:
        """The group's tokens of [H, B, T, D] as float32 [group_chunks, H, B, C, D]; zeros behind the last token."""
        H, B, T, D = x.shape
        length = self.group_chunks * CHUNK
        x = jnp.pad(x, [(0, 0), (0, 0), (0, self.num_chunks * CHUNK - T), (0, 0)])
        x = jax.lax.dynamic_slice_in_dim(x, group * length, length, axis=2)
        return jnp.moveaxis(x.astype(jnp.float32).reshape(H, B, -1, CHUNK, D), 2, 0)

    def chunks(self, x: jax.Array, group: jax.Array) -> jax.Array:
        """The group's chunks of [S, ...]."""
        return jax.lax.dynamic_slice_in_dim(x, group * self.group_chunks, self.group_chunks, axis=0)


def grouping(num_heads: int, num_batch: int, num_tokens: int) -> Grouping:
    """The grouping for a problem of this size on the default device."""
    num_chunks = -(-num_tokens // CHUNK)
    in_flight = _IN_FLIGHT.get(jax.default_backend(), _IN_FLIGHT_ELSEWHERE)
    group_chunks = max(1, min(num_chunks, in_flight // (num_heads * num_batch)))
    num_groups = -(-num_chunks // group_chunks)
    return Grouping(num_groups, -(-num_chunks // num_groups))


@dataclasses.dataclass(frozen=True)
class Segments:
    """Where segments lie. A *step* is a pair (chunk, slot): a chunk that several slots share has several steps.

    Attributes:
        slot: [S, 1, B, C] slot of each token; padding continues the slot before it.
        step_chunk: [M, B] chunk of each step, in order; surplus steps have no tokens.
        step_slot: [M, B] slot of each step.
        step_token: [M, 1, B, C] which tokens of the chunk belong to the step.
        token_step: [S, 1, B, C] the step of each token.
    """

    slot: jax.Array
    step_chunk: jax.Array
    step_slot: jax.Array
    step_token: jax.Array
    token_step: jax.Array


def find_segments(problem: Problem, num_chunks: int) -> Segments | None:
    """The steps of the problem's segments, in shapes fixed by T and N; None without ids."""
    if problem.segment_ids is None:
        return None
    B, T = problem.segment_ids.shape
    length = num_chunks * CHUNK
    ids = jnp.pad(problem.segment_ids, [(0, 0), (0, length - T)])
    slot = jnp.maximum(jax.lax.cummax(ids, axis=1), 1) - 1
    starts = (slot != jnp.roll(slot, 1, axis=1)).at[:, ::CHUNK].set(True)
    token_step = jnp.cumsum(starts, axis=1) - 1
    steps = jnp.arange(num_chunks + min(problem.num_segments, length) - 1)
    first = jax.vmap(lambda row: jnp.searchsorted(row, steps))(token_step)  # [B, M]; surplus steps: past the end
    first = jnp.minimum(first, length - 1)

    def chunked(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x.reshape(B, -1, CHUNK), 1, 0)[:, None]

    step_chunk = (first // CHUNK).T
    step_slot = jnp.take_along_axis(slot, first, axis=1).T
    token_step = chunked(token_step)
    own = jnp.take_along_axis(token_step, step_chunk[:, None, :, None], axis=0) == steps[:, None, None, None]
    return Segments(chunked(slot), step_chunk, step_slot, own, token_step)


def from_chunks(x: jax.Array, num_tokens: int) -> jax.Array:
    """[S, H, B, C, D] as [H, B, T, D]."""
    S, H, B, C, D = x.shape
    return jnp.moveaxis(x, 0, 2).reshape(H, B, S * C, D)[:, :, :num_tokens]


def to_steps(x: jax.Array, segments: Segments | None) -> jax.Array:
    """Chunks [S, H, B, ...] as steps [M, H, B, ...], each with its whole chunk."""
    if segments is None:
        return x
    chunk = segments.step_chunk
    if x.shape[2] == 1:
        return jnp.take(x, chunk[:, 0], axis=0)
    return jax.vmap(lambda rows, index: jnp.take(rows, index, axis=0), in_axes=(2, 1), out_axes=2)(x, chunk)


def from_steps(x: jax.Array, segments: Segments | None) -> jax.Array:
    """Steps [M, H, B, C, D] as chunks [S, H, B, C, D]: each token's row from its own step."""
    if segments is None:
        return x
    rows = jnp.arange(CHUNK)

    def pick(steps: jax.Array, token_step: jax.Array) -> jax.Array:  # [M, H, C, D], [S, C]
        return jnp.moveaxis(steps[token_step, :, rows], 2, 1)

    return jax.vmap(pick, in_axes=(2, 1), out_axes=2)(x, segments.token_step[:, 0])


def halves(x: jax.Array, m: int) -> tuple[jax.Array, jax.Array]:
    """Lower and upper halves [..., C / 2m, m, D] of the blocks of 2m rows of [..., C, D]."""
    blocks = x.reshape(*x.shape[:-2], x.shape[-2] // (2 * m), 2, m, x.shape[-1])
    return blocks[..., 0, :, :], blocks[..., 1, :, :]


def join(lower: jax.Array, upper: jax.Array) -> jax.Array:
    """The inverse of :func:`halves`."""
    *lead, n, m, D = lower.shape
    return jnp.stack([lower, upper], axis=-3).reshape(*lead, n * 2 * m, D)


def add_to_half(x: jax.Array, m: int, which: int, amount: jax.Array) -> jax.Array:
    """[..., C, D] with ``amount`` [..., C / 2m, m, D] added to the lower or upper halves of its blocks of 2m rows."""
    blocks = x.reshape(*x.shape[:-2], x.shape[-2] // (2 * m), 2, m, x.shape[-1])
    half = blocks[..., which, :, :] + amount
    return jax.lax.dynamic_update_slice_in_dim(blocks, half[..., None, :, :], which, axis=-3).reshape(x.shape)


def only_within_segments(corner: jax.Array, slot: jax.Array | None, m: int) -> jax.Array:
    """``corner`` [S, H, B, C / 2m, r m, m] with zeros where upper token i and lower token j differ in segment."""
    if slot is None:
        return corner
    lower, upper = halves(slot[..., None], m)
    same = upper == jnp.swapaxes(lower, -1, -2)
    return jnp.where(jnp.concatenate([same] * (corner.shape[-2] // m), axis=-2), corner, 0)


def decay_factors(decay: jax.Array, slot: jax.Array | None) -> list[tuple[jax.Array, jax.Array]]:
    """(prefix, suffix) of every block size 1, 2, 4, .. 64, each [S, H, B, C, K].

    prefix_i: product of the decays from the block's first token, or the first of i's segment in it, through i.
    suffix_j: product of the decays after j through the block's last token, or the last of j's segment in it.
    """
    prefix, suffix = decay, jnp.ones_like(decay)
    factors = [(prefix, suffix)]
    for m in LEVELS:
        (prefix_low, prefix_up), (suffix_low, suffix_up) = halves(prefix, m), halves(suffix, m)
        into_up = prefix_low[..., -1:, :]
        out_of_low = halves(decay, m)[1][..., :1, :] * suffix_up[..., :1, :]
        if slot is not None:
            slot_low, slot_up = halves(slot[..., None], m)
            into_up = jnp.where(slot_up == slot_low[..., -1:, :], into_up, 1)
            out_of_low = jnp.where(slot_low == slot_up[..., :1, :], out_of_low, 1)
        prefix = join(prefix_low, prefix_up * into_up)
        suffix = join(suffix_low * out_of_low, suffix_up)
        # Without the barrier the compiler computes the chain of products anew inside each of its many uses.
        prefix, suffix = jax.lax.optimization_barrier((prefix, suffix))
        factors.append((prefix, suffix))
    return factors


@dataclasses.dataclass(frozen=True)
class Group:
    """What both directions read of a group of chunks, [S, H, B, C, ...].

    Attributes:
        query: with scale, normalised if asked for.
        key: normalised if asked for.
        query_reciprocal: 1 / length of the raw rows, None if they are taken as they are.
        key_reciprocal: the same for key.
        beta: [S, H, B, C, 1], floored.
        factors: :func:`decay_factors`.
        slot: [S, 1, B, C] or None if there are no segments.
    """

    query: jax.Array
    key: jax.Array
    query_reciprocal: jax.Array | None
    key_reciprocal: jax.Array | None
    beta: jax.Array
    factors: list[tuple[jax.Array, jax.Array]]
    slot: jax.Array | None

    @property
    def query_in(self) -> jax.Array:
        """Query times the decay from the chunk's (or segment's) start."""
        return self.query * self.factors[-1][0]

    @property
    def key_in(self) -> jax.Array:
        """Key times the decay from the chunk's (or segment's) start."""
        return self.key * self.factors[-1][0]

    @property
    def key_out(self) -> jax.Array:
        """Key times the decay to the chunk's (or segment's) end."""
        return self.key * self.factors[-1][1]


def load_group(problem: Problem, cut: Grouping, group: jax.Array, segments: Segments | None) -> Group:
    """Reads, normalises and activates one group."""
    query, key = cut.tokens(problem.query, group), cut.tokens(problem.key, group)
    query_reciprocal = key_reciprocal = None
    if problem.use_qk_l2norm:
        (query, query_reciprocal), (key, key_reciprocal) = gates.l2_normalize(query), gates.l2_normalize(key)
    slot = None if segments is None else cut.chunks(segments.slot, group)
    return Group(
        query=query * problem.scale,
        key=key,
        query_reciprocal=query_reciprocal,
        key_reciprocal=key_reciprocal,
        beta=jnp.maximum(cut.tokens(problem.beta[..., None], group), SMALLEST_BETA),
        factors=decay_factors(jnp.exp(cut.tokens(gates.log_decay(problem), group)), slot),
        slot=slot,
    )


def product(spec: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """Einsum in full float32 on every device."""
    return jnp.einsum(spec, x, y, precision=jax.lax.Precision.HIGHEST)


def scores_and_inverse(group: Group) -> tuple[jax.Array, jax.Array]:
    """Aqk and A = (I + L)^-1, both [S, H, B, C, C] and lower triangular, block diagonal over segments.

    Aqk_ij = sum_c q_ic k_jc E_ijc (j <= i),  L_ij = beta_i sum_c k_ic k_jc E_ijc (j < i),  E_ij the decay from j to i.

    A grows with the blocks by exact elimination: [[A1, 0], [-A2 L21 A1, A2]].
    """
    query, key = group.query, group.key
    scores = jnp.sum(query * key, axis=-1)[..., None, None]  # [S, H, B, C, 1, 1]
    inverse = jnp.ones_like(scores)
    for m, (prefix, suffix) in zip(LEVELS, group.factors, strict=False):
        prefix_up, beta_up = halves(prefix, m)[1], halves(group.beta, m)[1]
        rows = jnp.concatenate([halves(query, m)[1] * prefix_up, halves(key, m)[1] * (prefix_up * beta_up)], axis=-2)
        corner = product("...ik,...jk->...ij", rows, halves(key * suffix, m)[0])
        corner = only_within_segments(corner, group.slot, m)
        scores = _grow(scores, corner[..., :m, :])
        low, up = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        corner = corner[..., m:, :]
        if m > 1:
            corner = product("...ij,...jk->...ik", up, product("...ij,...jk->...ik", corner, low))
        inverse = _grow(inverse, -corner)
    return scores[..., 0, :, :], inverse[..., 0, :, :]


def _grow(blocks: jax.Array, corner: jax.Array) -> jax.Array:
    """Diagonal blocks [..., 2n, m, m] and what lies below pairs of them as blocks [..., n, 2m, 2m]."""
    low, up = blocks[..., 0::2, :, :], blocks[..., 1::2, :, :]
    upper_right = jnp.zeros_like(corner)
    return jnp.concatenate(
        [jnp.concatenate([low, upper_right], axis=-1), jnp.concatenate([corner, up], axis=-1)], axis=-2
    )


def step_decay(prefix: jax.Array, segments: Segments | None) -> jax.Array:
    """Decay [M, H, B, K, 1] of the state over each step, from whole chunks' ``prefix`` [S, H, B, C, K]."""
    if segments is None:
        return prefix[..., -1, :, None]
    last = CHUNK - 1 - jnp.argmax(segments.step_token[..., ::-1], axis=-1)  # [M, 1, B]
    decay = jnp.take_along_axis(to_steps(prefix, segments), last[..., None, None], axis=3)[..., 0, :]
    return jnp.where(jnp.any(segments.step_token, axis=-1)[..., None], decay, 1)[..., None]


def own_rows(x: jax.Array, segments: Segments | None) -> jax.Array:
    """Chunks [S, H, B, r C, D] as steps [M, H, B, r C, D] with zeros for tokens of other steps."""
    if segments is None:
        return x
    own = jnp.concatenate([segments.step_token] * (x.shape[3] // CHUNK), axis=-1)
    return jnp.where(own[..., None], to_steps(x, segments), 0)


Step = Callable[[jax.Array, tuple[jax.Array, ...]], tuple[jax.Array, tuple[jax.Array, ...]]]


def run_steps(
    step: Step, states: jax.Array, rows: tuple[jax.Array, ...], segments: Segments | None, *, reverse: bool = False
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """The sequential part of either direction: ``step(h, row) -> (h, results)`` along the steps of every slot.

    Args:
        step: works on h [H, B, K, V] and one step of each of ``rows``.
        states: [B, N, H, K, V] h before the first step of each slot.
        rows: arrays [M, H, B, ...].
        segments: where the slots change; None if all tokens belong to slot 0.
        reverse: from the last step to the first.

    Returns:
        h after the last step of each slot [B, N, H, K, V], and the results [M, ...].
    """
    slots = states.transpose(1, 2, 0, 3, 4)  # [N, H, B, K, V]
    if segments is None:
        last, results = jax.lax.scan(step, slots[0], rows, reverse=reverse)
        slots = slots.at[0].set(last)
    else:

        def in_slot(slots: jax.Array, row: tuple[jax.Array, ...]) -> tuple[jax.Array, tuple[jax.Array, ...]]:
            after, results = step(_read_slot(slots, row[0]), row[1:])
            return _write_slot(slots, row[0], after), results

        slots, results = jax.lax.scan(in_slot, slots, (segments.step_slot, *rows), reverse=reverse)
    return slots.transpose(2, 0, 1, 3, 4), results


def _read_slot(slots: jax.Array, slot: jax.Array) -> jax.Array:
    """[H, B, K, V] states of slot [B] out of [N, H, B, K, V]."""
    if slot.shape[0] == 1:
        return jax.lax.dynamic_index_in_dim(slots, slot[0], 0, keepdims=False)
    return jax.vmap(lambda x, n: jax.lax.dynamic_index_in_dim(x, n, 0, keepdims=False), (2, 0), 1)(slots, slot)


def _write_slot(slots: jax.Array, slot: jax.Array, states: jax.Array) -> jax.Array:
    """``slots`` with the states of slot [B] replaced."""
    if slot.shape[0] == 1:
        return jax.lax.dynamic_update_index_in_dim(slots, states, slot[0], 0)
    return jax.vmap(lambda x, n, h: jax.lax.dynamic_update_index_in_dim(x, h, n, 0), (2, 0, 1), 2)(slots, slot, states)
