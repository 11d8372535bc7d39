"""Kimi Delta Attention in chunks of 64 tokens, plain XLA operations, with an explicit gradient.

Chunk form of the recurrence (Kimi Linear technical report, arXiv:2510.26692, WY form), h the state on entry, gam_i the
decay from entry through token i, gamC that of the whole chunk, kg_j the key decayed to the chunk's end::

    L_ij   = beta_i sum_c k_ic k_jc E_ijc  (j < i)          A = (I + L)^-1
    Aqk_ij = scale sum_c q_ic k_jc E_ijc   (j <= i)
    v_new = A beta (v - (k gam) h)
    o     = scale (q gam) h + Aqk v_new
    h'    = gamC h + kg^T v_new

What runs in which order, and how segments are kept apart, is in :mod:`ops.kda_tpu.xla_steps`; every gate is safe, by
:mod:`ops.kda_tpu.xla_chunks`.
The gradient is in :mod:`ops.kda_tpu.xla_backward`; it has no derivative of its own: use the backend ``scan`` for that,
and for forward mode. (Forward mode through a caller's own ``jax.jit`` meets jax's refusal, which cannot name it.)
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ops.kda_tpu import contract, gates, xla_backward
from ops.kda_tpu.contract import Problem
from ops.kda_tpu.xla_chunks import load, load_group, product, scores_and_inverse
from ops.kda_tpu.xla_steps import CHUNK, Arrays, find_steps

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


def _without_padding(problem: Problem) -> Outputs:
    output, final_state = _attention(gates.zero_padding(problem))
    return gates.zero_rows(output, problem.segment_ids), final_state


_compiled = jax.jit(_without_padding)


@jax.custom_vjp
def _attention(problem: Problem) -> Outputs:
    return _forward(problem, save=False)[0]


def _forward(problem: Problem, save: bool) -> tuple[Outputs, xla_backward.Residuals | None]:
    if save:
        problem = jax.tree.map(xla_backward.only_once, problem)
    steps = find_steps(problem)
    tokens = load(problem, steps)
    V = problem.value.shape[3]

    def step(h: jax.Array, row: Arrays) -> tuple[jax.Array, Arrays]:
        u, weights, key_out, scores, decay = row
        from_state = product("hbik,hbkv->hbiv", weights, h)
        v_new = u + from_state[..., :CHUNK, :]
        output = from_state[..., CHUNK:, :] + product("hbij,hbjv->hbiv", scores, v_new)
        after = decay * h + product("hbik,hbiv->hbkv", key_out, v_new)
        return after, (output, v_new, h) if save else (output,)

    def body(states: jax.Array, index: jax.Array, _: Arrays) -> tuple[jax.Array, Arrays]:
        group = load_group(problem, tokens, steps, index)
        scores, inverse = scores_and_inverse(group)
        given = jnp.concatenate([steps.tokens(tokens.value, index), -group.key_in], axis=-1)
        given = product("...ij,...jv->...iv", inverse, group.beta * given)
        weights = jnp.concatenate([given[..., V:], group.query_in], axis=-2)
        rows = (given[..., :V], weights, group.key_out, scores, group.decay)
        states, results = steps.recur(step, states, index, rows)
        return states, (*results, scores, inverse) if save else results

    final_state, (output, *kept) = steps.loop(body, problem.initial_state)
    output = steps.to_tokens(output).astype(problem.value.dtype)
    return (output, final_state), xla_backward.Residuals(problem, *kept) if save else None


_attention.defvjp(lambda problem: _forward(problem, save=True), xla_backward.backward)

kimi_delta_attention = contract.backend(_run)
