"""Inside a chunk: products of decayed rows without overflow, and the exact inverse of a unit lower triangle.

With G the inclusive cumulative log2 decay of a chunk and E_ij = 2^(G_i - G_j) per channel,

    Aqk_ij = scale sum_c q_ic k_jc E_ijc  (j <= i)        L_ij = beta_i sum_c k_ic k_jc E_ijc  (j < i)        A = (I + L)^-1

E is split as 2^(G_i - R) 2^(R - G_j) with an anchor R. A binary tree takes R between j and i, so both exponents are <= 0
for every gate: level m holds the pairs with i in the upper and j in the lower half of a block of 2m rows. It stops at blocks
of ``anchor_rows`` rows, inside which the anchor is the block's first row and the exponents may be positive: the steepest
decay is either known to be small enough or clamped there. Anchors never lie behind i, so a later gate changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu

from ops.kda_tpu.pallas.common import GateForm, Stage, iota, nn, nt, split
from ops.kda_tpu.pallas.config import CHUNK

_SUBLANES = 8
_EXPONENT_RANGE = 200.0  # of float32's 252, the rest is room for the operands
_INVERSE_ROWS = 16  # of the blocks inverted by substitution


@dataclass(frozen=True)
class IntraForm:
    """How the decay between two rows of a chunk is evaluated.

    Attributes:
        anchor_rows: rows of the innermost blocks: 16 or 8; 1 is the tree all the way down.
        clamp: largest -log2 decay of a token used inside those blocks, None if no gate exceeds it. A pair across a clamped
            token counts with 2^-clamp instead of less.
        bias: added to the exponents of the left factor and taken from the right one, so that both use half the range.
        local_sums: sums of decays are formed from their own terms, not as differences of G.
    """

    anchor_rows: int
    clamp: float | None
    bias: float
    local_sums: bool

    @classmethod
    def choose(cls, sub_block: str, gate: GateForm, local_sums: bool) -> IntraForm:
        """Cheapest form within ``sub_block`` ("clamped" or "tree") that holds for every gate of the form."""
        if sub_block == "tree":
            return cls(1, None, 0.0, True)
        anchor_rows = 16 if gate.steepest * 15 <= _EXPONENT_RANGE else 8
        steepest = _EXPONENT_RANGE / (anchor_rows - 1)
        clamp = steepest if gate.steepest > steepest else None
        return cls(anchor_rows, clamp, float(round(min(steepest, gate.steepest) * (anchor_rows - 1) / 2)), local_sums)

    @property
    def levels(self) -> tuple[int, ...]:
        """Half-block sizes of the tree, largest first."""
        return tuple(m for m in (32, 16, 8, 4, 2, 1) if m >= self.anchor_rows)

    @property
    def sums(self) -> int:
        """Arrays [C, K] of decay sums kept for a head and chunk."""
        if self.local_sums:
            return 2 + len(self.levels) + (self.anchor_rows > 1)
        return 1 if self.clamp is None else 2


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
        if form.anchor_rows > 1:
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
        at, rows, parts = 0 if self.form.clamp is None else 1, self.form.anchor_rows, []
        for start in range(0, CHUNK, rows):
            anchor = self.read(at, slice(start, start + 1)) - self.form.bias
            parts.append(self.read(at, slice(start, start + rows)) - anchor)
        return jnp.concatenate(parts, axis=0)


def scores(
    sums: Sequence[DecaySums], query: Sequence[Callable[[], jax.Array]], key: Sequence[Callable[[], jax.Array]]
) -> Stage:
    """Generator; returns for each head and chunk (sum q k E for j <= i, sum k k E for j < i), [C, C] float32, else 0.

    Args:
        sums: decay sums of each head and chunk of the group.
        query: loads [C, K] in the compute dtype.
        key: loads [C, K] in the compute dtype.
    """
    form = sums[0].form
    row, column = iota((CHUNK, CHUNK), 0), iota((CHUNK, CHUNK), 1)
    same = (row // form.anchor_rows) == (column // form.anchor_rows)
    masks = (same & (column <= row), same & (column < row))
    products = [_anchored_product(*unit) for unit in zip(sums, query, key, strict=True)]
    yield None
    found = [tuple(jnp.where(mask, part, 0.0) for mask, part in zip(masks, _halves(p), strict=True)) for p in products]
    for m in form.levels:
        products = [_level_product(m, *unit) for unit in zip(sums, query, key, strict=True)]
        yield None
        mask = _upper((row // m == column // m + 1) & (row // m % 2 == 1), m)
        found = [
            tuple(
                _put_upper(into, jnp.where(mask, part, _upper(into, m)), m)
                for into, part in zip(u, _halves(p), strict=True)
            )
            for u, p in zip(found, products, strict=True)
        ]
    return found


def _anchored_product(sums: DecaySums, query: Callable[[], jax.Array], key: Callable[[], jax.Array]) -> jax.Array:
    q, k = query(), key()
    if sums.form.anchor_rows == 1:
        return nt(jnp.concatenate([q, k], axis=0), k)
    exponent = sums.anchored()
    left, right = jnp.exp2(exponent), jnp.exp2(-exponent)
    return nt(jnp.concatenate([_times(q, left), _times(k, left)], axis=0), _times(k, right))


def _level_product(m: int, sums: DecaySums, query: Callable[[], jax.Array], key: Callable[[], jax.Array]) -> jax.Array:
    decay = jnp.exp2(sums.level(m))
    k = _times(key(), decay)
    q = _times(_upper(query(), m), _upper(decay, m))
    return nt(jnp.concatenate([q, _upper(k, m)], axis=0), k)


def _times(x: jax.Array, factor: jax.Array) -> jax.Array:
    return (x.astype(jnp.float32) * factor).astype(x.dtype)


def _halves(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    half = x.shape[0] // 2
    return x[:half], x[half:]


def _upper_starts(m: int) -> list[int]:
    return list(range(m, CHUNK, 2 * m))


def _upper(x: jax.Array, m: int) -> jax.Array:
    """Rows of the upper halves of blocks of 2m rows; all rows where those are no whole registers."""
    if m < _SUBLANES:
        return x
    return jnp.concatenate([x[start : start + m] for start in _upper_starts(m)], axis=0)


def _put_upper(x: jax.Array, rows: jax.Array, m: int) -> jax.Array:
    """``x`` with the rows that :func:`_upper` takes replaced."""
    if m < _SUBLANES:
        return rows
    parts = []
    for n, start in enumerate(_upper_starts(m)):
        parts += [x[start - m : start], rows[n * m : (n + 1) * m]]
    return jnp.concatenate(parts, axis=0)


def invert(lower: Sequence[jax.Array], terms: int) -> Stage:
    """Generator; returns (I + L)^-1 of strictly lower triangular L [C, C] float32, one for each of up to four.

    Blocks of 16 rows by exact substitution, all of two matrices side by side in 128 lanes; then twice
    [[X, 0], [-Y M X, Y]] for the inverses X, Y of two neighbouring blocks with M below X. A Neumann product instead of the
    substitution would lose everything for nearly parallel keys.

    Args:
        lower: the matrices L.
        terms: bfloat16 terms of the operands of the merging products: 2 (4 passes, 16 bits) or 3 (6 passes, float32).
    """
    last = len(lower) - 1
    pairs = [jnp.concatenate([lower[n], lower[min(n + 1, last)]], axis=1) for n in range(0, last + 1, 2)]
    inverse = yield from _substitute(pairs)
    for m in (16, 32):
        inverse = yield from _merge(pairs, inverse, m, terms)
    return [inverse[n // 2][:, n % 2 * CHUNK :][:, :CHUNK] for n in range(last + 1)]


def _substitute(pairs: Sequence[jax.Array]) -> Stage:
    """Generator; returns the inverses of the diagonal blocks of 16 rows, [C, 128] for two matrices, 0 elsewhere."""
    rows, registers = _INVERSE_ROWS, _INVERSE_ROWS // _SUBLANES
    shape = (_SUBLANES, 2 * CHUNK)
    lane, row = iota(shape, 1), iota(shape, 0)
    block, column = lane % CHUNK // rows, lane % rows
    packed, inverse = [], []
    for pair in pairs:
        registers_of = [pair[start : start + _SUBLANES] for start in range(0, CHUNK, _SUBLANES)]
        packed.append([])
        for a in range(registers):
            x = registers_of[a]
            for b in range(1, CHUNK // rows):
                x = jnp.where(block == b, registers_of[b * registers + a], x)
            packed[-1].append(x)
        inverse.append([jnp.where(row + _SUBLANES * a == column, 1.0, 0.0) for a in range(registers)])
    for t in range(rows - 1):
        # X_i -= L_it X_t for the rows i > t; L is 0 at the others.
        index = lane - column + t
        for x, lower in zip(inverse, packed, strict=True):
            x_t = x[t // _SUBLANES][t % _SUBLANES : t % _SUBLANES + 1]
            for a in range((t + 1) // _SUBLANES, registers):
                l_t = jnp.take_along_axis(lower[a], index, axis=1, mode="promise_in_bounds")
                x[a] = x[a] - l_t * x_t
        yield None
    return [
        jnp.concatenate(
            [jnp.where(block == b, x[a], 0.0) for b in range(CHUNK // rows) for a in range(registers)], axis=0
        )
        for x in inverse
    ]


def _merge(pairs: Sequence[jax.Array], inverse: Sequence[jax.Array], m: int, terms: int) -> Stage:
    """Generator; returns the inverses of the diagonal blocks of 2m rows from those of m rows."""
    shape = (CHUNK // 2, 2 * CHUNK)
    lower_start = iota(shape, 0) // m * 2 * m
    column = iota(shape, 1) % CHUNK
    below = (column >= lower_start) & (column < lower_start + m)
    products = _pair_products([jnp.where(below, _upper(pair, m), 0.0) for pair in pairs], inverse, terms)
    yield None
    zero = jnp.zeros((CHUNK, 2 * CHUNK), jnp.float32)
    upper = [_upper(x, m) for x in inverse]
    products = _pair_products(upper, [_put_upper(zero, y, m) for y in products], terms)
    yield None
    return [_put_upper(x, u - w, m) for x, u, w in zip(inverse, upper, products, strict=True)]


def _pair_products(left: Sequence[jax.Array], right: Sequence[jax.Array], terms: int) -> list[jax.Array]:
    """Products [32, 64] [64, 64] of each matrix, two side by side in 128 lanes, to 8 * ``terms`` bits.

    The passes of all matrices are stacked in one or two products of the matrix unit: passes along the contraction, the
    matrices of all pairs along rows and columns; the blocks that belong to one matrix are taken out of the result.
    """
    first = iota(left[0].shape, 1) < CHUNK
    rows = left[0].shape[0]
    l_terms = [_float_terms(x, terms) for x in left]
    r_terms = [
        jnp.concatenate([t.astype(jnp.bfloat16) for t in ts], axis=1)
        for ts in zip(*(_float_terms(x, terms) for x in right))
    ]

    def stacked(one: int, two: int) -> jax.Array:
        parts = []
        for ts in l_terms:
            swapped = [pltpu.roll(ts[n], CHUNK, 1) for n in (one, two)]
            parts += [jnp.where(first, ts[one], swapped[1]), jnp.where(first, swapped[0], ts[two])]
        return jnp.concatenate(parts, axis=0).astype(jnp.bfloat16)

    high = stacked(0, 1)
    result = nn(
        jnp.concatenate([high, high], axis=1), jnp.concatenate([r_terms[0], r_terms[0], r_terms[1], r_terms[1]], axis=0)
    )
    if terms == 3:
        result += nn(stacked(0, 2), jnp.concatenate([r_terms[2], r_terms[0]], axis=0))
    blocks = []
    for n in range(len(left)):
        own = result[2 * rows * n : 2 * rows * (n + 1), 2 * CHUNK * n : 2 * CHUNK * (n + 1)]
        blocks.append(jnp.where(first, own[:rows], own[rows:]))
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

    One product with the 0/1 matrix for a pair of arrays side by side: two heads, or a head's decays and their clamped form.

    Args:
        decay: log2 decays of each head and chunk, float32.
        matrix: :func:`sum_matrix` repeated along columns for each bfloat16 term.
        form: which sums.
    """
    terms = matrix.shape[1] // CHUNK
    columns = [d for x in decay for d in ((x,) if form.clamp is None else (x, jnp.maximum(x, -form.clamp)))]
    width, found = decay[0].shape[1], []
    for n in range(0, len(columns), 2):
        wide = jnp.concatenate(columns[n : n + 2], axis=1)
        product = nn(matrix, jnp.concatenate(split(wide, terms), axis=0))
        for start in range(0, wide.shape[1], width):
            column = product[:, start : start + width]
            found.append([column[at : at + CHUNK] for at in range(0, column.shape[0], CHUNK)])
    if form.clamp is None:
        return found
    return [
        [*(plain[:-1] if form.local_sums else plain), clamped[-1]]
        for plain, clamped in zip(found[::2], found[1::2], strict=True)
    ]
