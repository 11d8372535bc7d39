"""One grid step of the forward kernel, in program order.

A step works on two tiles. Its *front* half prepares its own tile as far as no state is needed: gate, norm, cumulative
decay and the products of decayed rows. Its *back* half finishes the tile of the step before: inverse, state, output.
The front half keeps the vector unit busy, the back half is a chain of short dependent products; side by side they hide
each other's latency, and the compiler's scheduler only overlaps what is neighbouring in program order. Both halves work
on pairs of matrices side by side in 128 lanes and on groups of two pairs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ops.kda_tpu.pallas.common import (
    LEAST_BETA,
    Done,
    GateForm,
    Need,
    Stage,
    interleave,
    iota,
    log2_decay,
    nn,
    nt,
    rsqrt_of_square_sum,
    tn,
)
from ops.kda_tpu.pallas.config import CHUNK
from ops.kda_tpu.pallas.intra import DecaySums, IntraForm, Rows, decay_sums, invert, scores

_LANES = 128
_GROUP_PAIRS = 2
_MANY_HEADS = 8  # so many hide the latency of the chain through the chunks


@dataclass(frozen=True)
class Layout:
    """What is static in the kernel.

    Attributes:
        heads: heads of a step, HB.
        chunks: chunks of a tile, NC.
        key_width: K of the kernel.
        value_width: V of the kernel.
        num_steps: entries of the step table, S.
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
    num_steps: int
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

    @property
    def units(self) -> int:
        """Head-chunks of a tile."""
        return self.heads * self.chunks

    @property
    def pairs(self) -> int:
        """Pairs of them; of an odd number the last is paired with itself."""
        return -(-self.units // 2)

    def scratch(self) -> dict[str, Any]:
        """Scratch memory by name; what the front half leaves for the back half of the next step is there twice."""
        rows = (CHUNK, self.key_width)
        return {
            "q": pltpu.VMEM((2 * self.units, *rows), jnp.float32),
            "k": pltpu.VMEM((2 * self.units, *rows), jnp.float32),
            "sums": pltpu.VMEM((2 * self.units * self.intra.sums, *rows), jnp.float32),
            "aqk": pltpu.VMEM((2 * self.pairs, CHUNK, 2 * CHUNK), self.dtype),
            "lower": pltpu.VMEM((2 * self.pairs, CHUNK, 2 * CHUNK), jnp.float32),
            "matrices": pltpu.VMEM((self.pairs, 2 * CHUNK, 2 * CHUNK), self.dtype),
            "substitution": pltpu.VMEM((self.pairs, 16, 2 * CHUNK), jnp.float32),
            "mask": pltpu.VMEM((2 * self.chunks if self.masked else 1, CHUNK, _LANES), jnp.float32),
        }


@dataclass(frozen=True)
class Unit:
    """One chunk of one head of a tile."""

    head: int
    chunk: int
    index: int

    @property
    def at(self) -> tuple[int, slice]:
        """Its rows in a block [HB, tile, width]."""
        return self.head, slice(self.chunk * CHUNK, (self.chunk + 1) * CHUNK)


@dataclass(frozen=True)
class Half:
    """The tile one half works on.

    Attributes:
        beta: ref [NC, HB, C] of the write strengths.
        ids: ref [NC, C] of the segment ids, None if nothing is masked.
        segment: id whose rows take part.
        fresh: whether this is the first visit of the tile.
        buffer: 0 or 1, which copy of the scratch it uses.
        masks: index of its first mask.
    """

    beta: Any
    ids: Any
    segment: Any
    fresh: Any
    buffer: jax.Array
    masks: int

    def valid(self, chunk: int) -> jax.Array:
        """Whether a token of the chunk takes part [1, C]."""
        return self.ids[chunk : chunk + 1] == self.segment

    def write_strengths(self, unit: Unit) -> jax.Array:
        """Beta [1, C]: positive, but zero on rows that take no part."""
        beta = jnp.maximum(self.beta[unit.chunk, unit.head : unit.head + 1], LEAST_BETA)
        return beta if self.ids is None else jnp.where(self.valid(unit.chunk), beta, 0.0)


def run_step(layout: Layout, refs: SimpleNamespace) -> None:
    """Body of the kernel.

    Args:
        layout: the static facts.
        refs: inputs, outputs and scratch by name.
    """
    step = pl.program_id(2)
    before = jnp.maximum(step - 1, 0)
    now = jnp.minimum(step, layout.num_steps - 1)
    is_first, segments, fresh = before == 0, (None, None), (True, True)
    ids: tuple[Any, Any] = (None, None)
    if layout.masked:
        row = pl.program_id(0) * layout.num_steps
        is_first = refs.is_first[row + before] == 1
        segments = (refs.segment[row + now], refs.segment[row + before])
        fresh = (refs.fresh[row + now] == 1, refs.fresh[row + before] == 1)
        ids = (refs.ids_front, refs.ids_back)
    front, back = (
        Half(beta, ids[n], segments[n], fresh[n], (step + n) % 2, n * layout.chunks)
        for n, beta in enumerate((refs.beta_front, refs.beta_back))
    )

    @pl.when(is_first)
    def _load_initial_state() -> None:
        def copy(head: jax.Array, carry: None) -> None:
            refs.state[head] = refs.initial[head]

        jax.lax.fori_loop(0, layout.heads, copy, None)

    if layout.masked:
        for half in (front, back):
            for chunk in range(layout.chunks):
                valid = half.valid(chunk).astype(jnp.float32)
                refs.mask[half.masks + chunk] = jnp.broadcast_to(valid, (_LANES, CHUNK)).T
    _Tiles(layout, refs, front, back).run()


@dataclass(frozen=True)
class _Tiles:
    """The stages of a step."""

    layout: Layout
    refs: SimpleNamespace
    front: Half
    back: Half

    def run(self) -> None:
        heads = range(self.layout.heads)
        interleave(self._stages(), done=[("state", head, -1) for head in heads])

    def _stages(self) -> Iterator[tuple[int, Stage]]:
        """Stages with the rounds they start in; chosen by the compiler's schedule.

        The front half starts its groups one after another, so that it lasts as long as the back half, and the back half
        inverts a chunk's matrices shortly before the recurrence comes to that chunk. With few heads the back half is as
        long as its chain of dependent products through the chunks, three rounds each; then its chunks start late too,
        and the front half goes pair by pair.
        """
        heads, chunks = self.layout.heads, self.layout.chunks
        units = [Unit(head, chunk, chunk * heads + head) for chunk in range(chunks) for head in range(heads)]
        pairs = [(n, units[2 * n], units[min(2 * n + 1, len(units) - 1)]) for n in range(self.layout.pairs)]
        few = heads < _MANY_HEADS
        for n in range(0, len(pairs), _GROUP_PAIRS):
            group = pairs[n : n + _GROUP_PAIRS]
            chunk = group[0][1].chunk
            yield 2 * chunk, self._invert(group)
            for pair, first, second in group:
                for unit in dict.fromkeys((first, second)):
                    yield 6 + 3 * unit.chunk if few else 0, self._recur(unit, pair)
            if few:
                for m, scored in enumerate(group, start=n):
                    yield (3 * chunks + 2) * m // len(pairs), self._score([scored])
            else:
                yield n, self._score(group)

    def _score(self, group: list[tuple[int, Unit, Unit]]) -> Stage:
        """Front half: leaves q, k, decay sums, Aqk and L of two pairs."""
        layout, refs, form = self.layout, self.refs, self.layout.intra
        units = list(dict.fromkeys(unit for _, *pair in group for unit in pair))
        decays = [self._prepare(unit) for unit in units]
        yield None
        for unit, arrays in zip(units, decay_sums(decays, refs.sum_matrix[...], form), strict=True):
            for n, x in enumerate(arrays):
                refs.sums[self._unit_at(self.front, unit) * form.sums + n] = x
        yield None
        rows = [(self._rows(first), self._rows(second)) for _, first, second in group]
        found = yield from scores(rows, form, layout.dtype)
        for (n, *pair), (qk, kk) in zip(group, found, strict=True):
            at = self.front.buffer * layout.pairs + n
            refs.aqk[at] = qk.astype(layout.dtype)
            strengths = [jnp.broadcast_to(self.front.write_strengths(unit), (CHUNK, CHUNK)) for unit in pair]
            refs.lower[at] = kk * jnp.concatenate(strengths, axis=0).T

    def _prepare(self, unit: Unit) -> jax.Array:
        """Stores the scaled query and the key, normalised if asked, and returns the log2 decay [C, K]."""
        layout, refs = self.layout, self.refs
        for source, target, scale in ((refs.query, refs.q, layout.scale), (refs.key, refs.k, 1.0)):
            x = self._select(self.front, unit, source[unit.at].astype(jnp.float32))
            factor: Any = rsqrt_of_square_sum(x) * scale if layout.normalise else scale
            target[self._unit_at(self.front, unit)] = x * factor
        gate = refs.gate[unit.at].astype(jnp.float32)
        rows = (lambda n: refs.gate_rows[unit.head, n : n + 1]) if layout.gate.activated else None
        decay = log2_decay(gate, rows, layout.gate, layout.dtype == jnp.float32, layout.intra.floor)
        return self._select(self.front, unit, decay)

    def _invert(self, group: list[tuple[int, Unit, Unit]]) -> Stage:
        """Back half, no state yet: leaves [A beta ; Aqk A beta] of two pairs.

        Aqk A is rounded as a whole: if keys are nearly parallel, the rows of v_new = A y nearly cancel in Aqk v_new and
        their rounding errors do not.
        """
        layout, refs = self.layout, self.refs
        at = [self.back.buffer * layout.pairs + n for n, *_ in group]
        scratch = [refs.substitution.at[n] for n, *_ in group]
        inverse = yield from invert([refs.lower[n] for n in at], layout.terms, scratch)
        a_beta = []
        for (_, *pair), a in zip(group, inverse, strict=True):
            a_beta.append(a * jnp.concatenate([self.back.write_strengths(unit) for unit in pair], axis=1))
        products = [nn(refs.aqk[n], _diagonal(a.astype(layout.dtype))) for n, a in zip(at, a_beta, strict=True)]
        yield None
        for (n, *pair), a, aqk_a in zip(group, a_beta, products, strict=True):
            stacked = jnp.concatenate([a, aqk_a], axis=0)
            refs.matrices[n] = stacked.astype(layout.dtype)
            if layout.save:
                slabs = (stacked * (-1.0 / layout.scale)).astype(layout.dtype).T
                for unit, slab in zip(pair, (slabs[:CHUNK], slabs[CHUNK:]), strict=True):
                    self._write(unit, refs.slab, (unit.head, unit.chunk), slab)
        for n, *_ in group:
            yield Done(("matrices", n))

    def _recur(self, unit: Unit, pair: int) -> Stage:
        """Back half: state and output of one chunk of one head."""
        layout, refs, dtype = self.layout, self.refs, self.layout.dtype
        sums = self._sums(self.back, unit)
        q_k = [ref[self._unit_at(self.back, unit)] for ref in (refs.k, refs.q)]
        gamma = jnp.exp2(sums.prefix())
        reading = jnp.concatenate([x * gamma for x in q_k], axis=0).astype(dtype)
        yield Need(("state", unit.head, unit.chunk - 1))
        h = refs.state[unit.head].astype(dtype)
        if layout.save:
            refs.states[unit.head, unit.chunk] = h
        read = nt(reading, h)
        yield Need(("matrices", pair))
        value = self._select(self.back, unit, refs.value[unit.at].astype(jnp.float32))
        rest = (value - read[:CHUNK]).astype(dtype)
        start = unit.index % 2 * CHUNK
        written = nn(refs.matrices[pair][:, start : start + CHUNK], rest)
        yield None
        v_new = written[:CHUNK].astype(dtype)
        k_last = q_k[0] * jnp.exp2(sums.suffix())
        update = tn(v_new, k_last.astype(dtype))
        yield None
        refs.state[unit.head] = refs.state[unit.head] * jnp.exp2(sums.total()) + update
        yield Done(("state", unit.head, unit.chunk))
        self._write(unit, refs.output, unit.at, read[CHUNK:] + written[CHUNK:])
        if layout.save:
            self._write(unit, refs.v_new, unit.at, v_new)

    def _unit_at(self, half: Half, unit: Unit) -> jax.Array:
        return half.buffer * self.layout.units + unit.index

    def _sums(self, half: Half, unit: Unit) -> DecaySums:
        first = self._unit_at(half, unit) * self.layout.intra.sums
        return DecaySums(self.layout.intra, lambda n, rows: self.refs.sums[first + n, rows])

    def _rows(self, unit: Unit) -> Rows:
        at = self._unit_at(self.front, unit)
        return Rows(self._sums(self.front, unit), lambda: self.refs.q[at], lambda: self.refs.k[at])

    def _select(self, half: Half, unit: Unit, x: jax.Array, other: Any = 0.0) -> jax.Array:
        """``x`` [C, width] on rows that take part, ``other`` on the rest."""
        if not self.layout.masked:
            return x
        mask, width = self.refs.mask[half.masks + unit.chunk], x.shape[1]
        return jnp.where(jnp.concatenate([mask] * -(-width // _LANES), axis=1)[:, :width] > 0.5, x, other)

    def _write(self, unit: Unit, ref: Any, at: Any, x: jax.Array) -> None:
        """Stores rows that take part; the others keep what earlier visits left, zero if there was none."""
        if self.layout.masked:
            old = jnp.where(self.back.fresh, 0.0, ref[at].astype(jnp.float32))
            x = self._select(self.back, unit, x.astype(jnp.float32), old)
        ref[at] = x.astype(ref.dtype)


def _diagonal(pair: jax.Array) -> jax.Array:
    """Block diagonal matrix [128, 128] of a pair [C, 128]."""
    first = iota(pair.shape, 1) < CHUNK
    zero = jnp.zeros((), pair.dtype)
    return jnp.concatenate([jnp.where(first, pair, zero), jnp.where(first, zero, pair)], axis=0)
