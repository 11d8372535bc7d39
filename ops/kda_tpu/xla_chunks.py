"""Chunks of 64 tokens for the XLA path: layout, segments, decay factors, the triangular inverse.

Inside, arrays are ``[S, H, B, C, D]``: S chunks first (the sequential axis), then heads H and batch rows B, the C = 64
tokens of a chunk, and D key or value channels. Everything is float32.

A chunk's pairs of tokens (i, j), j < i, are covered by a binary tree: for m = 1, 2, 4, .. 32 every block of 2m tokens
pairs its upper half (i) with its lower half (j). With R the last token of the lower half, the decay between them is

    exp(g_{j+1} + .. + g_i) = prefix_i suffix_j,   prefix_i = exp(g_{R+1} + .. + g_i),  suffix_j = exp(g_{j+1} + .. + g_R)

and no factor exceeds 1, whatever the gate. Both factors of 2m tokens are products of those of m tokens, so one exp per
gate is all, nothing is ever divided, and a token's result never depends on a later one, not even by rounding.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

CHUNK = 64
LEVELS = (1, 2, 4, 8, 16, 32)


@dataclasses.dataclass(frozen=True)
class Segments:
    """Where segments lie. A *step* is a pair (chunk, slot): a chunk that several slots share has several steps.

    Attributes:
        slot: [S, 1, B, C] slot of each token; padding continues the slot before it.
        real: [S, 1, B, C] False for padding.
        step_chunk: [M, B] chunk of each step, in order; surplus steps have no tokens.
        step_slot: [M, B] slot of each step.
        step_token: [M, 1, B, C] which tokens of the chunk belong to the step.
        token_step: [S, 1, B, C] the step of each token.
    """

    slot: jax.Array
    real: jax.Array
    step_chunk: jax.Array
    step_slot: jax.Array
    step_token: jax.Array
    token_step: jax.Array


def find_segments(segment_ids: jax.Array, num_segments: int) -> Segments:
    """The steps of ids [B, T] (zeros and a nondecreasing sequence in 1..N a row), in shapes fixed by T and N."""
    B, T = segment_ids.shape
    ids = jnp.pad(segment_ids, [(0, 0), (0, -T % CHUNK)])
    length = ids.shape[1]
    slot = jnp.maximum(jax.lax.cummax(ids, axis=1), 1) - 1
    starts = (slot != jnp.roll(slot, 1, axis=1)).at[:, ::CHUNK].set(True)
    token_step = jnp.cumsum(starts, axis=1) - 1
    num_steps = length // CHUNK + min(num_segments, length) - 1
    steps = jnp.arange(num_steps)
    first = jax.vmap(lambda row: jnp.searchsorted(row, steps))(token_step)  # [B, M]; surplus steps: past the end
    first = jnp.minimum(first, length - 1)

    def chunked(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x.reshape(B, -1, CHUNK), 1, 0)[:, None]

    step_chunk = (first // CHUNK).T
    token_step = chunked(token_step)
    own = jnp.take_along_axis(token_step, step_chunk[:, None, :, None], axis=0) == steps[:, None, None, None]
    return Segments(
        slot=chunked(slot),
        real=chunked(ids > 0),
        step_chunk=step_chunk,
        step_slot=jnp.take_along_axis(slot, first, axis=1).T,
        step_token=own,
        token_step=token_step,
    )


def to_chunks(x: jax.Array) -> jax.Array:
    """[H, B, T, D] as float32 [S, H, B, C, D]; the last chunk is filled up with zeros."""
    H, B, T, D = x.shape
    x = jnp.pad(x.astype(jnp.float32), [(0, 0), (0, 0), (0, -T % CHUNK), (0, 0)])
    return jnp.moveaxis(x.reshape(H, B, -1, CHUNK, D), 2, 0)


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


def same_segment(segments: Segments | None, m: int) -> jax.Array | None:
    """[S, 1, B, C / 2m, m, m]: whether upper token i and lower token j of a block share a segment; None if all do."""
    if segments is None:
        return None
    lower, upper = halves(segments.slot[..., None], m)
    return upper == jnp.swapaxes(lower, -1, -2)


def decay_factors(decay: jax.Array, segments: Segments | None) -> list[tuple[jax.Array, jax.Array]]:
    """(prefix, suffix) of every block size 1, 2, 4, .. 64, each [S, H, B, C, K].

    prefix_i: product of the decays from the block's first token, or the first of i's segment in it, through i.
    suffix_j: product of the decays after j through the block's last token, or the last of j's segment in it.
    """
    prefix, suffix = decay, jnp.ones_like(decay)
    factors = [(prefix, suffix)]
    slots = None if segments is None else segments.slot[..., None]
    for m in LEVELS:
        (prefix_low, prefix_up), (suffix_low, suffix_up) = halves(prefix, m), halves(suffix, m)
        into_up = prefix_low[..., -1:, :]
        out_of_low = halves(decay, m)[1][..., :1, :] * suffix_up[..., :1, :]
        if slots is not None:
            slot_low, slot_up = halves(slots, m)
            into_up = jnp.where(slot_up == slot_low[..., -1:, :], into_up, 1)
            out_of_low = jnp.where(slot_low == slot_up[..., :1, :], out_of_low, 1)
        prefix = join(prefix_low, prefix_up * into_up)
        suffix = join(suffix_low * out_of_low, suffix_up)
        factors.append((prefix, suffix))
    return factors


def product(spec: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """Einsum in full float32 on every device."""
    return jnp.einsum(spec, x, y, precision=jax.lax.Precision.HIGHEST)


def scores_and_inverse(
    query: jax.Array,
    key: jax.Array,
    beta: jax.Array,
    factors: list[tuple[jax.Array, jax.Array]],
    segments: Segments | None,
) -> tuple[jax.Array, jax.Array]:
    """Aqk and A = (I + L)^-1, both [S, H, B, C, C] and lower triangular, block diagonal over segments.

    Aqk_ij = sum_c q_ic k_jc E_ijc (j <= i),  L_ij = beta_i sum_c k_ic k_jc E_ijc (j < i),  E_ij the decay from j to i.

    A grows with the blocks by exact elimination: [[A1, 0], [-A2 L21 A1, A2]].
    """
    scores = jnp.sum(query * key, axis=-1)[..., None, None]  # [S, H, B, C, 1, 1]
    inverse = jnp.ones_like(scores)
    for m, (prefix, suffix) in zip(LEVELS, factors, strict=False):
        prefix_up, beta_up = halves(prefix, m)[1], halves(beta, m)[1]
        rows = jnp.concatenate([halves(query, m)[1] * prefix_up, halves(key, m)[1] * (prefix_up * beta_up)], axis=-2)
        corner = product("...ik,...jk->...ij", rows, halves(key * suffix, m)[0])
        same = same_segment(segments, m)
        corner_q, corner_k = corner[..., :m, :], corner[..., m:, :]
        if same is not None:
            corner_q, corner_k = jnp.where(same, corner_q, 0), jnp.where(same, corner_k, 0)
        scores = _grow(scores, corner_q)
        low, up = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        if m > 1:
            corner_k = product("...ij,...jk->...ik", up, product("...ij,...jk->...ik", corner_k, low))
        inverse = _grow(inverse, -corner_k)
    return scores[..., 0, :, :], inverse[..., 0, :, :]


def _grow(blocks: jax.Array, corner: jax.Array) -> jax.Array:
    """Diagonal blocks [..., 2n, m, m] and what lies below pairs of them as blocks [..., n, 2m, 2m]."""
    low, up = blocks[..., 0::2, :, :], blocks[..., 1::2, :, :]
    upper_right = jnp.zeros_like(corner)
    return jnp.concatenate(
        [jnp.concatenate([low, upper_right], axis=-1), jnp.concatenate([corner, up], axis=-1)], axis=-2
    )


def chunk_decay(prefix: jax.Array, segments: Segments | None) -> jax.Array:
    """Decay [M, H, B, K, 1] of the state over each step, from the prefix of whole chunks."""
    if segments is None:
        return prefix[..., -1, :, None]
    last = CHUNK - 1 - jnp.argmax(segments.step_token[..., ::-1], axis=-1)  # [M, 1, B]
    decay = jnp.take_along_axis(to_steps(prefix, segments), last[..., None, None], axis=3)[..., 0, :]
    return jnp.where(jnp.any(segments.step_token, axis=-1)[..., None], decay, 1)[..., None]


def own_rows(x: jax.Array, segments: Segments | None) -> jax.Array:
    """Chunks [S, H, B, C, D] as steps [M, H, B, C, D] with zeros for tokens of other steps."""
    if segments is None:
        return x
    return jnp.where(segments.step_token[..., None], to_steps(x, segments), 0)


def run_states(
    states: jax.Array,
    rows: tuple[jax.Array, ...],
    segments: Segments | None,
    *,
    reverse: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The sequential part of either direction, for each step in order (or in reverse)::

        y = a + W h          h <- decay h + R^T y (+ c)

    Args:
        states: [B, N, H, K, V] h before the first step of each slot.
        rows: a [S, H, B, C, V], W [S, H, B, C, K] and R [S, H, B, C, K] by chunks, decay [M, H, B, K, 1] and maybe
            c [M, H, B, K, V] by steps.
        segments: where the slots change; None if all tokens belong to slot 0.
        reverse: from the last step to the first.

    Returns:
        y [S, H, B, C, V] by chunks, h on entry of each step [M, H, B, K, V], and h after the last step of each slot.
    """
    slots = states.transpose(1, 2, 0, 3, 4)  # [N, H, B, K, V]
    a, weights, readout, *per_step = rows
    own = (own_rows(a, segments), own_rows(weights, segments), to_steps(readout, segments), *per_step)

    def advance(h: jax.Array, row: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        a, weights, readout, decay, *c = row
        y = a + product("hbik,hbkv->hbiv", weights, h)
        return sum(c, decay * h + product("hbik,hbiv->hbkv", readout, y)), y

    Carry = tuple[jax.Array, tuple[jax.Array, jax.Array]]

    def in_one_slot(h: jax.Array, row: tuple[jax.Array, ...]) -> Carry:
        after, y = advance(h, row)
        return after, (y, h)

    def in_slots(slots: jax.Array, row: tuple[jax.Array, ...]) -> Carry:
        slot, *row = row
        h = read_slot(slots, slot)
        after, y = advance(h, tuple(row))
        return write_slot(slots, slot, after), (y, h)

    if segments is None:
        last, (y, entries) = jax.lax.scan(in_one_slot, slots[0], own, reverse=reverse)
        slots = slots.at[0].set(last)
    else:
        slots, (y, entries) = jax.lax.scan(in_slots, slots, (segments.step_slot, *own), reverse=reverse)
    return from_steps(y, segments), entries, slots.transpose(2, 0, 1, 3, 4)


def read_slot(slots: jax.Array, slot: jax.Array) -> jax.Array:
    """[H, B, K, V] states of slot [B] out of [N, H, B, K, V]."""
    if slot.shape[0] == 1:
        return jax.lax.dynamic_index_in_dim(slots, slot[0], 0, keepdims=False)
    return jax.vmap(lambda x, n: jax.lax.dynamic_index_in_dim(x, n, 0, keepdims=False), (2, 0), 1)(slots, slot)


def write_slot(slots: jax.Array, slot: jax.Array, states: jax.Array) -> jax.Array:
    """``slots`` with the states of slot [B] replaced."""
    if slot.shape[0] == 1:
        return jax.lax.dynamic_update_index_in_dim(slots, states, slot[0], 0)
    return jax.vmap(lambda x, n, h: jax.lax.dynamic_update_index_in_dim(x, h, n, 0), (2, 0, 1), 2)(slots, slot, states)
