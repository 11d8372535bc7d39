"""The gate's activation on its own, against float64: decay and slope over every size of a_log and of the gate."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ops.kda_tpu.pallas.common import GateForm, gate_rows, softplus_decay
from tests.kda_pallas.problems import problem

SOFTPLUS = GateForm(True, True, None)


@pytest.mark.parametrize(("exact", "limit"), [(True, 2e-5), (False, 2e-3)])
@pytest.mark.parametrize("a_log", [-8.0, -2.0, 0.0, 2.8, 6.9, 7.1, 12.0, 40.0, 100.0])
def test_softplus_of_every_size(a_log: float, exact: bool, limit: float) -> None:
    """What a token leaves, 2^decay, and its derivative; that of mild tokens also relative to itself."""
    p = problem(gate="softplus")
    p = type(p)(**{**vars(p), "a_log": jnp.full_like(p.a_log, a_log)})
    rows = gate_rows(p, 64)[0]
    gate = jnp.concatenate([jnp.linspace(-130.0, 130.0, 500), jnp.linspace(-12.0, 3.0, 500) - a_log])
    gate = jnp.broadcast_to(gate[:, None], (1000, 64))
    activate = jax.jit(lambda x: softplus_decay(x, lambda n: rows[n : n + 1], SOFTPLUS, exact))
    decay, slope = (np.asarray(x, np.float64) for x in activate(gate))
    z = np.asarray(gate, np.float64) + np.asarray(rows[:1], np.float64)
    wanted = -np.exp(a_log) * np.logaddexp(0, z)
    wanted_slope = -np.exp(a_log - np.logaddexp(0, -z))
    left, wanted_left = np.exp2(decay), np.exp(wanted)
    assert np.abs(left - wanted_left).max() <= limit
    assert np.abs(left * np.maximum(slope, -1e300) - wanted_left * wanted_slope).max() <= limit
    mild = (wanted > -4.0) & (wanted_slope < -1e-30)
    assert np.abs(slope / wanted_slope - 1)[mild].max() <= (1e-4 if exact else 1e-2)
