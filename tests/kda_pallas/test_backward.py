"""The backward kernel on its own, in interpret mode, on residuals from a float64 forward."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from ops.kda_tpu.pallas.backward import Gradients, backward
from ops.kda_tpu.pallas.backward_chunk import Joint, gate_matrix
from ops.kda_tpu.pallas.backward_pairs import PairForm
from ops.kda_tpu.pallas.common import GateForm, split
from ops.kda_tpu.pallas.config import Config
from tests.kda_pallas.chunked_forward import residuals
from tests.kda_pallas.problems import QUICK, check_gradients, cotangents, problem, relative_rms, segments

SMALL = Config(chunks_per_step=1, heads_per_step=1)
PACKED = segments((50, -7, 20, 3), (-5, 30, 1, -4, 40))


jitted = jax.jit(backward, static_argnames=("config", "interpret"), compiler_options=QUICK)


def run(p: Any, config: Config = SMALL, d_output: Any = None, d_final: Any = None, interpret: Any = True) -> Gradients:
    call = jitted if interpret is True else backward  # the other interpreter's callbacks want to run eagerly
    return call(p, residuals(p, config), d_output, d_final, config=config, interpret=interpret)


def check(config: Config = SMALL, final: bool = True, interpret: Any = True, **options: Any) -> None:
    p = problem(**options)
    d_output, d_final = cotangents(p)
    d_final = d_final if final else None
    check_gradients(p, run(p, config, d_output, d_final, interpret), d_output, d_final)


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "float32", "gate": "softplus", "ids": PACKED, "slots": 4},
        {"dtype": "float32", "gate": "bounded", "normalize": False, "bias": False, "key_dim": 100, "value_dim": 60},
        {"dtype": "bfloat16", "gate": "bounded", "ids": PACKED, "slots": 4},
        {"dtype": "bfloat16", "gate": "softplus", "key_dim": 128, "value_dim": 64, "initial": False},
        {"dtype": "bfloat16", "gate": "log", "normalize": False, "scale": -0.3, "final": False},
    ],
    ids=lambda o: "-".join(str(o[k]) for k in ("dtype", "gate")),
)
def test_gradients(options: dict[str, Any]) -> None:
    config = replace(SMALL, sub_block="tree") if options["dtype"] == "float32" else SMALL
    check(config, **options)


def test_chunks_and_heads_of_a_step_keep_their_state_apart() -> None:
    check(Config(chunks_per_step=2, heads_per_step=2), heads=4, tokens=300, dtype="bfloat16", gate="log")


@pytest.mark.slow
@pytest.mark.parametrize("key_dim", [16, 60, 64, 100, 127, 128, 129, 256])
@pytest.mark.parametrize("value_dim", [16, 60, 64, 100, 127, 128, 129, 256])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_widths(key_dim: int, value_dim: int, dtype: str) -> None:
    check(heads=4, key_dim=key_dim, value_dim=value_dim, dtype=dtype, gate="softplus")


@pytest.mark.slow
@pytest.mark.parametrize("sub_block", ["clamped", "tree"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("ids", [None, PACKED], ids=["fixed", "packed"])
@pytest.mark.parametrize("gate", ["log", "softplus", "bounded"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_options(dtype: str, gate: str, ids: Any, normalize: bool, bias: bool, sub_block: Any) -> None:
    if gate == "log" and bias:
        pytest.skip("given log decays have no bias")
    config = Config(chunks_per_step=2, heads_per_step=2, sub_block=sub_block)
    check(config, heads=2, dtype=dtype, gate=gate, ids=ids, slots=5, normalize=normalize, bias=bias)


@pytest.mark.parametrize("mean", [5.0, *(pytest.param(m, marks=pytest.mark.slow) for m in (0.02, 1.0, 40.0))])
def test_float32_precision_at_any_gate(mean: float) -> None:
    check(replace(SMALL, sub_block="tree"), mean=mean, tokens=129)


@pytest.mark.slow
@pytest.mark.parametrize("mean", [0.02, 1.0, 5.0, 40.0])
@pytest.mark.parametrize("sub_block", ["clamped", "tree"])
def test_bfloat16_precision_at_any_gate(mean: float, sub_block: Any) -> None:
    """Eight heads: at strong gates the final cotangent is the last row's alone, and a head's d_beta is one sum."""
    check(replace(SMALL, sub_block=sub_block), heads=8, mean=mean, tokens=129, dtype="bfloat16")


@pytest.mark.parametrize(("dtype", "sub_block"), [("bfloat16", "clamped"), ("float32", "tree")])
def test_small_cotangents_do_not_underflow(dtype: str, sub_block: Any) -> None:
    """Those of a mean over many tokens: gradients are linear in them, to a rounding. Padding's are anything."""
    config, factor = replace(SMALL, sub_block=sub_block), 2.0**-30
    p = problem(dtype=dtype, gate="softplus", ids=segments((40, -4, 20)))
    d_output, d_final = cotangents(p)
    wanted = run(p, config, d_output, d_final)
    d_small = jnp.where(p.segment_ids[None, :, :, None] > 0, d_output * factor, jnp.asarray(1e30, d_output.dtype))
    small = run(p, config, d_small, d_final * factor)
    for name, x, y in zip(Gradients._fields, small, wanted, strict=True):
        assert x is not None, name
        assert relative_rms(x.astype(jnp.float32) / factor, y.astype(jnp.float32)) <= 2e-5, name


@pytest.mark.slow
def test_constant_gate_of_40_nats() -> None:
    """Every gradient of the gate is about e^-40 then; none of it may be rounding."""
    for dtype in ("float32", "bfloat16"):
        p = problem(dtype=dtype)
        p = replace(p, gate=jnp.full_like(p.gate, -40.0))
        d_output, _ = cotangents(p)
        check_gradients(p, run(p, replace(SMALL, sub_block="tree"), d_output), d_output, None)


@pytest.mark.parametrize("gate", ["softplus", "bounded"])
def test_extreme_gates_stay_finite(gate: str) -> None:
    p = problem(gate=gate, bias=False, dtype="bfloat16")
    token = jnp.arange(p.gate.shape[2])[:, None]
    raw = jnp.where(token % 3 == 0, -200.0, jnp.where(token % 3 == 1, 0.0, -1.0))
    p = replace(p, a_log=jnp.full_like(p.a_log, 100.0), gate=jnp.broadcast_to(raw, p.gate.shape).astype(p.gate.dtype))
    p = replace(p, delta_time_bias=jnp.zeros((1, 64)))
    d_output, d_final = cotangents(p)
    for name, x in run(p, SMALL, d_output, d_final)._asdict().items():
        assert bool(jnp.isfinite(x).all()), name


@pytest.mark.parametrize("sub_block", ["clamped", pytest.param("tree", marks=pytest.mark.slow)])
def test_nothing_of_a_later_token_reaches_the_gradients_of_an_earlier_loss(sub_block: Any) -> None:
    """Bitwise, gates in [-5, 0]: later gates changed, and tokens appended."""
    config = replace(SMALL, sub_block=sub_block)
    p = problem(dtype="bfloat16", tokens=64, mean=2.0)
    p = replace(p, gate=jnp.maximum(p.gate, -5.0))
    d_output, _ = cotangents(p)
    d_output = d_output.at[:, :, 20:].set(0.0)
    whole = run(p, config, d_output, jnp.zeros_like(p.initial_state))
    changed = replace(p, gate=p.gate.at[:, :, 20:].set(-0.125))
    cut = replace(p, **{n: getattr(p, n)[:, :, :40] for n in ("query", "key", "value", "gate", "beta")})
    for other, d in ((changed, d_output), (cut, d_output[:, :, :40])):
        got = run(other, config, d, jnp.zeros_like(p.initial_state))
        for name in ("query", "key", "value", "gate", "beta"):
            assert np.array_equal(getattr(got, name)[:, :, :20], getattr(whole, name)[:, :, :20]), name
        assert np.array_equal(got.initial_state, whole.initial_state)


def test_padding_is_zero_whatever_it_holds_and_unused_slots_pass_their_gradient() -> None:
    ids = segments((4, 3, -3))
    p = problem(dtype="bfloat16", gate="softplus", ids=ids, slots=4)
    d_output, d_final = cotangents(p)
    saved = residuals(p, SMALL)
    nan = {n: getattr(p, n).at[:, :, 7:].set(jnp.nan) for n in ("query", "key", "value", "gate", "beta")}
    d_output = d_output.at[:, :, 7:].set(jnp.nan)
    got = jitted(replace(p, **nan), saved, d_output, d_final, config=SMALL, interpret=True)
    check_gradients(p, got, d_output, d_final)
    assert np.array_equal(got.initial_state[:, 2:], d_final[:, 2:])


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "bfloat16", "gate": "bounded", "ids": PACKED, "slots": 4},
        {"dtype": "bfloat16", "gate": "softplus", "tokens": 128},
        pytest.param({"dtype": "float32", "gate": "log", "tokens": 130, "heads": 2}, marks=pytest.mark.slow),
    ],
    ids=["packed", "fixed", "float32"],
)
def test_no_race_and_no_read_of_unwritten_memory(options: dict[str, Any]) -> None:
    interpret = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
    check(interpret=interpret, **options)


def test_reverse_sum_is_no_difference_of_prefixes() -> None:
    """[1e8] * 32 + [1] * 32: the last 32 sums are exactly 32 .. 1."""
    form: Any = type("Form", (), {"chunk": 64, "terms": 3, "exact": True})
    P = jnp.where(jnp.arange(64) < 32, 1e8, 1.0).astype(jnp.float32)[:, None]
    joint = Joint(lambda: gate_matrix(form), 1)
    joint.put(jnp.concatenate(split(P, 3) + split(jnp.zeros_like(P), 3), axis=0))
    assert np.array_equal(joint.take(0)[32:, 0], np.arange(32, 0, -1))


def test_blocks_follow_the_gate() -> None:
    def rows(lower_bound: float | None, sub_block: str) -> int:
        return PairForm.choose(sub_block, GateForm(True, False, lower_bound), jnp.bfloat16, 1.0).inner

    assert rows(-5.0, "clamped") == 16
    assert rows(-9.0, "clamped") == rows(None, "clamped") == 8
    assert rows(-5.0, "tree") == rows(None, "tree") == 4
