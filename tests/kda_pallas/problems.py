"""Problems of the kernels' tests, their float64 gradients, and how far an answer is from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ops.kda_tpu import contract
from ops.kda_tpu.contract import Problem
from reference import kda as reference

#: For jax.jit: interpreted kernels are large programs that run once, so compiling them is what takes the time.
QUICK = {"xla_backend_optimization_level": 0}

_GRADIENTS = ("query", "key", "value", "gate", "beta", "a_log", "delta_time_bias", "initial_state")
FLOAT32 = dict.fromkeys(_GRADIENTS, 2e-5)
BFLOAT16 = dict.fromkeys(_GRADIENTS, 8e-3) | dict.fromkeys(("gate", "beta", "a_log", "delta_time_bias"), 1.5e-2)
TOLERANCES = {"float32": FLOAT32, "bfloat16": BFLOAT16}  # relative RMS by dtype of the inputs and gradient


def segments(*rows: Sequence[int]) -> jax.Array:
    """Segment ids [B, T] from lengths by batch row; a negative length is padding."""
    out = []
    for lengths in rows:
        used = np.cumsum([n > 0 for n in lengths])
        out.append(np.concatenate([np.full(abs(n), i if n > 0 else 0) for n, i in zip(lengths, used, strict=True)]))
    return jnp.asarray(np.stack(out), jnp.int32)


def problem(
    *,
    heads: int = 1,
    batch: int = 1,
    tokens: int = 80,
    key_dim: int = 64,
    value_dim: int = 64,
    dtype: str = "float32",
    gate: str = "log",
    mean: float = 1.0,
    ids: jax.Array | None = None,
    slots: int | None = None,
    normalize: bool = True,
    bias: bool = True,
    initial: bool = True,
    scale: float | None = None,
    lower_bound: float = -5.0,
    seed: int = 0,
) -> Problem:
    """A random problem; ``gate`` is "softplus", "bounded" or "log" (given log decays, log-normal around -mean nats).

    ``ids`` set batch and tokens; the rest is as in :class:`Problem`.
    """
    contract._register_pytree()
    rng = np.random.default_rng(seed)
    H, K, V = heads, key_dim, value_dim
    B, T = (batch, tokens) if ids is None else ids.shape
    N = slots or (1 if ids is None else int(ids.max()))
    q, k, v = (rng.normal(size=(H, B, T, n)) for n in (K, K, V))
    k = k + 0.3
    if not normalize:
        q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    raw = gate != "log"
    g = rng.normal(size=(H, B, T, K)) if raw else -mean * np.exp(rng.normal(size=(H, B, T, K)) * 0.7 - 0.245)
    narrow = [jnp.asarray(x, jnp.float32).astype(dtype) for x in (q, k, v, g, rng.uniform(0.05, 1, size=(H, B, T)))]
    a_log, d_bias = rng.normal(size=H) * 0.5, rng.normal(size=(H, K)) * 0.5
    state = jnp.asarray(rng.normal(size=(B, N, H, K, V)) * 0.5, jnp.float32)
    return Problem(
        **dict(zip(("query", "key", "value", "gate", "beta"), narrow, strict=True)),
        a_log=jnp.asarray(a_log, jnp.float32) if raw else None,
        delta_time_bias=jnp.asarray(d_bias, jnp.float32) if raw and bias else None,
        initial_state=state if initial else jnp.zeros_like(state),
        segment_ids=ids,
        scale=K**-0.5 if scale is None else scale,
        use_qk_l2norm=normalize,
        use_gate_in_kernel=raw,
        lower_bound=lower_bound if gate == "bounded" else None,
        output_final_state=True,
        num_segments=N,
        has_initial_state=initial,
    )


def cotangents(p: Problem, seed: int = 7) -> tuple[jax.Array, jax.Array]:
    """Random cotangents of output and final state."""
    rng = np.random.default_rng(seed)
    d_output = jnp.asarray(rng.normal(size=p.value.shape), jnp.float32).astype(p.value.dtype)
    return d_output, jnp.asarray(rng.normal(size=p.initial_state.shape) * 0.5, jnp.float32)


def float64(x: Any) -> np.ndarray | None:
    """``x`` as numpy float64, None as it is."""
    return None if x is None else np.asarray(jnp.asarray(x).astype(jnp.float32), np.float64)


def reference_gradients(p: Problem, d_output: jax.Array, d_final_state: jax.Array | None) -> reference.Gradients:
    """Gradients by the token recurrence in float64."""
    inputs = reference.Inputs(
        **{name: float64(getattr(p, name)) for name in _GRADIENTS},
        segment_ids=None if p.segment_ids is None else np.asarray(p.segment_ids),
        scale=p.scale,
        use_qk_l2norm=p.use_qk_l2norm,
        use_gate_in_kernel=p.use_gate_in_kernel,
        lower_bound=p.lower_bound,
        max_num_segments=p.num_segments,
    )
    return reference.backward(inputs, float64(d_output), float64(d_final_state))


def relative_rms(got: Any, wanted: Any, least: float = 0.0) -> float:
    """Norm of the difference over that of ``wanted`` (over ``least`` if larger); NaN if ``got`` has any."""
    got, wanted = float64(got), np.asarray(wanted, np.float64)
    difference = np.linalg.norm(got - wanted.reshape(got.shape))
    return float(difference / max(np.linalg.norm(wanted), least, 1e-150))


def check_gradients(p: Problem, got: Any, d_output: jax.Array, d_final_state: jax.Array | None) -> None:
    """Every gradient within its tolerance of the float64 ones, of its input's dtype, and exactly zero on padding.

    Those of a_log and delta_time_bias are sums over rows, which may cancel to anything; in bfloat16 their error is
    measured against the norm of d_gate, which is the size of such a sum of independent terms.
    """
    wanted = reference_gradients(p, d_output, d_final_state)
    limits = TOLERANCES[str(p.query.dtype)]
    errors = {}
    for name, limit in limits.items():
        gradient, source = getattr(got, name), getattr(p, name)
        if gradient is None:
            assert source is None or (name == "initial_state" and not p.has_initial_state), name
            continue
        assert gradient.dtype == source.dtype, name
        assert gradient.shape == source.shape, name
        summed = name in ("a_log", "delta_time_bias") and p.query.dtype == jnp.bfloat16
        least = float(np.linalg.norm(wanted.gate)) if summed else 0.0
        errors[name] = (relative_rms(gradient, getattr(wanted, name), least), limit)
    wrong = {name: f"{e:.2e} > {limit:.0e}" for name, (e, limit) in errors.items() if not e <= limit}
    assert not wrong, wrong
    if p.segment_ids is not None:
        padding = np.asarray(p.segment_ids) == 0
        for name in ("query", "key", "value", "gate", "beta"):
            assert not np.asarray(getattr(got, name).astype(jnp.float32))[:, padding].any(), name
