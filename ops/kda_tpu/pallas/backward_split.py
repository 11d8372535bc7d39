"""The backward as three kernels that pass their intermediates through HBM, for comparison with the fused one.

The stages are those of :mod:`ops.kda_tpu.pallas.backward_chunk`, cut where the chain through the chunks begins and
ends, so that all but the shortest kernel work on chunks that do not depend on each other. The intermediates have their
published names; with the saved slab S = [S1 | S2], factors of the scale left out::

    kda_backward_prepare   qg = q gam   w = k gam   kg = k 2^(gC - G)   2^gC   dAqk = dO v_new^T   dv = S2 dO
    kda_backward_state     dv <- dv + S1 kg dh      dh <- 2^gC dh + qg^T dO + w^T dv      d_value
    kda_backward_finish    WY, pairs of the chunk, norm, gate, cumulative sums: every other gradient

Here w and dv are without the inverse A, which S holds, and v_new is saved by the forward. The gradient of the state on
leaving a chunk, dh, goes through HBM in the compute dtype, as the state itself does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ops.kda_tpu.pallas.backward_chunk import (
    Form,
    Joint,
    Received,
    decays,
    emit_gradients,
    saved_arrays,
    scaled_prefix,
)
from ops.kda_tpu.pallas.backward_launch import Kernel, Launch, Operand, Result
from ops.kda_tpu.pallas.backward_view import ChunkView
from ops.kda_tpu.pallas.common import Done, Need, Stage, nn, nt, tn

Array = jax.Array


def split_backward(
    form: Form, launch: Launch, operands: Mapping[str, Operand], results: Mapping[str, Result]
) -> dict[str, Array]:
    """Runs the three kernels.

    Args:
        form: of the kernels' code.
        launch: of the problem.
        operands: everything the backward reads, by name.
        results: everything it returns, by name.

    Returns:
        The results.
    """
    everything = {**_intermediates(form, launch), **results}
    known: dict[str, Operand] = dict(operands)
    found: dict[str, Array] = {}
    for kernel, reads, writes in zip(split_kernels(form), _READS, _WRITES, strict=True):
        wanted = {name: everything[name] for name in writes if name in everything}
        arrays = launch.call(kernel, {name: known[name] for name in reads if name in known}, wanted)
        known |= {name: Operand(array, wanted[name].spec) for name, array in arrays.items()}
        found |= arrays
    return {name: found[name] for name in results}


# What each kernel reads and writes, where the problem has it.
_READS = (
    ("query", "key", "gate", "v_new", "d_output", "slab", "prefix_matrix", "parameters", "ids"),
    ("qg", "w", "kg", "decay", "dv_local", "d_output", "slab", "ids", "d_final"),
    (
        *("query", "key", "gate", "beta", "v_new", "d_output", "dv", "d_aqk", "states", "d_states"),
        *("prefix_matrix", "gate_matrix", "parameters", "ids"),
    ),
)
_WRITES = (
    ("qg", "w", "kg", "decay", "d_aqk", "dv_local"),
    ("dv", "d_states", "d_value", "d_initial"),
    ("d_query", "d_key", "d_gate", "d_beta", "d_parameters"),
)


def split_kernels(form: Form) -> list[Kernel]:
    """The three kernels in order."""
    saved = saved_arrays(form)
    kept = {name: dtype for name, dtype in saved.items() if name in ("query", "key")}
    return [
        Kernel("kda_backward_prepare", _prepare, carries_state=False, saved=kept),
        Kernel("kda_backward_state", _recur, carries_state=True),
        Kernel("kda_backward_finish", _finish, carries_state=False, saved=saved),
    ]


def _intermediates(form: Form, launch: Launch) -> dict[str, Result]:
    """What goes from kernel to kernel, by name: rows of tokens, and by step what differs between a tile's visits."""
    C, K, V = form.chunk, form.key_dim, form.value_dim
    H, B, Tp, chunks = launch.heads, launch.batch, launch.padded, launch.num_steps * form.chunks

    def rows(width: int) -> Result:
        return Result(jax.ShapeDtypeStruct((H, B, Tp, width), form.dtype), launch.tokens(width))

    decay = jax.ShapeDtypeStruct((B, H // form.heads, chunks, form.heads, K), jnp.float32)
    d_states = jax.ShapeDtypeStruct((H, B, chunks, V, K), form.dtype)
    return {
        **{name: rows(K) for name in ("qg", "w", "kg")},
        "decay": Result(decay, launch.row_block(K, by_step=True), shared=False),
        "d_aqk": rows(C),
        "dv_local": rows(V),
        "dv": rows(V),
        "d_states": Result(d_states, launch.chunks(V, K, by_step=True), shared=False),
    }


def _prepare(form: Form, at: ChunkView, joint_prefix: Joint, _: Joint) -> Stage:
    """All that needs no gradient of a state."""
    exponents = yield from decays(form, at, joint_prefix)
    gam = scaled_prefix(form, exponents)
    at.add("qg", at.query() * gam)
    at.add("w", at.key() * gam)
    at.add("kg", at.key() * jnp.exp2(exponents.suffix))
    at.set_row("decay", jnp.exp2(exponents.total))
    d_output = at.d_output()
    d_aqk = nt(d_output, at.v_new())
    dv = nn(at.slab()[:, form.chunk :], d_output)
    yield None
    at.add("d_aqk", d_aqk)
    at.add("dv_local", dv)


def _recur(form: Form, at: ChunkView, *_: Any) -> Stage:
    """The chain through the chunks: dh on leaving the chunk is stored, then taken to its entry."""
    yield Need(at.later)
    d_state = at.d_state().astype(form.dtype)
    at.set_block("d_states", d_state)
    d_v_new = nt(at.operand("kg"), d_state)
    yield None
    dv = at.operand("dv_local").astype(jnp.float32) + nn(at.slab()[:, : form.chunk], d_v_new.astype(form.dtype))
    yield None
    rows = jnp.concatenate([at.d_output(), dv.astype(form.dtype)], axis=0)
    update = tn(rows, jnp.concatenate([at.operand("qg"), at.operand("w")], axis=0))
    at.add("dv", dv)
    at.add_d_value(dv * -form.scale)
    at.set_d_state(at.d_state() * at.row("decay") + update)
    yield Done(at.here)


def _finish(form: Form, at: ChunkView, joint_prefix: Joint, joint_gate: Joint) -> Stage:
    """All that the chain does not wait for."""
    exponents = yield from decays(form, at, joint_prefix)
    d_state, n = at.block("d_states"), at.operand("dv")
    from_state = nn(jnp.concatenate([at.d_output(), n], axis=0), at.state())
    d_key_state = nn(at.v_new(), d_state) * jnp.exp2(exponents.suffix)
    products = jnp.concatenate([at.operand("d_aqk").astype(jnp.float32), nt(n, at.v_new())], axis=0)
    state_gate = jnp.sum(at.state().astype(jnp.float32) * d_state.astype(jnp.float32), axis=0, keepdims=True)
    state_gate = state_gate * jnp.exp2(exponents.total)
    yield None
    yield from emit_gradients(form, at, exponents, products, Received(from_state, d_key_state, state_gate), joint_gate)
