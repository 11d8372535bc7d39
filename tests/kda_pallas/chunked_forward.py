"""Residuals of the forward in numpy float64, so that the backward is tested on its own."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from ops.kda_tpu.contract import Problem
from ops.kda_tpu.pallas import schedule
from ops.kda_tpu.pallas.config import Config
from ops.kda_tpu.pallas.residuals import Residuals, compute_dtype, kernel_width

BETA_FLOOR = 2.0**-50


def residuals(problem: Problem, config: Config) -> Residuals:
    """What the forward saves: one dense triangular system per chunk and step."""
    H, B, T, K = problem.query.shape
    V = problem.value.shape[3]
    C, NC, tile_rows = config.chunk, config.chunks_per_step, config.tile
    wide, Kp, Vp = schedule.padded_length(T, tile_rows), kernel_width(K), kernel_width(V)
    steps = schedule.plan(problem.segment_ids, problem.num_segments, B, T, tile_rows)
    ids = np.asarray(schedule.pad_segment_ids(problem.segment_ids, B, T, tile_rows))
    q, k, v, g, beta = _prepared(problem, wide)
    S = steps.num_steps
    out = {
        "v_new": np.zeros((H, B, wide, Vp)),
        "slab": np.zeros((H, B, wide // C, C, 2 * C)),
        "states": np.zeros((H, B, S * NC, Vp, Kp)),
    }
    for h in range(H):
        for b in range(B):
            state = np.zeros((K, V))
            for s in range(S):
                tile, slot, segment = (int(x[b, s]) for x in (steps.tile, steps.slot, steps.segment))
                if int(steps.is_first[b, s]):
                    state = np.asarray(problem.initial_state[b, slot, h], np.float64)
                for c in range(NC):
                    chunk = tile * NC + c
                    rows = slice(chunk * C, (chunk + 1) * C)
                    real = ids[b, rows] == segment
                    out["states"][h, b, s * NC + c, :V, :K] = state.T
                    v_new, slab, state = _chunk(
                        *(np.where(real[:, None], x[h, b, rows], 0.0) for x in (q, k, v, g)),
                        np.where(real, np.maximum(beta[h, b, rows], BETA_FLOOR), 0.0),
                        state,
                        problem.scale,
                    )
                    out["v_new"][h, b, rows, :V] += v_new
                    out["slab"][h, b, chunk] += np.where(real[:, None], slab, 0.0)
    dtype = compute_dtype(problem)
    return Residuals(**{name: jnp.asarray(x, jnp.float32).astype(dtype) for name, x in out.items()}, steps=steps)


def _prepared(problem: Problem, wide: int) -> list[np.ndarray]:
    q, k, v, g, beta = (
        np.asarray(getattr(problem, n).astype(jnp.float32), np.float64)
        for n in ("query", "key", "value", "gate", "beta")
    )
    if problem.use_qk_l2norm:
        q, k = (x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
    if problem.use_gate_in_kernel:
        a = np.asarray(problem.a_log, np.float64)[:, None, None, None]
        z = g
        if problem.delta_time_bias is not None:
            z = z + np.asarray(problem.delta_time_bias, np.float64)[:, None, None, :]
        with np.errstate(over="ignore"):
            if problem.lower_bound is None:
                g = -np.exp(a) * np.logaddexp(0, z)
            else:
                g = problem.lower_bound / (1 + np.exp(-np.exp(a) * z))
    g = np.maximum(g, -1000.0)
    return [np.pad(x, [(0, 0), (0, 0), (0, wide - x.shape[2])] + [(0, 0)] * (x.ndim - 3)) for x in (q, k, v, g, beta)]


def _chunk(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, g: np.ndarray, beta: np.ndarray, state: np.ndarray, scale: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    C = q.shape[0]
    G = np.cumsum(g, axis=0)
    # Sums from j + 1 to i, never differences of prefix sums.
    between = np.zeros((C, C, q.shape[1]))
    for i in range(1, C):
        between[i, :i] = between[i - 1, :i] + g[i]
    E = np.exp(between)
    A = np.linalg.inv(np.eye(C) + beta[:, None] * np.tril(np.einsum("ic,jc,ijc->ij", k, k, E), -1))
    Aqk = scale * np.tril(np.einsum("ic,jc,ijc->ij", q, k, E))
    v_new = A @ (beta[:, None] * (v - (k * np.exp(G)) @ state))
    slab = -(beta / scale)[:, None] * np.concatenate([A.T, (Aqk @ A).T], axis=1)
    to_end = np.exp(np.concatenate([between[C - 1, : C - 1], np.zeros((1, q.shape[1]))]))
    return v_new, slab, np.exp(G[-1])[:, None] * state + (k * to_end).T @ v_new
