"""What the KDA benchmarks run, and the figures a static profile is held against."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

Attention = Callable[..., tuple[jax.Array, jax.Array | None]]
Arrays = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One program to profile or to time.

    Attributes:
        name: what the command line calls it.
        part: ``"step"`` (output and all gradients) or ``"forward"`` (output only, nothing saved).
        heads, batch, tokens, key_dim, value_dim: H, B, T, K, V.
        dtype: of query, key, value, gate and beta.
        lengths: tokens of each packed segment, filling each batch row; empty for one sequence a row without ids.
        gate: ``"bounded"``, ``"softplus"`` (raw gates, activated in the operator) or ``"log"`` (log decays).
        lower_bound: of the bounded form.
        rematerialize: whether the backward pass runs the forward again instead of reading what it saved.
        backward: ``"fused"`` in one kernel, or ``"split"`` in three.
    """

    name: str
    part: Literal["step", "forward"] = "step"
    heads: int = 16
    batch: int = 1
    tokens: int = 8192
    key_dim: int = 128
    value_dim: int = 128
    dtype: str = "bfloat16"
    lengths: tuple[int, ...] = ()
    gate: Literal["bounded", "softplus", "log"] = "bounded"
    lower_bound: float = -5.0
    rematerialize: bool = False
    backward: Literal["fused", "split"] = "fused"

    @property
    def segment_ids(self) -> np.ndarray | None:
        """int32 [B, T], 1-based, 0 behind the last segment; None without lengths."""
        if not self.lengths:
            return None
        ids = np.repeat(np.arange(1, len(self.lengths) + 1), self.lengths)
        row = np.pad(ids, (0, self.tokens - ids.size)).astype(np.int32)
        return np.broadcast_to(row, (self.batch, self.tokens)).copy()

    @property
    def options(self) -> dict[str, Any]:
        """Static arguments of the operator."""
        activated = self.gate != "log"
        return {
            "use_qk_l2norm": True,
            "use_gate_in_kernel": activated,
            "lower_bound": self.lower_bound if self.gate == "bounded" else None,
            "max_num_segments": len(self.lengths) or None,
        }


_PACKED = (1800, 1500, 2000, 1200, 800)

CASES: dict[str, Case] = {
    case.name: case
    for case in (
        Case("seed-fixed"),
        Case("seed-packed", tokens=sum(_PACKED), lengths=_PACKED),
        Case("forward", part="forward"),
        Case("forward-packed", part="forward", tokens=sum(_PACKED), lengths=_PACKED),
        Case("remat", rematerialize=True),
        Case("split", backward="split"),
        Case("float32", dtype="float32"),
        Case("float32-softplus", dtype="float32", gate="softplus"),
        Case("softplus", gate="softplus"),
        Case("log-decay", gate="log"),
        Case("few-heads", heads=4),
    )
}


@dataclass(frozen=True)
class Target:
    """A figure that a case must reach on a chip, beside the best published library's in the same model.

    Attributes:
        case, chip: what is profiled; chip None for figures that no chip changes.
        quantity: a key of what :func:`bench.kda_static.quantities` returns.
        must, aim, peer: upper bounds and the peer's figure, in the unit that ``quantity`` names; None if not stated.
    """

    case: str
    chip: str | None
    quantity: str
    must: float | None
    aim: float | None = None
    peer: float | None = None


TARGETS: tuple[Target, ...] = (
    Target("seed-fixed", "v6e", "ms", 1.1, 0.65, 2.72),
    Target("seed-fixed", "tpu7x", "ms", 1.0, 0.55, 1.87),
    Target("seed-fixed", "v5e", "ms", None, None, 4.62),
    Target("seed-packed", "v6e", "ms", 1.2, 0.75, 3.53),
    Target("seed-packed", "tpu7x", "ms", 1.1, 0.65, 2.39),
    Target("seed-packed", "v5e", "ms", None, None, 6.15),
    Target("forward", "v6e", "ms", 0.55, 0.40, 0.93),
    Target("forward", "tpu7x", "ms", 0.50, 0.35, 0.70),
    Target("seed-fixed", "v6e", "backward kernels ms", 0.45, 0.32, 1.19),
    Target("seed-fixed", "tpu7x", "backward kernels ms", 0.42, 0.28, 0.83),
    Target("seed-fixed", "v6e", "backward kernels MB", 500, None, 1650),
    Target("seed-fixed", "tpu7x", "backward kernels MB", 500, None, 1650),
    Target("remat", "v6e", "ms", 1.6, 1.1, 3.73),
    Target("float32", "v6e", "ms", 3.5, 2.5, 5.87),
    Target("softplus", "v6e", "times seed-fixed", 1.15),
    Target("softplus", "tpu7x", "times seed-fixed", 1.15),
    Target("few-heads", "v6e", "times a quarter of seed-fixed", 1.3),
    Target("few-heads", "tpu7x", "times a quarter of seed-fixed", 1.3),
    Target("seed-fixed", None, "residuals MB at H=32", 400),
)


def specs(case: Case) -> Arrays:
    """Shapes and dtypes of the operator's array arguments; segment ids as values."""
    H, B, T, K, V = case.heads, case.batch, case.tokens, case.key_dim, case.value_dim
    kind = jnp.dtype(case.dtype)
    shapes: dict[str, tuple[tuple[int, ...], Any]] = {
        "query": ((H, B, T, K), kind),
        "key": ((H, B, T, K), kind),
        "value": ((H, B, T, V), kind),
        "gate": ((H, B, T, K), kind),
        "beta": ((H, B, T), kind),
    }
    if case.gate != "log":
        shapes |= {"a_log": ((H,), jnp.float32), "delta_time_bias": ((H * K,), jnp.float32)}
    arrays: Arrays = {name: jax.ShapeDtypeStruct(*entry) for name, entry in shapes.items()}
    if case.segment_ids is not None:
        arrays["segment_ids"] = case.segment_ids
    return arrays


def values(case: Case, seed: int = 0) -> Arrays:
    """Seeded float32 arrays for :func:`specs`, in its dtypes: unit-variance tokens, mild gates."""
    rng = np.random.default_rng(seed)
    arrays: Arrays = {}
    for name, spec in specs(case).items():
        if name == "segment_ids":
            arrays[name] = spec
            continue
        drawn = rng.standard_normal(spec.shape, np.float32)
        if name == "beta":
            drawn = 1 / (1 + np.exp(-drawn))
        elif name == "a_log":
            drawn = 0.3 * drawn
        elif name == "gate" and case.gate == "log":
            drawn = -np.log1p(np.exp(drawn))
        arrays[name] = jnp.asarray(drawn, spec.dtype)
    return arrays


def run_forward(attention: Attention, case: Case, arrays: Mapping[str, Any]) -> jax.Array:
    """The operator's output."""
    tokens = [arrays[name] for name in ("query", "key", "value", "gate", "beta")]
    rest = {name: array for name, array in arrays.items() if name in ("a_log", "delta_time_bias", "segment_ids")}
    return attention(*tokens, **rest, **case.options)[0]


def program(attention: Attention, case: Case) -> Callable[..., Any]:
    """The function to compile: ``forward(arrays)`` or ``step(arrays, d_output) -> (output, gradients)``."""

    def forward(arrays: Arrays) -> jax.Array:
        return run_forward(attention, case, arrays)

    def step(arrays: Arrays, d_output: jax.Array) -> tuple[jax.Array, Arrays]:
        ids = {name: array for name, array in arrays.items() if name == "segment_ids"}
        differentiable = {name: array for name, array in arrays.items() if name != "segment_ids"}
        output, pull = jax.vjp(lambda floats: run_forward(attention, case, {**floats, **ids}), differentiable)
        return output, pull(d_output)[0]

    return forward if case.part == "forward" else step


def arguments(case: Case, arrays: Arrays) -> tuple[Any, ...]:
    """What :func:`program` is called with: the arrays, for a step also the output's cotangent."""
    if case.part == "forward":
        return (arrays,)
    value = arrays["value"]
    if isinstance(value, jax.ShapeDtypeStruct):
        return arrays, value
    cotangent = np.random.default_rng(1).standard_normal(value.shape, np.float32)
    return arrays, jnp.asarray(cotangent, value.dtype)
