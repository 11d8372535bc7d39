"""A steep stretch of tokens before a mild one: the pair across the boundary hardly decays and must not be lost.

Inside a block of 16 rows, row 8 sees row 7 through its own decay alone, however steep rows 1 to 7 are. Factors that
pass through an anchor before the stretch underflow there although their product does not.
"""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from ops.kda_tpu.pallas.backward import backward
from ops.kda_tpu.pallas.config import Config
from ops.kda_tpu.pallas.forward import forward
from tests.kda_pallas.problems import TOLERANCES, cotangents, problem, reference_gradients, relative_rms


@pytest.mark.parametrize("sub_block", ["clamped", pytest.param("tree", marks=pytest.mark.slow)])
@pytest.mark.parametrize("steep", [-15.0, pytest.param(-30.0, marks=pytest.mark.slow)])
def test_gradients_across_the_boundary(steep, sub_block):
    p = problem(dtype="bfloat16", tokens=64)
    gate = np.full(p.gate.shape, -0.1)
    for start in (1, 17, 41):
        gate[:, :, start : start + 7] = steep
    p = replace(p, gate=jnp.asarray(gate, p.gate.dtype))
    config = Config(chunks_per_step=1, heads_per_step=1, sub_block=sub_block)
    d_output, d_final = cotangents(p)
    _, _, residuals = forward(p, config, True, save=True)
    got = backward(p, residuals, d_output, d_final, config, True)
    wanted = reference_gradients(p, d_output, d_final)
    for name in ("query", "key", "value", "beta"):
        error = relative_rms(getattr(got, name), getattr(wanted, name))
        assert error <= TOLERANCES["bfloat16"][name], (name, error)
