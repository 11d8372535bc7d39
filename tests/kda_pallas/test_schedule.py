"""The step table against its definition, spelled out in Python."""

from __future__ import annotations

from dataclasses import fields

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ops.kda_tpu.pallas.common import Done, Need, interleave
from ops.kda_tpu.pallas.schedule import StepTable, pad_segment_ids, padded_length, plan


@st.composite
def packed_rows(draw: st.DrawFn) -> tuple[np.ndarray, int, int]:
    """Segment ids of two batch rows of one length, slots, rows of a tile; padding anywhere, slots may be unused."""
    slots, rows, length = draw(st.integers(1, 5)), draw(st.sampled_from([1, 4, 8])), draw(st.integers(1, 30))
    ids = []
    for _ in range(2):
        order = sorted(draw(st.lists(st.integers(1, slots), min_size=length, max_size=length)))
        padding = draw(st.lists(st.booleans(), min_size=length, max_size=length))
        ids.append(np.where(padding, 0, order))
    return np.stack(ids), slots, rows


def visits(ids: np.ndarray, rows: int) -> list[tuple[int, int]]:
    """(tile, slot) of each step of one batch row."""
    used = [n for n in ids if n]
    newest = used[0] if used else 1
    steps = []
    for tile in range(padded_length(len(ids), rows) // rows):
        here = list(dict.fromkeys(n for n in ids[tile * rows : (tile + 1) * rows] if n)) or [newest]
        newest = here[-1]
        steps += [(tile, n - 1) for n in here]
    return steps


@given(packed_rows())
@settings(max_examples=30)
def test_every_tile_is_visited_once_for_each_of_its_segments(case: tuple[np.ndarray, int, int]) -> None:
    ids, slots, rows = case
    table = plan(jnp.asarray(ids, jnp.int32), slots, *ids.shape, rows)
    assert table.num_steps == padded_length(ids.shape[1], rows) // rows + slots - 1
    for b in range(len(ids)):
        wanted = visits(ids[b], rows)
        got = {field.name: np.asarray(getattr(table, field.name)[b]) for field in fields(StepTable)}
        steps = list(zip(got["tile"], got["slot"], strict=True))
        assert steps[: len(wanted)] == wanted
        assert set(steps[len(wanted) :]) <= {wanted[-1]}
        assert got["segment"].tolist() == [slot + 1 for _, slot in wanted] + [-1] * (len(steps) - len(wanted))
        for first, last, of in (("is_first", "is_last", "slot"), ("fresh", "settled", "tile")):
            changes = np.flatnonzero(np.diff(got[of])) + 1
            assert np.flatnonzero(got[first]).tolist() == [0, *changes]
            assert np.flatnonzero(got[last]).tolist() == [*(changes - 1), len(steps) - 1]


def test_the_table_may_be_traced() -> None:
    ids = jnp.asarray([[1, 1, 0, 2, 2, 3, 0, 0, 0]])
    eager = plan(ids, 3, 1, 9, 4)
    traced = jax.jit(lambda ids: plan(ids, 3, 1, 9, 4))(ids)
    assert all(jnp.array_equal(a, b) for a, b in zip(eager.flat(), traced.flat(), strict=True))


def test_without_ids_a_step_is_a_tile() -> None:
    table = plan(None, 1, 2, 300, 128)
    assert table.tile.tolist() == [[0, 1, 2]] * 2
    assert table.is_first.tolist() == [[1, 0, 0]] * 2
    assert table.is_last.tolist() == [[0, 0, 1]] * 2
    assert pad_segment_ids(None, 2, 300, 128).sum(axis=1).tolist() == [300, 300]


def test_interleaving_takes_turns_and_waits() -> None:
    log: list[str] = []

    def stage(name: str, signals: list[Need | Done | None]):
        for n, signal in enumerate(signals):
            log.append(f"{name}{n}")
            yield signal
        log.append(f"{name}end")

    interleave([(0, stage("a", [Need("x"), None])), (1, stage("b", [None, Done("x")]))])
    assert log == ["a0", "b0", "b1", "a1", "bend", "aend"]


def test_waiting_for_nobody_is_an_error() -> None:
    def stage():
        yield Need("never")

    with pytest.raises(RuntimeError, match="never"):
        interleave([(0, stage())])
