"""Kimi Delta Attention in chunks of 64 tokens, plain XLA operations, with an explicit gradient.

Chunk form of the recurrence (Kimi Linear technical report, arXiv:2510.26692, WY form), h the state on entry, gam_i the
decay from entry through token i, gamC that of the whole chunk, kg_j the key decayed to the chunk's end::

    L_ij  = beta_i sum_c k_ic k_jc E_ijc  (j < i)      A = (I + L)^-1      Aqk_ij = scale sum_c q_ic k_jc E_ijc  (j <= i)
    v_new = A beta (v - (k gam) h)
    o     = scale (q gam) h + Aqk v_new
    h'    = gamC h + kg^T v_new

Everything but v_new and h' is computed for all chunks at once. Every gate is safe (:mod:`ops.kda_tpu.xla_chunks`).
The gradient is in :mod:`ops.kda_tpu.xla_backward`; it has no derivative of its own: use the backend ``scan`` for that.
"""

from __future__ import annotations


import jax
import jax.numpy as jnp

from ops.kda_tpu import contract, gates, xla_backward
from ops.kda_tpu.contract import Problem
from ops.kda_tpu.xla_chunks import (
    chunk_decay,
    decay_factors,
    find_segments,
    from_chunks,
    from_steps,
    product,
    run_states,
    scores_and_inverse,
    to_chunks,
    to_steps,
)


@jax.jit
def _run(problem: Problem) -> tuple[jax.Array, jax.Array]:
    return _attention(gates.zero_padding(problem))


@jax.custom_vjp
def _attention(problem: Problem) -> tuple[jax.Array, jax.Array]:
    return _forward(problem)[0]


def _forward(problem: Problem) -> tuple[tuple[jax.Array, jax.Array], xla_backward.Residuals]:
    segments = None
    if problem.segment_ids is not None:
        segments = find_segments(problem.segment_ids, problem.num_segments)
    query, key = to_chunks(problem.query), to_chunks(problem.key)
    if problem.use_qk_l2norm:
        query, key = gates.l2_normalize(query)[0], gates.l2_normalize(key)[0]
    query = query * problem.scale
    value = to_chunks(problem.value)
    beta = jnp.maximum(to_chunks(problem.beta[..., None]), xla_backward.SMALLEST_BETA)
    factors = decay_factors(jnp.exp(to_chunks(gates.log_decay(problem))), segments)
    scores, inverse = scores_and_inverse(query, key, beta, factors, segments)
    prefix, suffix = factors[-1]
    u = product("...ij,...jv->...iv", inverse, beta * value)
    minus_w = product("...ij,...jk->...ik", inverse, (-beta * key) * prefix)
    v_new, states, final_state = run_states(
        problem.initial_state, (u, minus_w, key * suffix, chunk_decay(prefix, segments)), segments
    )
    output = product("...ik,...kv->...iv", to_steps(query * prefix, segments), states)
    output = from_steps(output, segments) + product("...ij,...jv->...iv", scores, v_new)
    output = from_chunks(output, problem.query.shape[2]).astype(problem.value.dtype)
    residuals = xla_backward.Residuals(problem, v_new, states, scores, inverse)
    return (output, final_state), residuals


_attention.defvjp(_forward, xla_backward.backward)

kimi_delta_attention = contract.backend(_run)
