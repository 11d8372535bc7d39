"""Inside a chunk: products of decayed rows without overflow, and the exact inverse of a unit lower triangle.

With G the inclusive cumulative log2 decay of a chunk and E_ij = 2^(G_i - G_j) per channel,

    Aqk_ij = scale sum_c q_ic k_jc E_ijc  (j <= i)     L_ij = beta_i sum_c k_ic k_jc E_ijc  (j < i)     A = (I + L)^-1

E is split as 2^(G_i - R) 2^(R - G_j) with an anchor R. A binary tree takes R between j and i, so both exponents are
<= 0 for every gate: level m holds the pairs with i in the upper and j in the lower half of a block of 2m rows. It stops
at blocks of ``anchor_rows`` rows, inside which the anchor is the block's first row and the exponents may be positive:
the steepest decay is known to be small enough, or a floor makes it so. Anchors never lie behind i, so a later gate
changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ops.kda_tpu.pallas.common import LOWEST_LOG2_DECAY, GateForm, Phases, iota, nn, nt, split
from ops.kda_tpu.pallas.config import CHUNK

_SUBLANES = 8
_EXPONENT_RANGE = 200.0  # of float32's 252, the rest is room for the operands
_INVERSE_ROWS = 16  # of the blocks inverted by substitution
_PAIR = (CHUNK, 2 * CHUNK)  # two matrices [C, C] side by side fill the lanes


@dataclass(frozen=True)
class IntraForm:
    """How the decay between two rows of a chunk is evaluated.

    Attributes:
        anchor_rows: rows of the innermost blocks: 16 or 8.
        floor: log2 decay of a token below which it counts as this, so that those blocks stay in range: blocks of 8 rows
            leave 2^-28 where nothing may be left.
        bias: added to the exponents of the left factor and taken from the right one, so that both use half the range.
        local_sums: sums of decays are formed from their own terms, not as differences of G.
    """

    anchor_rows: int
    floor: float
    bias: float
    local_sums: bool

    @classmethod
    def choose(cls, gate: GateForm, local_sums: bool) -> IntraForm:
        """Cheapest form that holds for every gate of the form."""
        anchor_rows = 16 if gate.steepest * 15 <= _EXPONENT_RANGE else 8
        steepest = min(gate.steepest, _EXPONENT_RANGE / (anchor_rows - 1))
        floor = -steepest if gate.steepest > steepest else LOWEST_LOG2_DECAY
        return cls(anchor_rows, floor, float(round(steepest * (anchor_rows - 1) / 2)), local_sums)

    @property
    def levels(self) -> tuple[int, ...]:
        """Half-block sizes of the tree, largest first."""
        return tuple(m for m in (32, 16, 8) if m >= self.anchor_rows)

    @property
    def sums(self) -> int:
        """Arrays [C, K] of decay sums kept for a head and chunk."""
        if self.local_sums:
            return 3 + len(self.levels)
        return 1


def sum_matrix(form: IntraForm) -> np.ndarray:
    """0/1 matrix whose product with the decays of a chunk gives every sum a form needs, by rows of C.

    Inclusive prefix (G); with ``local_sums`` also the exclusive suffix, for each level the sum from the anchor (rows
    mid+1..i of an upper, j+1..mid of a lower row), and the sum behind the first row of the innermost block.
    """
    row, term = np.arange(CHUNK)[:, None], np.arange(CHUNK)[None, :]
    blocks = [term <= row]
    if form.local_sums:
        blocks.append(term > row)
        for m in form.levels:
            middle = row // (2 * m) * 2 * m + m - 1
            blocks.append(np.where(row > middle, (term > middle) & (term <= row), (term > row) & (term <= middle)))
        blocks.append((term <= row) & (term > row // form.anchor_rows * form.anchor_rows))
    return np.concatenate(blocks).astype(np.float32)


@dataclass(frozen=True)
class DecaySums:
    """Exponents of one head and chunk, [C, K] float32 (log2), read from where the sums were stored.

    Attributes:
        form: which sums there are.
        read: ``read(n, rows)`` loads rows of the n-th array [C, K].
    """

    form: IntraForm
    read: Callable[[int, slice], jax.Array]

    def prefix(self) -> jax.Array:
        """G, from the chunk's start to each row."""
        return self.read(0, slice(0, CHUNK))

    def total(self) -> jax.Array:
        """G of the last row [1, K]."""
        return self.read(0, slice(CHUNK - 1, CHUNK))

    def suffix(self) -> jax.Array:
        """Sum behind each row, to the chunk's end."""
        return self.read(1, slice(0, CHUNK)) if self.form.local_sums else self.total() - self.prefix()

    def level(self, m: int) -> jax.Array:
        """Between each row and the anchor of its block of 2m rows, the last row of the lower half."""
        if self.form.local_sums:
            return self.read(2 + self.form.levels.index(m), slice(0, CHUNK))
        parts = []
        for start in range(0, CHUNK, 2 * m):
            anchor = self.read(0, slice(start + m - 1, start + m))
            parts.append(anchor - self.read(0, slice(start, start + m)))
            parts.append(self.read(0, slice(start + m, start + 2 * m)) - anchor)
        return jnp.concatenate(parts, axis=0)

    def anchored(self) -> jax.Array:
        """From the first row of its innermost block to each row, plus the bias; the right factor takes its negative."""
        if self.form.local_sums:
            return self.read(self.form.sums - 1, slice(0, CHUNK)) + self.form.bias
        rows, parts = self.form.anchor_rows, []
        for start in range(0, CHUNK, rows):
            anchor = self.read(0, slice(start, start + 1)) - self.form.bias
            parts.append(self.read(0, slice(start, start + rows)) - anchor)
        return jnp.concatenate(parts, axis=0)


@dataclass(frozen=True)
class Rows:
    """One head and chunk as the products inside a chunk see it.

    Attributes:
        sums: its decay sums.
        query: loads [C, K] float32.
        key: loads [C, K] float32.
    """

    sums: DecaySums
    query: Callable[[], jax.Array]
    key: Callable[[], jax.Array]


Pair = tuple[Rows, Rows]


def scores(pairs: Sequence[Pair], form: IntraForm, dtype: jnp.dtype) -> Phases[list[tuple[jax.Array, jax.Array]]]:
    """Returns for each pair (sum q k E for j <= i, sum k k E for j < i), 0 elsewhere, [C, 128] float32.

    The matrices of a pair lie side by side: both right factors are loaded into the matrix unit at once, which costs no
    more, and of each product the half that belongs to its own rows is kept.
    """
    row, column = iota(_PAIR, 0), iota(_PAIR, 1) % CHUNK
    same = (row // form.anchor_rows) == (column // form.anchor_rows)
    products = [_anchored_product(pair, dtype) for pair in pairs]
    yield None
    found = [
        (jnp.where(same & (column <= row), qk, 0.0), jnp.where(same & (column < row), kk, 0.0)) for qk, kk in products
    ]
    for m in form.levels:
        products = [_level_product(pair, m, dtype) for pair in pairs]
        yield None
        mask = _upper((row // m == column // m + 1) & (row // m % 2 == 1), m)
        found = [
            (_blend(into[0], qk, mask, m), _blend(into[1], kk, mask, m))
            for into, (qk, kk) in zip(found, products, strict=True)
        ]
    return found


def _anchored_product(pair: Pair, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    left, right = [], []
    for rows in pair:
        q, k = rows.query(), rows.key()
        exponent = rows.sums.anchored()
        decay = jnp.exp2(exponent)
        right.append((k * jnp.exp2(-exponent)).astype(dtype))
        left += [(q * decay).astype(dtype), (k * decay).astype(dtype)]
    return _own_columns(nt(jnp.concatenate(left, axis=0), jnp.concatenate(right, axis=0)))


def _level_product(pair: Pair, m: int, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    left, right = [], []
    for rows in pair:
        decay = jnp.exp2(rows.sums.level(m))
        k = (rows.key() * decay).astype(dtype)
        left += [(_upper(rows.query(), m) * _upper(decay, m)).astype(dtype), _upper(k, m)]
        right.append(k)
    return _own_columns(nt(jnp.concatenate(left, axis=0), jnp.concatenate(right, axis=0)))


def _own_columns(product: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Blocks of rows q, k of the first of a pair, q, k of the second; each keeps its own 64 columns."""
    n = product.shape[0] // 4
    first = iota((n, 2 * CHUNK), 1) < CHUNK
    return jnp.where(first, product[:n], product[2 * n : 3 * n]), jnp.where(first, product[n : 2 * n], product[3 * n :])


def _upper(x: jax.Array, m: int) -> jax.Array:
    """Rows of the upper halves of blocks of 2m rows; these are whole registers, m >= 8."""
    return jnp.concatenate([x[start : start + m] for start in range(m, CHUNK, 2 * m)], axis=0)


def _put_upper(x: jax.Array, rows: jax.Array, m: int) -> jax.Array:
    """``x`` with the rows that :func:`_upper` takes replaced."""
    parts = []
    for n, start in enumerate(range(m, CHUNK, 2 * m)):
        parts += [x[start - m : start], rows[n * m : (n + 1) * m]]
    return jnp.concatenate(parts, axis=0)


def _blend(x: jax.Array, rows: jax.Array, mask: jax.Array, m: int) -> jax.Array:
    return _put_upper(x, jnp.where(mask, rows, _upper(x, m)), m)


def invert(lower: Sequence[jax.Array], terms: int, scratch: Sequence[Any]) -> Phases[list[jax.Array]]:
    """Returns (I + L)^-1 of strictly lower triangular L, pairs side by side in [C, 128] float32.

    Blocks of 16 rows by exact substitution; then twice [[X, 0], [-Y M X, Y]] for the inverses X, Y of two neighbouring
    blocks with M below X. A Neumann product instead of the substitution would lose everything for nearly parallel keys.

    Args:
        lower: pairs of matrices L, at most two pairs.
        terms: bfloat16 terms of the operands of the merging products: 2 (4 passes, 16 bits) or 3 (6 passes, float32).
        scratch: a ref [16, 128] float32 for each pair.
    """
    inverse = yield from _substitute(lower, scratch)
    for m in (16, 32):
        inverse = yield from _merge(lower, inverse, m, terms)
    return inverse


def _substitute(pairs: Sequence[jax.Array], scratch: Sequence[Any]) -> Phases[list[jax.Array]]:
    """Returns the inverses of the diagonal blocks of 16 rows, 0 elsewhere.

    Finished rows go through memory: a load repeats a row over the sublanes at once, the permute unit takes far longer.
    """
    rows, registers = _INVERSE_ROWS, _INVERSE_ROWS // _SUBLANES
    shape = (_SUBLANES, 2 * CHUNK)
    lane, row = iota(shape, 1), iota(shape, 0)
    block, column = lane % CHUNK // rows, lane % rows
    packed, inverse = [], []
    for pair in pairs:
        packed.append([_diagonal_blocks(pair, a, block) for a in range(registers)])
        inverse.append([jnp.where(row + _SUBLANES * a == column, 1.0, 0.0) for a in range(registers)])
    for t in range(rows - 1):
        # X_i -= L_it X_t for the rows i > t; L is 0 at the others.
        index = lane - column + t
        for x, lower, ref in zip(inverse, packed, scratch, strict=True):
            ref[pl.ds(t // _SUBLANES * _SUBLANES, _SUBLANES)] = x[t // _SUBLANES]
            x_t = ref[t : t + 1]
            for a in range((t + 1) // _SUBLANES, registers):
                x[a] -= jnp.take_along_axis(lower[a], index, axis=1, mode="promise_in_bounds") * x_t
        if t % 5 == 4:
            yield None
    return [
        jnp.concatenate(
            [jnp.where(block == b, x[a], 0.0) for b in range(CHUNK // rows) for a in range(registers)], axis=0
        )
        for x in inverse
    ]


def _diagonal_blocks(pair: jax.Array, a: int, block: jax.Array) -> jax.Array:
    """Register ``a`` of every diagonal block of 16 rows, each in its own columns [8, 128]."""
    x = pair[_SUBLANES * a :][:_SUBLANES]
    for b in range(1, CHUNK // _INVERSE_ROWS):
        start = b * _INVERSE_ROWS + _SUBLANES * a
        x = jnp.where(block == b, pair[start : start + _SUBLANES], x)
    return x


def _merge(pairs: Sequence[jax.Array], inverse: Sequence[jax.Array], m: int, terms: int) -> Phases[list[jax.Array]]:
    """Returns the inverses of the diagonal blocks of 2m rows from those of m rows."""
    shape = (CHUNK // 2, 2 * CHUNK)
    start, column = iota(shape, 0) // m * 2 * m, iota(shape, 1) % CHUNK
    below = (column >= start) & (column < start + m)
    left = [jnp.where(below, _upper(pair, m), 0.0) for pair in pairs]
    products = _pair_products(left, [_float_terms(x, terms) for x in inverse], terms)
    yield None
    upper = [_upper(x, m) for x in inverse]
    zero = jnp.zeros((CHUNK, 2 * CHUNK), jnp.float32)
    right = [[_put_upper(zero, part, m) for part in _float_terms(y, terms)] for y in products]
    products = _pair_products(upper, right, terms)
    yield None
    return [_put_upper(x, u - w, m) for x, u, w in zip(inverse, upper, products, strict=True)]


def _pair_products(left: Sequence[jax.Array], right: Sequence[Sequence[jax.Array]], terms: int) -> list[jax.Array]:
    """Products of matrices [32, 64] with matrices given as terms [64, 64], pairs side by side, to 8 * ``terms`` bits.

    The passes of all matrices are stacked in one or two products of the matrix unit: passes along the contraction,
    matrices along rows and columns; of the result each keeps its own block.
    """
    first = iota(left[0].shape, 1) < CHUNK
    rows = left[0].shape[0]
    left_terms = [_float_terms(x, terms) for x in left]
    wide = [jnp.concatenate(parts, axis=1).astype(jnp.bfloat16) for parts in zip(*right, strict=True)]

    def stacked(one: int, two: int) -> jax.Array:
        parts = []
        for x in left_terms:
            parts.append(jnp.where(first, x[one], pltpu.roll(x[two], CHUNK, 1)))
            parts.append(jnp.where(first, pltpu.roll(x[one], CHUNK, 1), x[two]))
        return jnp.concatenate(parts, axis=0).astype(jnp.bfloat16)

    high = stacked(0, 1)
    result = nn(jnp.concatenate([high, high], axis=1), jnp.concatenate([wide[0], wide[0], wide[1], wide[1]], axis=0))
    if terms == 3:
        result += nn(stacked(0, 2), jnp.concatenate([wide[2], wide[0]], axis=0))
    blocks = []
    for n in range(len(left)):
        own = result[2 * rows * n :, 2 * CHUNK * n : 2 * CHUNK * (n + 1)]
        blocks.append(jnp.where(first, own[:rows], own[rows : 2 * rows]))
    return blocks


def _float_terms(x: jax.Array, terms: int) -> list[jax.Array]:
    """As :func:`split`, in float32 registers, each exactly a bfloat16 number but for the last."""
    parts = []
    for _ in range(terms - 1):
        bits = pltpu.bitcast(x, jnp.uint32) & jnp.uint32(0xFFFF0000)
        parts.append(pltpu.bitcast(bits, jnp.float32))
        x = x - parts[-1]
    return [*parts, x]


def decay_sums(decay: Sequence[jax.Array], matrix: jax.Array, form: IntraForm) -> list[list[jax.Array]]:
    """Sums of log2 decays [C, K] of each head and chunk, as many arrays [C, K] as ``form.sums``.

    One product with the 0/1 matrix for two of them side by side.

    Args:
        decay: log2 decays of each head and chunk, float32, at least ``form.floor``.
        matrix: :func:`sum_matrix` repeated along columns for each bfloat16 term.
        form: which sums.
    """
    terms = matrix.shape[1] // CHUNK
    width, found = decay[0].shape[1], []
    for n in range(0, len(decay), 2):
        wide = jnp.concatenate(decay[n : n + 2], axis=1)
        product = nn(matrix, jnp.concatenate(split(wide, terms), axis=0))
        for start in range(0, wide.shape[1], width):
            column = product[:, start : start + width]
            found.append([column[at : at + CHUNK] for at in range(0, column.shape[0], CHUNK)])
    return found
