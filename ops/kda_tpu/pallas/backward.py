"""The fused backward kernel: one reverse walk over the steps of the forward.

Per step (a tile of NC chunks, HB heads, one segment) it reads query, key, gate, beta, the output's cotangent and the
residuals (v_new, slab, states), keeps the running gradient of the state in scratch, and writes the gradients of query,
key, value, raw gate and beta; those of a_log and delta_time_bias add up in one block a head, that of the initial state
leaves at its slot's first step. Everything in between (w, qg, kg, dv_new, dAqk, the pair coefficients) stays on chip.
:mod:`ops.kda_tpu.pallas.backward_chunk` has the mathematics.

Rows of other segments and padding are no-op tokens: zero query, key, v_new, cotangent and log decay. A tile that is
visited several times collects the rows of each visit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ops.kda_tpu.contract import Problem
from ops.kda_tpu.pallas.backward_chunk import Form, Joint, chunk_gradients, gate_matrix, prefix_matrix, saved_arrays
from ops.kda_tpu.pallas.backward_pairs import PairForm
from ops.kda_tpu.pallas.common import LOG2_E, GateForm, gate_rows, interleave
from ops.kda_tpu.pallas.config import Config, current_chip, vmem_limit_bytes
from ops.kda_tpu.pallas.residuals import Residuals
from ops.kda_tpu.pallas.schedule import StepTable, pad_segment_ids

Array = jax.Array

_PARAMETER_ROWS = 8  # of a head's block of gate parameters and of each of its two sums

# Program order: chunk c starts _LAG rounds behind chunk c + 1, groups of _GROUP heads start one round after another.
_LAG = 3
_GROUP = 4
_STAGGER = 4


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


@dataclass(frozen=True)
class Refs:
    """The kernel's refs: blocks [HB, NC * C, ...] of tokens and [HB, NC, ...] of chunks, scratch by name."""

    parameters: Any
    query: Any
    key: Any
    gate: Any
    beta: Any
    v_new: Any
    d_output: Any
    slab: Any
    states: Any
    ids: Any
    d_final: Any
    prefix_matrix: Any
    gate_matrix: Any
    d_query: Any
    d_key: Any
    d_value: Any
    d_gate: Any
    d_beta: Any
    d_parameters: Any
    d_initial: Any
    d_state: Any
    mask: Any
    packed_mask: Any
    saved: dict[str, Any]


class ChunkView:
    """One chunk of one head in the kernel's refs; loads are float32 or the compute dtype, masked, [C, K] or [C, V]."""

    def __init__(self, form: Form, refs: Refs, head: int, chunk: int) -> None:
        self._form, self._refs, self._head, self._chunk = form, refs, head, chunk
        self._rows = slice(chunk * form.chunk, (chunk + 1) * form.chunk)
        self.here = (head, chunk)
        self.later = (head, chunk + 1)

    def masked(self, x: Array) -> Array:
        """``x`` (float32 or bfloat16) with zeros in the rows that take no part, whatever they held."""
        return _from_words(_to_words(x) & self._row_bits(x), x.dtype) if self._form.masked else x

    def _row_bits(self, x: Array) -> Array:
        """All bits set in the words of rows that take part, for :func:`_to_words` of ``x``."""
        ref = self._refs.mask if x.dtype == jnp.float32 else self._refs.packed_mask
        return ref[self._chunk, :, : x.shape[1]]

    def raw(self, name: str) -> Array:
        """Rows of an input, float32."""
        return self.masked(getattr(self._refs, name)[self._head, self._rows].astype(jnp.float32))

    def _operand(self, name: str) -> Array:
        """Rows of an input in the compute dtype."""
        x = getattr(self._refs, name)[self._head, self._rows]
        if x.dtype != self._form.dtype:
            return self.masked(x.astype(jnp.float32)).astype(self._form.dtype)
        return self.masked(x)

    def gate(self) -> Array:
        """The gate input."""
        return self.raw("gate")

    def gate_row(self, row: int) -> Array:
        """A row [1, K] of the gate's parameters, see :func:`gate_rows`."""
        return self._refs.parameters[self._head, row : row + 1]

    def query(self) -> Array:
        """The query as the mathematics sees it, float32."""
        return self.saved("query") if self._form.normalize else self.raw("query")

    def key(self) -> Array:
        """The key as the mathematics sees it, float32."""
        return self.saved("key") if self._form.normalize else self.raw("key")

    def v_new(self) -> Array:
        """Saved v_new, compute dtype."""
        return self._operand("v_new")

    def d_output(self) -> Array:
        """Cotangent of the output, compute dtype."""
        return self._operand("d_output")

    def slab(self) -> Array:
        """Saved slab [C, 2 C]."""
        return self._refs.slab[self._head, self._chunk]

    def state(self) -> Array:
        """State on entry, [V, K]."""
        return self._refs.states[self._head, self._chunk]

    def beta(self) -> Array:
        """Beta as a row [1, C]."""
        return self._refs.beta[self._chunk, pl.ds(self._head, 1)]

    def d_state(self) -> Array:
        """Running gradient of the state, [V, K]."""
        return self._refs.d_state[self._head]

    def set_d_state(self, x: Array) -> None:
        """Replaces it."""
        self._refs.d_state[self._head] = x

    def save(self, name: str, x: Array) -> None:
        """Keeps ``x`` for a later stage."""
        ref = self._refs.saved[name]
        ref[self._head * self._form.chunks + self._chunk] = x.astype(ref.dtype)

    def saved(self, name: str) -> Array:
        """What :meth:`save` kept."""
        return self._refs.saved[name][self._head * self._form.chunks + self._chunk]

    def _add(self, ref: Any, x: Array) -> None:
        """Stores the rows that take part; the others are zero or an earlier visit's."""
        index, x = (self._head, self._rows), x.astype(ref.dtype)
        if self._form.masked:
            x = _from_words(_to_words(self.masked(x)) | _to_words(ref[index]), ref.dtype)
        ref[index] = x

    def add_d_query(self, x: Array) -> None:
        """Stores this visit's rows of d_query."""
        self._add(self._refs.d_query, x)

    def add_d_key(self, x: Array) -> None:
        """Stores this visit's rows of d_key."""
        self._add(self._refs.d_key, x)

    def add_d_value(self, x: Array) -> None:
        """Stores this visit's rows of d_value."""
        self._add(self._refs.d_value, x)

    def add_d_gate(self, x: Array) -> None:
        """Stores this visit's rows of d_gate."""
        self._add(self._refs.d_gate, x)

    def add_d_beta(self, x: Array) -> None:
        """Adds this visit's part of d_beta, [1, C], zero where no row takes part."""
        ref, index = self._refs.d_beta, (self._chunk, pl.ds(self._head, 1))
        ref[index] = ref[index] + x if self._form.masked else x

    def add_d_parameters(self, d_bias: Array, d_a_log: Array) -> None:
        """Adds per-row gradients [C, K] of bias and a_log to the head's sums, eight rows kept apart."""
        ref, R = self._refs.d_parameters, _PARAMETER_ROWS
        for offset, x in ((0, d_bias), (R, d_a_log)):
            total = ref[self._head, offset : offset + R]
            for row in range(0, self._form.chunk, R):
                total = total + x[row : row + R]
            ref[self._head, offset : offset + R] = total


def _kernel(form: Form, steps: int, names: Sequence[str], *all_refs: Any) -> None:
    tile, slot, segment, is_first, is_last, settled, *blocks = all_refs
    del tile, slot
    refs = _refs(form, names, blocks)
    batch, turn = pl.program_id(0), pl.program_id(2)
    step = batch * steps + steps - 1 - turn

    @pl.when(is_last[step] == 1)
    def _() -> None:
        refs.d_state[...] = jnp.zeros_like(refs.d_state) if refs.d_final is None else refs.d_final[...]

    if refs.d_parameters is not None:

        @pl.when(turn == 0)
        def _() -> None:
            refs.d_parameters[...] = jnp.zeros_like(refs.d_parameters)

    if form.masked:
        _make_mask(form, refs, segment[step])

        @pl.when(settled[step] == 1)
        def _() -> None:
            for ref in (refs.d_query, refs.d_key, refs.d_value, refs.d_gate, refs.d_beta):
                ref[...] = jnp.zeros_like(ref)

    _emit_chunks(form, refs)

    if refs.d_initial is not None:

        @pl.when(is_first[step] == 1)
        def _() -> None:
            refs.d_initial[...] = refs.d_state[...]


def _refs(form: Form, names: Sequence[str], blocks: Sequence[Any]) -> Refs:
    named: dict[str, Any] = dict.fromkeys(
        ("parameters", "ids", "d_final", "d_parameters", "d_initial", "mask", "packed_mask")
    )  # those a form may do without
    saved = saved_arrays(form)
    named |= dict(zip(names, blocks, strict=True))
    return Refs(saved={name: named.pop(f"saved_{name}") for name in saved}, **named)


def _make_mask(form: Form, refs: Refs, segment: Array) -> None:
    """Rows of the step's segment as all-ones words, once for all heads: a row of ids turned into columns.

    The packed mask is for bfloat16, two rows a word: from the bits of 1.0, 0x3F80.
    """
    C, width = form.chunk, refs.mask.shape[2]
    eye = jax.lax.broadcasted_iota(jnp.int32, (C, C), 0) == jax.lax.broadcasted_iota(jnp.int32, (C, C), 1)
    for chunk in range(form.chunks):
        here = (refs.ids[chunk : chunk + 1] == segment).astype(jnp.float32)
        column = jnp.sum(jnp.where(eye, here, 0.0), axis=1, keepdims=True)
        rows = jnp.broadcast_to(column, (C, width))
        refs.mask[chunk] = jnp.where(rows > 0, -1, 0)
        refs.packed_mask[chunk] = ((_to_words(rows.astype(jnp.bfloat16)) >> 7) & 0x00010001) * 0xFFFF


def _to_words(x: Array) -> Array:
    """Bits of ``x`` [C, n] as int32, [C, n] for float32 and [C / 2, n] for bfloat16."""
    return pltpu.bitcast(x, jnp.int32)


def _from_words(words: Array, dtype: Any) -> Array:
    """Inverse of :func:`_to_words`."""
    return pltpu.bitcast(words, dtype)


def _emit_chunks(form: Form, refs: Refs) -> None:
    """The step's code: every head's chunks from the last to the first, in the order that hides latencies."""
    pair = 2 if form.key_dim <= 128 and form.heads % 2 == 0 else 1
    stages = []
    prefixes: dict[tuple[int, int], Joint] = {}
    gates: dict[tuple[int, int], Joint] = {}
    for head in range(form.heads):
        for chunk in reversed(range(form.chunks)):
            joint = (head // pair, chunk)
            prefix = prefixes.setdefault(joint, Joint(lambda: refs.prefix_matrix[...], pair))
            gate = gates.setdefault(joint, Joint(lambda: refs.gate_matrix[...], pair))
            start = _LAG * (form.chunks - 1 - chunk) + head // _GROUP % _STAGGER
            stages.append((start, chunk_gradients(form, ChunkView(form, refs, head, chunk), prefix, gate)))
    interleave(stages, done=[(head, form.chunks) for head in range(form.heads)])


# ---- launch


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
        config: how the kernel is cut.
        interpret: what :func:`pl.pallas_call` takes: False, True or ``pltpu.InterpretParams``.

    Returns:
        Gradients, padding rows exactly zero.
    """
    form = _form(problem, residuals, config)
    launch = _Launch(form, problem, residuals.steps, interpret)
    K, V = form.key_dim, form.value_dim
    launch.read("query", _widen(problem.query, K), launch.tokens(K))
    launch.read("key", _widen(problem.key, K), launch.tokens(K))
    launch.read("gate", _widen(problem.gate, K), launch.tokens(K))
    launch.read("beta", launch.rows_of(_real_beta(problem)), launch.row_block())
    launch.read("v_new", residuals.v_new, launch.tokens(V))
    launch.read("d_output", _widen(d_output, V), launch.tokens(V))
    launch.read("slab", residuals.slab, launch.chunks(form.chunk, 2 * form.chunk))
    launch.read("states", residuals.states, launch.chunks(V, K, by_step=True))
    for name, matrix in (("prefix_matrix", prefix_matrix(form)), ("gate_matrix", gate_matrix(form))):
        launch.read(name, matrix, pl.BlockSpec(matrix.shape, lambda *_: (0, 0)))
    if form.gate.activated:
        launch.read("parameters", gate_rows(problem, K), launch.per_head(_PARAMETER_ROWS))
    if form.masked:
        launch.read("ids", launch.ids(problem.segment_ids), launch.ids_block())
    if d_final_state is not None:
        launch.read("d_final", _transposed_states(d_final_state, V, K), launch.per_slot())
    tokens = problem.query.shape[:3]
    for name, width in (("query", K), ("key", K), ("value", V), ("gate", K)):
        launch.write(f"d_{name}", (*tokens, width), getattr(problem, name).dtype, launch.tokens(width))
    launch.write("d_beta", launch.rows_of(problem.beta).shape, jnp.float32, launch.row_block())
    if form.gate.activated:
        launch.write("d_parameters", launch.parameter_sums(), jnp.float32, launch.per_head(2 * _PARAMETER_ROWS, True))
    if problem.has_initial_state:
        launch.write("d_initial", launch.state_shape(), jnp.float32, launch.per_slot())
    return _gradients(form, problem, residuals.steps, d_final_state, launch.run(), launch)


def _form(problem: Problem, residuals: Residuals, config: Config) -> Form:
    gate, dtype = GateForm.of(problem), residuals.v_new.dtype
    return Form(
        heads=config.backward_heads,
        chunks=config.chunks_per_step,
        chunk=config.chunk,
        key_dim=residuals.states.shape[-1],
        value_dim=residuals.states.shape[-2],
        dtype=dtype,
        scale=problem.scale,
        gate=gate,
        normalize=problem.use_qk_l2norm,
        masked=problem.segment_ids is not None or problem.query.shape[2] % config.tile != 0,
        pairs=PairForm.choose(config.sub_block, gate, dtype, problem.scale),
    )


class _Launch:
    """Collects the kernel's operands, results and block specs, and calls it."""

    def __init__(self, form: Form, problem: Problem, steps: StepTable, interpret: Any) -> None:
        self._form, self._interpret = form, interpret
        self._heads, self._batch, self._tokens = problem.query.shape[:3]
        self._slots = problem.num_segments
        self._steps = steps
        self._reads: list[tuple[str, Array, pl.BlockSpec]] = []
        self._writes: list[tuple[str, jax.ShapeDtypeStruct, pl.BlockSpec]] = []

    # A block index is computed from the grid position (batch row b, head group i, turn) and the prefetched table; the
    # walk is reversed, so turn j is step S - 1 - j.
    def _at(self, index: Callable[[Any, Any, Any, Any, Any], tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
        steps = self._steps.num_steps

        def index_map(b: Any, i: Any, turn: Any, tile: Any, slot: Any, *_: Any) -> tuple[Any, ...]:
            step = steps - 1 - turn
            return index(b, i, step, tile[b * steps + step], slot[b * steps + step])

        return index_map

    def read(self, name: str, array: Array, spec: pl.BlockSpec) -> None:
        """Adds an operand."""
        self._reads.append((name, array, spec))

    def write(self, name: str, shape: tuple[int, ...], dtype: Any, spec: pl.BlockSpec) -> None:
        """Adds a result."""
        self._writes.append((name, jax.ShapeDtypeStruct(shape, dtype), spec))

    def tokens(self, width: int) -> pl.BlockSpec:
        """Block of [H, B, T, width]: the step's tile."""
        form = self._form
        rows = form.chunks * form.chunk
        return pl.BlockSpec((form.heads, None, rows, width), self._at(lambda b, i, step, tile, slot: (i, b, tile, 0)))

    def chunks(self, rows: int, width: int, by_step: bool = False) -> pl.BlockSpec:
        """Block of [H, B, chunks, rows, width]: the chunks of the step's tile, or those saved by step."""
        form = self._form
        return pl.BlockSpec(
            (form.heads, None, form.chunks, rows, width),
            self._at(lambda b, i, step, tile, slot: (i, b, step if by_step else tile, 0, 0)),
        )

    def rows_of(self, x: Array) -> Array:
        """[H, B, T] as rows of chunks, float32 [B, H / HB, Tp / C, HB, C]."""
        form = self._form
        x = jnp.pad(x.astype(jnp.float32), ((0, 0), (0, 0), (0, self._padded() - self._tokens)))
        x = x.reshape(self._heads // form.heads, form.heads, self._batch, -1, form.chunk)
        return x.transpose(2, 0, 3, 1, 4)

    def from_rows(self, x: Array) -> Array:
        """Inverse of :meth:`rows_of`."""
        return x.transpose(1, 3, 0, 2, 4).reshape(self._heads, self._batch, -1)[:, :, : self._tokens]

    def row_block(self) -> pl.BlockSpec:
        """Block of what :meth:`rows_of` gives."""
        form = self._form
        return pl.BlockSpec(
            (None, None, form.chunks, form.heads, form.chunk),
            self._at(lambda b, i, step, tile, slot: (b, i, tile, 0, 0)),
        )

    def ids(self, segment_ids: Array | None) -> Array:
        """Segment ids by chunk, int32 [B, tiles, NC, C]."""
        form = self._form
        rows = form.chunks * form.chunk
        ids = pad_segment_ids(segment_ids, self._batch, self._tokens, rows)
        return ids.reshape(self._batch, -1, form.chunks, form.chunk)

    def ids_block(self) -> pl.BlockSpec:
        """Block of :meth:`ids`: the step's tile."""
        form = self._form
        return pl.BlockSpec(
            (None, None, form.chunks, form.chunk), self._at(lambda b, i, step, tile, slot: (b, tile, 0, 0))
        )

    def per_head(self, rows: int, by_batch: bool = False) -> pl.BlockSpec:
        """Block of [B, H, rows, K] or [H, rows, K], the same for every step."""
        form = self._form
        block = (form.heads, rows, form.key_dim)
        if by_batch:
            return pl.BlockSpec((None, *block), self._at(lambda b, i, step, tile, slot: (b, i, 0, 0)))
        return pl.BlockSpec(block, self._at(lambda b, i, step, tile, slot: (i, 0, 0)))

    def per_slot(self) -> pl.BlockSpec:
        """Block of [B, N, H, V, K]: the step's slot."""
        form = self._form
        return pl.BlockSpec(
            (None, None, form.heads, form.value_dim, form.key_dim),
            self._at(lambda b, i, step, tile, slot: (b, slot, i, 0, 0)),
        )

    def parameter_sums(self) -> tuple[int, ...]:
        """Shape of the sums of gate parameter gradients."""
        return (self._batch, self._heads, 2 * _PARAMETER_ROWS, self._form.key_dim)

    def state_shape(self) -> tuple[int, ...]:
        """Shape of transposed states."""
        return (self._batch, self._slots, self._heads, self._form.value_dim, self._form.key_dim)

    def _padded(self) -> int:
        rows = self._form.chunks * self._form.chunk
        return -(-self._tokens // rows) * rows

    def run(self) -> dict[str, Array]:
        """Calls the kernel; results by name."""
        form = self._form
        C, K, V = form.chunk, form.key_dim, form.value_dim
        scratch = {"d_state": pltpu.VMEM((form.heads, V, K), jnp.float32)}
        if form.masked:
            scratch["mask"] = pltpu.VMEM((form.chunks, C, max(K, V)), jnp.int32)
            scratch["packed_mask"] = pltpu.VMEM((form.chunks, C // 2, max(K, V)), jnp.int32)
        for name, dtype in saved_arrays(form).items():
            scratch[f"saved_{name}"] = pltpu.VMEM((form.heads * form.chunks, C, K), dtype)
        names = [x[0] for x in self._reads] + [x[0] for x in self._writes] + list(scratch)
        table = self._steps
        prefetch = (table.tile, table.slot, table.segment, table.is_first, table.is_last, table.settled)
        results = pl.pallas_call(
            functools.partial(_kernel, form, table.num_steps, names),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=len(prefetch),
                grid=(self._batch, self._heads // form.heads, table.num_steps),
                in_specs=[spec for _, _, spec in self._reads],
                out_specs=[spec for _, _, spec in self._writes],
                scratch_shapes=list(scratch.values()),
            ),
            out_shape=[shape for _, shape, _ in self._writes],
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel", "parallel", "arbitrary"),
                vmem_limit_bytes=vmem_limit_bytes(current_chip()),
            ),
            interpret=self._interpret,
            name="kda_backward",
        )(*(x.reshape(-1) for x in prefetch), *(array for _, array, _ in self._reads))
        return dict(zip((name for name, _, _ in self._writes), results, strict=True))


def _gradients(
    form: Form,
    problem: Problem,
    steps: StepTable,
    d_final_state: Array | None,
    results: dict[str, Array],
    launch: _Launch,
) -> Gradients:
    K, V = problem.query.shape[3], problem.value.shape[3]
    d_a_log = d_bias = d_initial = None
    if form.gate.activated:
        sums = results["d_parameters"]
        d_a_log = jnp.sum(sums[:, :, _PARAMETER_ROWS:], axis=(0, 2, 3))
        if problem.lower_bound is None:
            d_a_log = d_a_log / LOG2_E
        if problem.delta_time_bias is not None:
            d_bias = jnp.sum(sums[:, :, :_PARAMETER_ROWS, :K], axis=(0, 2))
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


def _widen(x: Array, width: int) -> Array:
    """``x`` with zero columns up to ``width``."""
    if x.shape[-1] == width:
        return x
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, width - x.shape[-1])])


def _transposed_states(states: Array, value_dim: int, key_dim: int) -> Array:
    """[B, N, H, K, V] as float32 [B, N, H, V, K] of the kernel's widths."""
    states = jnp.swapaxes(states.astype(jnp.float32), -1, -2)
    pad = [(0, 0)] * 3 + [(0, value_dim - states.shape[-2]), (0, key_dim - states.shape[-1])]
    return jnp.pad(states, pad)
