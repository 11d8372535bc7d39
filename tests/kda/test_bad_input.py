"""Bad input: an error that names the argument, before anything runs."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ops.kda_tpu import kimi_delta_attention

H, B, T, K, V = 2, 1, 6, 4, 3


def good() -> dict[str, Any]:
    return {
        "query": np.zeros((H, B, T, K), np.float32),
        "key": np.zeros((H, B, T, K), np.float32),
        "value": np.zeros((H, B, T, V), np.float32),
        "gate": np.zeros((H, B, T, K), np.float32),
        "beta": np.zeros((H, B, T), np.float32),
    }


RAW = {"use_gate_in_kernel": True, "a_log": np.zeros(H, np.float32)}

BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"query": [[0.0]]}, TypeError, "query: expected an array"),
    ({"beta": None}, TypeError, "beta: expected an array"),
    ({"query": np.zeros((H, T, K), np.float32)}, ValueError, "query: expected 4 axes"),
    ({"key": np.zeros((H, B, T, K + 1), np.float32)}, ValueError, r"key: expected \[H, B, T, K\]"),
    ({"value": np.zeros((B, T, H, V), np.float32)}, ValueError, r"value: expected \[H, B, T, V\]"),
    ({"beta": np.zeros((H, B, T, 1), np.float32)}, ValueError, r"beta: expected \[H, B, T\]"),
    ({"query": np.zeros((H, B, T, K), np.float16)}, TypeError, "query: expected float32 or bfloat16, got float16"),
    ({"value": np.zeros((H, B, T, V), np.int32)}, TypeError, "value: expected float32"),
    ({"gate": np.full((H, B, T, K), np.nan, np.float32)}, ValueError, "gate: expected log decays <= 0, got nan"),
    ({"beta": np.full((H, B, T), 1.5, np.float32)}, ValueError, r"beta: expected values in \[0, 1\], got 1.5"),
    ({"beta": np.full((H, B, T), np.nan, np.float32)}, ValueError, r"beta: expected values in \[0, 1\], got nan"),
    ({"gate": np.ones((H, B, T, K), np.float32)}, ValueError, "gate: expected log decays <= 0"),
    ({"use_gate_in_kernel": True}, ValueError, "a_log: expected an array"),
    ({"a_log": np.zeros(H, np.float32)}, ValueError, "a_log: .* use_gate_in_kernel"),
    ({"lower_bound": -5.0}, ValueError, "lower_bound: .* use_gate_in_kernel"),
    ({**RAW, "lower_bound": 1.0}, ValueError, "lower_bound: expected a finite number below 0"),
    ({**RAW, "lower_bound": "low"}, TypeError, "lower_bound: expected a number"),
    ({**RAW, "delta_time_bias": np.zeros(H, np.float32)}, ValueError, r"delta_time_bias: expected \[H\*K\]"),
    ({**RAW, "a_log": np.zeros(H + 1, np.float32)}, ValueError, r"a_log: expected \[H\]"),
    ({"scale": 0.0}, ValueError, "scale: expected a finite number"),
    (
        {"initial_state": np.zeros((B, 1, H, V, K), np.float32)},
        ValueError,
        r"initial_state: expected \[B, N, H, K, V\]",
    ),
    (
        {"initial_state": np.zeros((B, 2, H, K, V), np.float32), "max_num_segments": 3},
        ValueError,
        "initial_state: expected max_num_segments = 3 slots",
    ),
    ({"max_num_segments": 0}, ValueError, "max_num_segments: expected at least 1"),
    ({"segment_ids": np.ones((B, T), np.float32)}, TypeError, "segment_ids: expected integers"),
    ({"segment_ids": np.ones((T,), np.int32)}, ValueError, r"segment_ids: expected \[B, T\]"),
    ({"segment_ids": np.full((B, T), -1)}, ValueError, "segment_ids: expected ids >= 0"),
    ({"segment_ids": np.array([[1, 1, 2, 0, 1, 1]])}, ValueError, "segment_ids: expected ids that never decrease"),
    (
        {"segment_ids": np.full((B, T), 4), "max_num_segments": 3},
        ValueError,
        "segment_ids: expected ids of at most N = 3",
    ),
    ({"context_parallel_metadata": object()}, ValueError, "context_parallel_metadata"),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD)
def test_named_in_the_error(change: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        kimi_delta_attention(**{**good(), **change}, backend="scan")


def test_the_good_call_is_good() -> None:
    output, final_state = kimi_delta_attention(**good(), backend="reference")
    assert output.shape == (H, B, T, V)
    assert final_state is None


def test_traced_ids_need_the_number_of_slots() -> None:
    with pytest.raises(ValueError, match="max_num_segments: expected a number with traced segment_ids"):
        jax.jit(lambda ids: kimi_delta_attention(**good(), segment_ids=ids, backend="scan"))(
            jnp.ones((B, T), jnp.int32)
        )


def test_the_host_backend_names_scan_for_traced_values() -> None:
    with pytest.raises(TypeError, match=r"query: .*'scan'"):
        jax.jit(lambda q: kimi_delta_attention(**{**good(), "query": q}, backend="reference"))(good()["query"])


def test_the_contract_and_the_oracle_load_no_framework() -> None:
    code = "import ops.kda_tpu.api, ops.kda_tpu.oracle, sys; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
