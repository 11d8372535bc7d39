"""The backward: one fused kernel, or the split into three (:mod:`ops.kda_tpu.pallas.backward_split`).

The fused kernel is one reverse walk over the steps of the forward. Per step (a tile of NC chunks, HB heads, one
segment) it reads query, key, gate, beta, the output's cotangent and the residuals (v_new, slab, states), keeps the
running gradient of the state in scratch, and writes the gradients of query, key, value, raw gate and beta; those of
a_log and delta_time_bias add up in one block a head, that of the initial state leaves at its slot's first step.
Everything in between (w, qg, kg, dv_new, dAqk, the pair coefficients) stays on chip.
:mod:`ops.kda_tpu.pallas.backward_chunk` has the mathematics.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ops.kda_tpu.contract import Problem
from ops.kda_tpu.pallas.backward_chunk import Form, chunk_gradients, gate_matrix, prefix_matrix, saved_arrays
from ops.kda_tpu.pallas.backward_launch import Kernel, Launch, Operand, Result
from ops.kda_tpu.pallas.backward_pairs import PairForm
from ops.kda_tpu.pallas.backward_split import split_backward, split_kernels
from ops.kda_tpu.pallas.backward_view import PARAMETER_ROWS
from ops.kda_tpu.pallas.common import LOG2_E, GateForm, gate_rows, widen
from ops.kda_tpu.pallas.config import Config
from ops.kda_tpu.pallas.residuals import Residuals, compute_dtype, has_masks, kernel_width
from ops.kda_tpu.pallas.schedule import StepTable

Array = jax.Array


class Gradients(NamedTuple):
    """Gradients in the dtype of their inputs; None where there is no input (or none was asked for)."""

    query: Array
    key: Array
    value: Array
    gate: Array
    beta: Array
    a_log: Array | None
    delta_time_bias: Array | None
    initial_state: Array | None


def backward(
    problem: Problem,
    residuals: Residuals,
    d_output: Array,
    d_final_state: Array | None,
    config: Config,
    interpret: Any,
) -> Gradients:
    """Gradients of every input of the operator.

    Args:
        problem: the validated call.
        residuals: of the forward of the same problem and config.
        d_output: [H, B, T, V] cotangent of the output.
        d_final_state: [B, N, H, K, V] float32 cotangent of the final states; None for zeros.
        config: how the backward is cut.
        interpret: what :func:`pl.pallas_call` takes: False, True or ``pltpu.InterpretParams``.

    Returns:
        Gradients, padding rows exactly zero.
    """
    form = form_of(problem, config)
    launch = Launch(form, problem, residuals.steps, interpret)
    factor = None
    if form.pairs.scheme == "tree":  # its exponents leave no room for small cotangents
        factor = _unit_factor(problem.segment_ids, d_output, d_final_state)
        d_output = _scaled(d_output, factor)
        d_final_state = None if d_final_state is None else _scaled(d_final_state, factor)
    reads = _operands(form, launch, problem, residuals, d_output, d_final_state)
    writes = _results(form, launch, problem)
    if config.backward == "split":
        results = split_backward(form, launch, reads, writes)
    else:
        results = launch.call(_fused_kernel(form), reads, writes)
    gradients = _gradients(form, problem, residuals.steps, d_final_state, results, launch)
    return gradients if factor is None else jax.tree.map(lambda x: _scaled(x, 1 / factor), gradients)


def _unit_factor(ids: Array | None, d_output: Array, d_final_state: Array | None) -> Array:
    """The power of two, within 2^-100 to 2^100, that brings the largest cotangent near 1; padding does not count."""
    size = jnp.abs(d_output.astype(jnp.float32))
    if ids is not None:
        size = jnp.where(ids[:, :, None] > 0, size, 0.0)
    sizes = [size] if d_final_state is None else [size, jnp.abs(d_final_state)]
    largest = jnp.stack([jnp.max(jnp.where(jnp.isfinite(x), x, 0.0), initial=0.0) for x in sizes])
    exponent = jnp.frexp(jnp.max(largest))[1]
    return jnp.ldexp(jnp.float32(1.0), jnp.clip(-exponent, -100, 100))


def _scaled(x: Array, factor: Array) -> Array:
    return (x.astype(jnp.float32) * factor).astype(x.dtype)


def form_of(problem: Problem, config: Config) -> Form:
    """What the kernels' code depends on; of the problem only shapes and dtypes are looked at."""
    gate, dtype = GateForm.of(problem), compute_dtype(problem)
    return Form(
        heads=config.backward_heads,
        chunks=config.chunks_per_step,
        chunk=config.chunk,
        key_dim=kernel_width(problem.query.shape[3]),
        value_dim=kernel_width(problem.value.shape[3]),
        dtype=dtype,
        scale=problem.scale,
        gate=gate,
        normalize=problem.use_qk_l2norm,
        masked=has_masks(problem, config),
        pairs=PairForm.choose(config.sub_block, gate, dtype, problem.scale),
    )


def kernels(form: Form, config: Config) -> list[Kernel]:
    """The kernels that a configuration launches, in order."""
    return split_kernels(form) if config.backward == "split" else [_fused_kernel(form)]


def _fused_kernel(form: Form) -> Kernel:
    return Kernel("kda_backward", chunk_gradients, carries_state=True, saved=saved_arrays(form))


def _operands(
    form: Form,
    launch: Launch,
    problem: Problem,
    residuals: Residuals,
    d_output: Array,
    d_final_state: Array | None,
) -> dict[str, Operand]:
    """Everything that is read, by name."""
    C, K, V = form.chunk, form.key_dim, form.value_dim
    found = {
        "query": Operand(widen(problem.query, K), launch.tokens(K)),
        "key": Operand(widen(problem.key, K), launch.tokens(K)),
        "gate": Operand(widen(problem.gate, K), launch.tokens(K)),
        "beta": Operand(launch.rows_of(_real_beta(problem)), launch.row_block(C)),
        "v_new": Operand(residuals.v_new, launch.tokens(V)),
        "d_output": Operand(widen(d_output, V), launch.tokens(V)),
        "slab": Operand(residuals.slab, launch.chunks(C, 2 * C)),
        "states": Operand(residuals.states, launch.chunks(V, K, by_step=True)),
    }
    for name, matrix in (("prefix_matrix", prefix_matrix(form)), ("gate_matrix", gate_matrix(form))):
        found[name] = Operand(matrix, pl.BlockSpec(matrix.shape, lambda *_: (0, 0)))
    if form.gate.activated:
        found["parameters"] = Operand(gate_rows(problem, K), launch.per_head(PARAMETER_ROWS))
    if form.masked:
        found["ids"] = launch.ids(problem.segment_ids)
    if d_final_state is not None:
        found["d_final"] = Operand(_transposed_states(d_final_state, V, K), launch.per_slot())
    return found


def _results(form: Form, launch: Launch, problem: Problem) -> dict[str, Result]:
    """Everything that is returned, by name."""
    shape, K, V = jax.ShapeDtypeStruct, form.key_dim, form.value_dim
    H, B, T = problem.query.shape[:3]
    found = {}
    for name, width in (("query", K), ("key", K), ("value", V), ("gate", K)):
        dtype = getattr(problem, name).dtype
        found[f"d_{name}"] = Result(shape((H, B, T, width), dtype), launch.tokens(width))
    rows = (B, H // form.heads, launch.padded // form.chunk, form.heads, form.chunk)
    found["d_beta"] = Result(shape(rows, jnp.float32), launch.row_block(form.chunk))
    if form.gate.activated:
        sums = shape((B, H, 2 * PARAMETER_ROWS, K), jnp.float32)
        found["d_parameters"] = Result(sums, launch.per_head(2 * PARAMETER_ROWS, by_batch=True), shared=False)
    if problem.has_initial_state:
        states = shape((B, problem.num_segments, H, V, K), jnp.float32)
        found["d_initial"] = Result(states, launch.per_slot(), shared=False)
    return found


def _gradients(
    form: Form,
    problem: Problem,
    steps: StepTable,
    d_final_state: Array | None,
    results: dict[str, Array],
    launch: Launch,
) -> Gradients:
    K, V = problem.query.shape[3], problem.value.shape[3]
    d_a_log = d_bias = d_initial = None
    if form.gate.activated:
        sums = results["d_parameters"]
        d_a_log = jnp.sum(sums[:, :, PARAMETER_ROWS:], axis=(0, 2, 3))
        if problem.lower_bound is None:
            d_a_log = d_a_log / LOG2_E
        if problem.delta_time_bias is not None:
            d_bias = jnp.sum(sums[:, :, :PARAMETER_ROWS, :K], axis=(0, 2))
            if problem.lower_bound is not None:
                d_a_log = d_a_log + jnp.sum(d_bias * problem.delta_time_bias, axis=1)
    if problem.has_initial_state:
        seen = jnp.any(steps.slot[:, None, :] == jnp.arange(problem.num_segments)[:, None], axis=2)
        passed = jnp.zeros((), jnp.float32) if d_final_state is None else d_final_state
        d_initial = jnp.swapaxes(results["d_initial"], -1, -2)[..., :K, :V]
        d_initial = jnp.where(seen[..., None, None, None], d_initial, passed)
    return Gradients(
        results["d_query"][..., :K],
        results["d_key"][..., :K],
        results["d_value"][..., :V],
        results["d_gate"][..., :K],
        launch.from_rows(results["d_beta"]).astype(problem.beta.dtype),
        d_a_log,
        d_bias,
        d_initial,
    )


def _real_beta(problem: Problem) -> Array:
    """Beta with 1 in padding, which may hold anything: there 0 is divided by its square."""
    if problem.segment_ids is None:
        return problem.beta
    return jnp.where(problem.segment_ids == 0, 1.0, problem.beta)


def _transposed_states(states: Array, value_dim: int, key_dim: int) -> Array:
    """[B, N, H, K, V] as float32 [B, N, H, V, K] of the kernel's widths."""
    states = jnp.swapaxes(states.astype(jnp.float32), -1, -2)
    pad = [(0, 0)] * 3 + [(0, value_dim - states.shape[-2]), (0, key_dim - states.shape[-1])]
    return jnp.pad(states, pad)
