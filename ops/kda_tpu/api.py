"""The public operator: a choice of backend and one call."""

from __future__ import annotations

from typing import Any

from ops import registry

Array = Any  # numpy.ndarray or jax.Array


def kimi_delta_attention(
    query: Array,
    key: Array,
    value: Array,
    gate: Array,
    beta: Array,
    *,
    a_log: Array | None = None,
    delta_time_bias: Array | None = None,
    scale: float | None = None,
    initial_state: Array | None = None,
    output_final_state: bool = False,
    use_qk_l2norm: bool = False,
    use_gate_in_kernel: bool = False,
    segment_ids: Array | None = None,
    lower_bound: float | None = None,
    context_parallel_metadata: Any = None,
    max_num_segments: int | None = None,
    backend: str | None = None,
) -> tuple[Array, Array | None]:
    """Kimi Delta Attention: a gated delta rule with one decay per head, token and key channel.

    Per head and sequence, with state S [K, V] and log decay g (Kimi Linear technical report, arXiv:2510.26692)::

        S <- diag(exp(g_t)) S
        S <- S + beta_t k_t (v_t - k_t^T S)^T
        o_t = scale q_t^T S

    Args:
        query: [H, B, T, K] float32 or bfloat16.
        key: [H, B, T, K].
        value: [H, B, T, V].
        gate: [H, B, T, K] natural log of the decay, <= 0; the raw gate x with ``use_gate_in_kernel``.
        beta: [H, B, T] write strength in [0, 1].
        a_log: [H], needed with ``use_gate_in_kernel``: g = -exp(a_log) softplus(x + bias).
        delta_time_bias: [H*K], added to the raw gate per head and key channel.
        scale: factor of the output; None is K ** -0.5.
        initial_state: [B, N, H, K, V], one state per segment slot; None is zeros.
        output_final_state: whether to return the final states.
        use_qk_l2norm: normalise rows of query and key inside: x rsqrt(sum x^2 + 1e-6).
        use_gate_in_kernel: activate the raw gate inside.
        segment_ids: [B, T] integers, 1-based, 0 is padding; :mod:`ops.kda_tpu.contract` states their meaning.
        lower_bound: < 0, selects the bounded gate g = lower_bound sigmoid(exp(a_log) (x + bias)).
        context_parallel_metadata: not part of this version; must be None.
        max_num_segments: N, the number of state slots; needed with traced ``segment_ids`` without ``initial_state``.
        backend: name of a registry row; None takes ``OPS_KDA_BACKEND``, or else the first usable row.

    Returns:
        output [H, B, T, V] in the value's type, and the final states [B, N, H, K, V] float32 or None.

    Raises:
        TypeError: an array of another type, or a traced one given to the numpy backend.
        ValueError: a wrong shape, option or (concrete) value; nothing has been computed then.
        registry.BackendUnavailableError: the backend cannot run here.

    >>> import jax.numpy as jnp
    >>> q = k = v = jnp.full((1, 1, 3, 4), 0.5)
    >>> output, _ = kimi_delta_attention(q, k, v, jnp.zeros_like(q), jnp.ones((1, 1, 3)), backend="scan")
    >>> output.shape, round(float(output[0, 0, 2, 0]), 4)
    ((1, 1, 3, 4), 0.25)
    """
    run = registry.select("kda", backend)
    return run(
        query,
        key,
        value,
        gate,
        beta,
        a_log=a_log,
        delta_time_bias=delta_time_bias,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm=use_qk_l2norm,
        use_gate_in_kernel=use_gate_in_kernel,
        segment_ids=segment_ids,
        lower_bound=lower_bound,
        context_parallel_metadata=context_parallel_metadata,
        max_num_segments=max_num_segments,
    )
