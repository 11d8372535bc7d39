"""Every registered and usable backend against the float64 reference."""

from __future__ import annotations

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.moe import harness
from tests.moe.strategies import Case, cases

BACKENDS = harness.usable_backends()


# Cases are small as drawn; shrinking one over and over, each time in many processes, would take minutes.
ONCE = (Phase.explicit, Phase.generate)


def run_if_quick(case: Case, backend: str) -> None:
    """Runs the case; an emulation only runs small ones."""
    if backend != "nvshmem_emulated" or case.small():
        harness.run(case, backend)


def test_the_backends_of_this_package_take_part():
    assert {"torch", "reference"} <= set(BACKENDS)


@pytest.mark.parametrize("backend", BACKENDS)
def test_any_case(backend):
    @settings(phases=ONCE, max_examples=30 if backend == "torch" else 8)
    @given(cases())
    def check(case):
        run_if_quick(case, backend)

    check()


@pytest.mark.parametrize("backend", BACKENDS)
def test_any_gradient(backend):
    @settings(phases=ONCE, max_examples=20 if backend == "torch" else 6)
    @given(cases(gradient=True))
    def check(case):
        run_if_quick(case, backend)

    check()


@pytest.mark.slow
@settings(phases=ONCE, max_examples=1000)
@given(cases() | cases(gradient=True), st.just("torch"))
def test_many_cases(case, backend):
    harness.run(case, backend)
