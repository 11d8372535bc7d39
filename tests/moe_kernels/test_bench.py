"""The benchmark on the emulation counts what travels, and refuses to time what is wrong."""

import pytest
import torch

from bench import moe_emulated
from reference import moe_cases
from reference.moe_cases import Shape

SHAPE = Shape(num_experts=4, experts_per_token=2, hidden=16, max_num_tokens=3, world_size=2)


def test_messages_and_bytes() -> None:
    records = {str(row["name"]): row for row in moe_emulated.rows(moe_emulated.Options(SHAPE, repeats=1))}
    ids = [moe_cases.random_ids(SHAPE, 3, 0, rank) for rank in range(2)]
    away = [[SHAPE.expert_rank[expert] != rank for expert in token] for rank in range(2) for token in ids[rank]]
    trips = {"per_rank": sum(map(any, away)), "per_expert": sum(map(sum, away))}
    for mode, number in trips.items():
        assert records[f"{mode}, dispatch"]["puts"] == records[f"{mode}, combine"]["puts"] == number
    assert records["per_rank, dispatch"]["signals"] == 2
    assert records["per_expert, dispatch"]["signals"] == 4
    assert records["per_rank, combine"]["signals"] == 2
    for half in ("dispatch", "combine"):
        assert records[f"padded dense, {half}"]["puts"] == 2
        assert records[f"padded dense, {half}"]["MB_put"] == pytest.approx(2 * 2 * 3 * 16 * 2 / 1e6)


@pytest.mark.parametrize("value", [float("nan"), 3.0])
def test_a_wrong_result_is_not_timed(value: float) -> None:
    want = torch.ones(2, 4)
    output = want.bfloat16()
    output[1, 2] = value
    with pytest.raises(RuntimeError, match="token 1, column 2"):
        moe_emulated._check("x", 0, output, want)
