"""Pair terms of the backward inside a chunk: what row i of query and key and row j < i of key exchange.

With a_ij = scale dO_i . v_new_j, l_ij = scale n_i . v_new_j and E_ij = 2^(G_i - G_j) per key channel, the sums are::

    to query i   sum_j a_ij k_j E_ij          to key i   sum_j l_ij k_j E_ij
    to key j     sum_i (a_ij q_i + l_ij k_i) E_ij
    P_i          q_i (to query i) + k_i (to key i, as a row) - k_i (to key i, as a column)

E must be split into a factor of i and one of j for the matrix unit: 2^(G_i - R) 2^(R - G_j). Three schemes choose the
anchors R; none lets a later row touch an earlier result.

- row blocks: R is the first row of i's block of 16 rows, for all j before the block's end. Inside the block the
  exponents have both signs, so the gate must be bounded.
- nested: the same for all j before the block's begin, where every exponent is at most 0 and any gate will do; inside
  the block R is the first row of i's block of 8 rows, which a floor of a token's log2 decay keeps in range.
- tree: R lies between i and j (the middle of the smallest block of 2^n rows that holds both) down to blocks of 4 rows.

In bfloat16 P is built from the operands as the matrix unit saw them, rounded: the two ends of a pair then cancel
exactly in dg's sum over rows, and what remains does not drown in rounding, nor do the sums of dg over many rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp

from ops.kda_tpu.pallas.common import GateForm, Stage, iota, nn

Array = jax.Array
Scheme = Literal["row_blocks", "nested", "tree"]

# Binades between the largest and the smallest factor in a block with one anchor; float32 has 252, the rest is room for
# the operands.
_BINADES = 180.0
_OUTER = 16
_INNER = {"row_blocks": _OUTER, "nested": 8, "tree": 4}


@dataclass(frozen=True)
class PairForm:
    """How pairs are split.

    Attributes:
        scheme: where the anchors lie.
        dtype: of the matrix unit's operands.
        scale: factor of the output.
        steepest: largest -log2 decay of a token: the gate's bound, or the scheme's floor where the gate exceeds it.
        local_sums: exponents are sums of their own terms, not differences of prefix sums.
        diagonal: whether a_ii is among the pairs, so that q_i and k_i need no term of their own.
    """

    scheme: Scheme
    dtype: Any
    scale: float
    steepest: float
    local_sums: bool
    diagonal: bool

    @classmethod
    def choose(cls, sub_block: str, gate: GateForm, dtype: Any, scale: float) -> PairForm:
        """The cheapest scheme of ``sub_block`` ("clamped" or "tree") that holds for every gate of the form."""
        exact = dtype == jnp.float32
        scheme: Scheme = "tree"
        if sub_block != "tree":
            scheme = "row_blocks" if gate.steepest * (_OUTER - 1) <= _BINADES else "nested"
        steepest = min(gate.steepest, _BINADES / (_INNER[scheme] - 1))
        # In float32 the rounding of a_ii's two cancelling terms in P would show.
        diagonal = scheme == "row_blocks" and not exact
        return cls(scheme, dtype, scale, steepest, exact and scheme != "nested", diagonal)

    @property
    def inner(self) -> int:
        """Rows of the blocks on the diagonal with one anchor."""
        return _INNER[self.scheme]

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
    """0/1 matrices [C, C] of the sums over rows the exponents need, by name."""
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
    return sums


@dataclass(frozen=True)
class Exponents:
    """Log2 decays between rows of a chunk, [C, K] float32, at most 0."""

    form: PairForm
    sums: dict[str, Array]

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
        return -jnp.abs(self.prefix - self._repeat(m - 1, 2 * m, 0.0))

    def from_first(self, height: int, offset: float) -> Array:
        """From behind the first row of i's block of ``height`` rows through row i, plus ``offset``."""
        if "anchored" in self.sums and height == self.form.inner:
            return self.sums["anchored"] + offset
        return self.prefix - self._repeat(0, height, offset)

    def row(self, r: int) -> Array:
        """Prefix of row ``r``, [1, K]."""
        return self.prefix[r : r + 1]

    def _repeat(self, first: int, height: int, offset: float) -> Array:
        """Prefix of row ``first`` of each block of ``height`` rows less ``offset``, over the block."""
        G = self.prefix
        C, K = G.shape
        rows = [jnp.broadcast_to(self.row(r) - offset, (max(8, height), K)) for r in range(first, C, height)]
        if height == 4:
            lower = (iota((8, K), 0) & 4) == 0
            rows = [jnp.where(lower, a, b) for a, b in zip(rows[::2], rows[1::2], strict=True)]
        return jnp.concatenate(rows, axis=0)


@dataclass(frozen=True)
class Scores:
    """Pair coefficients without the scale's magnitude, in the compute dtype; zero where j is not before i.

    Attributes:
        a: [C, C] of dO and v_new (with its diagonal if ``form.diagonal``).
        l: [C, C] of n and v_new.
        transposed: [C, 2 C] = [l^T | a^T].
    """

    a: Array
    l: Array
    transposed: Array

    @classmethod
    def of(cls, form: PairForm, products: Array) -> Scores:
        """From [dO ; n] v_new^T, [2 C, C] float32."""
        C = products.shape[1]
        row, col = iota((C, C), 0), iota((C, C), 1)
        if form.scale < 0:
            products = -products
        a = jnp.where(row >= col if form.diagonal else row > col, products[:C], 0.0).astype(form.dtype)
        l = jnp.where(row > col, products[C:], 0.0).astype(form.dtype)
        return cls(a, l, jnp.concatenate([l, a], axis=0).T)


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
        """[k decay ; q decay], [2 C, K]."""
        return jnp.concatenate([(self.at.key() * decay).astype(dtype), (self.at.query() * decay).astype(dtype)], axis=0)


def pair_sums(form: PairForm, at: Any, exponents: Exponents, scores: Scores, sums: PairSums) -> Stage:
    """Stages that add up all pairs of a chunk in ``sums``."""
    if form.scheme == "tree":
        for m in form.levels:
            yield from _level(form, at, exponents, scores, sums, m)
        yield from _smallest_blocks(form, at, exponents, scores, sums)
        return
    yield from _row_blocks(form, at, exponents, scores, sums)
    if form.scheme == "nested":
        yield from _inner_blocks(form, at, exponents, scores, sums)


def _row_blocks(form: PairForm, at: Any, exponents: Exponents, scores: Scores, sums: PairSums) -> Stage:
    """Blocks of 16 rows against all columns before the block's end, or (nested) before its begin.

    A column block is decayed once to its own frame, the anchor of its block or (nested) of the next; every later row
    block needs it one factor 2^(R' - R) [1, K] further, and the results walk back through the same factors.
    """
    C, h = scores.a.shape[0], _OUTER
    own = form.scheme == "row_blocks"
    skip = 0 if own else h  # nothing comes before the first block, nor behind the last
    offset = form.half_range if own else 0.0
    row_decay = jnp.exp2(exponents.from_first(h, offset + form.log2_scale)[skip:])
    rows = [(x[skip:] * row_decay).astype(form.dtype) for x in (at.key(), at.query())]
    first = [exponents.row(r) for r in range(0, C, h)]
    step = [jnp.exp2(b - a) for a, b in zip(first[skip // h :], first[skip // h + 1 :], strict=False)]
    frames = range(skip // h, C // h)
    G, key = exponents.prefix, at.key()
    if own:
        every_decay = jnp.exp2(-exponents.from_first(h, offset))
        decay = [every_decay[h * b : h * b + h] for b in frames]
    else:
        decay = [jnp.exp2(first[x] - G[h * b : h * b + h]) for b, x in enumerate(frames)]
    column = [key[h * b : h * b + h] * d for b, d in enumerate(decay)]
    weights: list[Array] = []
    taken = []
    for n, x in enumerate(frames):
        column = [c * step[n - 1] if b < n else c for b, c in enumerate(column)]
        weights.append(jnp.concatenate([c.astype(form.dtype) for c in column[: n + 1]], axis=0))
        coefficients = [s[h * x : h * x + h, : h * (n + 1)] for s in (scores.a, scores.l)]
        taken.append(nn(jnp.concatenate(coefficients, axis=0), weights[-1]))
    block, zero = (iota((C, 2 * C), 1) & (C - 1)) // h, jnp.zeros((), form.dtype)
    left = []
    for n, x in enumerate(frames):
        end = h * (n + 1)
        left.append(jnp.where(block[:end] == x, scores.transposed[:end], zero))
    given = nn(jnp.concatenate(left, axis=0), jnp.concatenate([_below(x, skip) for x in rows], axis=0))
    yield None
    query = jnp.concatenate([x[:h] for x in taken], axis=0)
    key_rows = jnp.concatenate([x[h:] for x in taken], axis=0)
    back, gate = _walk_back(given, weights, step, h)
    key_columns = jnp.concatenate([x * d for x, d in zip(back, decay, strict=True)], axis=0)
    seen_key, seen_query = (x.astype(jnp.float32) for x in rows)
    sums.add(
        _below(query * row_decay, skip),
        _below(key_rows * row_decay, skip) + _above(key_columns, skip),
        _below(seen_query * query + seen_key * key_rows, skip) - _above(jnp.concatenate(gate, axis=0), skip),
    )
    yield None


def _below(x: Array, rows: int) -> Array:
    """``x`` below ``rows`` rows of zeros."""
    return jnp.concatenate([jnp.zeros((rows, x.shape[1]), x.dtype), x], axis=0) if rows else x


def _above(x: Array, rows: int) -> Array:
    """``x`` above ``rows`` rows of zeros."""
    return jnp.concatenate([x, jnp.zeros((rows, x.shape[1]), x.dtype)], axis=0) if rows else x


def _walk_back(given: Array, weights: list[Array], step: list[Array], h: int) -> tuple[list[Array], list[Array]]:
    """Per column block the sum of what the row blocks give, in the column block's frame; and its part of P.

    Args:
        given: results of the row blocks in turn, each over its columns.
        weights: those columns, one block of ``h`` rows more in each, as the products of the other direction saw them.
        step: step[n] leads from the n-th frame to the next.
        h: rows of a block.
    """
    count = len(weights)
    back: list[Array] = [given[:0]] * count
    gate: list[Array] = [given[:0]] * count
    offset = given.shape[0]
    for x in reversed(range(count)):
        offset -= weights[x].shape[0]
        for b in range(x + 1):
            part = given[offset + h * b : offset + h * b + h]
            seen = weights[x][h * b : h * b + h].astype(jnp.float32) * part
            gate[b] = seen if x == count - 1 else gate[b] + seen
            back[b] = part if x == count - 1 else back[b] * step[x] + part
    return back, gate


def _inner_blocks(form: PairForm, at: Any, exponents: Exponents, scores: Scores, sums: PairSums) -> Stage:
    """Pairs inside blocks of 16 rows, anchored at the first row of i's 8; both column blocks in one product.

    A column of the lower 8 is decayed to that anchor at once. By way of its own anchor a steep stretch between the two
    would underflow although the decay from the column on is mild.
    """
    C, h = scores.a.shape[0], form.inner
    zero = jnp.zeros((), form.dtype)

    def masked(x: Array, apart: int) -> Array:
        """``x`` [C, n C] where row and column block of 8 are the same (0) or neighbours in one block of 16 (1)."""
        row, col = iota(x.shape, 0) // h, (iota(x.shape, 1) & (C - 1)) // h
        return jnp.where((row ^ col) == apart, x, zero)

    row_decay = jnp.exp2(exponents.from_first(h, form.half_range + form.log2_scale))
    rows = Operands(at).weighted(row_decay, form.dtype)
    decay = jnp.exp2(-exponents.from_first(h, form.half_range))
    key, G, cross_parts = at.key(), exponents.prefix, []
    for r in range(0, C, 2 * h):
        lower = jnp.exp2(exponents.row(r + h) - G[r : r + h] - form.half_range)
        cross_parts += [lower, jnp.zeros_like(lower)]
    cross = jnp.concatenate(cross_parts, axis=0)
    weight = jnp.concatenate([key * decay, key * cross], axis=0).astype(form.dtype)
    left = jnp.concatenate(
        [jnp.concatenate([masked(s, 0), masked(s, 1)], axis=1) for s in (scores.a, scores.l)], axis=0
    )
    taken = nn(left, weight)
    given = nn(jnp.concatenate([masked(scores.transposed, d) for d in (0, 1)], axis=0), rows)
    yield None
    seen, seen_column = rows.astype(jnp.float32), weight.astype(jnp.float32) * given
    sums.add(
        taken[:C] * row_decay,
        taken[C:] * row_decay + given[:C] * decay + given[C:] * cross,
        seen[C:] * taken[:C] + seen[:C] * taken[C:] - seen_column[:C] - seen_column[C:],
    )
    yield None


def _level(form: PairForm, at: Any, exponents: Exponents, scores: Scores, sums: PairSums, m: int) -> Stage:
    """Rows of the upper half of a block of 2 m rows against columns of its lower half.

    Each row has one role, so one array of decays and one product serve both directions; the scale is split between the
    two factors.
    """
    C = scores.a.shape[0]
    row, col = iota((C, 2 * C), 0), iota((C, 2 * C), 1) & (C - 1)
    zero = jnp.zeros((), form.dtype)
    weights = Operands(at).weighted(jnp.exp2(exponents.level(m) + 0.5 * form.log2_scale), form.dtype)
    nothing = jnp.zeros((C, C), form.dtype)
    pair = _is_pair(row, col, m)
    left = [jnp.where(pair, jnp.concatenate([s, nothing], axis=1), zero) for s in (scores.a, scores.l)]
    left.append(jnp.where(_is_pair(col, row, m), scores.transposed, zero))
    result = nn(jnp.concatenate(left, axis=0), weights)
    yield None
    decay = jnp.exp2(exponents.level(m) + 0.5 * form.log2_scale)
    query, as_row, as_column = result[:C], result[C : 2 * C], result[2 * C :]
    seen = weights.astype(jnp.float32)
    sums.add(query * decay, (as_row + as_column) * decay, seen[C:] * query + seen[:C] * (as_row - as_column))


def _is_pair(i: Array, j: Array, m: int) -> Array:
    """Whether i and j lie in the upper and the lower half of one block of 2 m rows."""
    bits = m.bit_length() - 1
    return ((i >> bits) == (j >> bits) + 1) & ((i & m) == m)


def _smallest_blocks(form: PairForm, at: Any, exponents: Exponents, scores: Scores, sums: PairSums) -> Stage:
    """Pairs inside the blocks at the tree's end, each with its first row as anchor."""
    C = scores.a.shape[0]
    zero = jnp.zeros((), form.dtype)

    def inside(x: Array) -> Array:
        row, col = iota(x.shape, 0), iota(x.shape, 1) & (C - 1)
        return jnp.where(row // form.inner == col // form.inner, x, zero)

    def decays() -> tuple[Array, Array]:
        exponent = exponents.from_first(form.inner, form.half_range)
        return jnp.exp2(exponent + form.log2_scale), jnp.exp2(-exponent)

    row_decay, decay = decays()
    column = (at.key() * decay).astype(form.dtype)
    rows = Operands(at).weighted(row_decay, form.dtype)
    taken = nn(jnp.concatenate([inside(scores.a), inside(scores.l)], axis=0), column)
    given = nn(inside(scores.transposed), rows)
    yield None
    row_decay, decay = decays()
    seen = rows.astype(jnp.float32)
    sums.add(
        taken[:C] * row_decay,
        taken[C:] * row_decay + given * decay,
        seen[C:] * taken[:C] + seen[:C] * taken[C:] - column.astype(jnp.float32) * given,
    )
    yield None
