"""The forward kernel in interpret mode against the float64 recurrence.

Most of the time goes into compiling the interpreter's program, so tests share problems of one shape where they can.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from ops.kda_tpu.contract import Problem
from ops.kda_tpu.pallas.config import Config
from ops.kda_tpu.pallas.forward import forward
from ops.kda_tpu.pallas.residuals import Residuals
from reference import kda as reference
from tests.kda_pallas import chunked_forward
from tests.kda_pallas.problems import float64, problem, relative_rms, segments

SMALL = Config(chunks_per_step=1, heads_per_step=1)
PACKED = segments((50, -7, 20, 3), (-5, 30, 1, -4, 40))
OUTPUT = {"float32": 2e-5, "bfloat16": 5e-3}  # relative RMS by compute dtype
SAVED = {"float32": 2e-5, "bfloat16": 8e-3}
LOGARITHMS = {"tokens": 129, "normalize": False}  # three tiles, the last of one row
ROUGH = {"dtype": "bfloat16", "tokens": 80, "bias": False}


@functools.partial(jax.jit, static_argnums=(1, 2), compiler_options={"xla_backend_optimization_level": 0})
def compiled(p: Problem, config: Config, save: bool) -> tuple[jax.Array, jax.Array, Residuals | None]:
    return forward(p, config, True, save)


def run(p: Problem, config: Config = SMALL, save: bool = False) -> tuple[jax.Array, jax.Array, Residuals | None]:
    return compiled(p, config, save)


def recurrence(p: Problem) -> tuple[np.ndarray, np.ndarray]:
    arrays = ("query", "key", "value", "gate", "beta", "a_log", "delta_time_bias", "initial_state")
    options = ("scale", "use_qk_l2norm", "use_gate_in_kernel", "lower_bound")
    return reference.forward(
        reference.Inputs(
            **{name: float64(getattr(p, name)) for name in arrays},
            **{name: getattr(p, name) for name in options},
            segment_ids=None if p.segment_ids is None else np.asarray(p.segment_ids),
            max_num_segments=p.num_segments,
        )
    )


def check(p: Problem, output: jax.Array, state: jax.Array) -> None:
    wanted_output, wanted_state = recurrence(p)
    assert output.dtype == p.value.dtype
    assert state.dtype == jnp.float32
    limit = OUTPUT[str(p.query.dtype)]
    assert relative_rms(output, wanted_output) <= limit
    assert relative_rms(state, wanted_state) <= limit
    if p.segment_ids is not None:
        assert not np.asarray(output.astype(jnp.float32))[:, np.asarray(p.segment_ids) == 0].any()


def check_residuals(p: Problem, config: Config, saved: Residuals) -> None:
    wanted = chunked_forward.residuals(p, config)
    dtype = str(p.query.dtype)
    for name in ("v_new", "slab", "states"):
        got = getattr(saved, name)
        assert got.dtype == jnp.dtype(dtype)
        assert relative_rms(got, float64(getattr(wanted, name))) <= SAVED[dtype], name
    if p.segment_ids is not None:
        padding = np.pad(np.asarray(p.segment_ids) == 0, ((0, 0), (0, saved.v_new.shape[2] - p.query.shape[2])))
        padding[:, p.query.shape[2] :] = True
        for rows in (saved.v_new, saved.slab.reshape(*saved.v_new.shape[:3], -1)):
            assert not np.asarray(rows.astype(jnp.float32))[:, padding].any()


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "float32", "gate": "softplus", "ids": PACKED, "slots": 4},
        {"dtype": "float32", "gate": "bounded", "normalize": False, "bias": False, "key_dim": 100, "value_dim": 60},
        {"dtype": "bfloat16", "gate": "softplus", "ids": PACKED, "slots": 4},
        {"dtype": "bfloat16", "gate": "bounded", "key_dim": 128, "value_dim": 64, "initial": False},
        {"dtype": "bfloat16", "gate": "log", "normalize": False, "scale": -0.3, "batch": 2},
    ],
    ids=lambda o: "-".join(str(o[k]) for k in ("dtype", "gate")),
)
def test_output_state_and_residuals(options: dict[str, Any]) -> None:
    p = problem(**options)
    output, state, saved = run(p, save=True)
    check(p, output, state)
    check_residuals(p, SMALL, saved)


def test_slots_without_tokens_keep_their_state() -> None:
    p = problem(dtype="float32", gate="softplus", ids=PACKED, slots=4)
    _, state, _ = run(p, save=True)
    assert jnp.array_equal(state[:, 3], p.initial_state[:, 3])
    nothing = replace(p, segment_ids=jnp.zeros_like(PACKED))
    output, state, saved = run(nothing, save=True)
    assert not output.any()
    assert not saved.v_new.any()
    assert not saved.slab.any()
    assert jnp.array_equal(state, p.initial_state)


def test_what_stands_in_padding_does_not_matter() -> None:
    p = problem(dtype="bfloat16", gate="softplus", ids=PACKED, slots=4)
    padding = PACKED == 0
    poisoned = {
        name: jnp.where(padding[None, :, :, None], jnp.nan, getattr(p, name)).astype(p.value.dtype)
        for name in ("query", "key", "value", "gate")
    }
    poisoned["beta"] = jnp.where(padding[None], jnp.nan, p.beta).astype(p.beta.dtype)
    clean, dirty = run(p, save=True), run(replace(p, **poisoned), save=True)
    for a, b in zip(jax.tree.leaves(clean), jax.tree.leaves(dirty), strict=True):
        assert jnp.array_equal(a, b)


def test_chunks_and_heads_of_a_step_keep_their_state_apart() -> None:
    p = problem(heads=2, tokens=200, dtype="bfloat16", gate="bounded")
    output, state, _ = run(p, Config(chunks_per_step=3, heads_per_step=1))
    check(p, output, state)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_nearly_parallel_keys(dtype: str) -> None:
    """Queries and keys one constant unit vector, beta = 1, no decay: o_t = scale v_t, the inverse is bidiagonal."""
    p = problem(dtype=dtype, **LOGARITHMS)
    constant = jnp.full_like(p.query, p.query.shape[3] ** -0.5)
    ones = {"query": constant, "key": constant, "gate": jnp.zeros_like(p.gate), "beta": jnp.ones_like(p.beta)}
    output, _, _ = run(replace(p, **ones, initial_state=jnp.zeros_like(p.initial_state)))
    assert relative_rms(output, p.scale * float64(p.value)) <= OUTPUT[dtype]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mean", [0.02, 5.0, 40.0])
def test_gates_of_any_strength(mean: float, dtype: str) -> None:
    p = problem(dtype=dtype, mean=mean, **LOGARITHMS)
    output, state, _ = run(p)
    check(p, output, state)


@pytest.mark.parametrize(("gate", "raw", "log_decay"), [("softplus", -200.0, 0.0), ("bounded", 0.0, -2.5)])
def test_extreme_slopes_of_the_gate(gate: str, raw: float, log_decay: float) -> None:
    p = problem(gate=gate, **ROUGH)
    p = replace(p, a_log=jnp.full_like(p.a_log, 100.0), gate=jnp.full_like(p.gate, raw))
    output, state, _ = run(p)
    check(p, output, state)
    given = replace(p, gate=jnp.full_like(p.gate, log_decay), use_gate_in_kernel=False, a_log=None, lower_bound=None)
    assert relative_rms(output, recurrence(given)[0]) <= OUTPUT["bfloat16"]
    for raw in (-1.0, 3.0):
        steep = replace(p, gate=jnp.full_like(p.gate, raw))
        output, state, _ = run(steep)
        check(steep, output, state)


def test_a_later_token_changes_nothing_earlier() -> None:
    for p in (problem(dtype="bfloat16", mean=3.0, **LOGARITHMS), problem(gate="bounded", **ROUGH)):
        output, _, _ = run(p)
        late = {
            "gate": p.gate.at[:, :, 20:].multiply(3.0),
            "key": p.key.at[:, :, 20:].set(p.key[:, :, 20:, ::-1]),
            "value": p.value.at[:, :, 20:].set(-9.0),
        }
        changed, _, _ = run(replace(p, **late))
        assert jnp.array_equal(output[:, :, :20], changed[:, :, :20])
        assert not jnp.array_equal(output[:, :, 20:], changed[:, :, 20:])


def test_appended_tokens_change_nothing_earlier() -> None:
    long = problem(dtype="bfloat16", mean=3.0, **LOGARITHMS)
    names = ("query", "key", "value", "gate", "beta")
    short = replace(long, **{name: getattr(long, name)[:, :, :40] for name in names})
    assert jnp.array_equal(run(long)[0][:, :, :40], run(short)[0])


def test_no_races_and_no_read_of_undefined_memory() -> None:
    p = problem(heads=2, ids=segments((50, -20, 70, -10)), dtype="bfloat16", gate="bounded")
    strict = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
    config = Config(chunks_per_step=1, heads_per_step=2)
    output, state, saved = forward(p, config, strict, True)  # its callbacks want to run eagerly
    check(p, output, state)
    check_residuals(p, config, saved)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("gate", ["log", "softplus", "bounded"])
@pytest.mark.parametrize("packed", [False, True])
def test_every_form(dtype: str, gate: str, packed: bool) -> None:
    p = problem(heads=2, tokens=100, ids=PACKED if packed else None, dtype=dtype, gate=gate, mean=5.0)
    config = Config(chunks_per_step=2, heads_per_step=2)
    output, state, saved = run(p, config, save=True)
    check(p, output, state)
    check_residuals(p, config, saved)
    forward_only = run(p, config)
    assert jnp.array_equal(forward_only[0], output)
    assert jnp.array_equal(forward_only[1], state)


@pytest.mark.slow
@pytest.mark.parametrize(("key_dim", "value_dim"), [(16, 60), (60, 129), (127, 16), (129, 256), (256, 128), (192, 64)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_widths(key_dim: int, value_dim: int, dtype: str) -> None:
    p = problem(key_dim=key_dim, value_dim=value_dim, dtype=dtype, gate="softplus", ids=segments((40, -3, 57)))
    output, state, _ = run(p)
    check(p, output, state)


@pytest.mark.slow
@pytest.mark.parametrize("heads", [3, 5, 6])
def test_groups_of_heads_that_do_not_come_out_even(heads: int) -> None:
    p = problem(heads=heads, tokens=300, dtype="bfloat16", gate="bounded")
    output, state, _ = run(p, Config(chunks_per_step=2, heads_per_step=heads))
    check(p, output, state)


@pytest.mark.slow
def test_errors_do_not_grow_with_length() -> None:
    p = problem(tokens=4096, dtype="bfloat16", mean=0.02)
    output, state, _ = run(p, Config(chunks_per_step=4, heads_per_step=1))
    check(p, output, state)
    wanted, _ = recurrence(p)
    assert relative_rms(output[:, :, -512:], wanted[:, :, -512:]) <= OUTPUT["bfloat16"]
