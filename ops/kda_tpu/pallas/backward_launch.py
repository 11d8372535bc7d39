"""Launches of the backward's kernels: blocks, scratch, grid, and what every step does around its stages.

The grid is (batch rows, head groups, steps of the forward from the last to the first). A block index is computed from
the grid position and the step table, which arrives by scalar prefetch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ops.kda_tpu.contract import Problem
from ops.kda_tpu.pallas.backward_chunk import Form, Joint
from ops.kda_tpu.pallas.backward_view import ChunkView, Refs, make_mask
from ops.kda_tpu.pallas.common import Stage, interleave
from ops.kda_tpu.pallas.config import current_chip, vmem_limit_bytes
from ops.kda_tpu.pallas.schedule import StepTable, pad_segment_ids, padded_length

Array = jax.Array

# Program order: where the state links them, chunk c starts _LAG rounds behind chunk c + 1; groups of _GROUP heads start
# one round after another.
_LAG = 3
_GROUP = 4
_STAGGER = 4

_OPTIONAL = ("parameters", "ids", "d_final", "d_parameters", "d_initial", "d_state", "mask", "packed_mask")


class Operand(NamedTuple):
    """An array and the block of it that a step reads."""

    array: Array
    spec: pl.BlockSpec


class Result(NamedTuple):
    """Shape and dtype of a result, the block of it that a step writes, and whether a tile's visits share that block."""

    shape: jax.ShapeDtypeStruct
    spec: pl.BlockSpec
    shared: bool = True


@dataclass(frozen=True)
class Kernel:
    """One kernel of the backward.

    Attributes:
        name: what it is called in profiles.
        stage: ``stage(form, view, joint_prefix, joint_gate)`` yields the code of one chunk of one head.
        carries_state: whether the gradient of the state runs through the steps.
        saved: arrays [C, K] of a chunk and head that stages keep for later ones, name -> dtype.
    """

    name: str
    stage: Callable[[Form, ChunkView, Joint, Joint], Stage]
    carries_state: bool
    saved: Mapping[str, Any] = field(default_factory=dict)

    def scratch(self, form: Form) -> dict[str, Any]:
        """Scratch memory by name."""
        C, K, V = form.chunk, form.key_dim, form.value_dim
        found = {"d_state": pltpu.VMEM((form.heads, V, K), jnp.float32)} if self.carries_state else {}
        if form.masked:
            found["mask"] = pltpu.VMEM((form.chunks, C, max(K, V)), jnp.int32)
            found["packed_mask"] = pltpu.VMEM((form.chunks, C // 2, max(K, V)), jnp.int32)
        for name, dtype in self.saved.items():
            found[f"saved_{name}"] = pltpu.VMEM((form.heads * form.chunks, C, K), dtype)
        return found


class Launch:
    """Blocks of a problem's arrays, and the call of a kernel on them.

    Attributes:
        heads, batch: H and B.
        padded: Tp, tokens in whole tiles.
        num_steps: S, grid steps of a batch row.
    """

    def __init__(self, form: Form, problem: Problem, steps: StepTable, interpret: Any) -> None:
        self._form, self._interpret = form, interpret
        self.heads, self.batch, self._tokens = problem.query.shape[:3]
        self._visited_once = problem.segment_ids is None
        self._steps = steps
        self.num_steps = steps.num_steps
        self._rows = form.chunks * form.chunk
        self.padded = padded_length(self._tokens, self._rows)

    def _at(self, index: Callable[[Any, Any, Any, Any, Any], tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
        steps = self._steps.num_steps

        def index_map(b: Any, i: Any, turn: Any, tile: Any, slot: Any, *_: Any) -> tuple[Any, ...]:
            step = steps - 1 - turn
            return index(b, i, step, tile[b * steps + step], slot[b * steps + step])

        return index_map

    def tokens(self, width: int) -> pl.BlockSpec:
        """Block of [H, B, T, width]: the step's tile."""
        block = (self._form.heads, None, self._rows, width)
        return pl.BlockSpec(block, self._at(lambda b, i, step, tile, slot: (i, b, tile, 0)))

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
        x = jnp.pad(x.astype(jnp.float32), ((0, 0), (0, 0), (0, self.padded - self._tokens)))
        x = x.reshape(self.heads // form.heads, form.heads, self.batch, -1, form.chunk)
        return x.transpose(2, 0, 3, 1, 4)

    def from_rows(self, x: Array) -> Array:
        """Inverse of :meth:`rows_of`."""
        return x.transpose(1, 3, 0, 2, 4).reshape(self.heads, self.batch, -1)[:, :, : self._tokens]

    def row_block(self, width: int, by_step: bool = False) -> pl.BlockSpec:
        """Block of rows [B, H / HB, chunks, HB, width], of the step's tile or saved by step."""
        form = self._form
        return pl.BlockSpec(
            (None, None, form.chunks, form.heads, width),
            self._at(lambda b, i, step, tile, slot: (b, i, step if by_step else tile, 0, 0)),
        )

    def ids(self, segment_ids: Array | None) -> Operand:
        """Segment ids by chunk, int32 [B, tiles, NC, C]: the step's tile."""
        form = self._form
        ids = pad_segment_ids(segment_ids, self.batch, self._tokens, self._rows)
        ids = ids.reshape(self.batch, -1, form.chunks, form.chunk)
        block = (None, None, form.chunks, form.chunk)
        return Operand(ids, pl.BlockSpec(block, self._at(lambda b, i, step, tile, slot: (b, tile, 0, 0))))

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

    def call(self, kernel: Kernel, reads: Mapping[str, Operand], writes: Mapping[str, Result]) -> dict[str, Array]:
        """Runs a kernel; results by name."""
        form, table = self._form, self._steps
        scratch = kernel.scratch(form)
        prefetch = (table.tile, table.slot, table.segment, table.is_first, table.is_last, table.settled)
        carries = kernel.carries_state or "d_parameters" in writes or not self._visited_once
        names = [*reads, *writes, *scratch]
        shared = [name for name, result in writes.items() if result.shared]
        results = pl.pallas_call(
            functools.partial(_step, kernel, form, table.num_steps, names, shared),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=len(prefetch),
                grid=(self.batch, self.heads // form.heads, table.num_steps),
                in_specs=[operand.spec for operand in reads.values()],
                out_specs=[result.spec for result in writes.values()],
                scratch_shapes=list(scratch.values()),
            ),
            out_shape=[result.shape for result in writes.values()],
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel", "parallel", "arbitrary" if carries else "parallel"),
                vmem_limit_bytes=vmem_limit_bytes(current_chip()),
            ),
            interpret=self._interpret,
            name=kernel.name,
        )(*(x.reshape(-1) for x in prefetch), *(operand.array for operand in reads.values()))
        return dict(zip(writes, results, strict=True))


def _step(kernel: Kernel, form: Form, num_steps: int, names: list[str], shared: list[str], *all_refs: Any) -> None:
    """One grid step: sums and the running gradient begin where they must, the stages, the gradient leaves."""
    _, _, segment, is_first, is_last, settled, *blocks = all_refs
    named: dict[str, Any] = dict.fromkeys(_OPTIONAL) | dict(zip(names, blocks, strict=True))
    refs = Refs(saved={name: named.pop(f"saved_{name}") for name in kernel.saved}, **named)
    turn = pl.program_id(2)
    step = pl.program_id(0) * num_steps + num_steps - 1 - turn

    if kernel.carries_state:

        @pl.when(is_last[step] == 1)
        def _load_final_gradient() -> None:
            refs.d_state[...] = jnp.zeros_like(refs.d_state) if refs.d_final is None else refs.d_final[...]

    if refs.d_parameters is not None:

        @pl.when(turn == 0)
        def _clear_sums() -> None:
            refs.d_parameters[...] = jnp.zeros_like(refs.d_parameters)

    if form.masked:
        make_mask(form, refs, segment[step])

        @pl.when(settled[step] == 1)
        def _clear_shared() -> None:
            for name in shared:
                ref = getattr(refs, name)
                ref[...] = jnp.zeros_like(ref)

    _emit_chunks(kernel, form, refs)

    if refs.d_initial is not None:

        @pl.when(is_first[step] == 1)
        def _store_initial_gradient() -> None:
            refs.d_initial[...] = refs.d_state[...]


def _emit_chunks(kernel: Kernel, form: Form, refs: Refs) -> None:
    """The step's code: every head's chunks from the last to the first, in the order that hides latencies."""
    pair = 2 if form.key_dim <= 128 and form.heads % 2 == 0 else 1
    lag = _LAG if kernel.carries_state else 0
    stages = []
    joints: dict[tuple[str, int, int], Joint] = {}
    for head in range(form.heads):
        for chunk in reversed(range(form.chunks)):
            joint = [
                joints.setdefault((name, head // pair, chunk), Joint(functools.partial(_whole, refs, name), pair))
                for name in ("prefix_matrix", "gate_matrix")
            ]
            start = lag * (form.chunks - 1 - chunk) + head // _GROUP % _STAGGER
            stages.append((start, kernel.stage(form, ChunkView(form, refs, head, chunk), *joint)))
    interleave(stages, done=[(head, form.chunks) for head in range(form.heads)])


def _whole(refs: Refs, name: str) -> Array:
    return getattr(refs, name)[...]
