"""Array helpers and the program-order driver that the forward and the backward kernel share.

Helpers take and return arrays; only kernel bodies touch refs. Matrix products accumulate in float32. Operands in
float32 are multiplied at ``Precision.HIGHEST`` (six bfloat16 passes), operands in bfloat16 in one pass, so the
precision of a product is chosen by the dtype of its operands and can be read at the call.
"""

from __future__ import annotations

from collections.abc import Generator, Hashable, Iterable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

LOG2_E = 1.4426950408889634
Stage = Generator["Need | Done | None", None, None]


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
