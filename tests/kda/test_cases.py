"""Cases that KDA implementations are known to get wrong, each on every usable backend that has gradients."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ops import registry
from ops.kda_tpu import kimi_delta_attention
from reference import kda
from tests.kda import harness
from tests.kda.test_harness import DIFFERENTIABLE, STATUS
from tests.kda.tolerances import assert_close

every_backend = pytest.mark.parametrize("name", DIFFERENTIABLE)
#: Long runs: those of a backend that is here only on request, an interpreter, are left to `make test-all`.
every_backend_at_length = pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if STATUS[name].state == "usable" else pytest.mark.slow, id=name)
        for name in DIFFERENTIABLE
    ],
)

PER_TOKEN = ("query", "key", "value", "gate", "beta")


def arrays(T: int, K: int = 8, V: int = 8, H: int = 2, seed: int = 0) -> dict[str, np.ndarray]:
    """Unit rows, decays of 0 to 5 nats, one batch row."""
    random = np.random.default_rng(seed)
    q, k = random.standard_normal((2, H, 1, T, K))
    return {
        "query": q / np.linalg.norm(q, axis=-1, keepdims=True),
        "key": k / np.linalg.norm(k, axis=-1, keepdims=True),
        "value": random.standard_normal((H, 1, T, V)),
        "gate": -5 * random.uniform(size=(H, 1, T, K)),
        "beta": random.uniform(size=(H, 1, T)),
    }


def run(
    name: str,
    arrays: dict[str, np.ndarray],
    d_output: np.ndarray,
    d_final_state: np.ndarray,
    *,
    ids: np.ndarray | None = None,
    dtype: str = "float32",
    **options: Any,
) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """Output, final state and gradients by one backend."""
    options["max_num_segments"] = d_final_state.shape[1]
    operator = harness._compiled(registry.select("kda", name), tuple(options.items()))
    given = {key: jnp.asarray(x, dtype if key in PER_TOKEN else "float32") for key, x in arrays.items()}
    cotangents = (jnp.asarray(d_output, dtype), jnp.asarray(d_final_state, "float32"))
    (output, state), gradients = operator(given, None if ids is None else jnp.asarray(ids, jnp.int32), cotangents)
    return np.asarray(output), np.asarray(state), {key: np.asarray(x) for key, x in gradients.items()}


def check_all(
    name: str, given: dict[str, np.ndarray], d_output: np.ndarray, d_final_state: np.ndarray, **options: Any
) -> None:
    """Everything against the reference."""
    output, state, gradients = run(name, given, d_output, d_final_state, **options)
    exact = {key: np.asarray(x, np.float32) for key, x in given.items()}
    inputs = kda.Inputs(
        **exact, max_num_segments=d_final_state.shape[1], segment_ids=options.pop("ids", None), **options
    )
    expected_output, expected_state = kda.forward(inputs)
    assert_close(output, expected_output, "float32", "output")
    assert_close(state, expected_state, "float32", "final_state")
    expected = kda.backward(inputs, d_output, d_final_state)
    for key, gradient in gradients.items():
        assert_close(gradient, getattr(expected, key), "float32", key)


@every_backend
def test_a_later_token_never_changes_an_earlier_result(name: str) -> None:
    T, seen = 64, 20
    given = arrays(T)
    d_output = np.random.default_rng(1).standard_normal(given["value"].shape)
    d_output[:, :, seen:] = 0
    no_state = np.zeros((1, 1, 2, 8, 8))
    whole = np.ones((1, T))
    other = {**given, "gate": np.where(np.arange(T)[:, None] < seen, given["gate"], given["gate"][..., ::-1, :] - 1)}
    first = run(name, given, d_output, no_state, ids=whole, dtype="bfloat16")
    changed = run(name, other, d_output, no_state, ids=whole, dtype="bfloat16")
    shorter = run(name, given, d_output, no_state, ids=np.where(np.arange(T) < 40, 1, 0)[None], dtype="bfloat16")
    for variant in (changed, shorter):
        np.testing.assert_array_equal(first[0][:, :, :seen], variant[0][:, :, :seen])
        for key in PER_TOKEN:
            np.testing.assert_array_equal(first[2][key][:, :, :seen], variant[2][key][:, :, :seen], err_msg=key)


@every_backend
@pytest.mark.slow
def test_appended_tokens_change_nothing(name: str) -> None:
    long = arrays(64)
    short = {key: x[:, :, :40] for key, x in long.items()}
    d_output = np.random.default_rng(1).standard_normal(long["value"].shape)
    d_output[:, :, 20:] = 0
    no_state = np.zeros((1, 1, 2, 8, 8))
    a = run(name, long, d_output, no_state, dtype="bfloat16")
    b = run(name, short, d_output[:, :, :40], no_state, dtype="bfloat16")
    np.testing.assert_array_equal(a[0][:, :, :20], b[0][:, :, :20])
    for key in PER_TOKEN:
        np.testing.assert_array_equal(a[2][key][:, :, :20], b[2][key][:, :, :20], err_msg=key)


@every_backend_at_length
def test_extreme_gates_stay_finite(name: str) -> None:
    T = 10
    d_output, d_state = np.ones((2, 1, T, 8)), np.ones((1, 1, 2, 8, 8))
    extreme = {"a_log": np.full(2, 100.0), "delta_time_bias": np.zeros(16), "initial_state": np.ones((1, 1, 2, 8, 8))}
    for lower_bound, raw in ((None, -200.0), (-5.0, 0.0), (-5.0, -1.0)):
        given = {**arrays(T), **extreme, "gate": np.full((2, 1, T, 8), raw)}
        output, state, gradients = run(name, given, d_output, d_state, use_gate_in_kernel=True, lower_bound=lower_bound)
        for what, x in {"output": output, "state": state, **gradients}.items():
            assert np.isfinite(x).all(), (what, lower_bound, raw)


@every_backend_at_length
def test_decay_beyond_a_chunk_and_near_parallel_keys(name: str) -> None:
    T, K = 129, 8
    d_output = np.random.default_rng(1).standard_normal((2, 1, T, 8))
    d_state = np.random.default_rng(2).standard_normal((1, 1, 2, 8, 8))
    for decay in (-1.4, -5.6, -40.0):
        given = {**arrays(T), "gate": np.full((2, 1, T, K), decay)}
        check_all(name, given, d_output, d_state)
    parallel = np.full((2, 1, T, K), K**-0.5)
    given = {**arrays(T), "query": parallel, "key": parallel, "beta": np.ones((2, 1, T)), "gate": 0 * parallel}
    output, *_ = run(name, given, d_output, d_state)
    np.testing.assert_allclose(output, K**-0.5 * given["value"], rtol=1e-4, atol=1e-5)


@every_backend
def test_empty_segments_rows_behind_the_last_and_padding_only(name: str) -> None:
    T, N = 10, 4
    random = np.random.default_rng(3)
    given = {**arrays(T), "initial_state": random.standard_normal((1, N, 2, 8, 8))}
    d_output, d_state = np.ones((2, 1, T, 8)), random.standard_normal((1, N, 2, 8, 8))
    ids = np.array([[2, 2, 2, 2, 2, 4, 4, 4, 4, 0]])  # lengths 0, 5, 0, 4 and one row behind
    check_all(name, given, d_output, d_state, ids=ids)
    _, state, gradients = run(name, given, d_output, d_state, ids=ids)
    for slot in (0, 2):
        np.testing.assert_array_equal(state[:, slot], given["initial_state"][:, slot].astype(np.float32))
        np.testing.assert_array_equal(gradients["initial_state"][:, slot], d_state[:, slot].astype(np.float32))

    ids = np.array([[1, 1, 1, 1, 2, 2, 2, 0, 0, 0]])
    poisoned = {key: x.copy() for key, x in given.items()}
    for key in PER_TOKEN:
        poisoned[key][:, :, 7:] = np.nan
    output, _, gradients = run(name, poisoned, d_output, d_state, ids=ids)
    assert not output[:, :, 7:].any()
    for key in PER_TOKEN:
        assert np.isfinite(gradients[key]).all(), key
        assert not gradients[key][:, :, 7:].any(), key

    for _ in range(2):  # a call after larger ones: nothing of them is left
        output, state, gradients = run(name, given, d_output, d_state, ids=np.zeros((1, T)))
        assert not output.any()
        assert not any(gradients[key].any() for key in PER_TOKEN)
        np.testing.assert_array_equal(state, given["initial_state"].astype(np.float32))
        np.testing.assert_array_equal(gradients["initial_state"], d_state.astype(np.float32))


@every_backend_at_length
def test_slow_decay_over_many_tokens(name: str) -> None:
    """Equal gates round alike at every token: an error that adds up is one that grows with T."""
    T = 4096
    given = {key: np.asarray(x, np.float32) for key, x in arrays(T, H=1).items()}
    given |= {"gate": np.full((1, 1, T, 8), -1e-4, np.float32), "beta": np.zeros((1, 1, T), np.float32)}
    given["initial_state"] = np.ones((1, 1, 1, 8, 8), np.float32)
    output, state = kimi_delta_attention(**given, output_final_state=True, backend=name)
    expected_output, expected_state = kda.forward(kda.Inputs(**given))
    assert_close(state, expected_state, "float32", "final_state")
    assert_close(output, expected_output, "float32", "output")


@every_backend
def test_concrete_arrays_inside_a_traced_function(name: str) -> None:
    """A caller's jitted function may close over some arguments; they are concrete, but what is done to them is not."""
    given = {key: jnp.asarray(x, jnp.float32) for key, x in arrays(5).items()}
    query = given.pop("query")

    def call(query: jnp.ndarray) -> jnp.ndarray:
        return kimi_delta_attention(query, **given, backend=name)[0]

    np.testing.assert_allclose(jax.jit(call)(query), call(query), rtol=1e-5, atol=1e-6)
    wrong = {**given, "beta": given["beta"] + 1}
    with pytest.raises(ValueError, match="beta: expected values in"):
        jax.jit(lambda query: kimi_delta_attention(query, **wrong, backend=name)[0])(query)


@every_backend
def test_no_tokens_at_all(name: str) -> None:
    state = np.random.default_rng(0).standard_normal((1, 3, 2, 8, 8)).astype(np.float32)
    empty = {key: x.astype(np.float32) for key, x in arrays(0).items()}
    output, final_state = kimi_delta_attention(**empty, initial_state=state, output_final_state=True, backend=name)
    assert output.shape == (2, 1, 0, 8)
    assert str(final_state.dtype) == "float32"
    np.testing.assert_array_equal(final_state, state)


@every_backend
@pytest.mark.slow
@pytest.mark.parametrize("V", [128, 256])
@pytest.mark.parametrize("K", [64, 128])
def test_wide_heads(name: str, K: int, V: int) -> None:
    given = arrays(200, K=K, V=V, H=1)
    random = np.random.default_rng(1)
    check_all(name, given, random.standard_normal((1, 1, 200, V)), random.standard_normal((1, 1, 1, K, V)))
