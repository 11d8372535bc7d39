"""The backward as three kernels: gradients within the same tolerances as the fused one's, from kernels of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from ops.kda_tpu.pallas.backward import Gradients
from ops.kda_tpu.pallas.config import Config
from tests.kda_pallas import test_backend as through_backend
from tests.kda_pallas.problems import check_gradients, cotangents, problem, relative_rms
from tests.kda_pallas.test_backward import PACKED, SMALL, check, run

SPLIT = replace(SMALL, backward="split")
STEP = Config(chunks_per_step=2, heads_per_step=2, backward="split")


@pytest.mark.parametrize(
    ("config", "options"),
    [
        (replace(SPLIT, sub_block="tree"), {"dtype": "float32", "gate": "softplus", "ids": PACKED, "slots": 4}),
        (replace(STEP, heads_per_step=1), {"dtype": "bfloat16", "gate": "bounded", "heads": 2, "tokens": 200}),
        (SPLIT, {"dtype": "bfloat16", "gate": "log", "tokens": 64, "normalize": False, "scale": -0.3, "final": False}),
    ],
    ids=["float32-packed", "chunks-and-heads", "log-decay"],
)
def test_gradients(config: Config, options: dict[str, Any]) -> None:
    check(config, **options)


def test_three_kernels_under_both_memory_policies() -> None:
    p = problem(dtype="bfloat16", gate="softplus", tokens=64)
    split = ["kda_backward_prepare", "kda_backward_state", "kda_backward_finish"]
    for config, forward in ((SPLIT, 1), (replace(SPLIT, rematerialize_for_backward=True), 2)):
        operator = through_backend.operator(p, config)
        traced = through_backend.kernels(
            lambda x, d, f=operator: jax.vjp(f, x)[1](d), through_backend.arrays(p), cotangents(p)
        )
        assert [name for name, _ in traced] == ["kda_forward"] * forward + split


@pytest.mark.slow
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("ids", [None, PACKED], ids=["fixed", "packed"])
@pytest.mark.parametrize("gate", ["log", "softplus", "bounded"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_as_the_fused_kernel(dtype: str, gate: str, ids: Any, normalize: bool) -> None:
    """Float32 gradients of both differ by rounding alone; the bfloat16 ones are each within their tolerance."""
    sub_block: Any = "tree" if dtype == "float32" else "clamped"
    p = problem(heads=2, dtype=dtype, gate=gate, ids=ids, slots=5, normalize=normalize, bias=normalize)
    split = run(p, replace(STEP, sub_block=sub_block), *cotangents(p))
    check_gradients(p, split, *cotangents(p))
    if dtype == "float32":
        fused = run(p, replace(STEP, sub_block=sub_block, backward="fused"), *cotangents(p))
        for name, x, y in zip(Gradients._fields, split, fused, strict=True):
            assert (x is None and y is None) or relative_rms(x, y) <= 5e-6, name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "key_dim", "value_dim"),
    [
        *(("bfloat16", 16, 256), ("bfloat16", 127, 128), ("bfloat16", 256, 129)),
        *(("float32", 60, 100), ("float32", 128, 16), ("float32", 129, 64)),
    ],
)
def test_widths(dtype: str, key_dim: int, value_dim: int) -> None:
    check(SPLIT, key_dim=key_dim, value_dim=value_dim, dtype=dtype, gate="softplus")


@pytest.mark.slow
@pytest.mark.parametrize("mean", [0.02, 40.0])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_precision_at_any_gate(dtype: str, mean: float) -> None:
    check(replace(SPLIT, sub_block="tree"), final=dtype == "float32", mean=mean, tokens=129, dtype=dtype)


@pytest.mark.slow
def test_both_memory_policies_give_the_same_gradients() -> None:
    p = problem(dtype="bfloat16", gate="softplus", ids=PACKED, slots=4)
    policies = (SPLIT, replace(SPLIT, rematerialize_for_backward=True))
    saved, recomputed = (through_backend.gradients(p, config) for config in policies)
    check_gradients(p, saved, *cotangents(p))
    for name, x, y in zip(Gradients._fields, saved, recomputed, strict=True):
        assert np.array_equal(x, y), name


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"tokens": 128}, {"ids": PACKED, "slots": 4}], ids=["fixed", "packed"])
def test_no_race_and_no_read_of_unwritten_memory(options: dict[str, Any]) -> None:
    interpret = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
    check(SPLIT, interpret=interpret, dtype="bfloat16", gate="softplus", **options)
