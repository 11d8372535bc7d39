"""Forward kernel: gate, norm, decayed products inside a chunk, exact inverse, state recurrence and output in one.

For each chunk of C = 64 tokens of a head, with G the cumulative log2 decay, gC its last row, h the state on entry
(kept transposed, [V, K], float32) and Aqk, L, A = (I + L)^-1 of :mod:`ops.kda_tpu.pallas.intra`:

    v_new = A (beta (v - (k 2^G) h))        o = scale (q 2^G) h + Aqk v_new        h' = 2^gC h + (k 2^(gC - G))^T v_new

Precision with bfloat16 inputs: gates, norms, decays, scores and states are accumulated in float32; the cumulative decay
takes two bfloat16 terms of its operand, the inverse two of both; the operands of the other products are rounded to
bfloat16. With float32 inputs every product has float32 precision.

Here is the launcher; :mod:`ops.kda_tpu.pallas.forward_step` is the kernel's body.
"""

from __future__ import annotations

from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ops.kda_tpu.contract import Problem
from ops.kda_tpu.pallas.common import GateForm, gate_rows, widen
from ops.kda_tpu.pallas.config import CHUNK, Config, current_chip, vmem_limit_bytes
from ops.kda_tpu.pallas.forward_step import Layout, run_step
from ops.kda_tpu.pallas.intra import IntraForm, sum_matrix
from ops.kda_tpu.pallas.residuals import Residuals, compute_dtype, has_masks, kernel_width
from ops.kda_tpu.pallas.schedule import StepTable, pad_segment_ids, padded_length, plan

_TABLE = [field.name for field in fields(StepTable)]


def forward(
    problem: Problem, config: Config, interpret: Any = False, save: bool = False
) -> tuple[jax.Array, jax.Array, Residuals | None]:
    """Output, final state and, with ``save``, what the backward needs.

    Args:
        problem: the validated call.
        config: a legal configuration.
        interpret: False compiles for TPU; True or ``pltpu.InterpretParams`` interprets.
        save: whether to write the residuals.

    Returns:
        output [H, B, T, V] in the value's dtype, final state [B, N, H, K, V] float32, residuals or None.
    """
    H, B, T, K = problem.query.shape
    V = problem.value.shape[3]
    steps = plan(problem.segment_ids, problem.num_segments, B, T, config.tile)
    layout = layout_of(problem, config, steps.num_steps, save)
    inputs, outputs = _operands(problem, layout)
    tables = dict(zip(_TABLE, steps.flat(), strict=True)) if layout.masked else {}
    names = [*tables, *inputs, *outputs, *layout.scratch()]
    results = pl.pallas_call(
        lambda *refs: run_step(layout, SimpleNamespace(**dict(zip(names, refs, strict=True)))),
        out_shape=[shape for shape, _ in outputs.values()],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(tables),
            grid=(B, H // layout.heads, layout.num_steps + 1),
            in_specs=[spec for _, spec in inputs.values()],
            out_specs=[spec for _, spec in outputs.values()],
            scratch_shapes=list(layout.scratch().values()),
        ),
        input_output_aliases={len(tables) + list(inputs).index("initial"): list(outputs).index("state")},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=vmem_limit_bytes(current_chip())
        ),
        interpret=interpret,
        name="kda_forward",
    )(*tables.values(), *(array for array, _ in inputs.values()))
    found = dict(zip(outputs, results, strict=True))
    final_state = jnp.swapaxes(found["state"], 3, 4)[..., :K, :V]
    residuals = Residuals(found["v_new"], found["slab"], found["states"], steps) if save else None
    return found["output"][..., :V], final_state, residuals


def layout_of(problem: Problem, config: Config, num_steps: int, save: bool) -> Layout:
    """What is static in the kernel of a problem, of which only shapes and dtypes are looked at."""
    gate, dtype = GateForm.of(problem), compute_dtype(problem)
    return Layout(
        heads=config.heads_per_step,
        chunks=config.chunks_per_step,
        key_width=kernel_width(problem.query.shape[3]),
        value_width=kernel_width(problem.value.shape[3]),
        num_steps=num_steps,
        dtype=dtype,
        scale=problem.scale,
        normalise=problem.use_qk_l2norm,
        gate=gate,
        intra=IntraForm.choose(gate, local_sums=dtype == jnp.float32),
        masked=has_masks(problem, config),
        save=save,
    )


def _operands(problem: Problem, layout: Layout) -> tuple[dict[str, Any], dict[str, Any]]:
    """Inputs by name as (array, block) and outputs as (shape, block).

    Blocks of the front half follow the step, those of the back half the step before; the first and the last step of a
    row repeat a neighbour's blocks.
    """
    H, B, T, _ = problem.query.shape
    N, S = problem.num_segments, layout.num_steps
    HB, NC, KW, VW = layout.heads, layout.chunks, layout.key_width, layout.value_width
    tile = NC * CHUNK
    length = padded_length(T, tile)

    def front(s: Any) -> Any:
        return jnp.minimum(s, S - 1)

    def back(s: Any) -> Any:
        return jnp.maximum(s - 1, 0)

    def tile_of(b: Any, s: Any, tables: tuple[Any, ...]) -> Any:
        return tables[_TABLE.index("tile")][b * S + s] if tables else s

    def slot_of(b: Any, s: Any, tables: tuple[Any, ...]) -> Any:
        return tables[_TABLE.index("slot")][b * S + s] if tables else 0

    def tokens(width: int, half: Any) -> pl.BlockSpec:
        return pl.BlockSpec((HB, None, tile, width), lambda b, h, s, *t: (h, b, tile_of(b, half(s), t), 0))

    state = pl.BlockSpec((None, None, HB, VW, KW), lambda b, h, s, *t: (b, slot_of(b, back(s), t), h, 0, 0))
    beta = jnp.pad(problem.beta.astype(jnp.float32), ((0, 0), (0, 0), (0, length - T)))
    beta = beta.reshape(H // HB, HB, B, length // CHUNK, CHUNK).transpose(2, 0, 3, 1, 4)
    beta_spec = [
        pl.BlockSpec((None, None, NC, HB, CHUNK), lambda b, h, s, *t, f=f: (b, h, tile_of(b, f(s), t), 0, 0))
        for f in (front, back)
    ]
    matrix = jnp.tile(jnp.asarray(sum_matrix(layout.intra), jnp.bfloat16), (1, layout.terms))
    inputs: dict[str, Any] = {
        "query": (widen(problem.query, KW), tokens(KW, front)),
        "key": (widen(problem.key, KW), tokens(KW, front)),
        "gate": (widen(problem.gate, KW), tokens(KW, front)),
        "value": (widen(problem.value, VW), tokens(VW, back)),
        "beta_front": (beta, beta_spec[0]),
        "beta_back": (beta, beta_spec[1]),
        "sum_matrix": (matrix, pl.BlockSpec(matrix.shape, lambda b, h, s, *t: (0, 0))),
        "initial": (jnp.swapaxes(widen(widen(problem.initial_state, VW), KW, axis=3), 3, 4), state),
    }
    if layout.gate.activated:
        inputs["gate_rows"] = (gate_rows(problem, KW), pl.BlockSpec((HB, 8, KW), lambda b, h, s, *t: (h, 0, 0)))
    if layout.masked:
        ids = pad_segment_ids(problem.segment_ids, B, T, tile).reshape(B, length // tile, NC, CHUNK)
        for name, f in (("ids_front", front), ("ids_back", back)):
            spec = pl.BlockSpec((None, None, NC, CHUNK), lambda b, h, s, *t, f=f: (b, tile_of(b, f(s), t), 0, 0))
            inputs[name] = (ids, spec)
    shape = jax.ShapeDtypeStruct
    outputs: dict[str, Any] = {
        "output": (shape((H, B, T, VW), problem.value.dtype), tokens(VW, back)),
        "state": (shape((B, N, H, VW, KW), jnp.float32), state),
    }
    if layout.save:
        slab = pl.BlockSpec((HB, None, NC, CHUNK, 2 * CHUNK), lambda b, h, s, *t: (h, b, tile_of(b, back(s), t), 0, 0))
        states = pl.BlockSpec((HB, None, NC, VW, KW), lambda b, h, s, *t: (h, b, back(s), 0, 0))
        outputs["v_new"] = (shape((H, B, length, VW), layout.dtype), tokens(VW, back))
        outputs["slab"] = (shape((H, B, length // CHUNK, CHUNK, 2 * CHUNK), layout.dtype), slab)
        outputs["states"] = (shape((H, B, S * NC, VW, KW), layout.dtype), states)
    return inputs, outputs
