"""Forward kernel: gate, norm, decayed products inside a chunk, exact inverse, state recurrence and output in one.

For each chunk of C = 64 tokens of a head, with G the cumulative log2 decay, gC its last row, h the state on entry
(kept transposed, [V, K], float32) and Aqk, L, A = (I + L)^-1 of :mod:`ops.kda_tpu.pallas.intra`:

    v_new = A (beta (v - (k 2^G) h))        o = scale (q 2^G) h + Aqk v_new        h' = 2^gC h + (k 2^(gC - G))^T v_new

Everything up to A needs no state, so it is computed for many heads and chunks at once, in groups of four, and only the
three lines above run in order along the chunks. Precision with bfloat16 inputs: gates, norms, decays, scores and states
are accumulated in float32; the cumulative decay takes two bfloat16 terms of its operand, the inverse two of both; the
operands of the other products are rounded to bfloat16. With float32 inputs every product has float32 precision.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ops.kda_tpu.contract import Problem
from ops.kda_tpu.pallas.common import (
    Done,
    GateForm,
    Need,
    Stage,
    gate_rows,
    interleave,
    iota,
    log2_decay,
    nn,
    nt,
    rsqrt_of_square_sum,
    tn,
)
from ops.kda_tpu.pallas.config import CHUNK, Config, vmem_limit_bytes
from ops.kda_tpu.pallas.intra import DecaySums, IntraForm, decay_sums, invert, scores, sum_matrix
from ops.kda_tpu.pallas.residuals import Residuals, compute_dtype, kernel_width
from ops.kda_tpu.pallas.schedule import StepTable, pad_segment_ids, padded_length, plan

LEAST_BETA = 2.0**-50
_GROUP = 4  # heads and chunks whose inverses share the matrix unit


@dataclass(frozen=True)
class Layout:
    """What is static in the kernel.

    Attributes:
        heads: heads of a step, HB.
        chunks: chunks of a tile, NC.
        key_width: K of the kernel.
        value_width: V of the kernel.
        dtype: compute dtype.
        scale: factor of the query.
        normalise: whether q and k rows are normalised.
        gate: form of the gate.
        intra: form of the decay inside a chunk.
        masked: whether rows may be padding or of another segment.
        save: whether the residuals are written.
    """

    heads: int
    chunks: int
    key_width: int
    value_width: int
    dtype: jnp.dtype
    scale: float
    normalise: bool
    gate: GateForm
    intra: IntraForm
    masked: bool
    save: bool

    @property
    def terms(self) -> int:
        """Bfloat16 terms that carry the precision of decays and inverses."""
        return 3 if self.dtype == jnp.float32 else 2


@dataclass(frozen=True)
class Unit:
    """One chunk of one head of the step, and where its scratch lies."""

    head: int
    chunk: int
    index: int

    @property
    def rows(self) -> slice:
        """Its rows in the tile."""
        return slice(self.chunk * CHUNK, (self.chunk + 1) * CHUNK)


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
    tile = config.tile
    masked = problem.segment_ids is not None or T % tile != 0
    gate = GateForm.of(problem)
    dtype = compute_dtype(problem)
    layout = Layout(
        heads=config.heads_per_step,
        chunks=config.chunks_per_step,
        key_width=kernel_width(K),
        value_width=kernel_width(V),
        dtype=dtype,
        scale=problem.scale,
        normalise=problem.use_qk_l2norm,
        gate=gate,
        intra=IntraForm.choose(config.sub_block, gate, local_sums=dtype == jnp.float32),
        masked=masked,
        save=save,
    )
    steps = plan(problem.segment_ids, problem.num_segments, B, T, tile)
    inputs, outputs = _operands(problem, layout, steps)
    tables = steps.flat() if masked else ()
    names = [*(f"table_{n}" for n in range(len(tables))), *inputs, *outputs, "q", "k", "sums", "matrices", "mask"]
    results = pl.pallas_call(
        lambda *refs: _kernel(layout, steps.num_steps, SimpleNamespace(**dict(zip(names, refs, strict=True)))),
        out_shape=[shape for shape, _ in outputs.values()],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(tables),
            grid=(B, H // layout.heads, steps.num_steps),
            in_specs=[spec for _, spec in inputs.values()],
            out_specs=[spec for _, spec in outputs.values()],
            scratch_shapes=_scratch(layout),
        ),
        input_output_aliases={len(tables) + list(inputs).index("initial"): list(outputs).index("state")},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=vmem_limit_bytes()
        ),
        interpret=interpret,
        name="kda_forward",
    )(*tables, *(array for array, _ in inputs.values()))
    found = dict(zip(outputs, results, strict=True))
    final_state = jnp.swapaxes(found["state"], 3, 4)[..., :K, :V]
    residuals = Residuals(found["v_new"], found["slab"], found["states"], steps) if save else None
    return found["output"][..., :V], final_state, residuals


def _operands(problem: Problem, layout: Layout, steps: StepTable) -> tuple[dict[str, Any], dict[str, Any]]:
    """Inputs by name as (array, block) and outputs as (shape, block)."""
    H, B, T, _ = problem.query.shape
    N, S = problem.num_segments, steps.num_steps
    HB, NC, KW, VW = layout.heads, layout.chunks, layout.key_width, layout.value_width
    tile = NC * CHUNK
    length = padded_length(T, tile)

    def at(table: int, tables: tuple[Any, ...], b: Any, s: Any) -> Any:
        """Entry of the step table; without one a step is its tile, in slot 0."""
        return tables[table][b * S + s] if tables else (s, 0)[table]

    def tokens(width: int) -> pl.BlockSpec:
        return pl.BlockSpec((HB, None, tile, width), lambda b, h, s, *t: (h, b, at(0, t, b, s), 0))

    def by_head(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec((HB, *shape), lambda b, h, s, *t: (h, *(0 for _ in shape)))

    state = pl.BlockSpec((None, None, HB, VW, KW), lambda b, h, s, *t: (b, at(1, t, b, s), h, 0, 0))
    beta = jnp.pad(problem.beta.astype(jnp.float32), ((0, 0), (0, 0), (0, length - T)))
    beta = beta.reshape(H // HB, HB, B, length // CHUNK, CHUNK).transpose(2, 0, 3, 1, 4)
    matrix = jnp.tile(jnp.asarray(sum_matrix(layout.intra), jnp.bfloat16), (1, layout.terms))
    initial = jnp.swapaxes(_widen(_widen(problem.initial_state, VW), KW, axis=3), 3, 4)
    inputs: dict[str, Any] = {
        "query": (_widen(problem.query, KW), tokens(KW)),
        "key": (_widen(problem.key, KW), tokens(KW)),
        "value": (_widen(problem.value, VW), tokens(VW)),
        "gate": (_widen(problem.gate, KW), tokens(KW)),
        "beta": (beta, pl.BlockSpec((None, None, NC, HB, CHUNK), lambda b, h, s, *t: (b, h, at(0, t, b, s), 0, 0))),
        "sum_matrix": (matrix, pl.BlockSpec(matrix.shape, lambda b, h, s, *t: (0, 0))),
        "initial": (initial, state),
    }
    if layout.gate.activated:
        inputs["gate_rows"] = (gate_rows(problem, KW), by_head(8, KW))
    if layout.masked:
        ids = pad_segment_ids(problem.segment_ids, B, T, tile).reshape(B, length // tile, NC, CHUNK)
        inputs["ids"] = (ids, pl.BlockSpec((None, None, NC, CHUNK), lambda b, h, s, *t: (b, at(0, t, b, s), 0, 0)))
    shape = jax.ShapeDtypeStruct
    outputs: dict[str, Any] = {
        "output": (shape((H, B, T, VW), problem.value.dtype), tokens(VW)),
        "state": (shape((B, N, H, VW, KW), jnp.float32), state),
    }
    if layout.save:
        chunks = pl.BlockSpec((HB, None, NC, CHUNK, 2 * CHUNK), lambda b, h, s, *t: (h, b, at(0, t, b, s), 0, 0))
        states = pl.BlockSpec((HB, None, NC, VW, KW), lambda b, h, s, *t: (h, b, s, 0, 0))
        outputs["v_new"] = (shape((H, B, length, VW), layout.dtype), tokens(VW))
        outputs["slab"] = (shape((H, B, length // CHUNK, CHUNK, 2 * CHUNK), layout.dtype), chunks)
        outputs["states"] = (shape((H, B, S * NC, VW, KW), layout.dtype), states)
    return inputs, outputs


def _widen(x: jax.Array, width: int, axis: int = -1) -> jax.Array:
    """``x`` with zeros appended along ``axis`` up to ``width``."""
    pads = [(0, 0)] * x.ndim
    pads[axis] = (0, width - x.shape[axis])
    return jnp.pad(x, pads) if width != x.shape[axis] else x


def _scratch(layout: Layout) -> list[Any]:
    units, dtype = layout.heads * layout.chunks, layout.dtype
    return [
        pltpu.VMEM((units, CHUNK, layout.key_width), dtype),
        pltpu.VMEM((units, CHUNK, layout.key_width), dtype),
        pltpu.VMEM((units * layout.intra.sums, CHUNK, layout.key_width), jnp.float32),
        pltpu.VMEM((units, 2 * CHUNK, CHUNK), dtype),
        pltpu.VMEM((layout.chunks if layout.masked else 1, CHUNK, 128), jnp.float32),
    ]


def _kernel(layout: Layout, num_steps: int, refs: SimpleNamespace) -> None:
    """One grid step: ``chunks`` chunks of ``heads`` heads."""
    refs.visit = _Visit.read(layout, num_steps, refs)

    @pl.when(refs.visit.is_first)
    def _load_initial_state() -> None:
        def copy(head: jax.Array, carry: None) -> None:
            refs.state[head] = refs.initial[head]

        jax.lax.fori_loop(0, layout.heads, copy, None)

    if layout.masked:
        for chunk in range(layout.chunks):
            refs.mask[chunk] = jnp.broadcast_to(_valid(refs, chunk).astype(jnp.float32), (128, CHUNK)).T
    units = [
        Unit(head, chunk, chunk * layout.heads + head) for chunk in range(layout.chunks) for head in range(layout.heads)
    ]
    groups = [units[n : n + _GROUP] for n in range(0, len(units), _GROUP)]
    interleave(_stages(layout, refs, groups), done=[("state", head, -1) for head in range(layout.heads)])


def _stages(layout: Layout, refs: SimpleNamespace, groups: Sequence[Sequence[Unit]]) -> Iterator[tuple[int, Stage]]:
    """Stages of a step with the rounds they start in: groups are staggered, so that unlike phases overlap."""
    for n, group in enumerate(groups):
        yield 3 * n, _intra(layout, refs, group)
        for unit in group:
            yield 3 * n, _recur(layout, refs, unit, group)


@dataclass(frozen=True)
class _Visit:
    """What the step table says about this step; without a table there is one slot and a tile is visited once."""

    is_first: Any
    fresh: Any
    segment: Any

    @classmethod
    def read(cls, layout: Layout, num_steps: int, refs: SimpleNamespace) -> _Visit:
        step = pl.program_id(2)
        if not layout.masked:
            return cls(step == 0, True, 1)
        at = pl.program_id(0) * num_steps + step
        return cls(refs.table_3[at] == 1, refs.table_5[at] == 1, refs.table_2[at])


def _valid(refs: SimpleNamespace, chunk: int) -> jax.Array:
    """Whether a token of the chunk takes part in this step [1, C]."""
    return refs.ids[chunk : chunk + 1] == refs.visit.segment


def _select(layout: Layout, refs: SimpleNamespace, unit: Unit, x: jax.Array, other: Any = 0.0) -> jax.Array:
    """``x`` [C, width] on rows that take part, ``other`` on the rest."""
    if not layout.masked:
        return x
    mask = refs.mask[unit.chunk]
    wide = jnp.concatenate([mask] * -(-x.shape[1] // 128), axis=1)[:, : x.shape[1]]
    return jnp.where(wide > 0.5, x, other)


def _write(layout: Layout, refs: SimpleNamespace, unit: Unit, ref: Any, at: Any, x: jax.Array) -> None:
    """Stores rows that take part; the others keep what earlier visits left, zero if there was none."""
    if layout.masked:
        x = _select(layout, refs, unit, x, jnp.where(refs.visit.fresh, 0.0, ref[at].astype(jnp.float32)))
    ref[at] = x.astype(ref.dtype)


def _beta(layout: Layout, refs: SimpleNamespace, unit: Unit) -> jax.Array:
    """Write strengths [1, C]: positive, but zero on rows that take no part."""
    beta = jnp.maximum(refs.beta[unit.chunk, unit.head : unit.head + 1], LEAST_BETA)
    return jnp.where(_valid(refs, unit.chunk), beta, 0.0) if layout.masked else beta


def _prepare(layout: Layout, refs: SimpleNamespace, unit: Unit) -> jax.Array:
    """Stores the scaled query and the key, normalised if asked, and returns the log2 decay [C, K]."""
    at = (unit.head, unit.rows)
    for source, target, scale in ((refs.query, refs.q, layout.scale), (refs.key, refs.k, 1.0)):
        x = _select(layout, refs, unit, source[at].astype(jnp.float32))
        factor: Any = rsqrt_of_square_sum(x) * scale if layout.normalise else scale
        target[unit.index] = (x * factor).astype(layout.dtype)
    rows = refs.gate_rows[unit.head] if layout.gate.activated else None
    return _select(layout, refs, unit, log2_decay(refs.gate[at].astype(jnp.float32), rows, layout.gate))


def _sums(layout: Layout, refs: SimpleNamespace, unit: Unit) -> DecaySums:
    first = unit.index * layout.intra.sums
    return DecaySums(layout.intra, lambda n, rows: refs.sums[first + n, rows])


def _loader(ref: Any, unit: Unit) -> Callable[[], jax.Array]:
    return lambda: ref[unit.index]


def _intra(layout: Layout, refs: SimpleNamespace, group: Sequence[Unit]) -> Stage:
    """What needs no state, for a group: leaves [A beta ; Aqk A beta] (or [A beta ; Aqk] if nothing is saved)."""
    decays = [_prepare(layout, refs, unit) for unit in group]
    yield None
    for unit, found in zip(group, decay_sums(decays, refs.sum_matrix[...], layout.intra), strict=True):
        for n, x in enumerate(found):
            refs.sums[unit.index * layout.intra.sums + n] = x
    yield None
    sums = [_sums(layout, refs, unit) for unit in group]
    q_k = ([_loader(ref, unit) for unit in group] for ref in (refs.q, refs.k))
    pairs = yield from scores(sums, *q_k)
    eye = iota((CHUNK, CHUNK), 0) == iota((CHUNK, CHUNK), 1)
    lower = []
    for unit, (_, kk) in zip(group, pairs, strict=True):
        column = jnp.sum(jnp.where(eye, _beta(layout, refs, unit), 0.0), axis=1, keepdims=True)
        lower.append(kk * column)
    aqk = [qk.astype(layout.dtype) for qk, _ in pairs]
    yield None
    inverse = yield from invert(lower, layout.terms)
    a_beta = [a * _beta(layout, refs, unit) for a, unit in zip(inverse, group, strict=True)]
    rounded = [a.astype(layout.dtype) for a in a_beta]
    for unit, a in zip(group, rounded, strict=True):
        refs.matrices[unit.index, :CHUNK] = a
    if layout.save:
        products = [nn(qk, a) for qk, a in zip(aqk, rounded, strict=True)]
        yield None
        for unit, a, qk_a in zip(group, a_beta, products, strict=True):
            refs.matrices[unit.index, CHUNK:] = qk_a.astype(layout.dtype)
            slab = (jnp.concatenate([a, qk_a], axis=0) * (-1.0 / layout.scale)).astype(layout.dtype).T
            _write(layout, refs, unit, refs.slab, (unit.head, unit.chunk), slab)
    else:
        for unit, qk in zip(group, aqk, strict=True):
            refs.matrices[unit.index, CHUNK:] = qk
    yield Done(("intra", group[0].index))


def _recur(layout: Layout, refs: SimpleNamespace, unit: Unit, group: Sequence[Unit]) -> Stage:
    """State and output of one chunk of one head."""
    yield Need(("intra", group[0].index))
    sums, dtype = _sums(layout, refs, unit), layout.dtype
    k, q = refs.k[unit.index].astype(jnp.float32), refs.q[unit.index].astype(jnp.float32)
    gamma = jnp.exp2(sums.prefix())
    reading = jnp.concatenate([k * gamma, q * gamma], axis=0).astype(dtype)
    yield Need(("state", unit.head, unit.chunk - 1))
    h = refs.state[unit.head]
    if layout.save:
        refs.states[unit.head, unit.chunk] = h.astype(dtype)
    read = nt(reading, h.astype(dtype))
    yield None
    at = (unit.head, unit.rows)
    value = _select(layout, refs, unit, refs.value[at].astype(jnp.float32))
    rest = (value - read[:CHUNK]).astype(dtype)
    matrices = refs.matrices[unit.index]
    written = nn(matrices if layout.save else matrices[:CHUNK], rest)
    yield None
    v_new = written[:CHUNK].astype(dtype)
    k_last = (refs.k[unit.index].astype(jnp.float32) * jnp.exp2(sums.suffix())).astype(dtype)
    update = tn(v_new, k_last)
    within = written[CHUNK:] if layout.save else nn(matrices[CHUNK:], v_new)
    yield None
    refs.state[unit.head] = h * jnp.exp2(sums.total()) + update
    yield Done(("state", unit.head, unit.chunk))
    _write(layout, refs, unit, refs.output, at, read[CHUNK:] + within)
    if layout.save:
        _write(layout, refs, unit, refs.v_new, at, v_new.astype(jnp.float32))
