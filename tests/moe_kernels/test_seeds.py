"""The protocol under many schedules: late, reordered and torn messages, stalled ranks, two batches in flight."""

import pytest

from tests.moe_kernels.worlds import draw, simulate

CHUNK = 20
QUICK, ALL = 200, 2000


def _chunks() -> list:
    return [
        pytest.param(first, id=f"seeds {first} to {first + CHUNK - 1}", marks=[pytest.mark.slow] * (first >= QUICK))
        for first in range(0, ALL, CHUNK)
    ]


@pytest.mark.parametrize("first", _chunks())
@pytest.mark.parametrize("batches", [1, 2])
@pytest.mark.parametrize("mode", ["per_rank", "per_expert"])
def test_no_wrong_row_and_no_deadlock(mode: str, batches: int, first: int) -> None:
    for seed in range(first, first + CHUNK):
        simulate(**draw(seed, mode, batches))
