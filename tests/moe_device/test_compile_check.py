"""The compile check itself: what it compiles, and that it sees spills and widths."""

import json

import pytest

from bench import compile_check
from bench.compile_check import VARIANTS, compile_launch, record

KERNELS = ("dispatch send", "dispatch receive", "combine send", "combine receive")


def test_spills_are_seen_where_registers_run_out(monkeypatch):
    launch = next(launch for launch in record("per_rank") if launch.label == "combine receive")
    assert compile_launch(launch, 90).spill_bytes == 0
    monkeypatch.setattr(compile_check, "MAX_REGISTERS", 32)
    assert compile_launch(launch, 90).spill_bytes > 0


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_exchange_launches_the_four_kernels_in_order(variant):
    launches = record(variant)
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
