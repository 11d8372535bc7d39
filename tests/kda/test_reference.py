"""The reference's explicit gradients against finite differences of its own forward pass."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from reference import kda
from reference.cases import KDA, make
from tests.kda.harness import DIFFERENTIABLE


@pytest.mark.parametrize("name", ["short", "softplus", "bounded", "segments"])
def test_gradients_are_derivatives(name: str) -> None:
    case = dataclasses.replace(KDA[name], tokens=min(KDA[name].tokens, 20), key_channels=4, value_channels=3)
    inputs, d_output, d_final_state = make(case, seed=0)
    gradients = kda.backward(inputs, d_output, d_final_state)
    random = np.random.default_rng(1)

    def loss(moved: kda.Inputs) -> float:
        output, final_state = kda.forward(moved)
        return float((output * np.nan_to_num(d_output)).sum() + (final_state * d_final_state).sum())

    for field in DIFFERENTIABLE:
        array = getattr(inputs, field)
        if array is None:
            continue
        direction = random.standard_normal(array.shape)
        step = 1e-4

        def along(
            amount: float, field: str = field, array: np.ndarray = array, direction: np.ndarray = direction
        ) -> float:
            return loss(dataclasses.replace(inputs, **{field: array.astype(np.float64) + amount * direction}))

        slope = (8 * (along(step) - along(-step)) - (along(2 * step) - along(-2 * step))) / (12 * step)
        assert slope == pytest.approx(float((getattr(gradients, field) * direction).sum()), rel=1e-7, abs=1e-9), field


def test_split_and_carry_is_the_whole() -> None:
    inputs, *_ = make(KDA["short"], seed=0)
    output, final_state = kda.forward(inputs)
    tokens = ("query", "key", "value", "gate", "beta")
    first = dataclasses.replace(inputs, **{name: getattr(inputs, name)[:, :, :2] for name in tokens})
    rest = dataclasses.replace(inputs, **{name: getattr(inputs, name)[:, :, 2:] for name in tokens})
    output_first, between = kda.forward(first)
    output_rest, last = kda.forward(dataclasses.replace(rest, initial_state=between))
    np.testing.assert_allclose(np.concatenate([output_first, output_rest], axis=2), output, rtol=1e-13)
    np.testing.assert_allclose(last, final_state, rtol=1e-13)


def test_invalid_ids_are_padding() -> None:
    inputs, *_ = make(dataclasses.replace(KDA["segments"], tokens=8), seed=0)
    inputs = dataclasses.replace(
        inputs,
        **{name: np.nan_to_num(getattr(inputs, name)) for name in ("query", "key", "value", "gate", "beta")},
        segment_ids=np.array([[1, -3, 2, 9, 1, 2, 3, 0]] * 2),
    )
    clean = dataclasses.replace(inputs, segment_ids=np.array([[1, 0, 2, 0, 0, 2, 3, 0]] * 2))
    for invalid, valid in zip(kda.forward(inputs), kda.forward(clean), strict=True):
        np.testing.assert_array_equal(invalid, valid)
