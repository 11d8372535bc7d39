"""Gate activation and row normalisation, forward and backward, shared by the backends that run in jax.

Everything is computed in float32 (or float64 if given). Axes: H heads, B batch rows, T tokens, K key channels.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from ops.kda_tpu.contract import Problem

#: No log decay below this: exp of it is 0 in float32, so neither the value nor its gradient can differ.
LOWEST_LOG_DECAY = -104.0
#: exp of this is the largest factor exp(a_log) used in the bounded form; it keeps 0 * inf out.
_LARGEST_A_LOG = 80.0
_L2_EPSILON = 1e-6


def wide(x: jax.Array) -> jax.Array:
    """``x`` in the type of the computation: float32, or float64 if it has that."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def log_decay(problem: Problem) -> jax.Array:
    """Log decay of every token, [H, B, T, K] float32: the gate, activated if it is raw, and 0 in padding."""
    if not problem.use_gate_in_kernel:
        return wide(problem.gate)
    assert problem.a_log is not None
    decay = activate(problem.gate, problem.a_log, problem.delta_time_bias, problem.lower_bound)
    if problem.segment_ids is None:
        return decay
    return jnp.where((problem.segment_ids > 0)[None, :, :, None], decay, 0)


def activate(
    gate: jax.Array, a_log: jax.Array, delta_time_bias: jax.Array | None, lower_bound: float | None
) -> jax.Array:
    """Log decay of a raw gate.

    softplus form  g = -exp(a_log) softplus(gate + bias)
    bounded form   g = lower_bound sigmoid(exp(a_log) (gate + bias))

    Finite for every input, and so are its derivatives of any order.

    Args:
        gate: [H, B, T, K] raw gate.
        a_log: [H] log of the gate's slope.
        delta_time_bias: [H, K] or None.
        lower_bound: negative bound in nats, or None for the softplus form.

    Returns:
        [H, B, T, K] natural log of the decay, in [LOWEST_LOG_DECAY, 0].
    """
    z = _shifted(gate, delta_time_bias)
    a = a_log[:, None, None, None]
    if lower_bound is not None:
        return jnp.maximum(lower_bound * jax.nn.sigmoid(jnp.exp(jnp.minimum(a, _LARGEST_A_LOG)) * z), LOWEST_LOG_DECAY)
    return -jnp.exp(jnp.minimum(a + _log_softplus(z), jnp.log(-LOWEST_LOG_DECAY)))


def activate_backward(
    gate: jax.Array,
    a_log: jax.Array,
    delta_time_bias: jax.Array | None,
    lower_bound: float | None,
    d_log_decay: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Gradients of :func:`activate`: d_gate [H, B, T, K], d_a_log [H], d_delta_time_bias [H, K] or None.

    softplus form  d_gate = -exp(a_log) sigmoid(z) d_g            d_a_log = sum d_g g       z = gate + bias
    bounded form   d_gate = lower_bound s (1 - s) exp(a_log) d_g  d_a_log = sum d_gate z    s = sigmoid(exp(a_log) z)
    """
    z = _shifted(gate, delta_time_bias)
    a = a_log[:, None, None, None]
    log_decay = activate(gate, a_log, delta_time_bias, lower_bound)
    d_log_decay = jnp.where(log_decay > LOWEST_LOG_DECAY, d_log_decay, 0)
    if lower_bound is not None:
        slope = jnp.exp(jnp.minimum(a, _LARGEST_A_LOG))
        d_gate = lower_bound * jax.nn.sigmoid(slope * z) * jax.nn.sigmoid(-slope * z) * slope * d_log_decay
        d_a_log = jnp.sum(d_gate * z, axis=(1, 2, 3))
    else:
        # Where the decay is above its floor this exponent is below log(-floor): sigmoid <= softplus.
        slope = jnp.exp(jnp.minimum(a + jax.nn.log_sigmoid(z), jnp.log(-LOWEST_LOG_DECAY)))
        d_gate = -slope * d_log_decay
        d_a_log = jnp.sum(d_log_decay * log_decay, axis=(1, 2, 3))
    d_bias = None if delta_time_bias is None else jnp.sum(d_gate, axis=(1, 2))
    return d_gate, d_a_log, d_bias


def l2_normalize(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Rows of unit length, y = x rsqrt(sum x^2 + 1e-6), and that factor [..., 1]."""
    reciprocal = jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + _L2_EPSILON)
    return x * reciprocal, reciprocal


def l2_normalize_backward(y: jax.Array, reciprocal: jax.Array, d_y: jax.Array) -> jax.Array:
    """Gradient of :func:`l2_normalize`: d_x = r (d_y - y <y, d_y>)."""
    return reciprocal * (d_y - y * jnp.sum(y * d_y, axis=-1, keepdims=True))


def _shifted(gate: jax.Array, delta_time_bias: jax.Array | None) -> jax.Array:
    gate = wide(gate)
    return gate if delta_time_bias is None else gate + delta_time_bias[:, None, None, :]


def _log_softplus(z: jax.Array) -> jax.Array:
    """log(log(1 + exp(z))) without the underflow of exp(z) for very negative z."""
    switch = -15.0  # there the next term of the series, exp(2 z) / 24, is below float32's resolution
    low = jnp.minimum(z, switch)
    return jnp.where(z < switch, low - 0.5 * jnp.exp(low), jnp.log(jax.nn.softplus(jnp.maximum(z, switch))))


def zero_padding(problem: Problem) -> Problem:
    """The problem with zeros in every padding token, whatever stood there; its gradients there are zero as well."""
    if problem.segment_ids is None:
        return problem

    def masked(x: jax.Array) -> jax.Array:
        return zero_rows(x, problem.segment_ids)

    return dataclasses.replace(
        problem,
        query=masked(problem.query),
        key=masked(problem.key),
        value=masked(problem.value),
        gate=masked(problem.gate),
        beta=masked(problem.beta),
    )


def zero_rows(x: jax.Array, segment_ids: jax.Array | None) -> jax.Array:
    """[H, B, T] or [H, B, T, D] with zeros in padding; its cotangent is masked alike, whatever stands there."""
    if segment_ids is None:
        return x
    real = (segment_ids > 0)[None]
    return jnp.where(real if x.ndim == 3 else real[..., None], x, 0)
