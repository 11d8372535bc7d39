"""One forward and backward pass over a packed row at full size, a slice of it held to the float64 oracle."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ops.kda_tpu import kimi_delta_attention
from reference import kda as oracle

LENGTHS = (1800, 1500, 2000, 1200, 800)
HEADS = 16
HEAD_DIM = 128
LOWER_BOUND = -5.0


@dataclass(frozen=True)
class Checked:
    """Relative RMS errors of one head against the float64 recurrence.

    Attributes:
        output: of the output.
        gradient: the largest over the gradients of query, key, value, gate and beta.
    """

    output: float
    gradient: float


def inputs() -> oracle.Inputs:
    """Seeded inputs, float32, heads first, with raw gates."""
    rng = np.random.default_rng(0)
    num_tokens = sum(LENGTHS)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32)

    token_shape = (HEADS, 1, num_tokens, HEAD_DIM)
    return oracle.Inputs(
        query=normal(*token_shape),
        key=normal(*token_shape),
        value=normal(*token_shape),
        gate=normal(*token_shape) - 3,
        beta=rng.random(token_shape[:3], np.float32),
        a_log=normal(HEADS) * 0.3,
        delta_time_bias=normal(HEADS * HEAD_DIM) * 0.3,
        segment_ids=np.repeat(np.arange(1, len(LENGTHS) + 1, dtype=np.int32), LENGTHS)[None],
        use_qk_l2norm=True,
        use_gate_in_kernel=True,
        lower_bound=LOWER_BOUND,
    )


def forward_and_backward(given: oracle.Inputs, d_output: np.ndarray) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Output [H, B, T, V] and the gradients by argument name, on the registry's choice of backend."""

    def loss(differentiable: dict[str, Any], d_output: jax.Array) -> tuple[jax.Array, jax.Array]:
        output, _ = kimi_delta_attention(
            **differentiable,
            a_log=given.a_log,
            delta_time_bias=given.delta_time_bias,
            segment_ids=given.segment_ids,
            use_qk_l2norm=True,
            use_gate_in_kernel=True,
            lower_bound=LOWER_BOUND,
        )
        return jnp.vdot(output, d_output), output

    differentiable = {name: jnp.asarray(getattr(given, name)) for name in ("query", "key", "value", "gate", "beta")}
    gradients, output = jax.jit(jax.grad(loss, has_aux=True))(differentiable, jnp.asarray(d_output))
    return np.asarray(output), {name: np.asarray(gradient) for name, gradient in gradients.items()}


def check_head(
    given: oracle.Inputs, d_output: np.ndarray, output: np.ndarray, gradients: dict[str, np.ndarray], head: int
) -> Checked:
    """Compares every token of one head with the oracle."""
    one = slice(head, head + 1)
    assert given.a_log is not None
    assert given.delta_time_bias is not None
    alone = replace(
        given,
        **{name: getattr(given, name)[one] for name in gradients},
        a_log=given.a_log[one],
        delta_time_bias=given.delta_time_bias.reshape(HEADS, HEAD_DIM)[one],
    )
    expected_output, _ = oracle.forward(alone)
    expected = oracle.backward(alone, d_output[one])
    return Checked(
        output=_relative_rms(output[one], expected_output),
        gradient=max(_relative_rms(gradients[name][one], getattr(expected, name)) for name in gradients),
    )


def _relative_rms(got: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(got - expected) / np.linalg.norm(expected))
