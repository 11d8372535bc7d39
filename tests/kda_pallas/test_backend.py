"""The registry row: gradient, memory policies, transformations, refusals, the interpreter's switch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from ops import registry
from ops.kda_tpu.contract import ARRAY_FIELDS, Problem
from ops.kda_tpu.pallas import backend
from ops.kda_tpu.pallas.backward import Gradients
from ops.kda_tpu.pallas.config import Config
from tests.kda_pallas.problems import QUICK, check_gradients, cotangents, problem, segments

SMALL = Config(chunks_per_step=1, heads_per_step=1)
REMATERIALIZED = replace(SMALL, rematerialize_for_backward=True)
PACKED = segments((50, -7, 20, 3))
FLOATS = tuple(name for name in ARRAY_FIELDS if name != "segment_ids")
Arrays = dict[str, jax.Array]


def arrays(p: Problem) -> Arrays:
    return {name: x for name in FLOATS if (x := getattr(p, name)) is not None}


def operator(p: Problem, config: Config = SMALL, segment_ids: Any = None) -> Callable[[Arrays], tuple[Any, Any]]:
    """The public call as a function of its float arrays."""
    call = backend.with_options(config=config)

    def run(x: Arrays) -> tuple[Any, Any]:
        bias = x.get("delta_time_bias")
        rest = {name: x[name] for name in ("a_log", "initial_state") if name in x}
        return call(
            *(x[name] for name in ("query", "key", "value", "gate", "beta")),
            **rest,
            delta_time_bias=None if bias is None else bias.reshape(-1),
            scale=p.scale,
            output_final_state=p.output_final_state,
            use_qk_l2norm=p.use_qk_l2norm,
            use_gate_in_kernel=p.use_gate_in_kernel,
            lower_bound=p.lower_bound,
            segment_ids=p.segment_ids if segment_ids is None else segment_ids,
            max_num_segments=p.num_segments,
        )

    return run


def gradients(p: Problem, config: Config = SMALL) -> Gradients:
    @functools.partial(jax.jit, compiler_options=QUICK)
    def pull(x: Arrays, d: Any) -> Arrays:
        return jax.vjp(operator(p, config), x)[1](d)[0]

    got = pull(arrays(p), cotangents(p))
    return Gradients(*(got.get(name) for name in Gradients._fields))


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "bfloat16", "gate": "softplus", "ids": PACKED, "slots": 4},
        pytest.param({"dtype": "bfloat16", "gate": "bounded", "bias": False, "tokens": 128}, marks=pytest.mark.slow),
        pytest.param(
            {"dtype": "bfloat16", "gate": "log", "heads": 4, "key_dim": 100, "value_dim": 129}, marks=pytest.mark.slow
        ),
    ],
    ids=["packed", "fixed", "widths"],
)
def test_both_memory_policies_give_the_same_gradients(options: dict[str, Any]) -> None:
    p = problem(**options)
    saved, recomputed = gradients(p), gradients(p, REMATERIALIZED)
    check_gradients(p, saved, *cotangents(p))
    for name, x, y in zip(Gradients._fields, saved, recomputed, strict=True):
        assert (x is None and y is None) or np.array_equal(x, y), name


@pytest.mark.slow
@pytest.mark.parametrize("ids", [None, segments((50, -7, 20, 3), (80,))], ids=["fixed", "packed"])
@pytest.mark.parametrize("gate", ["log", "softplus", "bounded"])
def test_float32(gate: str, ids: Any) -> None:
    p = problem(gate=gate, ids=ids, slots=4, heads=2)
    config = Config(chunks_per_step=1, heads_per_step=2, sub_block="tree")
    check_gradients(p, gradients(p, config), *cotangents(p))


@pytest.mark.slow
@pytest.mark.parametrize("config", [SMALL, REMATERIALIZED], ids=["saved", "recomputed"])
@pytest.mark.parametrize("widths", [(16, 256), (64, 64), (60, 100), (127, 128), (128, 16), (129, 64), (256, 129)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_widths(dtype: str, widths: tuple[int, int], config: Config) -> None:
    p = problem(dtype=dtype, key_dim=widths[0], value_dim=widths[1], gate="softplus", ids=PACKED)
    if dtype == "float32":
        config = replace(config, sub_block="tree")
    check_gradients(p, gradients(p, config), *cotangents(p))


def test_gradients_have_the_dtype_of_their_input() -> None:
    p = problem(dtype="bfloat16", gate="softplus", heads=1, tokens=64)
    p = replace(p, beta=p.beta.astype(jnp.float32), gate=p.gate.astype(jnp.float32))
    shapes = jax.eval_shape(lambda x: jax.vjp(operator(p), x)[1](cotangents(p))[0], arrays(p))
    assert {name: x.dtype for name, x in shapes.items()} == {name: x.dtype for name, x in arrays(p).items()}


def kernels(function: Callable[..., Any], *args: Any) -> list[tuple[str, int]]:
    """Name and number of results of every Pallas kernel that a call traces."""
    found = []

    def visit(jaxpr: Any) -> None:
        for equation in jaxpr.eqns:
            if equation.primitive.name == "pallas_call":
                found.append((equation.params["name"], len(equation.outvars)))
                continue
            for sub in jaxprs_in_params(equation.params):
                visit(sub)

    visit(jax.make_jaxpr(function)(*args).jaxpr)
    return found


def test_what_only_the_backward_needs_is_saved_only_for_it() -> None:
    p = problem(dtype="bfloat16", tokens=64)
    x, d = arrays(p), cotangents(p)
    alone = kernels(operator(p), x)
    with_gradient = kernels(lambda x, d: jax.vjp(operator(p), x)[1](d), x, d)
    recomputed = kernels(lambda x, d: jax.vjp(operator(p, REMATERIALIZED), x)[1](d), x, d)
    (name, results), (saving, backward_kernel) = alone[0], with_gradient
    assert len(alone) == 1
    assert saving == (name, results + 3), "v_new, slab and states beside output and final state"
    assert recomputed == [*alone, saving, backward_kernel]


def test_the_trace_does_not_grow_with_the_batch() -> None:
    def size(batch: int) -> int:
        p = problem(dtype="bfloat16", tokens=64, batch=batch)
        jaxpr = jax.make_jaxpr(lambda x, d: jax.vjp(operator(p), x)[1](d))(arrays(p), cotangents(p))
        return len(str(jaxpr).splitlines())

    assert size(3) == size(1)


@pytest.mark.slow
def test_vmap_equals_a_loop() -> None:
    p = problem(dtype="bfloat16", gate="softplus", ids=PACKED)
    other = replace(problem(dtype="bfloat16", gate="softplus", ids=segments((30, 50)), seed=3), num_segments=3)
    other = replace(other, initial_state=jnp.concatenate([other.initial_state] * 2, axis=1)[:, :3])
    both = [arrays(p), arrays(other)]
    ids = [p.segment_ids, other.segment_ids]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *both)

    def loss(x: Arrays, segment_ids: jax.Array) -> jax.Array:
        output, state = operator(p, SMALL, segment_ids)(x)
        return jnp.sum(output.astype(jnp.float32) ** 2) + jnp.sum(jnp.sin(state))

    together = jax.jit(jax.vmap(jax.grad(loss)), compiler_options=QUICK)(stacked, jnp.stack(ids))
    single = jax.jit(jax.grad(loss), compiler_options=QUICK)
    for n in range(2):
        for name, x in single(both[n], ids[n]).items():
            np.testing.assert_allclose(
                together[name][n].astype(jnp.float32), x.astype(jnp.float32), rtol=1e-5, atol=1e-6, err_msg=name
            )


def test_no_tokens() -> None:
    p = problem(tokens=1)
    p = replace(p, **{name: getattr(p, name)[:, :, :0] for name in ("query", "key", "value", "gate", "beta")})
    got = gradients(p)
    assert np.array_equal(got.initial_state, cotangents(p)[1])
    assert got.query.shape == p.query.shape


@pytest.mark.parametrize("transform", ["jvp", "jvp of jit", "jit of jvp", "hessian", "jvp of grad"])
def test_other_derivatives_name_the_backend_that_has_them(transform: str) -> None:
    p = problem(dtype="bfloat16", tokens=64)
    x = arrays(p)

    def loss(x: Arrays) -> jax.Array:
        return jnp.sum(operator(p)(x)[0].astype(jnp.float32))

    calls: dict[str, Callable[[], Any]] = {
        "jvp": lambda: jax.jvp(loss, (x,), (x,)),
        "jvp of jit": lambda: jax.jvp(jax.jit(loss), (x,), (x,)),
        "jit of jvp": lambda: jax.jit(lambda x: jax.jvp(loss, (x,), (x,)))(x),
        "hessian": lambda: jax.grad(lambda x: sum(jnp.sum(g) for g in jax.grad(loss)(x).values()))(x),
        "jvp of grad": lambda: jax.jvp(jax.grad(loss), (x,), (x,)),
    }
    with pytest.raises(TypeError, match="backend='scan'"):
        calls[transform]()


def test_interpreter_follows_the_device_unless_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(backend.INTERPRET_VARIABLE, raising=False)
    assert backend.interprets() is (jax.default_backend() != "tpu")
    for word, answer in (("0", False), ("1", True)):
        monkeypatch.setenv(backend.INTERPRET_VARIABLE, word)
        assert backend.interprets() is answer
    monkeypatch.setenv(backend.INTERPRET_VARIABLE, "yes")
    with pytest.raises(ValueError, match=r"expected 0 .* got 'yes'"):
        operator(problem(tokens=64))(arrays(problem(tokens=64)))


def test_row_of_the_registry() -> None:
    assert registry.select("kda", "pallas_tpu") is backend.kimi_delta_attention


def test_illegal_configuration_is_refused() -> None:
    p = problem(tokens=64)
    with pytest.raises(ValueError, match="heads_per_step"):
        operator(p, Config(chunks_per_step=1, heads_per_step=3))(arrays(p))
