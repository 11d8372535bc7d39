"""Every kernel compiles for GPUs that are not here, without spills and with wide accesses."""

import json

import pytest

from bench import compile_check
from bench.compile_check import ARCHITECTURES, VARIANTS, compile_launch, record

QUICK = ("per_rank",)
KERNELS = ("dispatch send", "dispatch receive", "combine send", "combine receive")


def _launch(variant, label):
    return next(launch for launch in record(variant, **VARIANTS[variant]) if launch.label == label)


@pytest.mark.parametrize("label", KERNELS)
@pytest.mark.parametrize("variant", [pytest.param(v, marks=[pytest.mark.slow] * (v not in QUICK)) for v in VARIANTS])
def test_sm_90_does_not_spill_and_moves_16_bytes_at_a_time(variant, label):
    report = compile_launch(_launch(variant, label), 90)
    assert report.spill_bytes == 0
    assert report.loads.get(128, 0) > 0
    assert report.stores.get(128, 0) > 0
    assert 16 <= report.registers <= 255
    assert report.library or "direct" in variant or label.endswith("receive")


@pytest.mark.slow
@pytest.mark.parametrize("label", KERNELS)
@pytest.mark.parametrize("arch", [a for a in ARCHITECTURES if a != 90])
def test_other_architectures_compile_without_spills(arch, label):
    assert compile_launch(_launch("per_rank", label), arch).spill_bytes == 0


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_exchange_launches_the_four_kernels_in_order(variant):
    launches = record(variant, **VARIANTS[variant])
    assert tuple(launch.label for launch in launches) == KERNELS
    assert all(set(launch.kernel.arg_names) == set(launch.arguments) for launch in launches)


CODE = """
        /*0010*/                   LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0020*/                   LDG.E.64.STRONG.SYS R4, desc[UR4][R2.64] ;
        /*0030*/                   LDG.E.U16.CONSTANT R4, [R2.64] ;
        /*0040*/                   LD.E R4, [R2.64] ;
        /*0050*/                   STG.E desc[UR4][R2.64], R5 ;
        /*0060*/                   STG.E.U8 desc[UR4][R2.64], R5 ;
        /*0070*/                   LDGSTS.E.128 [R2], [R4.64] ;
"""


def test_widths_are_read_from_machine_code():
    loads, stores = compile_check._accesses(CODE)
    assert loads == {128: 1, 64: 1, 16: 1, 32: 1}
    assert stores == {32: 1, 8: 1}


def test_the_command_prints_a_table_and_writes_json_lines(monkeypatch, tmp_path, capsys):
    report = compile_check.Report("v", "k", 90, 40, 0, 0, 1024, {128: 3, 16: 2}, {64: 1}, True, 2048, 1.5)
    monkeypatch.setattr(compile_check, "check", lambda variants, architectures: [report])
    path = tmp_path / "compile.jsonl"
    compile_check.main(["--arch", "90", "--json", str(path)])
    printed = capsys.readouterr().out
    assert "sm_90" in printed
    assert "3/0/0/2" in printed
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines[1]["registers"] == 40
