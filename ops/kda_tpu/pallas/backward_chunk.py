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
    dk_i = scale (n h^T)_i gam_i + (v_new dh^T)_i 2^(gC - G_i) + sum_j l_ij k_j E_ij
           + sum_{j > i} (a_ji q_j + l_ji k_j) E_ji
    dg   = reverse_cumsum(P) + sum_v 2^gC h dh + exclusive_prefix(x)

P is q dq + k dk without x and the diagonal, the last sum with a minus sign: what row i's prefix G_i receives
(:mod:`ops.kda_tpu.pallas.backward_pairs`). No sum over rows is a total minus a prefix.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ops.kda_tpu.pallas.backward_pairs import Exponents, PairForm, PairSums, Scores, pair_sums, row_sums
from ops.kda_tpu.pallas.common import (
    LEAST_BETA,
    LOG2_E,
    Done,
    GateForm,
    Need,
    Phases,
    Stage,
    iota,
    nn,
    nt,
    rsqrt_of_square_sum,
    softplus_decay,
    split,
    tn,
)

Array = jax.Array


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
        normalize: whether q and k rows are normalised here.
        masked: whether some rows may not belong to the step's segment.
        pairs: how pairs of rows are split.
    """

    heads: int
    chunks: int
    chunk: int
    key_dim: int
    value_dim: int
    dtype: Any
    scale: float
    gate: GateForm
    normalize: bool
    masked: bool
    pairs: PairForm

    @property
    def exact(self) -> bool:
        """Whether operands stay float32."""
        return self.dtype == jnp.float32

    @property
    def terms(self) -> int:
        """Bfloat16 terms a float32 operand of a sum over rows is split into."""
        return 3 if self.exact else 2

    @property
    def floor(self) -> float | None:
        """Log2 decay below which a token's decay counts as this and its gate has no gradient; None: never below."""
        return -self.pairs.steepest if self.gate.steepest > self.pairs.steepest else None


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


def prefix_matrix(form: Form) -> Array:
    """Left side of the exponents' product, bfloat16 [sums * C, terms * C]: the sums stacked, once per term."""
    matrix = jnp.concatenate([m for _, m in row_sums(form.pairs, form.chunk)], axis=0).astype(jnp.bfloat16)
    return jnp.tile(matrix, (1, form.terms))


def gate_matrix(form: Form) -> Array:
    """Left side of dg's product, bfloat16 [C, ...]: reverse cumulative sum of P's terms, exclusive prefix of x's."""
    row, col = iota((form.chunk, form.chunk), 0), iota((form.chunk, form.chunk), 1)
    reverse, exclusive = col >= row, col < row
    terms_of_x = form.terms if form.exact else 1
    return jnp.concatenate([reverse] * form.terms + [exclusive] * terms_of_x, axis=1).astype(jnp.bfloat16)


def decays(form: Form, at: Any, joint_prefix: Joint) -> Phases[Exponents]:
    """Returns the decays between the chunk's rows; leaves q and k, normalised, where the view finds them."""
    number = joint_prefix.put(_log_decay_terms(form, at))
    _normalize(form, at)
    yield None
    return Exponents.of(form.pairs, joint_prefix.take(number))


def chunk_gradients(form: Form, at: Any, joint_prefix: Joint, joint_gate: Joint) -> Stage:
    """Stages of one chunk of one head: loads through ``at``, stores gradients through it.

    Args:
        form: the kernel's form.
        at: the chunk's view of the kernel's refs (:class:`ops.kda_tpu.pallas.backward_view.ChunkView`).
        joint_prefix: product with :func:`prefix_matrix`, shared with neighbouring heads.
        joint_gate: product with :func:`gate_matrix`.
    """
    exponents = yield from decays(form, at, joint_prefix)

    # n = S [k 2^(gC - G) dh ; dO]
    yield Need(at.later)
    to_end = jnp.exp2(exponents.suffix)
    weighted_key = (at.key() * to_end).astype(form.dtype)
    d_state = at.d_state().astype(form.dtype)
    d_v_new = nt(weighted_key, d_state)
    d_key_state = nn(at.v_new(), d_state)
    yield None
    d_key_state = d_key_state * to_end
    n = nn(at.slab(), jnp.concatenate([d_v_new.astype(form.dtype), at.d_output()], axis=0))
    yield None

    # dh <- 2^gC dh + scale [q gam ; k gam]^T [dO ; n]
    at.add_d_value(n * -form.scale)
    rows = jnp.concatenate([at.d_output(), n.astype(form.dtype)], axis=0)
    gam = scaled_prefix(form, exponents)
    decayed = jnp.concatenate([(at.query() * gam).astype(form.dtype), (at.key() * gam).astype(form.dtype)], axis=0)
    update = tn(rows, decayed)
    from_state = nn(rows, at.state())
    products = nt(rows, at.v_new())
    decay = jnp.exp2(exponents.total)
    state_gate = jnp.sum(at.state().astype(jnp.float32) * at.d_state(), axis=0, keepdims=True) * decay
    at.set_d_state(at.d_state() * decay + update)
    yield Done(at.here)

    yield from emit_gradients(form, at, exponents, products, Received(from_state, d_key_state, state_gate), joint_gate)


@dataclass(frozen=True)
class Received:
    """What a chunk's rows and gates get from the states on its two sides.

    Attributes:
        rows: [dO h^T ; n h^T] [2 C, K], without decay and scale.
        key: (v_new dh^T) 2^(gC - G) [C, K].
        gate: sum_v 2^gC h dh [1, K].
    """

    rows: Array
    key: Array
    gate: Array


def emit_gradients(
    form: Form, at: Any, exponents: Exponents, products: Array, received: Received, joint_gate: Joint
) -> Stage:
    """Stages that finish a chunk: pairs, gate and norm; stores the gradients of query, key, gate and beta.

    Args:
        form: the kernel's form.
        at: the chunk's view of the refs.
        exponents: its decays.
        products: [dO ; n] v_new^T, [2 C, C].
        received: the states' part.
        joint_gate: product with :func:`gate_matrix`.
    """
    _emit_d_beta(form, at, products)
    diagonal = None if form.pairs.diagonal else _diagonal(form, products)
    pairs = PairSums()
    yield from pair_sums(form.pairs, at, exponents, Scores.of(form.pairs, products), received.rows, pairs)
    assert pairs.query is not None
    assert pairs.key is not None
    assert pairs.gate is not None

    # dg = reverse_cumsum(P) + exclusive_prefix(x) + sum_v 2^gC h dh, the last through the last row of P
    q, k = at.query(), at.key()
    last = jnp.where(iota((8, form.key_dim), 0) == 7, received.gate, 0.0)
    P = jnp.concatenate([pairs.gate[:-8], pairs.gate[-8:] + last], axis=0)
    terms = split(P, form.terms) + split(k * received.key, form.terms if form.exact else 1)
    number = joint_gate.put(jnp.concatenate(terms, axis=0))
    d_query, d_key = pairs.query, received.key + pairs.key
    if diagonal is not None:
        d_query, d_key = d_query + diagonal * k, d_key + diagonal * q
    at.add_d_query(_unnormalize(form, at, "query", q, d_query))
    at.add_d_key(_unnormalize(form, at, "key", k, d_key))
    yield None
    _emit_d_gate(form, at, joint_gate.take(number))


def scaled_prefix(form: Form, exponents: Exponents) -> Array:
    """Gam times the scale, whose magnitude the exponents' prefix already has."""
    gam = jnp.exp2(exponents.prefix)
    return gam if form.scale > 0 else -gam


def _emit_d_beta(form: Form, at: Any, products: Array) -> None:
    """d_beta_i = dv_i . v_new_i / beta_i^2, with n = -dv / scale in the lower half of ``products``."""
    C = form.chunk
    eye = iota((C, C), 0) == iota((C, C), 1)
    beta = jnp.maximum(at.beta(), LEAST_BETA)
    at.add_d_beta(jnp.sum(jnp.where(eye, products[C:], 0.0), axis=0, keepdims=True) * (-form.scale / (beta * beta)))


def _diagonal(form: Form, products: Array) -> Array:
    """Pair of a row with itself, which no decay touches: scale dO_i . v_new_i, [C, 1]."""
    C = form.chunk
    scaled_eye = jnp.where(iota((C, C), 0) == iota((C, C), 1), form.scale, 0.0)
    return jnp.sum(products[:C] * scaled_eye, axis=1, keepdims=True)


# ---- gate and norm


def saved_arrays(form: Form) -> dict[str, Any]:
    """What stages keep for later ones, [C, K] a chunk and head: name -> dtype."""
    names: dict[str, Any] = {}
    if form.normalize:
        # In float32: unpacking them at every use would cost more than the loads.
        names |= dict.fromkeys(("query", "key", "query_reciprocal", "key_reciprocal"), jnp.float32)
    if form.gate.activated:
        names["gate_slope"] = jnp.float32
        if form.gate.lower_bound is None:
            names["log2_decay"] = jnp.float32
    return names


def _log_decay_terms(form: Form, at: Any) -> Array:
    """Log2 decay of the chunk's rows, split along the contraction of :func:`prefix_matrix`; masked rows have none.

    The first row, which of all sums only the prefix has, carries the logarithm of the scale.
    """
    if not form.gate.activated:
        log2_decay = at.gate() * LOG2_E
        if form.floor is not None:
            log2_decay = jnp.maximum(log2_decay, form.floor)
    elif form.gate.lower_bound is None:
        log2_decay = _softplus_decay(form, at)
    else:
        log2_decay = _bounded_decay(form, at, form.gate.lower_bound)
    log2_decay = at.masked(log2_decay)
    head = log2_decay[:8] + jnp.where(iota((8, form.key_dim), 0) == 0, form.pairs.log2_scale, 0.0)
    return jnp.concatenate(split(jnp.concatenate([head, log2_decay[8:]], axis=0), form.terms), axis=0)


def _shifted(form: Form, at: Any) -> Array:
    return at.gate() + at.gate_row(0) if form.gate.has_bias else at.gate()


def _bounded_decay(form: Form, at: Any, lower_bound: float) -> Array:
    """lower_bound s log2 e, s = sigmoid(exp(a_log) z), z = x + bias; saves its slope s (1 - s)."""
    exponent = _shifted(form, at) * (at.gate_row(1) * -LOG2_E)
    sigmoid = pl.reciprocal(1.0 + jnp.exp2(exponent), approx=not form.exact)
    log2_decay = sigmoid * (lower_bound * LOG2_E)
    slope = sigmoid - sigmoid * sigmoid
    if form.floor is not None:
        slope = jnp.where(log2_decay > form.floor, slope, 0.0)
        log2_decay = jnp.maximum(log2_decay, form.floor)
    at.save("gate_slope", slope)
    return log2_decay


def _softplus_decay(form: Form, at: Any) -> Array:
    """-exp(a_log) softplus(x + bias) log2 e; saves its slope (of the natural log) and its value."""
    assert form.floor is not None
    log2_decay, slope = softplus_decay(at.gate(), at.gate_row, form.gate, form.exact)
    at.save("gate_slope", jnp.where(log2_decay > form.floor, slope, 0.0))
    log2_decay = jnp.maximum(log2_decay, form.floor)
    at.save("log2_decay", log2_decay)
    return log2_decay


def _emit_d_gate(form: Form, at: Any, d_log_decay: Array) -> None:
    """Gradient of the gate input from that of the log decay (nats); adds to the sums for bias and a_log.

    a_log's sum is not finished here: softplus form d_g g, with g in log2 units; bounded form d_gate x, without bias.
    """
    d_log_decay = at.masked(d_log_decay)
    if not form.gate.activated:
        if form.floor is not None:
            d_log_decay = jnp.where(at.gate() * LOG2_E > form.floor, d_log_decay, 0.0)
        at.add_d_gate(d_log_decay)
        return
    if form.gate.lower_bound is None:
        d_gate = d_log_decay * at.saved("gate_slope")
        d_a_log = d_log_decay * at.saved("log2_decay")
    else:
        d_gate = d_log_decay * at.saved("gate_slope") * (at.gate_row(1) * form.gate.lower_bound)
        d_a_log = d_gate * at.gate()
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
        at.save(name, x * reciprocal)


def _unnormalize(form: Form, at: Any, name: str, y: Array, d_y: Array) -> Array:
    """Gradient of the row before its normalisation: r (d_y - y <y, d_y>)."""
    if not form.normalize:
        return d_y
    return at.saved(f"{name}_reciprocal") * (d_y - y * jnp.sum(d_y * y, axis=1, keepdims=True))
