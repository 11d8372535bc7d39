"""The mathematics of a chunk of 64 tokens for the XLA path: decay factors, scores, the triangular inverse.

Layout and names are those of :mod:`ops.kda_tpu.xla_steps`. A chunk's pairs of tokens (i, j), j < i, are covered by a
binary tree: for m = 1, 2, 4, .. 32 every block of 2m tokens pairs its upper half (i) with its lower half (j). With R
the last token of the lower half, the decay between them is

    exp(g_{j+1} + .. + g_i) = prefix_i suffix_j
    prefix_i = exp(g_{R+1} + .. + g_i)          suffix_j = exp(g_{j+1} + .. + g_R)

and no factor exceeds 1, whatever the gate. Both factors of 2m tokens are products of those of m tokens, so one exp per
gate is all, nothing is ever divided, and a token's result never depends on a later one, not even by rounding.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from ops.kda_tpu import gates
from ops.kda_tpu.contract import Problem
from ops.kda_tpu.xla_steps import Steps

LEVELS = (1, 2, 4, 8, 16, 32)
LOWER, UPPER = 0, 1
#: Smallest write strength; the gradient divides by it. What it writes instead of nothing is below 1e-15 of a value.
SMALLEST_BETA = 2.0**-50


@dataclasses.dataclass(frozen=True)
class Tokens:
    """What both directions read of a problem, [H, B, T', D], filled up to whole chunks.

    Attributes:
        query: as given.
        key: as given.
        value: as given.
        log_decay: activated, float32.
        beta: with a last axis of one.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    log_decay: jax.Array
    beta: jax.Array


def load(problem: Problem, steps: Steps) -> Tokens:
    """The problem's tokens, once for all groups."""
    arrays = (problem.query, problem.key, problem.value, gates.log_decay(problem), problem.beta[..., None])
    return Tokens(*map(steps.padded, arrays))


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


def decay_factors(decay: jax.Array) -> list[tuple[jax.Array, jax.Array]]:
    """(prefix, suffix) of every block size 1, 2, 4, .. 64, each [G, H, B, C, K].

    prefix_i: product of the decays from the block's first token through i.
    suffix_j: product of the decays after j through the block's last token.
    """
    prefix, suffix = decay, jnp.ones_like(decay)
    factors = [(prefix, suffix)]
    for m in LEVELS:
        (prefix_low, prefix_up), (suffix_low, suffix_up) = halves(prefix, m), halves(suffix, m)
        prefix = join(prefix_low, prefix_up * prefix_low[..., -1:, :])
        suffix = join(suffix_low * (halves(decay, m)[1][..., :1, :] * suffix_up[..., :1, :]), suffix_up)
        factors.append((prefix, suffix))
    return factors


@dataclasses.dataclass(frozen=True)
class Group:
    """What both directions read of a group of steps, [G, H, B, C, ...].

    Attributes:
        query: with scale, normalised if asked for.
        key: normalised if asked for.
        query_reciprocal: 1 / length of the raw rows, None if they are taken as they are.
        key_reciprocal: the same for key.
        beta: [G, H, B, C, 1], floored.
        factors: :func:`decay_factors`.
        decay: of the state over the whole chunk, [G, H, B, K, 1].
    """

    query: jax.Array
    key: jax.Array
    query_reciprocal: jax.Array | None
    key_reciprocal: jax.Array | None
    beta: jax.Array
    factors: list[tuple[jax.Array, jax.Array]]
    decay: jax.Array

    @property
    def query_in(self) -> jax.Array:
        """Query times the decay from the chunk's start."""
        return self.query * self.factors[-1][0]

    @property
    def key_in(self) -> jax.Array:
        """Key times the decay from the chunk's start."""
        return self.key * self.factors[-1][0]

    @property
    def key_out(self) -> jax.Array:
        """Key times the decay to the chunk's end."""
        return self.key * self.factors[-1][1]


def load_group(problem: Problem, tokens: Tokens, steps: Steps, group: jax.Array) -> Group:
    """Reads and normalises one group."""
    query, key = steps.tokens(tokens.query, group), steps.tokens(tokens.key, group)
    query_reciprocal = key_reciprocal = None
    if problem.use_qk_l2norm:
        (query, query_reciprocal), (key, key_reciprocal) = gates.l2_normalize(query), gates.l2_normalize(key)
    log_decay = steps.tokens(tokens.log_decay, group)
    return Group(
        query=query * problem.scale,
        key=key,
        query_reciprocal=query_reciprocal,
        key_reciprocal=key_reciprocal,
        beta=jnp.maximum(steps.tokens(tokens.beta, group), SMALLEST_BETA),
        factors=decay_factors(jnp.exp(log_decay)),
        # One exp a chunk: products of equal factors round the same way each time, and over T that adds up.
        decay=jnp.exp(jnp.sum(log_decay, axis=-2))[..., None],
    )


def product(spec: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """Einsum in full float32 on every device."""
    return jnp.einsum(spec, x, y, precision=jax.lax.Precision.HIGHEST)


def scores_and_inverse(group: Group) -> tuple[jax.Array, jax.Array]:
    """Aqk and A = (I + L)^-1, both [G, H, B, C, C] and lower triangular.

    Aqk_ij = sum_c q_ic k_jc E_ijc (j <= i),  L_ij = beta_i sum_c k_ic k_jc E_ijc (j < i),  E_ij the decay from j to i.

    A grows with the blocks by exact elimination: [[A1, 0], [-A2 L21 A1, A2]].
    """
    query, key = group.query, group.key
    scores = jnp.sum(query * key, axis=-1)[..., None, None]  # [G, H, B, C, 1, 1]
    inverse = jnp.ones_like(scores)
    for m, (prefix, suffix) in zip(LEVELS, group.factors, strict=False):
        prefix_up, beta_up = halves(prefix, m)[1], halves(group.beta, m)[1]
        rows = jnp.concatenate([halves(query, m)[1] * prefix_up, halves(key, m)[1] * (prefix_up * beta_up)], axis=-2)
        corner = product("...ik,...jk->...ij", rows, halves(key * suffix, m)[0])
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
