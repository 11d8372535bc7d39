"""VMEM the kernels need: blocks that are copied in and out, scratch as the kernels lay it out, room for spills."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ops.kda_tpu.contract import Problem
from ops.kda_tpu.pallas.backward import form_of, kernels
from ops.kda_tpu.pallas.config import LANES, Config, ProblemShape, round_up
from ops.kda_tpu.pallas.forward import layout_of

_SUBLANE_BYTES = 32  # of the 8 sublanes of a lane; narrower types pack more rows
_SMALL = 2 << 20  # gate parameters, write strengths, ids, sum matrices, spills that every kernel has
# Arrays [C, K] in float32 that the compiler spills for each head and chunk of a step, from its reports on kernels of 4
# to 64 of them; those with the pairs of a chunk by the pairs' scheme, and twice as many in float32.
_SPILLED = {"kda_forward": 6, "kda_backward_prepare": 2, "kda_backward_state": 1}
_SPILLED_PAIRS = {"row_blocks": 6, "tree": 20}


@dataclass(frozen=True)
class Blocks:
    """Large arrays a kernel reads or writes a block of, by kind.

    Attributes:
        key, value, gate: rows of tokens, K, V and K channels; the gate and its gradient have its dtype.
        square: rows of a chunk's matrices, one or two C-wide ones in 128 lanes.
        states: one a chunk, [V, K].
        edges: states at a segment's edges, float32.
    """

    key: int
    value: int
    gate: int
    square: int = 0
    states: int = 0
    edges: int = 0


_BLOCKS = {
    "kda_forward": Blocks(key=2, value=3, gate=1, square=1, states=1, edges=2),
    "kda_backward": Blocks(key=4, value=3, gate=2, square=1, states=1, edges=2),
    "kda_backward_prepare": Blocks(key=5, value=3, gate=1, square=2),
    "kda_backward_state": Blocks(key=3, value=4, gate=0, square=1, states=1, edges=2),
    "kda_backward_finish": Blocks(key=4, value=3, gate=2, square=1, states=2),
}


def vmem_bytes(config: Config, shape: ProblemShape) -> dict[str, int]:
    """Estimated VMEM of each kernel by name, at least what the compiler takes.

    Blocks are double-buffered, those of the states at a segment's edges too. The forward is the one that saves: it runs
    under either memory policy. ``tests/kda_pallas/test_compile.py`` holds this against the compiler's own figures.
    """
    problem = _problem(shape)
    form, layout = form_of(problem, config), layout_of(problem, config, num_steps=1, save=True)
    scratch = {"kda_forward": layout.scratch()} | {
        kernel.name: kernel.scratch(form) for kernel in kernels(form, config)
    }
    found = {}
    for name, arrays in scratch.items():
        heads = layout.heads if name == "kda_forward" else form.heads
        spilled = _SPILLED.get(name) or _SPILLED_PAIRS[form.pairs.scheme] * (2 if form.exact else 1)
        per_head = _bytes_per_head(_BLOCKS[name], spilled, config, shape)
        found[name] = heads * per_head + _bytes(arrays.values()) + _SMALL
    return found


def _bytes_per_head(blocks: Blocks, spilled: int, config: Config, shape: ProblemShape) -> int:
    """Blocks and spills."""
    key, value = round_up(shape.key_dim, LANES), round_up(shape.value_dim, LANES)
    row = (blocks.key * key + blocks.value * value + blocks.square * LANES) * shape.itemsize
    row += blocks.gate * key * jnp.dtype(shape.gate_dtype or shape.dtype).itemsize
    chunk = config.chunk * row + blocks.states * value * key * shape.itemsize
    spills = spilled * config.chunk * max(key, value) * 4
    edges = blocks.edges * value * key * 4
    return config.chunks_per_step * (2 * chunk + spills) + 2 * edges


def _bytes(arrays: Iterable[Any]) -> int:
    """Bytes of arrays in VMEM, the last two axes in whole tiles."""
    total = 0
    for array in arrays:
        *leading, rows, lanes = array.shape
        itemsize = jnp.dtype(array.dtype).itemsize
        total += math.prod(leading) * round_up(rows, _SUBLANE_BYTES // itemsize) * round_up(lanes, LANES) * itemsize
    return total


def _problem(shape: ProblemShape) -> Problem:
    """A problem of that shape without values: raw gate, norm and bias, which take the most scratch."""
    H, B, T, K, V = shape.heads, shape.batch, shape.tokens, shape.key_dim, shape.value_dim

    def array(dtype: str, *axes: int) -> Any:
        return jax.ShapeDtypeStruct(axes, jnp.dtype(dtype))

    return Problem(
        query=array(shape.dtype, H, B, T, K),
        key=array(shape.dtype, H, B, T, K),
        value=array(shape.dtype, H, B, T, V),
        gate=array(shape.gate_dtype or shape.dtype, H, B, T, K),
        beta=array(shape.dtype, H, B, T),
        a_log=array("float32", H),
        delta_time_bias=array("float32", H, K),
        initial_state=array("float32", B, 1, H, K, V),
        segment_ids=array("int32", B, T) if shape.segmented else None,
        scale=1.0,
        use_qk_l2norm=True,
        use_gate_in_kernel=True,
        lower_bound=shape.lower_bound,
        output_final_state=True,
        num_segments=1,
        has_initial_state=True,
    )
