"""Backward of one chunk of one head: the mathematics of the backward kernel, as stages that interleave.

Notation (a chunk of C rows; kernels hold the state and its gradient transposed, [V, K])::

    G       inclusive prefix sum of the log decay in the chunk, log2 units; gC its last row
    E_ij    2^(G_i - G_j), per key channel; gam = 2^G
    h, dh   state on entry of the chunk; gradient of the state on leaving it
    S       saved slab -(beta / scale) [A^T | (Aqk A)^T]

    n    = S [k 2^(gC - G) dh ; dO]                      n = -dv / scale, so dv = -scale n
    dh  <- 2^gC dh + scale (q gam)^T dO + scale (k gam)^T n
    x    = k (v_new dh^T) 2^(gC - G)
    dbeta_i = dv_i . v_new_i / beta_i^2
    a_ij = scale dO_i . v_new_j,  l_ij = scale n_i . v_new_j      j < i; their diagonals do not touch the gate
    dq_i = scale (dO h^T)_i gam_i + sum_j a_ij k_j E_ij
    dk_i = scale (n h^T)_i gam_i + (v_new dh^T)_i 2^(gC - G_i) + sum_j l_ij k_j E_ij + sum_{j > i} (a_ji q_j + l_ji k_j) E_ji
    dg   = reverse_cumsum(P) + sum_v 2^gC h dh + exclusive_prefix(x)

P is q dq + k dk without x and the diagonal, the last sum with a minus sign: what row i's prefix G_i receives. It is
built from the operands as the matrix unit saw them (rounded), so that the two ends of a pair cancel exactly in the sum
and what remains does not drown in rounding; and no sum is a total minus a prefix.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ops.kda_tpu.pallas.common import LOG2_E, Done, Need, Stage, iota, nn, nt, rsqrt_of_square_sum, split, tn

Array = jax.Array
GateForm = Literal["log", "softplus", "bounded"]

BETA_FLOOR = 2.0**-50

# A block of rows with one anchor splits 2^(G_i - G_j) into 2^(G_i - R) 2^(R - G_j) with R its first row: exponents of
# both signs. Two rules keep them in float32's range with room for the operands: no more than this many binades ...
_ANCHOR_BINADES = 160.0
# ... and, where the gate has no bound, this floor of a token's log2 decay per anchored block height. What it changes is
# below the floor itself: 2^-60 (41 nats) for 4 rows, 2^-28 (19 nats) for 8.
_FLOOR = {4: 60.0, 8: 28.0, 16: _ANCHOR_BINADES / 15}


@dataclass(frozen=True)
class Form:
    """What the kernel's code depends on.

    Attributes:
        heads, chunks: heads and chunks of a grid step.
        chunk: rows of a chunk, C.
        key_dim, value_dim: widths of the kernel's blocks.
        dtype: compute dtype, of operands of the matrix unit.
        scale: factor of the output.
        gate: how the gate input becomes a log decay.
        lower_bound: of the bounded form, in nats.
        normalize: whether q and k rows are normalised here.
        masked: whether some rows may not belong to the step's segment.
        anchor_rows: height of the blocks on the diagonal that share one anchor; 16 needs a bound on the decay.
    """

    heads: int
    chunks: int
    chunk: int
    key_dim: int
    value_dim: int
    dtype: Any
    scale: float
    gate: GateForm
    lower_bound: float | None
    normalize: bool
    masked: bool
    anchor_rows: int

    @property
    def exact(self) -> bool:
        """Whether operands stay float32."""
        return self.dtype == jnp.float32

    @property
    def terms(self) -> int:
        """Bfloat16 terms a float32 operand of a sum over rows is split into."""
        return 3 if self.exact else 2

    @property
    def floor(self) -> float:
        """Lowest log2 decay of a token that is told apart from no decay at all; its gate gets no gradient below."""
        return -_FLOOR[self.anchor_rows]

    @property
    def tree_levels(self) -> tuple[int, ...]:
        """Half heights of the blocks whose halves meet at an anchor between them."""
        if self.anchor_rows == 16:
            return ()
        return tuple(m for m in (32, 16, 8, 4) if m >= self.anchor_rows)


def anchor_rows(gate: GateForm, lower_bound: float | None, exact: bool) -> int:
    """Tallest blocks on the diagonal that one anchor serves: 16 if the gate is bounded enough, else 4 or 8."""
    if gate == "bounded" and lower_bound is not None and -lower_bound * LOG2_E * 15 <= _ANCHOR_BINADES:
        return 16
    return 4 if exact else 8


@dataclass
class Joint:
    """One product M [x_0 | x_1 | ...] for the heads that share the constant left side M: the weight is loaded once.

    A weight of up to 256 columns costs the same. Each head puts its operand in one round and takes its columns in the
    next; the last to put emits the product.
    """

    matrix: Callable[[], Array]
    members: int
    operands: list[Array] = field(default_factory=list)
    product: Array | None = None

    def put(self, operand: Array) -> int:
        """Adds a head's operand; returns the number to :meth:`take` its result by."""
        self.operands.append(operand)
        if len(self.operands) == self.members:
            together = self.operands[0] if self.members == 1 else jnp.concatenate(self.operands, axis=1)
            self.product = nn(self.matrix(), together)
        return len(self.operands) - 1

    def take(self, number: int) -> Array:
        """A head's columns of the product."""
        assert self.product is not None
        width = self.operands[number].shape[1]
        return self.product[:, number * width : (number + 1) * width]


def row_sums(form: Form) -> list[tuple[str, Array]]:
    """0/1 matrices [C, C] of the sums over rows the exponents need, by name.

    In bfloat16 problems every exponent is a difference of prefix sums. In float32 problems with an unbounded gate
    such a difference cancels, so each is summed on its own, from its anchor.
    """
    row, col = iota((form.chunk, form.chunk), 0), iota((form.chunk, form.chunk), 1)
    sums = [("prefix", col <= row)]
    if form.exact and form.tree_levels:
        sums.append(("suffix", col > row))
        for m in form.tree_levels:
            middle = row // (2 * m) * (2 * m) + m
            sums.append(
                (f"level{m}", jnp.where(row >= middle, (col >= middle) & (col <= row), (col > row) & (col < middle)))
            )
        first = row // form.anchor_rows * form.anchor_rows
        sums.append(("anchored", (col > first) & (col <= row)))
    return sums


def prefix_matrix(form: Form) -> Array:
    """Left side of the exponents' product, bfloat16 [sums * C, terms * C]: the sums stacked, once per term."""
    matrix = jnp.concatenate([m for _, m in row_sums(form)], axis=0).astype(jnp.bfloat16)
    return jnp.tile(matrix, (1, form.terms))


def gate_matrix(form: Form) -> Array:
    """Left side of dg's product, bfloat16 [C, ...]: reverse cumulative sum of P's terms, exclusive prefix of x's."""
    row, col = iota((form.chunk, form.chunk), 0), iota((form.chunk, form.chunk), 1)
    reverse, exclusive = col >= row, col < row
    terms_of_x = form.terms if form.exact else 1
    return jnp.concatenate([reverse] * form.terms + [exclusive] * terms_of_x, axis=1).astype(jnp.bfloat16)


@dataclass
class Exponents:
    """Log2 decays between rows of a chunk, [C, K] float32, never positive except :meth:`anchored`'s negative."""

    form: Form
    sums: dict[str, Array]

    @property
    def prefix(self) -> Array:
        """From the chunk's entry through row i: G."""
        return self.sums["prefix"]

    @property
    def total(self) -> Array:
        """Of the whole chunk, [1, K]: gC."""
        return self.prefix[self.form.chunk - 1 :]

    @property
    def suffix(self) -> Array:
        """From behind row i to the chunk's end: gC - G."""
        return self.sums["suffix"] if "suffix" in self.sums else self.total - self.prefix

    def level(self, m: int) -> Array:
        """Between row i and the middle of its block of 2 m rows, on either side."""
        if f"level{m}" in self.sums:
            return self.sums[f"level{m}"]
        return -jnp.abs(self.prefix - self._repeat(m - 1, 2 * m))

    def anchored(self) -> Array:
        """From behind the first row of i's anchored block through row i."""
        return (
            self.sums["anchored"] if "anchored" in self.sums else self.prefix - self._repeat(0, self.form.anchor_rows)
        )

    def _repeat(self, first: int, height: int) -> Array:
        """Row ``first`` of each block of ``height`` rows, over the block."""
        G = self.prefix
        rows = [jnp.broadcast_to(G[r : r + 1], (max(8, height), G.shape[1])) for r in range(first, G.shape[0], height)]
        if height == 4:
            lower = (iota((8, G.shape[1]), 0) & 4) == 0
            rows = [jnp.where(lower, a, b) for a, b in zip(rows[::2], rows[1::2], strict=True)]
        return jnp.concatenate(rows, axis=0)


@dataclass(frozen=True)
class Scores:
    """Pair coefficients of a chunk, compute dtype; row i, column j < i unless said otherwise.

    Attributes:
        a: [C, C] of dO and v_new: what dq_i takes from k_j.
        l: [C, C] of n and v_new: what dk_i takes from k_j.
        transposed: [C, 2 C] = [l^T | a^T]: what dk_j takes from k_i and q_i.
    """

    a: Array
    l: Array
    transposed: Array


@dataclass
class PairSums:
    """What the pairs inside a chunk add to the gradients, [C, K] float32 each: d_query, d_key, and P."""

    d_query: Array
    d_key: Array
    gate: Array


def chunk_gradients(form: Form, at: Any, joint_prefix: Joint, joint_gate: Joint) -> Stage:
    """Stages of one chunk of one head: loads through ``at``, stores gradients through it.

    Args:
        form: the kernel's form.
        at: the chunk's view of the kernel's refs (:class:`ops.kda_tpu.pallas.backward.ChunkView`).
        joint_prefix: product with :func:`prefix_matrix`, shared with neighbouring heads.
        joint_gate: product with :func:`gate_matrix`.
    """
    number = joint_prefix.put(_log_decay_terms(form, at))
    _normalize(form, at)
    yield None
    C = form.chunk
    summed = joint_prefix.take(number)
    exponents = Exponents(form, {name: summed[i * C : (i + 1) * C] for i, (name, _) in enumerate(row_sums(form))})

    # n = S [k 2^(gC - G) dh ; dO]
    yield Need(at.later)
    weighted_key = (at.key() * jnp.exp2(exponents.suffix)).astype(form.dtype)
    d_state = at.d_state().astype(form.dtype)
    d_v_new = nt(weighted_key, d_state)
    d_key_state = nn(at.v_new(), d_state)
    yield None
    n = nn(at.slab(), jnp.concatenate([d_v_new.astype(form.dtype), at.d_output()], axis=0))
    yield None

    # dh <- 2^gC dh + scale [q gam ; k gam]^T [dO ; n]
    at.add_d_value(n * -form.scale)
    rows = jnp.concatenate([at.d_output(), n.astype(form.dtype)], axis=0)
    gam = jnp.exp2(exponents.prefix) * form.scale
    decayed = jnp.concatenate([(at.query() * gam).astype(form.dtype), (at.key() * gam).astype(form.dtype)], axis=0)
    update = tn(rows, decayed)
    from_state = nn(rows, at.state())
    products = nt(rows, at.v_new())
    decay = jnp.exp2(exponents.total)
    state_gate = jnp.sum(at.state().astype(jnp.float32) * at.d_state(), axis=0, keepdims=True) * decay
    at.set_d_state(at.d_state() * decay + update)
    yield Done(at.here)

    diagonal = _diagonal_terms(form, at, products)
    scores = _scores(form, products)
    pairs = PairSums(*(jnp.zeros((C, form.key_dim), jnp.float32) for _ in range(3)))
    if form.tree_levels:
        yield from _tree(form, at, exponents, scores, pairs)
    else:
        yield from _row_blocks(form, at, exponents, scores, pairs)

    # dg = reverse_cumsum(P) + exclusive_prefix(x) + sum_v 2^gC h dh
    gam = jnp.exp2(exponents.prefix) * form.scale
    q, k = at.query(), at.key()
    d_query = from_state[:C] * gam
    d_key = from_state[C:] * gam
    d_key_state = d_key_state * jnp.exp2(exponents.suffix)
    P = q * d_query + k * d_key + pairs.gate
    terms = split(P, form.terms) + split(k * d_key_state, form.terms if form.exact else 1)
    number = joint_gate.put(jnp.concatenate(terms, axis=0))
    at.add_d_query(_unnormalize(form, at, "query", q, d_query + pairs.d_query + diagonal * k))
    at.add_d_key(_unnormalize(form, at, "key", k, d_key + d_key_state + pairs.d_key + diagonal * q))
    yield None
    _emit_d_gate(form, at, joint_gate.take(number) + state_gate)


def _diagonal_terms(form: Form, at: Any, products: Array) -> Array:
    """Emits d_beta; returns scale dO_i . v_new_i, [C, 1]."""
    C = form.chunk
    eye = iota((C, C), 0) == iota((C, C), 1)
    beta = jnp.maximum(at.beta(), BETA_FLOOR)
    at.add_d_beta(jnp.sum(jnp.where(eye, products[C:], 0.0), axis=0, keepdims=True) * (-form.scale / (beta * beta)))
    return jnp.sum(jnp.where(eye, products[:C], 0.0), axis=1, keepdims=True) * form.scale


def _scores(form: Form, products: Array) -> Scores:
    C = form.chunk
    below = iota((C, C), 0) > iota((C, C), 1)
    a = jnp.where(below, products[:C] * form.scale, 0.0).astype(form.dtype)
    l = jnp.where(below, products[C:] * form.scale, 0.0).astype(form.dtype)
    return Scores(a, l, jnp.concatenate([l, a], axis=0).T)


def _row_blocks(form: Form, at: Any, exponents: Exponents, scores: Scores, pairs: PairSums) -> Stage:
    """Pair sums with one anchor, its first row, for each block of 16 rows, diagonal block included; for bounded gates.

    Rows i of the block take 2^(G_i - R), every column j before the block's end 2^(R - G_j).
    """
    C, height = form.chunk, form.anchor_rows
    half_range = float(round(-(form.lower_bound or 0.0) * LOG2_E * (height - 1) / 2))
    starts = range(0, C, height)
    G = exponents.prefix
    row_decay = jnp.exp2(exponents.anchored() + half_range)
    rows = jnp.concatenate(
        [(at.key() * row_decay).astype(form.dtype), (at.query() * row_decay).astype(form.dtype)], axis=0
    )
    columns, taken = [], []
    for start in starts:
        end = start + height
        columns.append((at.key()[:end] * jnp.exp2(G[start : start + 1] - half_range - G[:end])).astype(form.dtype))
        left = jnp.concatenate([scores.a[start:end, :end], scores.l[start:end, :end]], axis=0)
        taken.append(nn(left, columns[-1]))
    block = (iota((C, 2 * C), 1) & (C - 1)) // height
    zero = jnp.zeros((), form.dtype)
    left = [jnp.where(block[: s + height] == s // height, scores.transposed[: s + height], zero) for s in starts]
    given = nn(jnp.concatenate(left, axis=0), rows)
    yield None
    to_query = jnp.concatenate([x[:height] for x in taken], axis=0)
    to_key = jnp.concatenate([x[height:] for x in taken], axis=0)
    row_decay = jnp.exp2(exponents.anchored() + half_range)
    d_key, gate = [0.0] * len(starts), [0.0] * len(starts)
    offset = 0
    for start, column in zip(starts, columns, strict=True):
        end = start + height
        part = given[offset : offset + end]
        offset += end
        decayed = part * jnp.exp2(G[start : start + 1] - half_range - G[:end])
        seen = column.astype(jnp.float32) * part
        for b in range(end // height):
            d_key[b] += decayed[b * height : (b + 1) * height]
            gate[b] += seen[b * height : (b + 1) * height]
    pairs.d_query = to_query * row_decay
    pairs.d_key = to_key * row_decay + jnp.concatenate(d_key, axis=0)
    seen_rows = rows.astype(jnp.float32)
    pairs.gate = seen_rows[C:] * to_query + seen_rows[:C] * to_key - jnp.concatenate(gate, axis=0)
    yield None


def _tree(form: Form, at: Any, exponents: Exponents, scores: Scores, pairs: PairSums) -> Stage:
    """Pair sums for any gate: anchors between the two rows of a pair, then small anchored blocks.

    Level m: rows i of the upper half of a block of 2 m rows, columns j of the lower half, anchor the last row of the
    lower half: both exponents are at most 0. One product serves both directions, since each row has one role.
    """
    C = form.chunk
    row, col = iota((C, 2 * C), 0), iota((C, 2 * C), 1)
    nothing = jnp.zeros((C, C), form.dtype)
    taken = jnp.concatenate([jnp.concatenate([s, nothing], axis=1) for s in (scores.a, scores.l)], axis=0)
    zero = jnp.zeros((), form.dtype)
    for m in form.tree_levels:
        decay = jnp.exp2(exponents.level(m))
        key = (at.key() * decay).astype(form.dtype)
        weights = jnp.concatenate([key, (at.query() * decay).astype(form.dtype)], axis=0)
        pair = _is_pair(row, col & (C - 1), m)
        given = _is_pair(col & (C - 1), row, m)
        left = jnp.concatenate(
            [
                jnp.where(pair, taken[:C], zero),
                jnp.where(pair, taken[C:], zero),
                jnp.where(given, scores.transposed, zero),
            ],
            axis=0,
        )
        result = nn(left, weights)
        yield None
        decay = jnp.exp2(exponents.level(m))
        to_query, to_key, from_rows = result[:C], result[C : 2 * C], result[2 * C :]
        seen = weights.astype(jnp.float32)
        pairs.d_query = pairs.d_query + to_query * decay
        pairs.d_key = pairs.d_key + (to_key + from_rows) * decay
        pairs.gate = pairs.gate + seen[C:] * to_query + seen[:C] * (to_key - from_rows)
    yield from _anchored_blocks(form, at, exponents, scores, pairs)


def _is_pair(i: Array, j: Array, m: int) -> Array:
    """Whether i and j lie in the upper and the lower half of one block of 2 m rows."""
    bits = m.bit_length() - 1
    return ((i >> bits) == (j >> bits) + 1) & ((i & m) == m)


def _anchored_blocks(form: Form, at: Any, exponents: Exponents, scores: Scores, pairs: PairSums) -> Stage:
    """Pair sums inside the small blocks on the diagonal, each with its first row as anchor."""
    C, height = form.chunk, form.anchor_rows
    half_range = float(round(-form.floor * (height - 1) / 2))
    zero = jnp.zeros((), form.dtype)

    def inside(x: Array) -> Array:
        row, col = iota(x.shape, 0), iota(x.shape, 1) & (C - 1)
        return jnp.where((row & (C - 1)) // height == col // height, x, zero)

    row_decay = jnp.exp2(exponents.anchored() + half_range)
    column_decay = jnp.exp2(-half_range - exponents.anchored())
    column = (at.key() * column_decay).astype(form.dtype)
    rows = jnp.concatenate(
        [(at.key() * row_decay).astype(form.dtype), (at.query() * row_decay).astype(form.dtype)], axis=0
    )
    taken = nn(jnp.concatenate([inside(scores.a), inside(scores.l)], axis=0), column)
    given = nn(inside(scores.transposed), rows)
    yield None
    row_decay = jnp.exp2(exponents.anchored() + half_range)
    column_decay = jnp.exp2(-half_range - exponents.anchored())
    seen = rows.astype(jnp.float32)
    pairs.d_query = pairs.d_query + taken[:C] * row_decay
    pairs.d_key = pairs.d_key + taken[C:] * row_decay + given * column_decay
    pairs.gate = pairs.gate + seen[C:] * taken[:C] + seen[:C] * taken[C:] - column.astype(jnp.float32) * given
    yield None


# ---- gate and norm


def _log_decay_terms(form: Form, at: Any) -> Array:
    """Log2 decay of the chunk's rows, split along the contraction of :func:`prefix_matrix`; masked rows have none."""
    x = at.gate()
    if form.gate == "log":
        log2_decay = jnp.maximum(x * LOG2_E, form.floor)
    elif form.gate == "bounded":
        # sigmoid(exp(a_log) (x + bias)); parameters: bias, -exp(a_log) log2 e, lower_bound log2 e, lower_bound exp(a_log)
        bias, slope, bound, _ = at.gate_parameters()
        sigmoid = pl.reciprocal(1.0 + jnp.exp2((x + bias) * slope), approx=not form.exact)
        at.save("sigmoid", sigmoid)
        log2_decay = jnp.maximum(sigmoid * bound, form.floor)
    else:
        log2_decay = _softplus_decay(form, at, x)
    return jnp.concatenate(split(at.masked(log2_decay), form.terms), axis=0)


def _softplus_decay(form: Form, at: Any, x: Array) -> Array:
    """-exp(a_log) softplus(z) log2 e, and its slope and value saved; finite whatever a_log and z = x + bias are.

    softplus(z) = e^min(z, 0) r with r = log(1 + u) / u below 0 and z + log(1 + u) above, u = e^-|z|; e^min(z, 0) joins
    exp(a_log) in one exponent. log(1 + u) / u is taken at the rounded 1 + u, which does not change the quotient.
    """
    bias, a_log2, _, _ = at.gate_parameters()
    z = x + bias
    one_plus_u = 1.0 + jnp.exp2(-jnp.abs(z) * LOG2_E)
    log = jnp.log(one_plus_u)
    inverse = pl.reciprocal(jnp.maximum(one_plus_u - 1.0, 2.0**-24), approx=not form.exact)
    ratio = jnp.where(z < 0, jnp.where(one_plus_u > 1.0, log * inverse, 1.0), z + log)
    rate = jnp.exp2(jnp.minimum(a_log2 + jnp.minimum(z, 0.0) * LOG2_E, 100.0))
    log2_decay = rate * ratio * -LOG2_E
    above = log2_decay > form.floor
    at.save("decay", jnp.where(above, log2_decay, 0.0))
    at.save("slope", jnp.where(above, rate * pl.reciprocal(one_plus_u, approx=not form.exact), 0.0))
    return jnp.where(above, log2_decay, form.floor)


def _emit_d_gate(form: Form, at: Any, d_log_decay: Array) -> None:
    """Gradient of the gate input from that of the log decay (nats); adds to d_bias and d_a_log."""
    d_log_decay = at.masked(d_log_decay)
    if form.gate == "log":
        at.add_d_gate(d_log_decay)
        return
    if form.gate == "bounded":
        bias, _, bound, slope = at.gate_parameters()
        sigmoid = at.saved("sigmoid")
        d_gate = d_log_decay * slope * (sigmoid - sigmoid * sigmoid)
        if math.isfinite(form.floor) and (form.lower_bound or 0.0) * LOG2_E < form.floor:
            d_gate = jnp.where(sigmoid * bound > form.floor, d_gate, 0.0)
        d_a_log = d_gate * (at.gate() + bias)
    else:
        d_gate = -d_log_decay * at.saved("slope")
        d_a_log = d_log_decay * at.saved("decay") * (1.0 / LOG2_E)
    at.add_d_gate(d_gate)
    at.add_d_parameters(d_gate, d_a_log)


def _normalize(form: Form, at: Any) -> None:
    """Leaves q and k (normalised, masked) where :meth:`at.query` and :meth:`at.key` find them."""
    if not form.normalize:
        return
    for name in ("query", "key"):
        x = at.raw(name)
        reciprocal = rsqrt_of_square_sum(x)
        at.save(f"{name}_reciprocal", jnp.broadcast_to(reciprocal, x.shape))
        at.save(name, (x * reciprocal).astype(form.dtype))


def _unnormalize(form: Form, at: Any, name: str, y: Array, d_y: Array) -> Array:
    """Gradient of the row before its normalisation: r (d_y - y <y, d_y>)."""
    if not form.normalize:
        return d_y
    return at.saved(f"{name}_reciprocal") * (d_y - y * jnp.sum(d_y * y, axis=1, keepdims=True))
