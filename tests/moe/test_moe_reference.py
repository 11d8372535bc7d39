"""The float64 reference against results worked out by hand and against its own definition."""

from __future__ import annotations

import numpy as np
import pytest

from reference import moe, moe_cases

# Two groups of two ranks, five experts: 0 and 1 on rank 0, 2 and 3 on rank 1, 4 on rank 2, none on rank 3.
WORLD = moe.World(4, moe.blocks(5, 4), dp_size=2)
IDS = [np.array([[4, 0], [1, -1], [4, 4]]), np.array([[0, 7]])]
TOKENS = [np.array([[10.0, 1], [20, 2], [30, 3]]), np.array([[40.0, 4]])]
WEIGHTS = [np.array([[0.5, 2.0], [1.0, 9.0], [3.0, 4.0]]), np.array([[0.25, 9.0]])]


def test_blocks():
    assert moe.blocks(5, 4) == (0, 0, 1, 1, 2)
    assert moe.blocks(3, 4) == (0, 1, 2)
    assert moe.blocks(8, 2) == (0, 0, 0, 0, 1, 1, 1, 1)


def test_rows_by_hand():
    found = moe.sources(WORLD, IDS)
    # Rank 0 sends tokens 0 and 2 of the first group, rank 1 token 1, rank 2 the second group's only one.
    assert found[0].rank.tolist() == [0, 2]
    assert found[1].rank.tolist() == [1]
    assert list(zip(found[4].rank, found[4].token, found[4].choice, strict=True)) == [(0, 0, 0), (0, 2, 0), (0, 2, 1)]
    assert [len(source.rank) for source in found] == [2, 1, 0, 0, 3]
    rows = moe.dispatch(WORLD, TOKENS, IDS)
    assert rows[0].tolist() == [[10, 1], [40, 4]]
    assert rows[4].tolist() == [[10, 1], [30, 3], [30, 3]]
    assert rows[2].shape == (0, 2)


def test_sums_by_hand():
    rows = moe.dispatch(WORLD, TOKENS, IDS)
    output = moe.combine(WORLD, rows, IDS, WEIGHTS)
    assert output[0].tolist() == [[25, 2.5], [20, 2], [210, 21]]
    assert output[1].tolist() == [[10, 1]]


def test_contiguous_beginnings():
    assert moe.first_rows([3, 0, 4, 5], 4) == [0, 4, 4, 8, 16]


def test_combine_is_the_transpose_of_dispatch():
    rng = np.random.default_rng(0)
    tokens = [rng.standard_normal(part.shape) for part in TOKENS]
    rows = [rng.standard_normal(part.shape) for part in moe.dispatch(WORLD, TOKENS, IDS)]
    there = sum(np.vdot(a, b) for a, b in zip(moe.dispatch(WORLD, tokens, IDS), rows, strict=True))
    back = sum(np.vdot(a, b) for a, b in zip(tokens, moe.dispatch_gradient(WORLD, rows, IDS), strict=True))
    assert there == pytest.approx(back, rel=1e-12)


def test_gradients_by_differences():
    rng = np.random.default_rng(1)
    rows = [rng.standard_normal(part.shape) for part in moe.dispatch(WORLD, TOKENS, IDS)]
    cotangents = [rng.standard_normal(part.shape) for part in TOKENS]

    def loss() -> float:
        outputs = moe.combine(WORLD, rows, IDS, WEIGHTS)
        return sum(float(np.vdot(a, b)) for a, b in zip(outputs, cotangents, strict=True))

    d_rows, d_weights = moe.combine_gradient(WORLD, rows, IDS, WEIGHTS, cotangents)
    for inputs, gradients in ((rows, d_rows), (WEIGHTS, d_weights)):
        for array, gradient in zip(inputs, gradients, strict=True):
            for index in np.ndindex(array.shape):
                before = array[index]
                array[index] = before + 0.5  # the loss is linear in each
                above = loss()
                array[index] = before - 0.5
                assert above - loss() == pytest.approx(gradient[index], abs=1e-9)
                array[index] = before


@pytest.mark.parametrize("hidden", [7, 16, 40, 2880])
def test_a_payload_tells_its_token_and_layer(hidden):
    ids = np.array([0, 1, 7, 8, 1023, 32767])
    for layer in (0, 1, 63):
        rows = moe_cases.payload(ids, hidden, layer)
        assert [moe_cases.payload_id(row) for row in rows] == [(int(token), layer) for token in ids]
        assert rows.max() <= 7


def test_named_ids_are_distinct_within_a_token():
    for shape in moe_cases.SHAPES.values():
        ids = moe_cases.random_ids(shape, 4, seed=3)
        assert all(len(set(token)) == len(token) for token in ids.tolist())
        assert ids.max() < shape.num_experts
