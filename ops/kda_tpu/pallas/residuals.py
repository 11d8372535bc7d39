"""What the forward kernel leaves for the backward one."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from ops.kda_tpu.contract import Problem
from ops.kda_tpu.pallas.config import Config
from ops.kda_tpu.pallas.schedule import StepTable


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Residuals:
    """Saved by the forward; axes: H heads, B batch, Tp tokens in whole tiles, C = 64, S steps, NC chunks of a tile.

    The compute dtype is float32 if any of query, key, value is, else bfloat16; the gate's dtype plays no part. K and V
    are the kernel's widths (:func:`kernel_width` of the problem's); the extra columns are zero.

    Attributes:
        v_new: [H, B, Tp, V] compute dtype, A (beta (v - (k e^G) h)); exactly zero on padding rows.
        slab: [H, B, Tp / C, C, 2 C] compute dtype, -(beta / scale) [A^T | (Aqk A)^T], row j scaled by beta_j, which is
            floored at 2^-50; block diagonal over the segments of a chunk, exactly zero on padding rows.
        states: [H, B, S * NC, V, K] bfloat16 (float32 in float32 problems), transposed state on entry of chunk c of
            step s at s * NC + c. A step of one slot that has no rows in a chunk still has its entry.
        steps: the table the forward walked, tiles of NC * C rows.
    """

    v_new: jax.Array
    slab: jax.Array
    states: jax.Array
    steps: StepTable


def compute_dtype(problem: Problem) -> jnp.dtype:
    """Dtype of the operands of matrix products and of the residuals."""
    wide = any(x.dtype == jnp.float32 for x in (problem.query, problem.key, problem.value))
    return jnp.dtype(jnp.float32 if wide else jnp.bfloat16)


def kernel_width(channels: int) -> int:
    """Channels the kernels work on: multiples of 64 as they are, others padded to the next multiple of 128."""
    return channels if channels % 64 == 0 else -(-channels // 128) * 128


def has_masks(problem: Problem, config: Config) -> bool:
    """Whether a step may hold rows that are not of its segment: padding, another one's, or past the last token."""
    return problem.segment_ids is not None or problem.query.shape[2] % config.tile != 0
