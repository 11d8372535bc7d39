"""The stopwatch and its report."""

import json

import pytest

from bench import timing


def test_variants_take_turns_and_rounds_match():
    order = []
    timings = timing.interleave({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, repeats=3, warmup=1)
    assert order == ["a", "b"] + ["a", "b"] * 3
    assert [len(t.seconds) for t in timings.values()] == [3, 3]


def test_result_is_waited_for_inside_the_clock():
    waited = []
    timing.interleave({"a": lambda: "result"}, repeats=2, warmup=1, wait=waited.append)
    assert waited == ["result"] * 3


def test_budget_ends_after_a_whole_round():
    timings = timing.interleave({"a": lambda: None, "b": lambda: None}, repeats=50, budget_seconds=0.0)
    assert [len(t.seconds) for t in timings.values()] == [1, 1]


def test_ratio_is_taken_within_rounds():
    # A machine that is ten times slower in the second round: the ratio of medians would not be 2.
    slow, fast = timing.Timing("s", (2.0, 20.0, 2.0), 0.0), timing.Timing("f", (1.0, 10.0, 1.0), 0.0)
    assert timing.ratio(slow, fast) == timing.Spread(2.0, 2.0, 2.0)
    with pytest.raises(ValueError, match="3 rounds"):
        timing.ratio(slow, timing.Timing("f", (1.0,), 0.0))


def test_spread_of_a_known_sample():
    assert timing.Spread.of(list(range(11))) == timing.Spread(5, 1.0, 9.0)
    with pytest.raises(ValueError, match="at least one"):
        timing.Spread.of([])


@pytest.mark.parametrize("bad", [{"repeats": 0}, {"warmup": 0}])
def test_counts_below_one_are_refused(bad):
    with pytest.raises(ValueError, match="at least 1, got 0"):
        timing.interleave({"a": lambda: None}, **bad)


def test_table_and_json_lines_carry_the_same_figures(tmp_path):
    rows = [timing.timing_row(timing.Timing("xla", (0.5, 0.5), 1.0), tokens=64), {"name": "scan", "median_ms": None}]
    text = timing.table(rows).splitlines()
    assert text[0].split()[:2] == ["name", "median_ms"]
    assert text[1].split()[:2] == ["xla", "500"]
    assert "-" in text[2].split()
    path = timing.write_json_lines(tmp_path / "out" / "x.jsonl", timing.environment(case="c"), rows)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines[0]["environment"]["case"] == "c"
    assert "numpy" in lines[0]["environment"]["versions"]
    assert lines[1] == rows[0]
