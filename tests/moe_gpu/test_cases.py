"""The GPU's cases on the emulation: that they are right themselves, before there is a GPU to run them on."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ops.moe_comm_gpu.emulation_backend import Exchange
from tests.moe_gpu import cases

CASES = cases.world_cases(1)


@pytest.mark.parametrize(
    "number", [pytest.param(n, marks=[] if n in (2, 5) else pytest.mark.slow) for n in range(len(CASES))]
)
def test_a_case_for_the_gpu(number: int) -> None:
    case = replace(CASES[number], shape=replace(CASES[number].shape, hidden=136, max_num_tokens=5))
    case = replace(case, num_tokens=tuple(min(count, 5) for count in case.num_tokens))
    with Exchange(case.config(), num_programs=1) as exchange:
        for _ in range(2):
            cases.check_everywhere(case, [cases.observe(case, exchange, torch.device("cpu"))])
