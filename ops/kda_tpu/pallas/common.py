"""Array helpers and the program-order driver that the forward and the backward kernel share.

Helpers take and return arrays; only kernel bodies touch refs. Matrix products accumulate in float32. Operands in
float32 are multiplied at ``Precision.HIGHEST`` (six bfloat16 passes), operands in bfloat16 in one pass, so the
precision of a product is chosen by the dtype of its operands and can be read at the call.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Hashable, Iterable
from dataclasses import dataclass
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from ops.kda_tpu.contract import Problem

LOG2_E = math.log2(math.e)
LOWEST_LOG2_DECAY = -150.0
"""No log2 decay below this: 2^-150 is 0 in float32, and finite sums of it keep inf - inf out."""
_LARGEST_A_LOG = 80.0  # exp of it is finite, and large enough to reach every bound of a gate
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
    """Per-head constants of the gate, float32 [H, 8, width]: bias, exp(a_log), a_log log2 e + log2 log2 e, zeros."""
    assert problem.a_log is not None
    heads, channels = problem.query.shape[0], problem.query.shape[3]
    bias = jnp.zeros((heads, channels)) if problem.delta_time_bias is None else problem.delta_time_bias
    bias = jnp.pad(bias, ((0, 0), (0, width - channels)))
    slope = jnp.exp(jnp.minimum(problem.a_log, _LARGEST_A_LOG))
    logarithm = problem.a_log * LOG2_E + math.log2(LOG2_E)
    rows = [bias, *(jnp.broadcast_to(x[:, None], (heads, width)) for x in (slope, logarithm))]
    return jnp.pad(jnp.stack(rows, axis=1), ((0, 0), (0, 5), (0, 0)))


def log2_decay(gate: jax.Array, rows: jax.Array | None, form: GateForm) -> jax.Array:
    """Log2 of the decay, at least LOWEST_LOG2_DECAY.

    bounded    log2 e lower_bound sigmoid(exp(a_log) (gate + bias))
    softplus   -exp(a_log) log2(1 + 2^z), z = log2 e (gate + bias); for z < -12 its first term, whose exponents are
               added before they are raised, since the factors alone leave float32's range

    Args:
        gate: [C, K] float32, raw or the natural log of the decay.
        rows: [8, K] of :func:`gate_rows`, None if ``gate`` is not raw.
        form: which of these.
    """
    if rows is None:
        return jnp.maximum(gate * LOG2_E, LOWEST_LOG2_DECAY)
    shifted = gate + rows[0:1] if form.has_bias else gate
    if form.lower_bound is not None:
        decay = form.lower_bound * LOG2_E / (1.0 + jnp.exp2(shifted * (rows[1:2] * -LOG2_E)))
        return jnp.maximum(decay, LOWEST_LOG2_DECAY) if -form.lower_bound * LOG2_E > -LOWEST_LOG2_DECAY else decay
    z = shifted * LOG2_E
    softplus = jnp.maximum(z, 0.0) + LOG2_E * jnp.log(1.0 + jnp.exp2(-jnp.abs(z)))
    return jnp.maximum(-jnp.where(z < -12.0, jnp.exp2(z + rows[2:3]), softplus * rows[1:2]), LOWEST_LOG2_DECAY)


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
