"""The kernels compiled for GPUs that are not there: no spills, wide accesses, no stray library calls."""

from __future__ import annotations

import pytest

from bench import compile_check

KERNELS = ["dispatch send", "dispatch receive", "combine send", "combine receive"]
QUICK = ("per_rank", 90)


def _variants() -> list:
    return [
        pytest.param(name, arch, id=f"{name}-sm_{arch}", marks=[] if (name, arch) == QUICK else pytest.mark.slow)
        for name in compile_check.VARIANTS
        for arch in compile_check.ARCHITECTURES
    ]


@pytest.mark.parametrize(("variant", "arch"), _variants())
def test_code(variant: str, arch: int) -> None:
    if arch < 89 and "quantise" in variant:
        pytest.skip("hardware before sm_89 does not convert to fp8")
    reports = list(compile_check.check([variant], [arch]))
    assert [report.label for report in reports] == KERNELS
    for report in reports:
        assert report.spill_bytes == 0, report
        assert report.stack_bytes == 0, report
        assert report.loads.get(128, 0) > 0, report
        assert report.stores.get(128, 0) > 0, report
        # Receiving needs no library: waiting is a load, and nothing is sent.
        assert report.library == report.label.endswith("send"), report
