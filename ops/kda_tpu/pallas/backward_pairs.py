"""Pair terms of the backward inside a chunk: what row i of query and key and row j < i of key exchange.

With a_ij = scale dO_i . v_new_j, l_ij = scale n_i . v_new_j and E_ij = 2^(G_i - G_j) per key channel, the sums are::

    to query i   sum_j a_ij k_j E_ij          to key i   sum_j l_ij k_j E_ij
    to key j     sum_i (a_ij q_i + l_ij k_i) E_ij
    P_i          q_i (to query i) + k_i (to key i, as a row) - k_i (to key i, as a column)

E must be split into a factor of i and one of j for the matrix unit: 2^(G_i - R) 2^(R - G_j). Two schemes choose the
anchors R; neither lets a later row touch an earlier result.

- row blocks: R is the first row of i's block, for all j before the block's end. For columns before the block every
  exponent is at most 0 and any gate will do. Inside it the exponents have both signs: a bounded gate permits blocks of
  16 rows; in blocks of 8 a floor of a token's log2 decay keeps any gate in range.
- tree: R lies between i and j (the middle of the smallest block of 2^n rows that holds both) down to blocks of 4 rows.

In bfloat16 P is built from the operands as the matrix unit saw them, rounded: the two ends of a pair then cancel
exactly in dg's sum over rows, and what remains does not drown in rounding, nor do the sums of dg over many rows. Row
blocks take whole powers of two for their anchors there: moving an operand to another anchor does not round it, so each
row is rounded once and P is formed once, from sums over all anchors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp

from ops.kda_tpu.pallas.common import GateForm, Stage, iota, nn
from ops.kda_tpu.pallas.config import CHUNK

Array = jax.Array
Scheme = Literal["row_blocks", "tree"]

# Binades between the largest and the smallest factor in a block with one anchor, of float32's 252. The rest is room for
# the coefficients: half of these binades lie below them in some sums, and cotangents of a mean over many tokens are
# small themselves. The tree takes more, so that no gate down to -40 nats meets its floor.
_BINADES = {"row_blocks": 140.0, "tree": 180.0}
_SUBLANES = 8
_PACKED_ROWS = 16  # of a register in bfloat16
_TREE_ROWS = 4


@dataclass(frozen=True)
class PairForm:
    """How pairs are split.

    Attributes:
        scheme: where the anchors lie.
        inner: rows of the blocks on the diagonal with one anchor.
        dtype: of the matrix unit's operands.
        scale: factor of the output.
        steepest: largest -log2 decay of a token: the gate's bound, or the scheme's floor where the gate exceeds it.
        local_sums: exponents are sums of their own terms, not differences of prefix sums.
        diagonal: whether a_ii is among the pairs, so that q_i and k_i need no term of their own.
    """

    scheme: Scheme
    inner: int
    dtype: Any
    scale: float
    steepest: float
    local_sums: bool
    diagonal: bool

    @classmethod
    def choose(cls, sub_block: str, gate: GateForm, dtype: Any, scale: float) -> PairForm:
        """The cheapest scheme of ``sub_block`` ("clamped" or "tree") that holds for every gate of the form."""
        exact = dtype == jnp.float32
        scheme: Scheme = "tree" if sub_block == "tree" else "row_blocks"
        binades = _BINADES[scheme]
        bounded = gate.steepest * 15 <= binades
        inner = _TREE_ROWS if sub_block == "tree" else 16 if bounded else 8
        steepest = min(gate.steepest, binades / (inner - 1))
        # In float32 the rounding of a_ii's two cancelling terms in P would show, in the others where gates are steep.
        diagonal = inner == 16 and not exact
        return cls(scheme, inner, dtype, scale, steepest, exact, diagonal)

    @property
    def score_rows(self) -> int:
        """Rows of the blocks that the two sorts of scores alternate in."""
        return self.inner if self.scheme == "row_blocks" else CHUNK

    @property
    def levels(self) -> tuple[int, ...]:
        """Half heights of the tree's blocks."""
        return (32, 16, 8, 4) if self.scheme == "tree" else ()

    @property
    def half_range(self) -> float:
        """Added to the exponents of an inner block's rows, taken from its columns: both use half the range."""
        return float(round(self.steepest * (self.inner - 1) / 2))

    @property
    def log2_scale(self) -> float:
        """The scale's part of the rows' exponents; its sign is in the coefficients."""
        return math.log2(abs(self.scale))


def row_sums(form: PairForm, C: int) -> list[tuple[str, Array]]:
    """0/1 matrices [rows, C] of the sums over rows the exponents need, by name: C rows each, 8 for "first"."""
    row, col = iota((C, C), 0), iota((C, C), 1)
    sums = [("prefix", col <= row)]
    if form.local_sums:
        sums.append(("suffix", col > row))
        for m in form.levels:
            middle = row // (2 * m) * (2 * m) + m
            after, before = (col >= middle) & (col <= row), (col > row) & (col < middle)
            sums.append((f"level{m}", jnp.where(row >= middle, after, before)))
        first = row // form.inner * form.inner
        sums.append(("anchored", (col > first) & (col <= row)))
    if form.scheme == "row_blocks":
        first = iota((_SUBLANES, C), 0) * form.inner
        sums.append(("first", (iota((_SUBLANES, C), 1) <= first) & (first < C)))
    return sums


@dataclass(frozen=True)
class Exponents:
    """Log2 decays between rows of a chunk, [C, K] float32; the prefix also has the scale."""

    form: PairForm
    sums: dict[str, Array]

    @classmethod
    def of(cls, form: PairForm, summed: Array) -> Exponents:
        """From the sums over rows, one below the other as in :func:`row_sums`."""
        sums, start = {}, 0
        for name, matrix in row_sums(form, CHUNK):
            sums[name] = summed[start : start + matrix.shape[0]]
            start += matrix.shape[0]
        return cls(form, sums)

    @property
    def prefix(self) -> Array:
        """From the chunk's entry through row i: G, plus log2 of the scale; the other sums have it no more."""
        return self.sums["prefix"]

    @property
    def total(self) -> Array:
        """Of the whole chunk, [1, K]: gC."""
        return self.row(self.prefix.shape[0] - 1) - self.form.log2_scale

    @property
    def suffix(self) -> Array:
        """From behind row i to the chunk's end."""
        return self.sums["suffix"] if "suffix" in self.sums else self.row(self.prefix.shape[0] - 1) - self.prefix

    def level(self, m: int) -> Array:
        """Between row i and the middle of its block of 2 m rows, on either side."""
        if f"level{m}" in self.sums:
            return self.sums[f"level{m}"]
        return -jnp.abs(self.prefix - self._repeat(m - 1, 2 * m))

    def factors(self) -> tuple[Array, Array]:
        """2^(G_i - R) of every row with its own block's anchor R, and the scale times 2^(R - G_i) of every column.

        Half the range is added to the exponents of the rows and taken from those of the columns.
        """
        half, scale = self.form.half_range, self.form.log2_scale
        if "anchored" in self.sums:
            exponent = self.sums["anchored"]
            return jnp.exp2(exponent + half), jnp.exp2((scale - half) - exponent)
        if self.form.scheme == "tree":
            anchor = self._repeat(0, self.form.inner)
            return jnp.exp2(self.prefix - anchor + half), jnp.exp2(anchor - self.prefix + (scale - half))
        exponent = self.prefix - self.over_blocks(self.anchors - half)
        return jnp.exp2(exponent), jnp.exp2(scale - exponent)

    @property
    def anchors(self) -> Array:
        """Prefix of the first row of every block [8, K], in bfloat16 problems the integer below."""
        first = self.sums["first"]
        return first if self.form.dtype == jnp.float32 else jnp.floor(first)

    def over_blocks(self, x: Array) -> Array:
        """Row b of ``x`` [8, K] over the rows of block b, [C, K]."""
        h, (C, K) = self.form.inner, self.prefix.shape
        return jnp.concatenate([jnp.broadcast_to(x[b : b + 1], (h, K)) for b in range(C // h)], axis=0)

    def row(self, r: int) -> Array:
        """Prefix of row ``r``, [1, K]."""
        return self.prefix[r : r + 1]

    def _repeat(self, first: int, height: int) -> Array:
        """Prefix of row ``first`` of each block of ``height`` rows, over the block."""
        G = self.prefix
        C, K = G.shape
        rows = [jnp.broadcast_to(self.row(r), (max(8, height), K)) for r in range(first, C, height)]
        if height == 4:
            lower = (iota((8, K), 0) & 4) == 0
            rows = [jnp.where(lower, a, b) for a, b in zip(rows[::2], rows[1::2], strict=True)]
        return jnp.concatenate(rows, axis=0)


@dataclass(frozen=True)
class Scores:
    """Pair coefficients without the scale's magnitude, in the compute dtype; zero where j is not before i.

    Attributes:
        rows: [2 C, C], for each block of ``form.score_rows`` rows those of dO and v_new (with their diagonal if
            ``form.diagonal``), then those of n and v_new. Where row blocks see an earlier block they have the factor
            2^-half_range, because the rows' factor has its inverse and those columns do not.
        transposed: [C, 2 C].
    """

    rows: Array
    transposed: Array

    @classmethod
    def of(cls, form: PairForm, products: Array) -> Scores:
        """From [dO ; n] v_new^T, [2 C, C] float32."""
        C = products.shape[1]
        row, col = iota((C, C), 0), iota((C, C), 1)
        if form.scale < 0:
            products = -products
        weight = jnp.where(row > col, 1.0, 0.0)
        if form.scheme == "row_blocks":
            weight = jnp.where(row // form.inner > col // form.inner, 2.0**-form.half_range, weight)
        a = products[:C] * (jnp.where(row == col, 1.0, weight) if form.diagonal else weight)
        l = products[C:] * weight
        rows = _alternating(a, l, form.score_rows).astype(form.dtype)
        return cls(rows, rows.T)


def _alternating(a: Array, b: Array, height: int) -> Array:
    """Blocks of ``height`` rows of ``a`` and ``b`` in turns."""
    parts = [x[start : start + height] for start in range(0, a.shape[0], height) for x in (a, b)]
    return jnp.concatenate(parts, axis=0)


@dataclass
class PairSums:
    """What the pairs give, [C, K] float32 each: to query, to key (as a row and as a column), and P."""

    query: Array | None = None
    key: Array | None = None
    gate: Array | None = None

    def add(self, query: Array, key: Array, gate: Array) -> None:
        """Adds a scheme's part."""
        self.query = query if self.query is None else self.query + query
        self.key = key if self.key is None else self.key + key
        self.gate = gate if self.gate is None else self.gate + gate


@dataclass(frozen=True)
class Operands:
    """Query and key [C, K] float32, loaded where they are used."""

    at: Any

    def weighted(self, decay: Array, dtype: Any) -> Array:
        """[q decay ; k decay], [2 C, K]."""
        return jnp.concatenate([(self.at.query() * decay).astype(dtype), (self.at.key() * decay).astype(dtype)], axis=0)


def pair_sums(
    form: PairForm, at: Any, exponents: Exponents, scores: Scores, from_state: Array, sums: PairSums
) -> Stage:
    """Stages that add up in ``sums`` all pairs of a chunk and what its rows got from the state.

    Args:
        form: how pairs are split.
        at: the chunk's view of the refs.
        exponents: its decays.
        scores: its pair coefficients.
        from_state: [dO h^T ; n h^T] [2 C, K], without decay and scale.
        sums: where to add.
    """
    if form.scale < 0:
        from_state = -from_state
    if form.scheme == "row_blocks":
        yield from _row_blocks(form, at, exponents, scores, from_state, sums)
        return
    for m in form.levels:
        yield from _level(form, at, exponents, scores, sums, m)
    yield from _smallest_blocks(form, at, exponents, scores, sums)
    C, gam = CHUNK, jnp.exp2(exponents.prefix)
    query, key = from_state[:C] * gam, from_state[C:] * gam
    sums.add(query, key, at.query() * query + at.key() * key)


def _row_blocks(
    form: PairForm, at: Any, exponents: Exponents, scores: Scores, from_state: Array, sums: PairSums
) -> Stage:
    """Blocks of rows against all columns before the block's end.

    A column block is decayed to the anchor of its own block; every later row block needs it one factor 2^(R' - R)
    [1, K] further, and the results walk back through the same factors.
    """
    C, h = CHUNK, form.inner
    frames = range(C // h)
    row_decay, column_decay = exponents.factors()
    steps = _Steps.of(form, exponents)
    rows = _alternating(at.query() * row_decay, at.key() * row_decay, h).astype(form.dtype)
    seen_column = (at.key() * column_decay).astype(form.dtype).astype(jnp.float32)
    columns = [seen_column[h * b : h * b + h] for b in frames]
    frame, zero = (iota((C, 2 * C), 1) // (2 * h)), jnp.zeros((), form.dtype)
    taken, left, starts = [], [], [0]
    for x in frames:
        columns = [c * steps.factor(b, x) if b < x else c for b, c in enumerate(columns)]
        end = -(-h * (x + 1) // _PACKED_ROWS) * _PACKED_ROWS
        weights = jnp.concatenate(columns[: end // h], axis=0).astype(form.dtype)
        taken.append(nn(scores.rows[2 * h * x : 2 * h * (x + 1), :end], weights))
        left.append(jnp.where(frame[:end] == x, scores.transposed[:end], zero))
        starts.append(starts[-1] + end)
    given = nn(jnp.concatenate(left, axis=0), rows)
    yield None
    totals: dict[int, Array] = {}
    for x in reversed(frames):
        for b in range(x + 1):
            part = given[starts[x] + h * b :][:h]
            totals[b] = totals[b] * steps.factor(b, x + 1) + part if b in totals else part
    column = jnp.concatenate([totals[b] for b in frames], axis=0)
    from_entry = jnp.exp2(exponents.anchors - form.half_range)
    query, key = (
        jnp.concatenate([t[n * h : n * h + h] for t in taken], axis=0)
        + from_state[n * C : n * C + C] * exponents.over_blocks(from_entry)
        for n in range(2)
    )
    seen_rows = rows.astype(jnp.float32)
    seen_query, seen_key = (
        jnp.concatenate([seen_rows[2 * h * x + n * h :][:h] for x in frames], axis=0) for n in range(2)
    )
    sums.add(
        query * row_decay,
        key * row_decay + column * column_decay,
        seen_query * query + seen_key * key - seen_column * column,
    )
    yield None


@dataclass(frozen=True)
class _Steps:
    """The factors from the anchor of one row block to that of the next, exact in bfloat16 problems.

    Attributes:
        out: [8, K], row b leads the block before b from its own anchor to that of block b, and out of the half range
            that its columns have lost; a block may be steeper than one factor without that could express.
        far: [8, K], the same for columns further back, which may underflow.
    """

    out: Array
    far: Array

    @classmethod
    def of(cls, form: PairForm, exponents: Exponents) -> _Steps:
        """From the anchors."""
        anchors = exponents.anchors
        step = anchors - jnp.concatenate([anchors[:1], anchors[:-1]], axis=0)
        return cls(jnp.exp2(step + form.half_range), jnp.exp2(step))

    def factor(self, block: int, frame: int) -> Array:
        """For a column block's way between the anchor of ``frame`` and the one before."""
        return (self.out if block == frame - 1 else self.far)[frame : frame + 1]


def _level(form: PairForm, at: Any, exponents: Exponents, scores: Scores, sums: PairSums, m: int) -> Stage:
    """Rows of the upper half of a block of 2 m rows against columns of its lower half.

    Each row has one role, so one array of decays and one product serve both directions; the scale is split between the
    two factors. Where halves are whole registers only rows with a role are multiplied.
    """
    C, halves = CHUNK, _Halves(m, m >= (_SUBLANES if form.dtype == jnp.float32 else _PACKED_ROWS))
    zero = jnp.zeros((), form.dtype)
    weights = Operands(at).weighted(jnp.exp2(exponents.level(m) + 0.5 * form.log2_scale), form.dtype)
    row, col = iota((C, 2 * C), 0), iota((C, 2 * C), 1) & (C - 1)
    nothing = jnp.zeros((C, C), form.dtype)
    pair = _is_pair(row, col, m)
    rows = [jnp.where(pair, jnp.concatenate([nothing, scores.rows[n : n + C]], axis=1), zero) for n in (0, C)]
    columns = jnp.where(_is_pair(col, row, m), scores.transposed, zero)
    result = nn(jnp.concatenate([*map(halves.later, rows), halves.earlier(columns)], axis=0), weights)
    yield None
    decay = jnp.exp2(exponents.level(m) + 0.5 * form.log2_scale)
    count = result.shape[0] // 3
    query, key, column = (result[n * count : (n + 1) * count] for n in range(3))
    later, earlier = halves.later(decay), halves.earlier(decay)
    seen_query, seen_key = (weights[n : n + C].astype(jnp.float32) for n in (0, C))
    gate = halves.later(seen_query) * query + halves.later(seen_key) * key
    sums.add(
        halves.join(jnp.zeros_like(query), query * later),
        halves.join(column * earlier, key * later),
        halves.join(-halves.earlier(seen_key) * column, gate),
    )


@dataclass(frozen=True)
class _Halves:
    """The lower (earlier) and upper (later) halves of blocks of 2 m rows; all rows where no half is whole registers."""

    m: int
    whole: bool

    def earlier(self, x: Array) -> Array:
        """Rows of the lower halves."""
        return self._rows(x, 0)

    def later(self, x: Array) -> Array:
        """Rows of the upper halves."""
        return self._rows(x, self.m)

    def join(self, earlier: Array, later: Array) -> Array:
        """The rows in order; their sum where each has all, zero in the others."""
        if not self.whole:
            return earlier + later
        return _alternating(earlier, later, self.m)

    def _rows(self, x: Array, first: int) -> Array:
        if not self.whole:
            return x
        return jnp.concatenate([x[r : r + self.m] for r in range(first, CHUNK, 2 * self.m)], axis=0)


def _is_pair(i: Array, j: Array, m: int) -> Array:
    """Whether i and j lie in the upper and the lower half of one block of 2 m rows."""
    bits = m.bit_length() - 1
    return ((i >> bits) == (j >> bits) + 1) & ((i & m) == m)


def _smallest_blocks(form: PairForm, at: Any, exponents: Exponents, scores: Scores, sums: PairSums) -> Stage:
    """Pairs inside the blocks at the tree's end, each with its first row as anchor."""
    C = CHUNK
    zero = jnp.zeros((), form.dtype)

    def inside(x: Array) -> Array:
        row, col = iota(x.shape, 0) & (C - 1), iota(x.shape, 1) & (C - 1)
        return jnp.where(row // form.inner == col // form.inner, x, zero)

    row_decay, column_decay = exponents.factors()
    column = (at.key() * column_decay).astype(form.dtype)
    rows = Operands(at).weighted(row_decay, form.dtype)
    taken = nn(inside(scores.rows), column)
    given = nn(inside(scores.transposed), rows)
    yield None
    row_decay, column_decay = exponents.factors()
    seen = rows.astype(jnp.float32)
    sums.add(
        taken[:C] * row_decay,
        taken[C:] * row_decay + given * column_decay,
        seen[:C] * taken[:C] + seen[C:] * taken[C:] - column.astype(jnp.float32) * given,
    )
    yield None
