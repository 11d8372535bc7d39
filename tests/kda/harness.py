"""Holds any KDA operator to the float64 reference: outputs, final states and every gradient."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from reference import kda
from reference.cases import Case, make
from tests.kda.tolerances import assert_close

Operator = Callable[..., tuple[Any, Any]]

DIFFERENTIABLE = ("query", "key", "value", "gate", "beta", "a_log", "delta_time_bias", "initial_state")
_BF16_INPUTS = ("query", "key", "value", "gate", "beta")


@functools.lru_cache(maxsize=64)
def _compiled(operator: Operator, options: tuple[tuple[str, Any], ...]) -> Callable[..., Any]:
    """One jitted call: (output, final_state), gradients. Segment ids are traced, so that only shapes are compiled."""

    def run(arrays: dict[str, Any], segment_ids: Any, cotangents: tuple[Any, Any]) -> Any:
        def call(arrays: dict[str, Any]) -> tuple[Any, Any]:
            return operator(**arrays, segment_ids=segment_ids, output_final_state=True, **dict(options))

        results, pullback = jax.vjp(call, arrays)
        return results, pullback(cotangents)[0]

    return jax.jit(run)


def options_of(inputs: kda.Inputs) -> dict[str, Any]:
    """The operator's static arguments."""
    names = ("scale", "use_qk_l2norm", "use_gate_in_kernel", "lower_bound", "max_num_segments")
    return {name: getattr(inputs, name) for name in names}


def arrays_of(inputs: kda.Inputs, dtype: str = "float32") -> dict[str, Any]:
    """The operator's differentiable arrays that are given, in ``dtype`` where the operator takes it."""
    arrays = {name: getattr(inputs, name) for name in DIFFERENTIABLE if getattr(inputs, name) is not None}
    return {name: jnp.asarray(x, dtype if name in _BF16_INPUTS else jnp.float32) for name, x in arrays.items()}


def rounded(inputs: kda.Inputs, dtype: str) -> kda.Inputs:
    """The inputs as ``dtype`` holds them: what the reference must be given for a fair comparison."""
    if dtype == "float32":
        return inputs
    arrays = {name: np.asarray(jnp.asarray(getattr(inputs, name), dtype).astype(jnp.float32)) for name in _BF16_INPUTS}
    return dataclasses.replace(inputs, **arrays)


def check(operator: Operator, case: Case, seed: int, dtype: str = "float32") -> None:
    """Output, final state and gradients of a jax operator against the reference; padding must be exactly zero."""
    inputs, d_output, d_final_state = make(case, seed)
    inputs = rounded(inputs, dtype)
    arrays = arrays_of(inputs, dtype)
    d_output = np.asarray(jnp.asarray(d_output, dtype).astype(jnp.float32))
    run = _compiled(operator, tuple(options_of(inputs).items()))
    (output, final_state), gradients = run(
        arrays, inputs.segment_ids, (jnp.asarray(d_output, dtype), jnp.asarray(d_final_state))
    )
    expected_output, expected_state = kda.forward(inputs)
    expected = kda.backward(inputs, d_output, d_final_state)
    assert str(output.dtype) == dtype
    assert str(final_state.dtype) == "float32"
    assert_close(output, expected_output, dtype, "output")
    assert_close(final_state, expected_state, dtype, "final_state")
    for name, gradient in gradients.items():
        assert gradient.dtype == arrays[name].dtype, name
        assert_close(gradient, getattr(expected, name), dtype, name)
    if inputs.segment_ids is not None:
        padding = inputs.segment_ids == 0
        for name in ("query", "key", "value", "gate", "beta"):
            assert not np.asarray(gradients[name])[:, padding].any(), f"gradient of {name} is not zero in padding"
        assert not np.asarray(output)[:, padding].any(), "output is not zero in padding"


def check_values(operator: Operator, case: Case, seed: int) -> None:
    """Output and final state of an operator on numpy arrays against the reference."""
    inputs, *_ = make(case, seed)
    arrays = {name: getattr(inputs, name) for name in DIFFERENTIABLE}
    output, final_state = operator(
        **arrays, segment_ids=inputs.segment_ids, output_final_state=True, **options_of(inputs)
    )
    expected_output, expected_state = kda.forward(inputs)
    assert_close(output, expected_output, "float32", "output")
    assert_close(final_state, expected_state, "float32", "final_state")
