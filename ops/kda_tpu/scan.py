"""Kimi Delta Attention token by token in ``jax.lax.scan``: plain, differentiable any number of times and in both modes.

The recurrence of :func:`ops.kda_tpu.api.kimi_delta_attention` as it stands, in float32 with full-precision products.
Blocks of tokens are rematerialised, so a gradient keeps one state a block and the states of one block.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ops.kda_tpu import contract, gates
from ops.kda_tpu.contract import Problem

#: Tokens between two states that a gradient keeps.
_BLOCK = 64


def _run(problem: Problem) -> tuple[jax.Array, jax.Array]:
    problem = gates.zero_padding(problem)
    query, key = gates.wide(problem.query), gates.wide(problem.key)
    if problem.use_qk_l2norm:
        query, key = gates.l2_normalize(query)[0], gates.l2_normalize(key)[0]
    B, T = query.shape[1:3]
    ids = jnp.ones((B, T), jnp.int32) if problem.segment_ids is None else problem.segment_ids
    tokens = (query * problem.scale, key, gates.wide(problem.value), gates.log_decay(problem), gates.wide(problem.beta))
    # Time first, in blocks; the tokens that fill the last block are padding: zeros, which decay nothing.
    block = min(_BLOCK, T)
    fill = -T % block
    slot = jnp.maximum(ids - 1, 0).T
    rows = tuple(_blocks(x, fill, block) for x in (*(jnp.moveaxis(x, 2, 0) for x in tokens), slot))
    state, output = jax.lax.scan(jax.checkpoint(_block), problem.initial_state, rows)
    output = output.reshape(T + fill, *output.shape[2:])[:T]
    output = gates.zero_rows(jnp.moveaxis(output, 0, 2), problem.segment_ids)
    return output.astype(problem.value.dtype), state


def _blocks(x: jax.Array, fill: int, block: int) -> jax.Array:
    """[T, ...] as [blocks, block, ...], filled up with zeros."""
    filled = jnp.pad(x, [(0, fill)] + [(0, 0)] * (x.ndim - 1))
    return filled.reshape(-1, block, *x.shape[1:])


def _block(states: jax.Array, rows: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
    return jax.lax.scan(_token, states, rows)


def _token(states: jax.Array, row: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
    """One token of every head and batch row; states [B, N, H, K, V], only the token's slot changes."""
    q, k, v, log_decay, beta, slot = row  # [H, B, K] or [H, B, V]; beta [H, B]; slot [B]
    batch = jnp.arange(slot.shape[0])
    precision = jax.lax.Precision.HIGHEST
    before, g = states[batch, slot], jnp.moveaxis(log_decay, 0, 1)[..., None]  # [B, H, K, V], [B, H, K, 1]
    # exp(g) near 1 rounds equal gates the same way at every token, an error that would grow with T; expm1(g) does not.
    state = jnp.where(g > -0.5, before + jnp.expm1(g) * before, jnp.exp(g) * before)
    error = v - jnp.einsum("hbk,bhkv->hbv", k, state, precision=precision)
    state = state + jnp.einsum("hbk,hbv->bhkv", beta[..., None] * k, error, precision=precision)
    output = jnp.einsum("hbk,bhkv->hbv", q, state, precision=precision)
    return states.at[batch, slot].set(state), output


kimi_delta_attention = contract.backend(_run)
