"""Array helpers and the program-order driver that the forward and the backward kernel share.

Helpers take and return arrays; only kernel bodies touch refs. Matrix products accumulate in float32. Operands in
float32 are multiplied at ``Precision.HIGHEST`` (six bfloat16 passes), operands in bfloat16 in one pass, so the
precision of a product is chosen by the dtype of its operands and can be read at the call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Hashable, Iterable
from dataclasses import dataclass
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ops.kda_tpu.contract import Problem

LOG2_E = math.log2(math.e)
LOWEST_LOG2_DECAY = -150.0
"""No log2 decay below this: 2^-150 is 0 in float32, and finite sums of it keep inf - inf out."""
LEAST_BETA = 2.0**-50
"""The backward divides by beta, so the saved slab and it count a smaller one as this."""
_LARGEST_A_LOG = 80.0  # exp of it is finite, and large enough to reach every bound of a gate
_STEEP_A_LOG = 7.0
_Result = TypeVar("_Result")
Phases = Generator["Need | Done | None", None, _Result]
"""Part of a stage: yields at the end of each phase (see :func:`interleave`) and returns a result."""
Stage = Phases[None]


def iota(shape: tuple[int, ...], axis: int) -> jax.Array:
    """Index along ``axis``, int32."""
    return lax.broadcasted_iota(jnp.int32, shape, axis)


def _product(a: jax.Array, b: jax.Array, axis_a: int, axis_b: int) -> jax.Array:
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    dimensions = (((axis_a,), (axis_b,)), ((), ()))
    return lax.dot_general(a, b, dimensions, precision=precision, preferred_element_type=jnp.float32)


def nn(a: jax.Array, b: jax.Array) -> jax.Array:
    """Product a b, float32. A weight ``b`` of K rows costs K/4 cycles to load whatever its width up to 256."""
    return _product(a, b, 1, 0)


def nt(a: jax.Array, b: jax.Array) -> jax.Array:
    """Product a b^T, float32. A weight ``b`` of N rows costs N/2 cycles to load."""
    return _product(a, b, 1, 1)


def tn(a: jax.Array, b: jax.Array) -> jax.Array:
    """Product a^T b, float32. ``a`` passes through the transpose unit first."""
    return _product(a, b, 0, 0)


def split(x: jax.Array, terms: int) -> list[jax.Array]:
    """Bfloat16 arrays, largest first, whose sum is ``x`` (float32) to 8 * ``terms`` bits."""
    parts = []
    for _ in range(terms - 1):
        parts.append(x.astype(jnp.bfloat16))
        x = x - parts[-1].astype(jnp.float32)
    return [*parts, x.astype(jnp.bfloat16)]


def widen(x: jax.Array, width: int, axis: int = -1) -> jax.Array:
    """``x`` with zeros appended along ``axis`` up to ``width``."""
    pads = [(0, 0)] * x.ndim
    pads[axis] = (0, width - x.shape[axis])
    return jnp.pad(x, pads) if width != x.shape[axis] else x


def rsqrt_of_square_sum(x: jax.Array) -> jax.Array:
    """1 / sqrt(sum_c x_c^2 + 1e-6) of each row of ``x`` [C, K] float32, as [C, 1]."""
    return lax.rsqrt(jnp.sum(x * x, axis=1, keepdims=True) + 1e-6)


@dataclass(frozen=True)
class GateForm:
    """How the kernel turns ``gate`` into the log2 decay.

    Attributes:
        activated: whether ``gate`` is raw; if not it is the natural log of the decay.
        has_bias: whether delta_time_bias is added to it.
        lower_bound: bound in nats of the bounded form; None for the softplus form.
    """

    activated: bool
    has_bias: bool
    lower_bound: float | None

    @classmethod
    def of(cls, problem: Problem) -> GateForm:
        """The form a problem asks for."""
        return cls(problem.use_gate_in_kernel, problem.delta_time_bias is not None, problem.lower_bound)

    @property
    def steepest(self) -> float:
        """Largest possible -log2 of the decay of one token."""
        bound = math.inf if self.lower_bound is None else -self.lower_bound * LOG2_E
        return min(bound, -LOWEST_LOG2_DECAY)


def gate_rows(problem: Problem, width: int) -> jax.Array:
    """Per-head constants of the gate, float32 [H, 8, width].

    Rows 0 to 2: bias, exp(a_log), a_log log2 e. Rows 3 to 7 are those of :func:`_rounded_softplus`.
    """
    assert problem.a_log is not None
    heads, channels = problem.query.shape[0], problem.query.shape[3]
    bias = jnp.zeros((heads, channels)) if problem.delta_time_bias is None else problem.delta_time_bias
    bias = jnp.pad(bias, ((0, 0), (0, width - channels)))
    a_log = problem.a_log[:, None]
    slope = jnp.exp(jnp.minimum(a_log, _LARGEST_A_LOG))
    steep = a_log > _STEEP_A_LOG
    curved, straight = jnp.where(steep, 0.0, -slope), jnp.where(steep, -1.0, 0.0)
    joined = bias + jnp.where(steep, a_log, 0.0)
    rows = [bias, slope, a_log * LOG2_E, joined, curved * LOG2_E, straight * LOG2_E, curved, straight]
    return jnp.stack([jnp.broadcast_to(x, (heads, width)) for x in rows], axis=1)


def log2_decay(
    gate: jax.Array,
    row: Callable[[int], jax.Array] | None,
    form: GateForm,
    exact: bool,
    lowest: float = LOWEST_LOG2_DECAY,
) -> jax.Array:
    """Log2 of the decay, at least ``lowest``.

    bounded    log2 e lower_bound sigmoid(exp(a_log) (gate + bias))
    softplus   -log2 e exp(a_log) log(1 + e^(gate + bias)), see :func:`softplus_decay`

    Args:
        gate: [C, K] float32, raw or the natural log of the decay.
        row: gives a row [1, K] of :func:`gate_rows`; None if ``gate`` is not raw.
        form: which of these.
        exact: float32 precision; else that of bfloat16 operands.
        lowest: below this a decay counts as this.
    """
    if row is None:
        return jnp.maximum(gate * LOG2_E, lowest)
    if form.lower_bound is None:
        return jnp.maximum(softplus_decay(gate, row, form, exact)[0], lowest)
    shifted = gate + row(0) if form.has_bias else gate
    decay = form.lower_bound * LOG2_E / (1.0 + jnp.exp2(shifted * (row(1) * -LOG2_E)))
    return jnp.maximum(decay, lowest) if -form.lower_bound * LOG2_E > -lowest else decay


def softplus_decay(
    gate: jax.Array, row: Callable[[int], jax.Array], form: GateForm, exact: bool
) -> tuple[jax.Array, jax.Array]:
    """Softplus form: log2 of the decay and the derivative of its natural log by ``gate``, which may be -inf.

    With u = e^z, z = gate + bias, these are -log2 e exp(a_log) log(1 + u) and -exp(a_log) u / (1 + u). Where u is small
    its exponent joins that of exp(a_log): their product may be of ordinary size where neither factor is.

    Args:
        gate: [C, K] float32, raw.
        row: gives a row [1, K] of :func:`gate_rows`.
        form: of the gate.
        exact: float32 precision; else that of bfloat16 operands.
    """
    if not exact:
        return _rounded_softplus(gate, row)
    z = gate + row(0) if form.has_bias else gate
    z_log2 = z * LOG2_E
    small = z_log2 < -8.0
    u = jnp.exp2(jnp.minimum(z_log2, 30.0))
    low = jnp.exp2(z_log2 + row(2))
    softplus = jnp.maximum(jnp.log(1.0 + u), z)
    decay = jnp.where(small, low * (u * (0.5 * LOG2_E) - LOG2_E), softplus * (row(1) * -LOG2_E))
    return decay, jnp.where(small, -low, u * -row(1)) / (1.0 + u)


def _rounded_softplus(gate: jax.Array, row: Callable[[int], jax.Array]) -> tuple[jax.Array, jax.Array]:
    """:func:`softplus_decay` to bfloat16's precision with one exponential; each head has one formula of two.

    Up to a_log = _STEEP_A_LOG that of the text (rounding 1 + u costs exp(a_log) 2^-24). Beyond it a decay is of
    ordinary size only where u is so small that log(1 + u) is u; exp(a_log) u is e^(z + a_log). The rows choose: bias
    or bias + a_log, then the factors of log(1 + e) and e in the decay, of 1 / (1 + e) and 1 in the derivative.
    """
    z = gate + row(3)
    e = jnp.exp2(jnp.minimum(z, 20.0) * LOG2_E)
    decay = jnp.maximum(jnp.log(1.0 + e), z) * row(4) + e * row(5)
    return decay, e * (row(6) * pl.reciprocal(1.0 + e, approx=True) + row(7))


@dataclass(frozen=True)
class Need:
    """Yielded by a stage that must not go on before some stage has yielded ``Done(key)``."""

    key: Hashable


@dataclass(frozen=True)
class Done:
    """Yielded by a stage once what ``key`` names has been written."""

    key: Hashable


def interleave(stages: Iterable[tuple[int, Stage]], done: Iterable[Hashable] = ()) -> None:
    """Emits the code of many generators in turns, one phase of each a round, in the order given.

    The compiler's scheduler hardly moves code across heads, so independent work only overlaps if it is neighbouring in
    program order: each generator yields after a product whose result it needs next.

    Args:
        stages: pairs of the round in which a generator starts and the generator. It yields None at the end of a phase,
            ``Need(key)`` to wait for a key and ``Done(key)`` to announce one.
        done: keys announced beforehand.

    Raises:
        RuntimeError: every remaining generator waits for a key that none will announce.
    """
    announced = set(done)
    waiting: list[tuple[int, Stage, Hashable]] = [(start, stage, None) for start, stage in stages]
    clock = 0
    while waiting:
        rest = []
        moved = False
        for start, stage, key in waiting:
            if clock < start or (key is not None and key not in announced):
                rest.append((start, stage, key))
                continue
            moved = True
            signal = next(stage, stage)
            if isinstance(signal, Done):
                announced.add(signal.key)
            if signal is not stage:
                rest.append((start, stage, signal.key if isinstance(signal, Need) else None))
        if not moved and all(start <= clock for start, _, _ in rest):
            raise RuntimeError(f"stages wait for keys nobody announces: {sorted({str(key) for _, _, key in rest})}")
        waiting = rest
        clock += 1
