"""Kimi Delta Attention in chunks of 64 tokens, plain XLA operations, with an explicit gradient.

Chunk form of the recurrence (Kimi Linear technical report, arXiv:2510.26692, WY form), h the state on entry, gam_i the
decay from entry through token i, gamC that of the whole chunk, kg_j the key decayed to the chunk's end::

    L_ij   = beta_i sum_c k_ic k_jc E_ijc  (j < i)          A = (I + L)^-1
    Aqk_ij = scale sum_c q_ic k_jc E_ijc   (j <= i)
    v_new = A beta (v - (k gam) h)
    o     = scale (q gam) h + Aqk v_new
    h'    = gamC h + kg^T v_new

Everything but v_new and h' is computed for all chunks at once. Every gate is safe (:mod:`ops.kda_tpu.xla_chunks`).
The gradient is in :mod:`ops.kda_tpu.xla_backward`; it has no derivative of its own: use the backend ``scan`` for that.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ops.kda_tpu import contract, gates, xla_backward
from ops.kda_tpu.contract import Problem
from ops.kda_tpu.xla_chunks import (
    CHUNK,
    find_segments,
    from_chunks,
    from_steps,
    grouping,
    load_group,
    own_rows,
    product,
    run_steps,
    scores_and_inverse,
    step_decay,
    to_steps,
)

Outputs = tuple[jax.Array, jax.Array]


def _run(problem: Problem) -> Outputs:
    try:
        return _compiled(problem)
    except TypeError as error:
        if "custom_vjp" not in str(error):
            raise
        raise TypeError(
            "kimi_delta_attention: the backend 'xla' has no forward-mode derivative; choose backend='scan'"
        ) from error


@jax.jit
def _compiled(problem: Problem) -> Outputs:
    return _attention(gates.zero_padding(problem))


@jax.custom_vjp
def _attention(problem: Problem) -> Outputs:
    return _forward(problem, save=False)[0]


def _forward(problem: Problem, save: bool) -> tuple[Outputs, xla_backward.Residuals | None]:
    if save:
        problem = jax.tree.map(xla_backward.only_once, problem)
    H, B, T, _ = problem.query.shape
    cut = grouping(H, B, T)
    segments = find_segments(problem, cut.num_chunks)

    def prepare(index: jax.Array) -> tuple[jax.Array, ...]:
        group = load_group(problem, cut, index, segments)
        scores, inverse = scores_and_inverse(group)
        u = product("...ij,...jv->...iv", inverse, group.beta * cut.tokens(problem.value, index))
        minus_w = product("...ij,...jk->...ik", inverse, -group.beta * group.key_in)
        weights = jnp.concatenate([minus_w, group.query_in], axis=-2)
        prefix = group.factors[-1][0]
        return scores, inverse, u, weights, group.key_out, prefix if segments else prefix[..., -1:, :]

    scores, inverse, u, weights, key_out, prefix = cut.over(prepare)

    def step(h: jax.Array, row: tuple[jax.Array, ...]) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        u, weights, key_out, scores, decay = row
        from_state = product("hbik,hbkv->hbiv", weights, h)
        v_new = u + from_state[..., :CHUNK, :]
        output = from_state[..., CHUNK:, :] + product("hbij,hbjv->hbiv", scores, v_new)
        after = decay * h + product("hbik,hbiv->hbkv", key_out, v_new)
        return after, (output, v_new, h) if save else (output,)

    rows = (
        own_rows(u, segments),
        own_rows(weights, segments),
        to_steps(key_out, segments),
        to_steps(scores, segments),
        step_decay(prefix, segments),
    )
    final_state, (output, *kept) = run_steps(step, problem.initial_state, rows, segments)
    output = from_chunks(from_steps(output, segments), T).astype(problem.value.dtype)
    if not save:
        return (output, final_state), None
    v_new, states = kept
    return (output, final_state), xla_backward.Residuals(problem, from_steps(v_new, segments), states, scores, inverse)


_attention.defvjp(lambda problem: _forward(problem, save=True), xla_backward.backward)

kimi_delta_attention = contract.backend(_run)
