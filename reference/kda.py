"""Kimi Delta Attention token by token in numpy float64, with an explicit gradient for every input.

Per head and sequence, with state S [K, V], log decay g, write strength beta (Kimi Linear technical report,
arXiv:2510.26692)::

    S <- diag(exp(g_t)) S
    e  = v_t - S^T k_t
    S <- S + beta_t k_t e^T
    o_t = scale S^T q_t

Axes: H heads, B batch rows, T tokens, K key channels, V value channels, N state slots. A token with segment id n in
1..N belongs to slot n - 1; one with id 0, an id outside 0..N or an id smaller than an earlier valid one is padding: it
changes no state, its output and all its gradients are zero and its values are never read.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

_L2_EPSILON = 1e-6
#: Tokens between two states that the backward pass keeps; the states between are computed again.
_CHECKPOINT = 64


@dataclass(frozen=True)
class Inputs:
    """Arguments of the operator; every array is used in float64.

    Attributes:
        query: [H, B, T, K].
        key: [H, B, T, K].
        value: [H, B, T, V].
        gate: [H, B, T, K] natural log of the decay, or the raw gate with ``use_gate_in_kernel``.
        beta: [H, B, T].
        a_log: [H], with ``use_gate_in_kernel``.
        delta_time_bias: [H*K] or [H, K] or None.
        initial_state: [B, N, H, K, V] or None for zeros.
        segment_ids: [B, T] integers or None.
        scale: factor of the output; None is K ** -0.5.
        use_qk_l2norm: y = x rsqrt(sum x^2 + 1e-6) on rows of query and key.
        use_gate_in_kernel: g = -exp(a_log) softplus(x + bias), or with ``lower_bound``
            g = lower_bound sigmoid(exp(a_log) (x + bias)).
        lower_bound: negative, selects the bounded gate.
        max_num_segments: N; None takes it from initial_state, else the largest id, else 1.
    """

    query: Array
    key: Array
    value: Array
    gate: Array
    beta: Array
    a_log: Array | None = None
    delta_time_bias: Array | None = None
    initial_state: Array | None = None
    segment_ids: Array | None = None
    scale: float | None = None
    use_qk_l2norm: bool = False
    use_gate_in_kernel: bool = False
    lower_bound: float | None = None
    max_num_segments: int | None = None


@dataclass(frozen=True)
class Gradients:
    """Gradient of ``sum(output * d_output) + sum(final_state * d_final_state)`` by each input, in the input's shape."""

    query: Array
    key: Array
    value: Array
    gate: Array
    beta: Array
    a_log: Array | None
    delta_time_bias: Array | None
    initial_state: Array


@dataclass
class _Prepared:
    """What the recurrence reads: float64, activated, normalised, padding set to zero."""

    query: Array
    key: Array
    value: Array
    log_decay: Array
    beta: Array
    initial_state: Array
    slots: Array  # [B, T], slot of each token, -1 for padding
    scale: float
    saved: dict[str, Array] = field(default_factory=dict)


def forward(inputs: Inputs) -> tuple[Array, Array]:
    """Output [H, B, T, V] and final state [B, N, H, K, V], float64."""
    p = _prepare(inputs)
    output = np.zeros_like(p.value)
    state = p.initial_state.copy()
    for b, tokens in enumerate(p.slots):
        for t in np.flatnonzero(tokens >= 0).tolist():
            n = tokens[t]
            state[b, n] = _step(p, b, t, state[b, n])
            output[:, b, t] = p.scale * np.einsum("hk,hkv->hv", p.query[:, b, t], state[b, n])
    return output, state


def backward(inputs: Inputs, d_output: Array, d_final_state: Array | None = None) -> Gradients:
    """Gradients for the cotangents ``d_output`` [H, B, T, V] and ``d_final_state`` [B, N, H, K, V] (None is zeros)."""
    p = _prepare(inputs)
    d_output = np.asarray(d_output, dtype=np.float64)
    d_state = np.zeros_like(p.initial_state) if d_final_state is None else np.array(d_final_state, dtype=np.float64)
    d = {name: np.zeros_like(getattr(p, name)) for name in ("query", "key", "value", "log_decay", "beta")}
    for b, row in enumerate(p.slots):
        for n in range(p.initial_state.shape[1]):
            tokens = np.flatnonzero(row == n).tolist()
            blocks = [tokens[at : at + _CHECKPOINT] for at in range(0, len(tokens), _CHECKPOINT)]
            entries = [p.initial_state[b, n]]
            for block in blocks[:-1]:
                state = entries[-1]
                for t in block:
                    state = _step(p, b, t, state)
                entries.append(state)
            for block, entry in zip(reversed(blocks), reversed(entries[: len(blocks)]), strict=True):
                states = [entry]
                for t in block:
                    states.append(_step(p, b, t, states[-1]))
                for t, before, after in zip(block[::-1], states[-2::-1], states[:0:-1], strict=True):
                    d_state[b, n] = _step_backward(p, d, d_output, b, t, before, after, d_state[b, n])
    return _finish(inputs, p, d, d_state)


def _step(p: _Prepared, b: int, t: int, state: Array) -> Array:
    key = p.key[:, b, t]
    decayed = np.exp(p.log_decay[:, b, t])[..., None] * state
    error = p.value[:, b, t] - np.einsum("hk,hkv->hv", key, decayed)
    return decayed + (p.beta[:, b, t, None] * key)[..., None] * error[:, None, :]


def _step_backward(
    p: _Prepared, d: dict[str, Array], d_output: Array, b: int, t: int, before: Array, after: Array, d_after: Array
) -> Array:
    """Adds token ``t``'s gradients to ``d`` and returns the gradient of the state before it."""
    key, beta = p.key[:, b, t], p.beta[:, b, t]
    decayed = np.exp(p.log_decay[:, b, t])[..., None] * before
    error = p.value[:, b, t] - np.einsum("hk,hkv->hv", key, decayed)
    d_out = p.scale * d_output[:, b, t]
    d["query"][:, b, t] = np.einsum("hkv,hv->hk", after, d_out)
    d_after = d_after + p.query[:, b, t][..., None] * d_out[:, None, :]
    d_write = np.einsum("hkv,hk->hv", d_after, key)
    d_error = beta[:, None] * d_write
    d["beta"][:, b, t] = np.einsum("hv,hv->h", d_write, error)
    d["value"][:, b, t] = d_error
    d["key"][:, b, t] = beta[:, None] * np.einsum("hkv,hv->hk", d_after, error) - np.einsum(
        "hkv,hv->hk", decayed, d_error
    )
    d_decayed = d_after - key[..., None] * d_error[:, None, :]
    d["log_decay"][:, b, t] = np.einsum("hkv,hkv->hk", d_decayed, decayed)
    return np.exp(p.log_decay[:, b, t])[..., None] * d_decayed


def _prepare(inputs: Inputs) -> _Prepared:
    H, B, T, K = inputs.query.shape
    V = inputs.value.shape[3]
    N, slots = _slots(inputs, B, T)
    padding = (slots < 0)[None, :, :, None]

    def real(array: Array) -> Array:
        return np.where(padding, 0.0, np.asarray(array, dtype=np.float64))

    query, key, gate = real(inputs.query), real(inputs.key), real(inputs.gate)
    saved: dict[str, Array] = {}
    if inputs.use_qk_l2norm:
        for name, rows in (("query", query), ("key", key)):
            saved[f"{name}_reciprocal"] = (np.sum(rows**2, axis=-1, keepdims=True) + _L2_EPSILON) ** -0.5
        query, key = query * saved["query_reciprocal"], key * saved["key_reciprocal"]
    if inputs.use_gate_in_kernel:
        gate = np.where(padding, 0.0, _activate(inputs, gate)[0])
    state = inputs.initial_state
    return _Prepared(
        query=query,
        key=key,
        value=real(inputs.value),
        log_decay=gate,
        beta=np.where(padding[..., 0], 0.0, np.asarray(inputs.beta, dtype=np.float64)),
        initial_state=np.zeros((B, N, H, K, V)) if state is None else np.array(state, dtype=np.float64),
        slots=slots,
        scale=float(K) ** -0.5 if inputs.scale is None else inputs.scale,
        saved=saved,
    )


def _slots(inputs: Inputs, B: int, T: int) -> tuple[int, Array]:
    """N and the slot of every token [B, T], -1 for padding."""
    N = inputs.max_num_segments
    if N is None and inputs.initial_state is not None:
        N = inputs.initial_state.shape[1]
    if inputs.segment_ids is None:
        return N or 1, np.zeros((B, T), dtype=np.int64)
    ids = np.asarray(inputs.segment_ids, dtype=np.int64)
    if N is None:
        N = max(1, int(ids.max(initial=0)))
    slots = np.full((B, T), -1, dtype=np.int64)
    for b in range(B):
        largest = 1
        for t in range(T):
            if largest <= ids[b, t] <= N:
                slots[b, t], largest = ids[b, t] - 1, ids[b, t]
    return N, slots


def _activate(inputs: Inputs, gate: Array) -> tuple[Array, Array, Array]:
    """Log decay g, its derivative by the raw gate and its derivative by a_log, each [H, B, T, K]."""
    H, _, _, K = gate.shape
    assert inputs.a_log is not None
    a = np.asarray(inputs.a_log, dtype=np.float64).reshape(H, 1, 1, 1)
    bias = 0.0 if inputs.delta_time_bias is None else np.asarray(inputs.delta_time_bias, np.float64).reshape(H, 1, 1, K)
    z = gate + bias
    with np.errstate(over="ignore"):
        if inputs.lower_bound is None:
            g = -np.exp(a) * np.logaddexp(0.0, z)
            return g, -np.exp(a) * _sigmoid(z), g
        sigmoid = _sigmoid(np.exp(a) * z)
        by_argument = inputs.lower_bound * sigmoid * _sigmoid(-np.exp(a) * z)
        return inputs.lower_bound * sigmoid, by_argument * np.exp(a), by_argument * np.exp(a) * z


def _sigmoid(z: Array) -> Array:
    return np.exp(-np.logaddexp(0.0, -z))


def _finish(inputs: Inputs, p: _Prepared, d: dict[str, Array], d_state: Array) -> Gradients:
    """From gradients of what the recurrence reads to gradients of the inputs."""
    for name in ("query", "key") if inputs.use_qk_l2norm else ():
        rows = getattr(p, name)
        inner = np.sum(rows * d[name], axis=-1, keepdims=True)
        d[name] = p.saved[f"{name}_reciprocal"] * (d[name] - rows * inner)
    d_gate, d_a_log, d_bias = d["log_decay"], None, None
    if inputs.use_gate_in_kernel:
        raw = np.where((p.slots < 0)[None, :, :, None], 0.0, np.asarray(inputs.gate, dtype=np.float64))
        _, by_gate, by_a_log = _activate(inputs, raw)
        d_a_log = np.sum(d_gate * by_a_log, axis=(1, 2, 3))
        d_gate = d_gate * by_gate
        if inputs.delta_time_bias is not None:
            d_bias = np.sum(d_gate, axis=(1, 2)).reshape(np.shape(inputs.delta_time_bias))
    return Gradients(
        query=d["query"],
        key=d["key"],
        value=d["value"],
        gate=d_gate,
        beta=d["beta"],
        a_log=d_a_log,
        delta_time_bias=d_bias,
        initial_state=d_state,
    )
