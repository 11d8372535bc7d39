"""Every usable KDA backend against the float64 reference, over drawn problems."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given, settings

from ops import registry
from reference.cases import KDA, Case
from tests.kda import harness, strategies

STATUS = {status.backend.name: status for status in registry.backends("kda")}
USABLE = [name for name, status in STATUS.items() if status.usable]
#: Backends that run on numpy arrays, without gradients.
ON_HOST = ("reference",)
DIFFERENTIABLE = [name for name in USABLE if name not in ON_HOST]


def examples(name: str) -> int:
    """Fewer for a backend that is here only on request: it is slow (an interpreter)."""
    return 12 if STATUS[name].state == "usable" else 2


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_outputs_and_gradients(name: str) -> None:
    operator = registry.select("kda", name)

    @settings(max_examples=examples(name))
    @given(strategies.cases(), strategies.seeds)
    def holds(case: Case, seed: int) -> None:
        harness.check(operator, case, seed)

    holds()


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_bfloat16(name: str) -> None:
    harness.check(registry.select("kda", name), KDA["short"], seed=1, dtype="bfloat16")


@pytest.mark.parametrize("name", [name for name in ON_HOST if name in USABLE])
def test_host_backends(name: str) -> None:
    operator = registry.select("kda", name)
    for case, seed in itertools.product(strategies.SMALL, (0, 1)):
        harness.check_values(operator, KDA[case], seed)


@pytest.mark.slow
@pytest.mark.parametrize("decay", strategies.DECAYS)
@pytest.mark.parametrize("case", strategies.SMALL)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_every_small_case(name: str, dtype: str, case: str, decay: float) -> None:
    harness.check(registry.select("kda", name), dataclasses.replace(KDA[case], decay=decay), seed=7, dtype=dtype)


def test_something_is_tested() -> None:
    assert {"scan", "xla"} <= set(DIFFERENTIABLE)
