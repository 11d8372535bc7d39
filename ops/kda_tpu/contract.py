"""What every KDA backend is given, and the one place where the public arguments are checked.

Axes: H heads, B batch rows, T tokens, K key channels, V value channels, N state slots. Heads come first, states are
``[B, N, H, K, V]`` in float32.

Segments
    ``segment_ids`` [B, T] packs several sequences into one batch row. Ids are 1-based; a token of id ``n`` belongs to
    state slot ``n - 1``, whose sequence is its tokens in order. Id 0 is padding: the state passes it unchanged, its
    output is zero and so are all its gradients, exactly; padding may stand anywhere, also inside a segment. A slot
    without tokens ends in its initial state, and its final state's gradient passes to the initial state. Without ids a
    batch row is one sequence in slot 0.

    N is ``max_num_segments``, else the slots of ``initial_state``, else the largest concrete id, else 1. Traced ids
    need one of the first two. Concrete ids that are negative, above N or decreasing along a row (padding aside) are an
    error. Traced ids cannot be looked at, so a token with such an id counts as padding; the rule is causal, a token's
    validity depends on earlier tokens only. With traced ids beta and gate go unchecked too: padding may hold anything.

Types
    query, key, value, gate, beta, a_log and delta_time_bias are float32 or bfloat16, each on its own; float16 is
    refused (its range is too small for the gates). The output has the value's type, states are float32, a gradient has
    its input's type.

This module loads no framework: the numpy backend uses it without jax installed.
"""

from __future__ import annotations

import contextlib
import functools
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

Array = Any  # numpy.ndarray or jax.Array

_FLOATS = ("float32", "bfloat16")


@dataclass(frozen=True)
class Problem:
    """A validated call; a pytree whose leaves are the arrays, the rest is static.

    Attributes:
        query: [H, B, T, K] float32 or bfloat16, not normalised yet if ``use_qk_l2norm``.
        key: [H, B, T, K].
        value: [H, B, T, V].
        gate: [H, B, T, K] natural log of the decay (<= 0), or the raw gate if ``use_gate_in_kernel``.
        beta: [H, B, T] write strength in [0, 1].
        a_log: [H] float32 or None; present if ``use_gate_in_kernel``.
        delta_time_bias: [H, K] float32 or None.
        initial_state: [B, N, H, K, V] float32, zeros if the caller gave none.
        segment_ids: [B, T] int32 or None; in each row zeros and a nondecreasing sequence in 1..N.
        scale: factor of the output.
        use_qk_l2norm: whether rows of query and key are normalised in the operator.
        use_gate_in_kernel: whether ``gate`` is raw.
        lower_bound: negative bound of the log decay (bounded form of the gate) or None (softplus form).
        output_final_state: whether the caller wants the final state.
        num_segments: N.
        has_initial_state: whether the caller gave ``initial_state``.
    """

    query: Array
    key: Array
    value: Array
    gate: Array
    beta: Array
    a_log: Array | None
    delta_time_bias: Array | None
    initial_state: Array
    segment_ids: Array | None
    scale: float
    use_qk_l2norm: bool
    use_gate_in_kernel: bool
    lower_bound: float | None
    output_final_state: bool
    num_segments: int
    has_initial_state: bool


#: Fields of :class:`Problem` that are arrays; the others are static.
ARRAY_FIELDS = (
    "query", "key", "value", "gate", "beta", "a_log", "delta_time_bias", "initial_state", "segment_ids",
)  # fmt: skip
STATIC_FIELDS = tuple(field.name for field in fields(Problem) if field.name not in ARRAY_FIELDS)

Run = Callable[[Problem], tuple[Array, Array | None]]


def backend(run: Run, *, on_host: bool = False) -> Callable[..., tuple[Array, Array | None]]:
    """Turns ``run(problem) -> (output, final_state or None)`` into the public callable: checks, builds, runs.

    Args:
        run: computes output [H, B, T, V] and final state [B, N, H, K, V]; it never sees T = 0.
        on_host: the backend works on numpy arrays; float64 is then allowed (and kept), a traced array refused.
    """
    if not on_host:
        _register_pytree()

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
    ) -> tuple[Array, Array | None]:
        """Kimi Delta Attention by this backend; see :func:`ops.kda_tpu.api.kimi_delta_attention`."""
        if context_parallel_metadata is not None:
            raise ValueError(
                "context_parallel_metadata: context parallelism is not part of this version; pass None and keep each "
                "sequence on one device"
            )
        arrays = {
            "query": query, "key": key, "value": value, "gate": gate, "beta": beta, "a_log": a_log,
            "delta_time_bias": delta_time_bias, "initial_state": initial_state, "segment_ids": segment_ids,
        }  # fmt: skip
        _check_arrays(arrays, on_host)
        _check_gate_options(arrays, use_gate_in_kernel, lower_bound)
        num_segments = _num_segments(arrays, max_num_segments)
        with _at_once():
            _check_values(arrays, use_gate_in_kernel, num_segments)
        problem = _build(
            arrays,
            on_host,
            scale=_scale(scale, query.shape[3]),
            use_qk_l2norm=bool(use_qk_l2norm),
            use_gate_in_kernel=bool(use_gate_in_kernel),
            lower_bound=None if lower_bound is None else float(lower_bound),
            output_final_state=bool(output_final_state),
            num_segments=num_segments,
            has_initial_state=initial_state is not None,
        )
        if query.shape[2] == 0:
            output: Array = problem.value[:, :, :0]
            final_state = problem.initial_state.astype(np.float32)
        else:
            output, final_state = run(problem)
        return output, final_state if output_final_state else None

    return kimi_delta_attention


def is_traced(array: Array) -> bool:
    """Whether ``array`` is a jax tracer, whose values cannot be looked at."""
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(array, jax.core.Tracer)


@functools.cache
def _register_pytree() -> None:
    import jax

    jax.tree_util.register_dataclass(Problem, data_fields=list(ARRAY_FIELDS), meta_fields=list(STATIC_FIELDS))


def _check_arrays(arrays: dict[str, Array | None], on_host: bool) -> None:
    """Kinds, types and shapes; reads no values."""
    for name, array in arrays.items():
        if array is not None and not (hasattr(array, "shape") and hasattr(array, "dtype")):
            raise TypeError(f"{name}: expected an array, got {type(array).__name__}; convert it first")
        if array is None and name in ("query", "key", "value", "gate", "beta"):
            raise TypeError(f"{name}: expected an array, got None; it has no default")
        if on_host and is_traced(array):
            raise TypeError(
                f"{name}: this backend runs numpy on concrete arrays, got a traced one; under jax.jit, jax.grad or "
                "jax.vmap choose the backend 'scan'"
            )
    _check_dtypes(arrays, on_host)
    query, value, state = arrays["query"], arrays["value"], arrays["initial_state"]
    assert query is not None
    assert value is not None
    if query.ndim != 4:
        raise ValueError(f"query: expected 4 axes [H, B, T, K], got shape {query.shape}; heads come first")
    if value.ndim != 4:
        raise ValueError(f"value: expected 4 axes [H, B, T, V], got shape {value.shape}; heads come first")
    H, B, T, K = query.shape
    V = value.shape[3]
    if 0 in (H, B, K, V):
        raise ValueError(f"query, value: only T may be 0, got shapes {query.shape} and {value.shape}; drop empty axes")
    N = state.shape[1] if state is not None and state.ndim == 5 else "N"
    expected = {
        "key": ("[H, B, T, K]", (H, B, T, K)),
        "value": ("[H, B, T, V]", (H, B, T, V)),
        "gate": ("[H, B, T, K]", (H, B, T, K)),
        "beta": ("[H, B, T]", (H, B, T)),
        "a_log": ("[H]", (H,)),
        "delta_time_bias": ("[H*K], one value per head and key channel", (H * K,)),
        "initial_state": ("[B, N, H, K, V]", (B, N, H, K, V)),
        "segment_ids": ("[B, T]", (B, T)),
    }
    for name, (axes, shape) in expected.items():
        array = arrays[name]
        if array is not None and tuple(array.shape) != shape:
            wanted = str(shape).replace("'", "")
            raise ValueError(
                f"{name}: expected {axes} = {wanted} beside query {tuple(query.shape)} and value {tuple(value.shape)}, "
                f"got shape {tuple(array.shape)}; reshape or transpose it"
            )
    if state is not None and state.shape[1] == 0:
        raise ValueError("initial_state: expected at least one slot on axis N, got 0; pass None for zero states")


def _check_dtypes(arrays: dict[str, Array | None], on_host: bool) -> None:
    floats = (*_FLOATS, "float64") if on_host else _FLOATS
    for name, array in arrays.items():
        if array is None:
            continue
        kind = str(array.dtype)
        if name == "segment_ids":
            if not kind.startswith(("int", "uint")):
                raise TypeError(f"segment_ids: expected integers, got {kind}; cast to int32")
        elif kind not in floats:
            raise TypeError(f"{name}: expected {' or '.join(floats)}, got {kind}; cast to {floats[0]}")


def _check_gate_options(arrays: dict[str, Array | None], use_gate_in_kernel: bool, lower_bound: float | None) -> None:
    if use_gate_in_kernel:
        if arrays["a_log"] is None:
            raise ValueError(
                "a_log: expected an array [H] with use_gate_in_kernel=True, got None; pass it, or pass the log decay "
                "as gate with use_gate_in_kernel=False"
            )
    else:
        options = {"a_log": arrays["a_log"], "delta_time_bias": arrays["delta_time_bias"], "lower_bound": lower_bound}
        for name, given in options.items():
            if given is not None:
                raise ValueError(
                    f"{name}: shapes the gate inside the operator, got it with use_gate_in_kernel=False; set "
                    "use_gate_in_kernel=True, or pass None"
                )
    if lower_bound is None:
        return
    if is_traced(lower_bound) or not isinstance(lower_bound, int | float | np.number):
        raise TypeError(f"lower_bound: expected a number, got {type(lower_bound).__name__}; it is a static option")
    if not -math.inf < lower_bound < 0:
        raise ValueError(
            f"lower_bound: expected a finite number below 0 (nats a token), got {lower_bound}; a usual value is -5.0"
        )


def _scale(scale: float | None, num_key_channels: int) -> float:
    if scale is None:
        return float(num_key_channels) ** -0.5
    if is_traced(scale) or not isinstance(scale, int | float | np.number):
        raise TypeError(f"scale: expected a number, got {type(scale).__name__}; it is a static option")
    if not math.isfinite(scale) or scale == 0:
        raise ValueError(f"scale: expected a finite number other than 0, got {scale}; None means K ** -0.5")
    return float(scale)


def _num_segments(arrays: dict[str, Array | None], max_num_segments: int | None) -> int:
    """N, from whatever states it first."""
    state, ids = arrays["initial_state"], arrays["segment_ids"]
    if max_num_segments is not None:
        if is_traced(max_num_segments) or not isinstance(max_num_segments, int | np.integer):
            raise TypeError(f"max_num_segments: expected an int, got {type(max_num_segments).__name__}; it is static")
        if max_num_segments < 1:
            raise ValueError(f"max_num_segments: expected at least 1, got {max_num_segments}")
        if state is not None and state.shape[1] != max_num_segments:
            raise ValueError(
                f"initial_state: expected max_num_segments = {max_num_segments} slots on axis N, got {state.shape[1]}; "
                "make them equal, or leave max_num_segments out"
            )
        return int(max_num_segments)
    if state is not None:
        return int(state.shape[1])
    if ids is None:
        return 1
    if is_traced(ids):
        raise ValueError(
            "max_num_segments: expected a number with traced segment_ids, got None; pass the largest number of "
            "segments in a batch row (the shape of the final state depends on it), or make the ids with numpy, so "
            "that they are not traced"
        )
    return max(1, int(np.max(np.asarray(ids), initial=0)))


def _at_once() -> contextlib.AbstractContextManager[Any]:
    """Where operations on concrete jax arrays give concrete results, also while a caller's function is traced."""
    jax = sys.modules.get("jax")
    return contextlib.nullcontext() if jax is None else jax.ensure_compile_time_eval()


def _check_values(arrays: dict[str, Array | None], use_gate_in_kernel: bool, num_segments: int) -> None:
    """Ranges of what is concrete; padding may hold anything."""
    ids = arrays["segment_ids"]
    if is_traced(ids):
        return
    real: np.ndarray = np.True_  # type: ignore[assignment]
    if ids is not None:
        host_ids = np.asarray(ids)
        _check_segment_ids(host_ids, num_segments)
        real = host_ids > 0
    beta, gate = arrays["beta"], arrays["gate"]
    # The comparisons run where the arrays are; only their small results come to the host.
    if beta is not None and not is_traced(beta):
        at = _first(~np.asarray((beta >= 0) & (beta <= 1)) & real)
        if at is not None:
            raise ValueError(
                f"beta: expected values in [0, 1], got {float(beta[at])} at [head, batch, token] = {at}; apply a "
                "sigmoid first"
            )
    if gate is not None and not use_gate_in_kernel and not is_traced(gate):
        at = _first(~np.asarray((gate <= 0).all(axis=-1)) & real)
        if at is not None:
            raise ValueError(
                f"gate: expected log decays <= 0, got {float(gate[at].max())} at [head, batch, token] = {at}; pass raw "
                "gates with use_gate_in_kernel=True"
            )


def _first(wrong: np.ndarray) -> tuple[int, ...] | None:
    return tuple(int(i) for i in np.argwhere(wrong)[0]) if wrong.any() else None


def _check_segment_ids(ids: np.ndarray, num_segments: int) -> None:
    for row, row_ids in enumerate(ids):
        used = row_ids[row_ids != 0].astype(np.int64)
        if used.size == 0:
            continue
        if used.min() < 0:
            raise ValueError(f"segment_ids: expected ids >= 0 (0 is padding), got {used.min()} in batch row {row}")
        if used.max() > num_segments:
            raise ValueError(
                f"segment_ids: expected ids of at most N = {num_segments}, got {used.max()} in batch row {row}; raise "
                "max_num_segments or give initial_state more slots"
            )
        if (np.diff(used) < 0).any():
            at = int(np.argmax(np.diff(used) < 0))
            raise ValueError(
                f"segment_ids: expected ids that never decrease along a row, got {used[at + 1]} after {used[at]} in "
                f"batch row {row}; number the segments in their order"
            )


def _build(arrays: dict[str, Array | None], on_host: bool, **static: Any) -> Problem:
    """Arrays in the backend's array type, with defaults and ids in their normal form."""
    if on_host:
        xp: Any = np
    else:
        import jax.numpy as xp

    def wide(name: str) -> Array | None:
        array = arrays[name]
        return None if array is None else xp.asarray(array).astype(xp.float64 if on_host else xp.float32)

    H, B, _, K = arrays["query"].shape  # type: ignore[union-attr]
    V = arrays["value"].shape[3]  # type: ignore[union-attr]
    state, bias, ids = wide("initial_state"), wide("delta_time_bias"), arrays["segment_ids"]
    N = static["num_segments"]
    return Problem(
        **{name: xp.asarray(arrays[name]) for name in ("query", "key", "value", "gate", "beta")},
        a_log=wide("a_log"),
        delta_time_bias=None if bias is None else bias.reshape(H, K),
        initial_state=xp.zeros((B, N, H, K, V), xp.float32) if state is None else state,
        segment_ids=None if ids is None else _normal_segment_ids(ids, N, xp),
        **static,
    )


def _normal_segment_ids(ids: Array, num_segments: int, xp: Any) -> Array:
    """Ids with every invalid one turned into padding; only traced ids can still have any."""
    if not is_traced(ids):
        return xp.asarray(np.asarray(ids).astype(np.int32))
    import jax

    ids = ids.astype(xp.int32)
    ids = xp.where((ids < 0) | (ids > num_segments), 0, ids)
    return xp.where(ids < jax.lax.cummax(ids, axis=1), 0, ids)
