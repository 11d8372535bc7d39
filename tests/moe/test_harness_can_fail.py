"""The harness refuses exchanges that are wrong on purpose."""

from __future__ import annotations

import inspect
from dataclasses import replace

import pytest

from ops.moe_comm_gpu.exchange import Exchange
from tests.moe import faults, harness
from tests.moe.strategies import full

# Every batch, option and path that some fault needs to show: two batches, groups, scales, bias, room left over.
FORWARD = full(
    "published_small",
    num_tokens=(10, 9),
    batches=2,
    in_dtype="float8_e4m3fn",
    scale_block=128,
    weights_early=True,
    bias=True,
    accumulate=True,
    seed=5,
)
BACKWARD = full("published_small", gradient=True, weights_early=True, seed=5)

FAULTS = [
    name
    for name, thing in inspect.getmembers(faults, inspect.isclass)
    if issubclass(thing, Exchange) and thing.__module__ == faults.__name__
]


@pytest.mark.parametrize("case", [FORWARD, BACKWARD], ids=["forward", "backward"])
def test_the_right_exchange_passes(case):
    harness.run(case, "torch")


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_exchange_fails(fault):
    case = BACKWARD if "Gradient" in fault else FORWARD
    with pytest.raises(AssertionError) as refused:
        harness.run(case, f"tests.moe.faults:{fault}")
    assert "Error" not in str(refused.value), "refused for another reason than its result"


def test_there_are_enough_faults():
    assert len(FAULTS) >= 20


def test_a_result_that_is_not_a_number_never_passes():
    observed = harness.observe(FORWARD, "torch")
    harness.check(FORWARD, observed)
    observed[1][0].output[0, 0] = float("nan")
    with pytest.raises(AssertionError, match="rank 1, batch 0: output"):
        harness.check(FORWARD, observed)


def test_one_element_far_off_is_named():
    observed = harness.observe(FORWARD, "torch")
    observed[2][1].output[3, 100] *= 1.05
    observed[2][1].output[3, 100] += 0.05
    with pytest.raises(AssertionError, match=r"rank 2, batch 1: output\[3, 100\] is .* \(1 of 4608 elements are off\)"):
        harness.check(replace(FORWARD), observed)
