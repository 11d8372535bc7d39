"""The benchmark of the exchange checks what it times, and writes what it prints."""

from __future__ import annotations

import json

import pytest
import torch

from bench import moe_comm_gpu, moe_gloo
from reference.moe_cases import Shape

SHAPE = Shape(num_experts=8, experts_per_token=2, hidden=64, max_num_tokens=4, world_size=2)


def test_the_gloo_section_runs(tmp_path, capsys):
    sizes = ["--ranks", "2", "--tokens", "4", "--experts", "8", "--choices", "2", "--hidden", "64", "--repeats", "2"]
    assert moe_comm_gpu.main(["gloo", *sizes, "--out", str(tmp_path)]) == 0
    first, *records = [json.loads(line) for line in (tmp_path / "moe_comm_gpu_gloo.jsonl").read_text().splitlines()]
    assert "environment" in first
    by_name = {record["name"]: record for record in records}
    assert set(by_name) == {
        "exchange, dispatch", "exchange, combine", "padded dense, dispatch", "padded dense, combine",
        "noting an arrival",
    }  # fmt: skip
    # Every rank sends the other one every slot of half the experts, 64 elements of 2 bytes each.
    assert by_name["padded dense, dispatch"]["MB_sent"] == pytest.approx(2 * 4 * 4 * 128 / 1e6)
    assert by_name["padded dense, dispatch"]["messages"] == 2
    assert 0 < by_name["exchange, combine"]["MB_sent"] < by_name["padded dense, combine"]["MB_sent"]
    assert "exchange, dispatch" in capsys.readouterr().out


def test_a_wrong_result_is_not_timed():
    options = moe_gloo.Options(SHAPE)
    with pytest.raises(RuntimeError, match="some variant: token 0, column 0 is nan, expected"):
        moe_gloo._check("some variant", torch.full((4, 64), float("nan")), options, rank=0)
