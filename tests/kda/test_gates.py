"""The activation of the gate, which every backend shares or is held to."""

import jax.numpy as jnp
import numpy as np
import pytest

from ops.kda_tpu import gates


def test_values() -> None:
    hot, zero = jnp.full(1, 100.0), jnp.zeros((1, 1, 1, 1))
    assert float(gates.activate(zero - 200, hot, None, None)[0, 0, 0, 0]) == pytest.approx(0, abs=1e-30)
    assert float(gates.activate(zero, hot, None, -5.0)[0, 0, 0, 0]) == -2.5
    # A sigmoid, not a clamped softplus.
    assert float(gates.activate(zero, jnp.zeros(1), None, -5.0)[0, 0, 0, 0]) == -2.5
    # Per head and channel.
    g = gates.activate(jnp.zeros((2, 1, 1, 4)), jnp.zeros(2), jnp.arange(8.0).reshape(2, 4), None)
    np.testing.assert_allclose(g.reshape(8), -np.logaddexp(0, np.arange(8)), rtol=1e-6)
