"""The KDA bench: its cases, the verdicts on targets, the tuner's choice, the command line."""

import json
import re
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from bench import kda_cases, kda_peer, kda_static, kda_tpu, tune_kda
from bench.kda_cases import CASES, TARGETS, Case, Target
from bench.static_profile.chips import CHIPS
from bench.tune_kda import Trial
from ops.kda_tpu.pallas import config as kernels

TINY = Case("tiny", heads=2, tokens=20, key_dim=16, value_dim=8, dtype="float32", lengths=(7, 0, 11))


def test_segment_ids_follow_the_lengths_and_end_in_padding():
    ids = replace(TINY, batch=2).segment_ids
    assert ids.shape == (2, 20)
    assert ids[1].tolist() == [1] * 7 + [3] * 11 + [0] * 2
    assert CASES["seed-fixed"].segment_ids is None


def test_values_have_the_shapes_of_the_specs():
    for case in (TINY, replace(TINY, gate="log", dtype="bfloat16"), replace(TINY, gate="softplus")):
        specs, values = kda_cases.specs(case), kda_cases.values(case)
        assert {k: (v.shape, v.dtype) for k, v in specs.items()} == {k: (v.shape, v.dtype) for k, v in values.items()}


@pytest.mark.parametrize(
    ("backend", "case"),
    [("scan", replace(TINY, gate="log", lengths=())), pytest.param("xla", TINY, marks=pytest.mark.slow)],
)
def test_check_before_timing_agrees_with_the_reference(backend, case):
    assert kda_tpu._error(backend, case) < kda_tpu.CHECK_TOLERANCE


def test_a_backend_that_is_wrong_is_not_timed(monkeypatch, capsys, tmp_path):
    def wrong(query, key, value, gate, beta, **options):
        return value * jnp.sum(query * key * gate, axis=-1, keepdims=True) * beta[..., None] * 0.5, None

    monkeypatch.setattr(kda_tpu.registry, "select", lambda op, name: wrong)
    monkeypatch.setattr(kda_tpu, "CHECKED_TOKENS", 16)
    with np.errstate(all="ignore"):
        assert kda_tpu.main(["--out", str(tmp_path), "--heads", "1", "--tokens", "16"]) == 1
    assert "WRONG" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_targets_speak_of_cases_and_chips_that_exist():
    quantities = {"ms", "backward kernels ms", "backward kernels MB", "residuals MB at H=32"} | {
        "times seed-fixed",
        "times a quarter of seed-fixed",
    }
    for target in TARGETS:
        assert target.case in CASES
        assert target.chip is None or target.chip in CHIPS
        assert target.quantity in quantities
        assert target.must is None or target.aim is None or target.aim < target.must


class FakeReport:
    def __init__(self, ms):
        self.ms = ms

    def matching(self, pattern):
        return ()


@pytest.mark.parametrize(("ms", "verdict"), [(1.2, "MISSED"), (1.0, "must"), (0.6, "aim")])
def test_verdict_on_a_target(ms, verdict):
    profiled = kda_static.Profiled(CASES["seed-fixed"], "v6e", FakeReport(ms))
    (row,) = kda_static.target_rows([profiled], [Target("seed-fixed", "v6e", "ms", 1.1, 0.65, 2.72)])
    assert (row["estimate"], row["reached"]) == (ms, verdict)


def test_ratios_compare_with_the_base_case_of_the_same_chip():
    profiles = [
        kda_static.Profiled(CASES["seed-fixed"], "v6e", FakeReport(1.0)),
        kda_static.Profiled(CASES["few-heads"], "v6e", FakeReport(0.3)),
        kda_static.Profiled(CASES["few-heads"], "tpu7x", FakeReport(9.0)),
    ]
    targets = [Target("few-heads", chip, "times a quarter of seed-fixed", 1.3) for chip in ("v6e", "tpu7x")]
    (row,) = kda_static.target_rows(profiles, targets)
    assert (row["chip"], row["estimate"], row["reached"]) == ("v6e", 1.2, "must")


def test_a_case_with_a_ratio_for_a_target_brings_the_base_along():
    assert kda_static.with_base(["softplus", "remat"]) == ["seed-fixed", "softplus", "remat"]
    assert kda_static.with_base(["few-heads", "seed-fixed"]) == ["few-heads", "seed-fixed"]
    assert kda_static.with_base(["remat"]) == ["remat"]


def test_a_refused_program_fails_its_targets():
    profiled = kda_static.Profiled(CASES["remat"], "v6e", None, "CompilationError: no")
    (row,) = kda_static.target_rows([profiled], [Target("remat", "v6e", "ms", 1.6)])
    assert row["reached"] == "failed"
    assert "FAILED: CompilationError" in kda_static.show(profiled)


def test_residuals_are_counted_beside_the_inputs():
    case = replace(CASES["seed-fixed"], heads=2, tokens=1024)
    rows = 2 * 1024
    expected = rows * (128 + 128) * 2 + rows // 64 * 128 * 128 * 2  # v_new and slab, then a state per chunk
    expected += 2 * 128 * 128 * 4  # the initial state that stands in for none
    assert expected <= kda_static.residual_bytes(case) <= 1.01 * expected


def test_a_peer_that_is_not_there_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(kda_peer.importlib.util, "find_spec", lambda name: None if name == "tokamax" else True)
    assert kda_tpu.main(["--static", "--case", "seed-fixed", "--peer", "tokamax"]) == 2
    assert "pip install tokamax==" in capsys.readouterr().err


def test_a_peer_of_the_same_run_stands_beside_the_target():
    profiles = [
        kda_static.Profiled(CASES["seed-fixed"], "v6e", FakeReport(1.0)),
        kda_static.Profiled(CASES["seed-fixed"], "v6e", FakeReport(2.5), peer="tokamax"),
    ]
    (row,) = kda_static.target_rows(profiles, [Target("seed-fixed", "v6e", "ms", 1.1)])
    assert (row["estimate"], row["peer here"]) == (1.0, 2.5)


def test_kernels_of_a_peers_backward_are_told_from_its_forward():
    forward = ("_fused_gate_intra_kernel", "_chunk_kda_fwd_h_o_varlen_kernel")
    backward = (
        "_fused_recompute_w_u_vnew_from_h_kernel",
        "_chunk_kda_bwd_dAv_kernel",
        "_fused_dhu_wy_intra_cumsum_kernel",
    )
    assert all(re.search(kda_peer.BACKWARD, name) for name in backward)
    assert not any(re.search(kda_peer.BACKWARD, name) for name in forward)


def test_unknown_case_is_refused_before_anything_is_compiled(capsys):
    assert kda_tpu.main(["--static", "--case", "seed"]) == 2
    assert "seed-fixed" in capsys.readouterr().err


def test_tuner_chooses_the_heads_of_forward_and_backward_apart():
    base = kernels.Config()
    trials = [Trial(4, 16, 0.5, 0.4), Trial(4, 8, 0.6, 0.3), Trial(8, 8, 0.55, 0.36), Trial(2, 16, 1e9, 1e9)]
    config, ms = tune_kda.best(trials, base)
    assert ms == pytest.approx(0.8)
    assert (config.chunks_per_step, config.heads_per_step, config.backward_heads_per_step) == (4, 16, 8)
    with pytest.raises(ValueError, match="one that compiles"):
        tune_kda.best([Trial(4, 16, float("inf"), float("inf"))], base)


@pytest.mark.parametrize("heads", [1, 4, 12, 16, 17])
def test_tuner_tries_legal_cuts_only(heads):
    shape = kernels.ProblemShape(heads, 1, 8192, 128, 128)
    tried = list(tune_kda.candidates(shape, "v5p"))
    assert tried
    assert all(kernels.why_illegal(config, shape, "v5p") is None for config in tried)


def test_tuner_stores_what_choose_reads(tmp_path, monkeypatch):
    path = tmp_path / "tuned.json"
    path.write_text('{"about": "test", "choices": {}}')
    shape = kernels.ProblemShape(16, 1, 8192, 128, 128)
    choice = kernels.Config(chunks_per_step=2, backward_heads_per_step=8)
    tune_kda.store(path, "v6e", shape, choice, 0.81234)
    data = json.loads(path.read_text())
    assert data["estimated_ms"] == {"v6e": {shape.shape_class: 0.8123}}
    monkeypatch.setattr(kernels, "tuned", lambda: data["choices"])
    assert kernels.choose(shape, "v6e") == choice


@pytest.mark.slow
def test_static_command_end_to_end(monkeypatch, capsys, tmp_path):
    pytest.importorskip("libtpu", reason="libtpu, the TPU compiler, is not installed")
    small = replace(TINY, name="small", tokens=300, lengths=(100, 200), key_dim=128, value_dim=128, dtype="bfloat16")
    monkeypatch.setitem(CASES, "small", small)
    monkeypatch.setenv("OPS_KDA_INTERPRET", "1")
    assert kda_tpu.main(["--static", "--case", "small", "--chip", "v6e", "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "kda_forward" in out
    assert "Nothing here was measured" in out
    records = [json.loads(line) for line in (tmp_path / "kda_tpu_static.jsonl").read_text().splitlines()]
    assert {"kda_forward", "kda_backward"} <= {record.get("kernel") for record in records}
