"""Gradient of the chunked XLA path, chunk by chunk, explicit.

Names as in :mod:`ops.kda_tpu.xla`; dO is the output's gradient, dh' that of the state leaving a chunk. With
delta = v_new / beta (what a token writes before its strength)::

    dvb   = A^T (Aqk^T dO + kg dh')        dv    = beta dvb             dbeta_i = dvb_i . delta_i
    dh    = gamC dh' + scale (q gam)^T dO - (k gam)^T dv                           gradient of the state entering
    dAqk  = scale tril(dO v_new^T)         dM    = -strict_tril(dv v_new^T)
    dq_i  = scale gam (dO h^T)_i  + sum_j dAqk_ij k_j E_ij
    dk_i  = decay to the end (v_new dh'^T)_i - gam (dv h^T)_i + sum_j dM_ij k_j E_ij
          + sum_l (dAqk_li q_l + dM_li k_l) E_li                                             l > i > j

The decay of token t is crossed by every pair (i, j) with j < t <= i. Each kind of pair sums over just those: pairs that
enter the chunk by suffix sums, pairs that leave it by prefix sums, pairs inside it level by level of the tree, by suffix
sums in upper halves and prefix sums in lower halves. No sum is the difference of two others, so gradients of strongly
decaying gates keep their relative precision, and the pair i = j, which no decay touches, never enters.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from ops.kda_tpu import gates
from ops.kda_tpu.contract import Problem
from ops.kda_tpu.xla_chunks import (
    CHUNK,
    LEVELS,
    Segments,
    chunk_decay,
    decay_factors,
    find_segments,
    from_chunks,
    from_steps,
    halves,
    join,
    own_rows,
    product,
    run_states,
    same_segment,
    to_chunks,
    to_steps,
)

#: Smallest write strength; the gradient divides by it. It changes a state by less than one float32 rounding.
SMALLEST_BETA = 2.0**-50


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Residuals:
    """What the forward pass keeps.

    Attributes:
        problem: the call, padding zeroed.
        v_new: [S, H, B, C, V] what each token writes.
        states: [M, H, B, K, V] state on entry of each step.
        scores: [S, H, B, C, C] Aqk with scale.
        inverse: [S, H, B, C, C] A.
    """

    problem: Problem
    v_new: jax.Array
    states: jax.Array
    scores: jax.Array
    inverse: jax.Array


def backward(residuals: Residuals, cotangents: tuple[jax.Array, jax.Array]) -> tuple[Problem]:
    """Gradient of every array of the problem."""
    problem, v_new, states = residuals.problem, residuals.v_new, residuals.states
    T = problem.query.shape[2]
    segments = None
    if problem.segment_ids is not None:
        segments = find_segments(problem.segment_ids, problem.num_segments)
    query, key = to_chunks(problem.query), to_chunks(problem.key)
    if problem.use_qk_l2norm:
        (query, query_reciprocal), (key, key_reciprocal) = gates.l2_normalize(query), gates.l2_normalize(key)
    beta = jnp.maximum(to_chunks(problem.beta[..., None]), SMALLEST_BETA)
    decay = jnp.exp(to_chunks(gates.log_decay(problem)))
    factors = decay_factors(decay, segments)
    prefix, suffix = factors[-1]
    query = query * problem.scale
    d_output = to_chunks(cotangents[0])

    query_in, key_in, key_out = query * prefix, key * prefix, key * suffix
    x = product("...ij,...iv->...jv", residuals.scores, d_output)
    d_from_output = product("...ij,...iv->...jv", residuals.inverse, x)
    d_from_state = product("...ij,...ik->...jk", residuals.inverse, key_out)
    step_decay = chunk_decay(prefix, segments)
    d_state_output = product("...ik,...iv->...kv", to_steps(query_in, segments), own_rows(d_output, segments))
    dvb, d_states, d_initial_state = run_states(
        cotangents[1],
        (d_from_output, d_from_state, -beta * key_in, step_decay, d_state_output),
        segments,
        reverse=True,
    )
    d_value = beta * dvb
    d_beta = jnp.sum(dvb * (v_new / beta), axis=-1)

    # Pairs of a token and the state entering or leaving its chunk.
    d_query_in = prefix * from_steps(product("...iv,...kv->...ik", to_steps(d_output, segments), states), segments)
    d_key_in = -prefix * from_steps(product("...iv,...kv->...ik", to_steps(d_value, segments), states), segments)
    d_key_out = suffix * from_steps(product("...iv,...kv->...ik", to_steps(v_new, segments), d_states), segments)
    through = step_decay[..., 0] * jnp.sum(states * d_states, axis=-1)  # [M, H, B, K]
    d_decay = _crossing_sums(query * d_query_in + key * d_key_in, key * d_key_out, segments)
    d_decay += from_steps(
        jnp.broadcast_to(through[..., None, :], (*through.shape[:-1], CHUNK, through.shape[-1])), segments
    )

    d_query_pairs, d_key_pairs, d_decay_pairs = _pairs(query, key, factors, d_output, d_value, v_new, segments)
    diagonal = jnp.sum(d_output * v_new, axis=-1, keepdims=True)
    d_query = problem.scale * (d_query_in + d_query_pairs + diagonal * key)
    d_key = d_key_in + d_key_out + d_key_pairs + diagonal * query
    d_decay += d_decay_pairs
    if problem.use_qk_l2norm:
        d_query = gates.l2_normalize_backward(query / problem.scale, query_reciprocal, d_query)
        d_key = gates.l2_normalize_backward(key, key_reciprocal, d_key)
    return (_gradients(problem, d_query, d_key, d_value, d_decay, d_beta, d_initial_state, T),)


def _gradients(problem: Problem, d_query, d_key, d_value, d_decay, d_beta, d_initial_state, T) -> Problem:
    d_gate, d_a_log, d_bias = from_chunks(d_decay, T), None, None
    if problem.use_gate_in_kernel:
        if problem.segment_ids is not None:
            d_gate = jnp.where((problem.segment_ids > 0)[None, :, :, None], d_gate, 0)
        d_gate, d_a_log, d_bias = gates.activate_backward(
            problem.gate, problem.a_log, problem.delta_time_bias, problem.lower_bound, d_gate
        )
    ids = problem.segment_ids
    return dataclasses.replace(
        problem,
        query=from_chunks(d_query, T).astype(problem.query.dtype),
        key=from_chunks(d_key, T).astype(problem.key.dtype),
        value=from_chunks(d_value, T).astype(problem.value.dtype),
        gate=d_gate.astype(problem.gate.dtype),
        beta=from_chunks(d_beta[..., None], T)[..., 0].astype(problem.beta.dtype),
        a_log=d_a_log,
        delta_time_bias=d_bias,
        initial_state=d_initial_state,
        segment_ids=None if ids is None else np.zeros(ids.shape, jax.dtypes.float0),
    )


def _crossing_sums(entering: jax.Array, leaving: jax.Array, segments: Segments | None) -> jax.Array:
    """Per token t, in its segment and chunk: sum of ``entering`` from t on, and of ``leaving`` before t."""
    later = jnp.triu(jnp.ones((CHUNK, CHUNK), jnp.float32))  # [t, i], i >= t
    earlier = 1 - later  # [t, j], j < t
    if segments is not None:
        slot = segments.slot[..., None]
        same = slot == jnp.swapaxes(slot, -1, -2)
        later, earlier = jnp.where(same, later, 0), jnp.where(same, earlier, 0)
    weights = jnp.concatenate([later, earlier], axis=-1)
    rows = jnp.concatenate([entering, leaving], axis=-2)
    weights = jnp.broadcast_to(weights, (*rows.shape[:3], *weights.shape[-2:]))
    return product("...ti,...ik->...tk", weights, rows)


def _pairs(
    query: jax.Array,
    key: jax.Array,
    factors: list[tuple[jax.Array, jax.Array]],
    d_output: jax.Array,
    d_value: jax.Array,
    v_new: jax.Array,
    segments: Segments | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of query (times scale), key and log decay from pairs i > j inside a chunk, level by level."""
    d_query, d_key, d_decay = jnp.zeros_like(query), jnp.zeros_like(query), jnp.zeros_like(query)
    for m, (prefix, suffix) in zip(LEVELS, factors, strict=False):
        key_low, key_up = halves(key, m)
        query_up, prefix_up, suffix_low = halves(query, m)[1], halves(prefix, m)[1], halves(suffix, m)[0]
        upper = jnp.concatenate([halves(d_output, m)[1], -halves(d_value, m)[1]], axis=-2)
        corner = product("...iv,...jv->...ij", upper, halves(v_new, m)[0])
        same = same_segment(segments, m)
        if same is not None:
            corner = jnp.where(jnp.concatenate([same, same], axis=-2), corner, 0)
        rows = product("...ij,...jk->...ik", corner, key_low * suffix_low)
        d_query_up, d_key_up = rows[..., :m, :] * prefix_up, rows[..., m:, :] * prefix_up
        upper = jnp.concatenate([query_up * prefix_up, key_up * prefix_up], axis=-2)
        d_key_low = suffix_low * product("...ij,...ik->...jk", corner, upper)
        later = jnp.triu(jnp.ones((m, m), jnp.float32))
        decay_up = product("ti,...ik->...tk", later, query_up * d_query_up + key_up * d_key_up)
        decay_low = product("tj,...jk->...tk", 1 - later, key_low * d_key_low)
        d_query += join(jnp.zeros_like(d_query_up), d_query_up)
        d_key += join(d_key_low, d_key_up)
        d_decay += join(decay_low, decay_up)
    return d_query, d_key, d_decay
