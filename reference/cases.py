"""Named KDA problems and their seeded inputs, the same for tests and benches.

>>> case = KDA["bar"]
>>> inputs, d_output, d_final_state = make(case, seed=0)
>>> inputs.query.shape, d_output.shape
((4, 1, 1024, 128), (4, 1, 1024, 128))
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from reference import kda

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Case:
    """A problem up to its values.

    Attributes:
        name: what tests and benches call it.
        heads: H.
        batch: B.
        tokens: T.
        key_channels: K.
        value_channels: V.
        segments: N if there are segment ids, else None.
        lengths: lengths of the segments of every batch row, padding behind; None draws ids, padding anywhere.
        decay: mean log decay per token and channel in nats (exponentially distributed); ignored with a raw gate.
        normalise: use_qk_l2norm (the raw rows are then not of unit length).
        raw_gate: use_gate_in_kernel.
        lower_bound: of the bounded gate.
        bias: whether there is a delta_time_bias.
        state: whether there is an initial state.
    """

    name: str
    heads: int
    batch: int
    tokens: int
    key_channels: int
    value_channels: int
    segments: int | None = None
    lengths: tuple[int, ...] | None = None
    decay: float = 1.0
    normalise: bool = False
    raw_gate: bool = False
    lower_bound: float | None = None
    bias: bool = False
    state: bool = False


_PACKED = (1800, 1500, 2000, 1200, 800)
_TRAINING: dict[str, Any] = {"normalise": True, "raw_gate": True, "lower_bound": -5.0, "bias": True}

KDA: dict[str, Case] = {
    case.name: case
    for case in (
        Case("bar", 4, 1, 1024, 128, 128),
        Case("training", 16, 1, 8192, 128, 128, **_TRAINING),
        Case("packed", 16, 1, sum(_PACKED), 128, 128, segments=len(_PACKED), lengths=_PACKED, **_TRAINING),
        # Small ones, for tests: each option at least once, lengths that are no multiple of a chunk, K != V.
        Case("plain", 8, 1, 200, 8, 12),
        Case("short", 2, 2, 5, 8, 8, state=True),
        Case("softplus", 2, 2, 130, 16, 8, segments=5, normalise=True, raw_gate=True, bias=True, state=True),
        Case("bounded", 1, 1, 200, 8, 40, segments=3, normalise=True, raw_gate=True, lower_bound=-5.0, state=True),
        Case("segments", 4, 2, 150, 8, 8, segments=7),
    )
}


def make(case: Case, seed: int) -> tuple[kda.Inputs, Array, Array]:
    """Inputs, d_output [H, B, T, V] and d_final_state [B, N, H, K, V] in float32; what stands in padding is NaN."""
    random = np.random.default_rng(seed)
    H, B, T, K, V = case.heads, case.batch, case.tokens, case.key_channels, case.value_channels
    N = case.segments or 1

    def normal(*shape: int) -> Array:
        return random.standard_normal(shape, dtype=np.float32)

    def rows() -> Array:
        x = normal(H, B, T, K)
        return x if case.normalise else x / np.linalg.norm(x, axis=-1, keepdims=True)

    gate = normal(H, B, T, K)
    if not case.raw_gate:
        gate = np.asarray(-case.decay * random.exponential(size=(H, B, T, K)), dtype=np.float32)
    query, key, value = rows(), rows(), normal(H, B, T, V)
    beta = np.asarray(random.uniform(size=(H, B, T))).astype(np.float32)
    ids = None if case.segments is None else segment_ids(case, random)
    if ids is not None:
        for array in (query, key, value, gate, beta):
            array[:, ids == 0] = np.nan
    inputs = kda.Inputs(
        query=query,
        key=key,
        value=value,
        gate=gate,
        beta=beta,
        a_log=np.log(case.decay + 0.1 * random.uniform(size=(H,))).astype(np.float32) if case.raw_gate else None,
        delta_time_bias=0.5 * normal(H * K) if case.bias else None,
        initial_state=normal(B, N, H, K, V) if case.state else None,
        segment_ids=ids,
        use_qk_l2norm=case.normalise,
        use_gate_in_kernel=case.raw_gate,
        lower_bound=case.lower_bound,
        max_num_segments=N,
    )
    d_output, d_final_state = normal(H, B, T, V), normal(B, N, H, K, V)
    if ids is not None:
        d_output[:, ids == 0] = np.nan
    return inputs, d_output, d_final_state


def segment_ids(case: Case, random: np.random.Generator) -> Array:
    """[B, T] int32: as ``lengths`` say, or drawn with unused slots and padding in front, between and inside."""
    assert case.segments is not None
    ids = np.zeros((case.batch, case.tokens), np.int32)
    if case.lengths is not None:
        ids[:, : sum(case.lengths)] = np.repeat(np.arange(1, len(case.lengths) + 1), case.lengths)
        return ids
    ids[:] = np.sort(random.integers(1, case.segments + 1, size=ids.shape), axis=1)
    # One slot without tokens, if there are several; its neighbours keep theirs.
    if case.segments > 1:
        ids[ids == random.integers(1, case.segments + 1)] = 0
    ids[random.uniform(size=ids.shape) < 0.1] = 0
    return ids
