"""What only the chunked XLA path promises: its derivatives' limits, vmap, exact sums, groups of steps."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ops.kda_tpu import contract, scan, xla, xla_backward, xla_chunks, xla_steps
from reference.cases import KDA, make
from tests.kda.harness import arrays_of, check, options_of

INPUTS = make(KDA["short"], seed=0)[0]


def loss(arrays: dict[str, jax.Array]) -> jax.Array:
    return xla.kimi_delta_attention(**arrays, **options_of(INPUTS))[0].sum()


def test_second_derivative_names_scan() -> None:
    arrays = arrays_of(INPUTS)
    with pytest.raises(TypeError, match="backend='scan'"):
        jax.grad(lambda a: sum(x.sum() for x in jax.tree.leaves(jax.grad(loss)(a))))(arrays)


def test_forward_mode_names_scan() -> None:
    arrays = arrays_of(INPUTS)
    with pytest.raises(TypeError, match="backend='scan'"):
        jax.jvp(loss, (arrays,), (arrays,))


def test_scan_has_every_derivative() -> None:
    arrays = arrays_of(INPUTS)

    def squared(a: dict[str, jax.Array]) -> jax.Array:
        return (scan.kimi_delta_attention(**a, **options_of(INPUTS))[0] ** 2).sum()

    along = jax.tree.map(jnp.ones_like, arrays)
    forward_over_reverse = jax.jvp(jax.grad(squared), (arrays,), (along,))[1]
    reverse_over_reverse = jax.grad(
        lambda a: sum((x * y).sum() for x, y in zip(*map(jax.tree.leaves, (jax.grad(squared)(a), along)), strict=True))
    )(arrays)
    for a, b in zip(*map(jax.tree.leaves, (forward_over_reverse, reverse_over_reverse)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3)


def test_vmap_is_a_loop() -> None:
    arrays = arrays_of(INPUTS)
    stacked = jax.tree.map(lambda x: jnp.stack([x, 0.5 * x]), arrays)
    gradients = jax.vmap(jax.grad(loss))(stacked)
    for i in range(2):
        single = jax.grad(loss)(jax.tree.map(lambda x, i=i: x[i], stacked))
        for a, b in zip(*map(jax.tree.leaves, (gradients, single)), strict=True):
            np.testing.assert_allclose(a[i], b, rtol=1e-4, atol=1e-5)


def test_reverse_sums_are_not_differences() -> None:
    rows = jnp.zeros((1, 1, 1, 64, 1)).at[..., :32, 0].set(1e8).at[..., 32:, 0].set(1)
    sums = xla_backward._chunk_sums(rows, jnp.zeros_like(rows))
    np.testing.assert_array_equal(sums[0, 0, 0, 32:, 0], np.arange(32, 0, -1))


def test_inverse_of_near_parallel_keys_is_exact() -> None:
    """L of ones: A has ones on the diagonal and -1 just below; a Neumann product errs by 8e9 here."""
    key = jnp.full((1, 1, 1, 64, 4), 0.5)
    decay = jnp.ones_like(key)
    group = xla_chunks.Group(key, key, None, None, jnp.ones((1, 1, 1, 64, 1)), xla_chunks.decay_factors(decay), decay)
    _, inverse = xla_chunks.scores_and_inverse(group)
    np.testing.assert_array_equal(inverse[0, 0, 0], np.eye(64) - np.eye(64, k=-1))


@pytest.mark.parametrize("in_flight", [24, 8192], ids=["three steps a turn", "all at once"])
@pytest.mark.parametrize("case", ["plain", "segments"])
def test_many_steps_a_turn(monkeypatch: pytest.MonkeyPatch, case: str, in_flight: int) -> None:
    """What other devices do: a CPU takes one step a turn, as every other test."""
    monkeypatch.setitem(xla_steps._IN_FLIGHT, "cpu", in_flight)
    check(contract.backend(lambda problem: xla._without_padding(problem)), KDA[case], seed=0)
