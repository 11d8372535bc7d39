"""Registry row ``pallas_tpu``: the Pallas kernels behind the public signature, with their gradient.

Reverse mode, once: the forward kernel saves typed residuals (:class:`ops.kda_tpu.pallas.residuals.Residuals`), or
saves nothing and runs again in the backward pass (``rematerialize_for_backward``); one backward kernel returns every
gradient. Calls that nobody differentiates save nothing. Forward mode and second derivatives raise an error that names
the backend which has them.

Off TPU the kernels run in Pallas' interpreter; ``OPS_KDA_INTERPRET`` = 0 or 1 overrides the choice, so that the
compiler can be run for a TPU that is not there.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from ops.kda_tpu import contract
from ops.kda_tpu.contract import Problem
from ops.kda_tpu.pallas.backward import backward as backward_kernels
from ops.kda_tpu.pallas.config import Backward, Config, ProblemShape, check, choose, current_chip
from ops.kda_tpu.pallas.forward import forward
from ops.kda_tpu.pallas.residuals import Residuals, compute_dtype

Array = jax.Array
Saved = tuple[Problem, Residuals | None]

INTERPRET_VARIABLE = "OPS_KDA_INTERPRET"


def with_options(
    *, config: Config | None = None, rematerialize_for_backward: bool = False, backward: Backward = "fused"
) -> Callable[..., tuple[Array, Array | None]]:
    """The operator with a memory policy or a whole configuration of one's own.

    Args:
        config: how the kernels are cut and scheduled; None takes the stored choice for the chip and shape.
        rematerialize_for_backward: save only the inputs and run the forward again in the backward pass; the gradients
            are the same. A ``config`` states the policy itself.
        backward: ``"fused"``, or ``"split"`` for three kernels, slower, to compare the fused one with. A ``config``
            states this itself, too.

    Returns:
        A function with the signature of :func:`ops.kda_tpu.api.kimi_delta_attention` without ``backend``.

    >>> operator = with_options(rematerialize_for_backward=True)
    """

    def run(problem: Problem) -> tuple[Array, Array | None]:
        shape = _shape(problem)
        chip = current_chip()
        chosen = (
            choose(shape, chip, rematerialize_for_backward=rematerialize_for_backward, backward=backward)
            if config is None
            else check(config, shape, chip)
        )
        output, final_state = _attention(_reverse_only(problem), chosen, interprets())
        return output, final_state if problem.output_final_state else None

    return contract.backend(run)


def interprets() -> bool:
    """Whether kernels run in Pallas' interpreter: the environment's word, else whether the device is no TPU.

    Raises:
        ValueError: ``OPS_KDA_INTERPRET`` is neither 0 nor 1.
    """
    word = os.environ.get(INTERPRET_VARIABLE, "")
    if word not in ("", "0", "1"):
        raise ValueError(f"{INTERPRET_VARIABLE}: expected 0 (compile), 1 (interpret) or unset, got {word!r}")
    return word == "1" if word else jax.default_backend() != "tpu"


def _shape(problem: Problem) -> ProblemShape:
    H, B, T, K = problem.query.shape
    V = problem.value.shape[3]
    dtype = str(compute_dtype(problem))
    segmented = problem.segment_ids is not None
    return ProblemShape(
        *(H, B, T, K, V),
        dtype=dtype,
        segmented=segmented,
        lower_bound=problem.lower_bound,
        gate_dtype=str(problem.gate.dtype),
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _attention(problem: Problem, config: Config, interpret: bool) -> tuple[Array, Array]:
    output, final_state, _ = forward(problem, config, interpret, save=False)
    return output, final_state


def _attention_forward(problem: Problem, config: Config, interpret: bool) -> tuple[tuple[Array, Array], Saved]:
    problem = _once(problem)
    keep = not config.rematerialize_for_backward
    output, final_state, residuals = forward(problem, config, interpret, save=keep)
    return (output, final_state), (problem, residuals)


def _attention_backward(
    config: Config, interpret: bool, saved: Saved, cotangents: tuple[Array, Array]
) -> tuple[Problem]:
    problem, residuals = _once(saved)
    d_output, d_final_state = _once(cotangents)
    if residuals is None:
        residuals = forward(problem, config, interpret, save=True)[2]
        assert residuals is not None
    wanted = d_final_state if problem.output_final_state else None
    gradients = backward_kernels(problem, residuals, d_output, wanted, config, interpret)
    d_initial_state = gradients.initial_state
    if d_initial_state is None:  # the caller gave none, so nobody asks
        d_initial_state = jnp.zeros_like(problem.initial_state)
    arrays = gradients._asdict() | {"initial_state": d_initial_state}
    ids = problem.segment_ids
    d_ids = None if ids is None else np.zeros(ids.shape, jax.dtypes.float0)
    return (replace(problem, segment_ids=d_ids, **arrays),)


_attention.defvjp(_attention_forward, _attention_backward)

#: The operator as the registry offers it.
kimi_delta_attention = with_options()


# ---- what the kernels' gradient cannot do


def _refuse(what: str) -> NoReturn:
    raise TypeError(
        f"{what}: the 'pallas_tpu' backend of kimi_delta_attention has its first gradient only (jax.grad, jax.vjp); "
        "pass backend='scan', which is differentiable any number of times, in forward mode too"
    )


@jax.custom_jvp
def _guard(x: Any) -> Any:
    """Identity with no derivative: what the rules of :func:`_attention` compute on cannot be differentiated again."""
    return x


@_guard.defjvp
def _(primals: Any, tangents: Any) -> NoReturn:
    _refuse("second derivative")


def _once(tree: Any) -> Any:
    """``tree`` with its inexact leaves guarded."""
    return jax.tree.map(lambda x: _guard(x) if jnp.issubdtype(x.dtype, jnp.inexact) else x, tree)


# A linear identity that exists to be transposed: evaluated, which only forward mode does, it refuses.
_transposed_only = Primitive("kda_transposed_only")
_transposed_only.def_abstract_eval(lambda x: x)
_transposed_only.def_impl(lambda *_: _refuse("forward-mode derivative"))
ad.deflinear2(_transposed_only, lambda cotangent, _: [cotangent])
batching.defvectorized(_transposed_only)
mlir.register_lowering(_transposed_only, lambda *_: _refuse("forward-mode derivative"))


@jax.custom_jvp
def _entry(x: Array) -> Array:
    """Identity whose tangent can be transposed but not computed."""
    return x


@_entry.defjvp
def _(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    return primals[0], _transposed_only.bind(tangents[0])


def _reverse_only(problem: Problem) -> Problem:
    """``problem`` with arrays that refuse forward-mode derivatives by name, ahead of jax's own anonymous refusal."""
    floats = [name for name in contract.ARRAY_FIELDS if name != "segment_ids"]
    guarded: dict[str, Any] = {name: _entry(x) for name in floats if (x := getattr(problem, name)) is not None}
    return replace(problem, **guarded)
