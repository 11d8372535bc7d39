"""The numpy float64 reference as a backend: concrete arrays in, numpy arrays out, no gradients through jax."""

from __future__ import annotations

import numpy as np

from ops.kda_tpu import contract
from ops.kda_tpu.contract import Array, Problem
from reference import kda


def _run(problem: Problem) -> tuple[Array, Array | None]:
    output, final_state = kda.forward(
        kda.Inputs(
            query=problem.query,
            key=problem.key,
            value=problem.value,
            gate=problem.gate,
            beta=problem.beta,
            a_log=problem.a_log,
            delta_time_bias=problem.delta_time_bias,
            initial_state=problem.initial_state,
            segment_ids=problem.segment_ids,
            scale=problem.scale,
            use_qk_l2norm=problem.use_qk_l2norm,
            use_gate_in_kernel=problem.use_gate_in_kernel,
            lower_bound=problem.lower_bound,
        )
    )
    return output.astype(problem.value.dtype), final_state.astype(np.float32)


kimi_delta_attention = contract.backend(_run, on_host=True)
