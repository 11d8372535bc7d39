"""The harness itself: it passes a right operator and fails each deliberately wrong one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from ops.kda_tpu import scan
from reference.cases import Case
from tests.kda import harness

CASE = Case("tiny", 2, 1, 12, 4, 4, segments=3, normalise=True, raw_gate=True, bias=True, state=True)
SEED = 5

Arguments = dict[str, Any]


def with_arguments(change: Callable[[Arguments], Arguments]) -> harness.Operator:
    """The scan backend with some arguments changed."""
    return lambda **arguments: scan.kimi_delta_attention(**{**arguments, **change(arguments)})


def with_results(change: Callable[[Any, Any, Arguments], tuple[Any, Any]]) -> harness.Operator:
    """The scan backend with its results changed."""
    return lambda **arguments: change(*scan.kimi_delta_attention(**arguments), arguments)


def scaled_gradient(x: jax.Array) -> jax.Array:
    return x + 0.01 * (x - jax.lax.stop_gradient(x))


def third_token(arguments: Arguments) -> jax.Array:
    real = arguments["segment_ids"] > 0
    return (real & (jnp.cumsum(real, axis=1) == 3))[None, :, :, None]


WRONG = {
    "no decay": with_arguments(lambda a: {"gate": jnp.full_like(a["gate"], -1e3)}),
    "write strength ignored": with_arguments(lambda a: {"beta": jnp.ones_like(a["beta"])}),
    "segments joined": with_arguments(lambda a: {"segment_ids": jnp.minimum(a["segment_ids"], 1)}),
    "scale forgotten": with_arguments(lambda a: {"scale": 1.0}),
    "bias forgotten": with_arguments(lambda a: {"delta_time_bias": 0 * a["delta_time_bias"]}),
    "heads swapped": with_arguments(lambda a: {"key": a["key"][::-1]}),
    "gradient scaled": with_arguments(lambda a: {"beta": scaled_gradient(a["beta"])}),
    "gradient dropped": with_arguments(lambda a: {"a_log": jax.lax.stop_gradient(a["a_log"])}),
    "row dropped": with_results(lambda o, s, a: (jnp.where(third_token(a), 0, o), s)),
    "final state stale": with_results(lambda o, s, a: (o, a["initial_state"])),
    "padding read": with_results(lambda o, s, a: (o + 0 * a["value"], s)),
    "padding not zero": with_results(lambda o, s, a: (jnp.where(a["segment_ids"][None, ..., None] > 0, o, 1e-9), s)),
    "rounded to bfloat16": with_results(lambda o, s, a: (o.astype(jnp.bfloat16).astype(jnp.float32), s)),
}


def test_right_operator_passes() -> None:
    harness.check(scan.kimi_delta_attention, CASE, SEED)


@pytest.mark.parametrize("what", WRONG)
def test_wrong_operator_fails(what: str) -> None:
    with pytest.raises(AssertionError):
        harness.check(WRONG[what], CASE, SEED)
