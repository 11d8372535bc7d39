"""Gradient of the chunked XLA path, chunk by chunk, explicit.

Names as in :mod:`ops.kda_tpu.xla`; dO is the output's gradient, dh' that of the state leaving a chunk. With
delta = v_new / beta (what a token writes before its strength)::

    dvb   = A^T (Aqk^T dO + kg dh')        dv    = beta dvb             dbeta_i = dvb_i . delta_i
    dh    = gamC dh' + scale (q gam)^T dO - (k gam)^T dv                           gradient of the state entering
    dAqk  = scale tril(dO v_new^T)         dM    = -strict_tril(dv v_new^T)
    dq_i  = scale gam (dO h^T)_i  + sum_j dAqk_ij k_j E_ij
    dk_i  = decay to the end (v_new dh'^T)_i - gam (dv h^T)_i + sum_j dM_ij k_j E_ij
          + sum_l (dAqk_li q_l + dM_li k_l) E_li                                             l > i > j

The decay of token t is crossed by every pair (i, j) with j < t <= i. Each kind of pair sums over just those: pairs
that enter the chunk by suffix sums, pairs that leave it by prefix sums, pairs inside it level by level of the tree, by
suffix sums in upper halves and prefix sums in lower halves. No sum is the difference of two others, so gradients of
strongly decaying gates keep their relative precision, and the pair i = j, which no decay touches, never enters.
"""

from __future__ import annotations

import dataclasses
from typing import Never

import jax
import jax.numpy as jnp
import numpy as np

from ops.kda_tpu import gates
from ops.kda_tpu.contract import Problem
from ops.kda_tpu.xla_chunks import (
    LEVELS,
    LOWER,
    UPPER,
    Group,
    add_to_half,
    halves,
    load,
    load_group,
    product,
)
from ops.kda_tpu.xla_steps import CHUNK, Arrays, find_steps


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Residuals:
    """What the forward pass keeps.

    Attributes:
        problem: the call, with zeros in padding.
        v_new: [M, H, B, C, V] what each token writes.
        states: [M, H, B, K, V] state on entry of each step.
        scores: [M, H, B, C, C] Aqk with scale.
        inverse: [M, H, B, C, C] A.
    """

    problem: Problem
    v_new: jax.Array
    states: jax.Array
    scores: jax.Array
    inverse: jax.Array


@jax.custom_jvp
def only_once(x: jax.Array) -> jax.Array:
    """``x``; taking a derivative of it is an error."""
    return x


@only_once.defjvp
def _no_second_derivative(*_: object) -> Never:
    raise TypeError(
        "kimi_delta_attention: the backend 'xla' has a first reverse-mode derivative only; for second derivatives and "
        "forward mode choose backend='scan'"
    )


def backward(residuals: Residuals, cotangents: tuple[jax.Array, jax.Array]) -> tuple[Problem]:
    """Gradient of every array of the problem."""
    problem = residuals.problem
    d_output, d_final_state = jax.tree.map(only_once, cotangents)
    steps = find_steps(problem)
    tokens = load(problem, steps)
    d_output = steps.padded(d_output)
    V = problem.value.shape[3]

    def step(d_after: jax.Array, row: Arrays) -> tuple[jax.Array, Arrays]:
        d_out, d_from_output, d_from_state, readout, decay = row
        dvb = d_from_output + product("hbik,hbkv->hbiv", d_from_state, d_after)
        d_before = product("hbik,hbiv->hbkv", readout, jnp.concatenate([d_out, dvb], axis=-2))
        return decay * d_after + d_before, (dvb, d_after)

    def body(d_states: jax.Array, index: jax.Array, kept: Arrays) -> tuple[jax.Array, Arrays]:
        v_new, h, scores, inverse = kept
        group, d_out = load_group(problem, tokens, steps, index), steps.tokens(d_output, index)
        given = jnp.concatenate([product("...ij,...iv->...jv", scores, d_out), group.key_out], axis=-1)
        given = product("...ij,...iv->...jv", inverse, given)
        readout = jnp.concatenate([group.query_in, -group.beta * group.key_in], axis=-2)
        rows = (d_out, given[..., :V], given[..., V:], readout, group.decay)
        d_states, (dvb, d_after) = steps.recur(step, d_states, index, rows, reverse=True)
        through = group.decay[..., 0] * jnp.sum(h * d_after, axis=-1)
        by_state = product("...iv,...kv->...ik", jnp.concatenate([d_out, dvb], axis=-2), h)
        d_key_state = product("...iv,...kv->...ik", v_new, d_after)
        from_state = (by_state[..., :CHUNK, :], by_state[..., CHUNK:, :], d_key_state, through[..., None, :])
        return d_states, _group_gradients(problem, group, d_out, dvb, v_new, *from_state)

    kept = (residuals.v_new, residuals.states, residuals.scores, residuals.inverse)
    d_initial_state, gradients = steps.loop(body, d_final_state, kept, reverse=True)
    d_query, d_key, d_value, d_decay, d_beta = map(steps.to_tokens, gradients)
    return (_gradients(problem, d_query, d_key, d_value, d_decay, d_beta, d_initial_state),)


def _group_gradients(
    problem: Problem,
    group: Group,
    d_output: jax.Array,
    dvb: jax.Array,
    v_new: jax.Array,
    d_query_state: jax.Array,
    dvb_state: jax.Array,
    d_key_state: jax.Array,
    through: jax.Array,
) -> tuple[jax.Array, ...]:
    """Gradients of query, key, value, log decay and beta [G, H, B, C, ...] for one group.

    Args:
        problem: the call.
        group: its inputs.
        d_output: dO.
        dvb: d_value / beta.
        v_new: what each token writes.
        d_query_state: dO h^T.
        dvb_state: dvb h^T.
        d_key_state: v_new dh'^T.
        through: what each decay gains by the pair (state entering, state leaving), [G, H, B, 1, K].
    """
    query, key, beta = group.query, group.key, group.beta
    prefix, suffix = group.factors[-1]
    d_value = beta * dvb
    d_beta = jnp.sum(dvb * v_new, axis=-1, keepdims=True) / beta
    d_query_in = prefix * d_query_state
    d_key_in = -prefix * (beta * dvb_state)
    d_key_out = suffix * d_key_state
    d_decay = through + _chunk_sums(query * d_query_in + key * d_key_in, key * d_key_out)
    d_query, d_key, d_decay_pairs = _pairs(group, d_output, d_value, v_new)
    diagonal = jnp.sum(d_output * v_new, axis=-1, keepdims=True)
    d_query = problem.scale * (d_query + d_query_in + diagonal * key)
    d_key = d_key + d_key_in + d_key_out + diagonal * query
    if group.query_reciprocal is not None and group.key_reciprocal is not None:
        d_query = gates.l2_normalize_backward(query / problem.scale, group.query_reciprocal, d_query)
        d_key = gates.l2_normalize_backward(key, group.key_reciprocal, d_key)
    return d_query, d_key, d_value, d_decay + d_decay_pairs, d_beta


def _gradients(
    problem: Problem,
    d_query: jax.Array,
    d_key: jax.Array,
    d_value: jax.Array,
    d_gate: jax.Array,
    d_beta: jax.Array,
    d_initial_state: jax.Array,
) -> Problem:
    """The problem's cotangent, in the types of its inputs, from float32 gradients; ``d_gate`` is of the log decay."""
    d_a_log = d_bias = None
    ids = problem.segment_ids
    if problem.use_gate_in_kernel:
        assert problem.a_log is not None
        if ids is not None:
            d_gate = jnp.where((ids > 0)[None, :, :, None], d_gate, 0)
        d_gate, d_a_log, d_bias = gates.activate_backward(
            problem.gate, problem.a_log, problem.delta_time_bias, problem.lower_bound, d_gate
        )
    return dataclasses.replace(
        problem,
        query=d_query.astype(problem.query.dtype),
        key=d_key.astype(problem.key.dtype),
        value=d_value.astype(problem.value.dtype),
        gate=d_gate.astype(problem.gate.dtype),
        beta=d_beta[..., 0].astype(problem.beta.dtype),
        a_log=d_a_log,
        delta_time_bias=d_bias,
        initial_state=d_initial_state,
        segment_ids=None if ids is None else np.zeros(ids.shape, jax.dtypes.float0),
    )


def _chunk_sums(entering: jax.Array, leaving: jax.Array) -> jax.Array:
    """Per token t of a chunk: sum of ``entering`` from t on, and of ``leaving`` before t."""
    later = jnp.triu(jnp.ones((CHUNK, CHUNK), jnp.float32))  # [t, i], i >= t
    weights = jnp.concatenate([later, 1 - later], axis=-1)
    return _weighted(weights, jnp.concatenate([entering, leaving], axis=-2))


def _crossing_sums(lower: jax.Array, upper: jax.Array) -> jax.Array:
    """Halves [..., n, m, K] of blocks to sums [..., n * 2m, K] over the pairs that cross each token's decay.

    Token t of an upper half is crossed by its tokens from t on, one of a lower half by the tokens before t.
    """
    *lead, n, m, K = upper.shape
    later = jnp.triu(jnp.ones((m, m), jnp.float32))
    weights = jnp.block([[1 - later, jnp.zeros_like(later)], [jnp.zeros_like(later), later]])
    return _weighted(weights, jnp.concatenate([lower, upper], axis=-2)).reshape(*lead, n * 2 * m, K)


def _weighted(weights: jax.Array, rows: jax.Array) -> jax.Array:
    weights = jnp.broadcast_to(weights, (*rows.shape[:-2], *weights.shape[-2:]))
    return product("...ti,...ik->...tk", weights, rows)


def _pairs(
    group: Group, d_output: jax.Array, d_value: jax.Array, v_new: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of query (with scale), key and log decay by pairs i > j inside a chunk, level by level."""
    query, key = group.query, group.key
    d_query, d_key, d_decay = jnp.zeros_like(query), jnp.zeros_like(query), jnp.zeros_like(query)
    for m, (prefix, suffix) in zip(LEVELS, group.factors, strict=False):
        key_low, key_up = halves(key, m)
        query_up, prefix_up, suffix_low = halves(query, m)[1], halves(prefix, m)[1], halves(suffix, m)[0]
        upper = jnp.concatenate([halves(d_output, m)[1], -halves(d_value, m)[1]], axis=-2)
        corner = product("...iv,...jv->...ij", upper, halves(v_new, m)[0])
        rows = product("...ij,...jk->...ik", corner, key_low * suffix_low)
        d_query_up, d_key_up = rows[..., :m, :] * prefix_up, rows[..., m:, :] * prefix_up
        upper = jnp.concatenate([query_up * prefix_up, key_up * prefix_up], axis=-2)
        d_key_low = suffix_low * product("...ij,...ik->...jk", corner, upper)
        d_query = add_to_half(d_query, m, UPPER, d_query_up)
        d_key = add_to_half(d_key, m, UPPER, d_key_up)
        d_key = add_to_half(d_key, m, LOWER, d_key_low)
        d_decay += _crossing_sums(key_low * d_key_low, query_up * d_query_up + key_up * d_key_up)
    return d_query, d_key, d_decay
