"""The TPU compiler accepts the kernels: every class of configuration, four chips, ahead of time and without a TPU.

Interpret mode does not know what the compiler refuses (shapes, layouts, VMEM), so this is the only test of it off TPU.
A small covering subset runs always, the whole product in `make test-all`.
"""

from dataclasses import replace
from types import MappingProxyType

import jax
import pytest

from bench import kda_cases
from bench.kda_cases import Case
from bench.static_profile.chips import CHIPS
from bench.static_profile.compiler import Compiled
from bench.static_profile.profile import compile_for, profile
from ops.kda_tpu.pallas.backend import INTERPRET_VARIABLE, with_options
from ops.kda_tpu.pallas.config import MIB, Config, ProblemShape, vmem_limit_bytes
from ops.kda_tpu.pallas.vmem import vmem_bytes

pytest.importorskip(
    "libtpu", reason="libtpu, the TPU compiler, is not installed: pip install 'accelerator-ops[kda-tpu]'"
)

SMALL = Case("small", heads=2, tokens=256)
SEGMENTS = {"tokens": 300, "lengths": (70, 0, 129, 90)}  # begin inside tiles, one is empty, padding behind
SMALL_CONFIG = Config(chunks_per_step=2, heads_per_step=2)
SPLIT = replace(SMALL_CONFIG, backward="split")

CLASSES = MappingProxyType(
    {
        "bounded": (SMALL, SMALL_CONFIG),
        "softplus": (replace(SMALL, gate="softplus"), SMALL_CONFIG),
        "log-decay": (replace(SMALL, gate="log"), SMALL_CONFIG),
        "segments": (replace(SMALL, **SEGMENTS), SMALL_CONFIG),
        "forward-only": (replace(SMALL, part="forward", **SEGMENTS), SMALL_CONFIG),
        "rematerializing": (replace(SMALL, **SEGMENTS), replace(SMALL_CONFIG, rematerialize_for_backward=True)),
        "tree": (replace(SMALL, gate="softplus"), replace(SMALL_CONFIG, sub_block="tree")),
        "float32": (replace(SMALL, dtype="float32", gate="softplus"), replace(SMALL_CONFIG, sub_block="tree")),
        "float32-segments": (replace(SMALL, dtype="float32", **SEGMENTS), replace(SMALL_CONFIG, sub_block="tree")),
        "unaligned": (replace(SMALL, key_dim=100, value_dim=60, tokens=129), SMALL_CONFIG),
        "wide": (replace(SMALL, key_dim=256, value_dim=129), SMALL_CONFIG),
        "narrow": (replace(SMALL, key_dim=16, value_dim=64, gate="log"), SMALL_CONFIG),
        "batch-and-head-groups": (replace(SMALL, heads=6, batch=2), replace(SMALL_CONFIG, backward_heads_per_step=3)),
        "split": (SMALL, SPLIT),
        "split-segments": (replace(SMALL, gate="softplus", **SEGMENTS), SPLIT),
        "split-float32": (replace(SMALL, dtype="float32", key_dim=100, value_dim=60), replace(SPLIT, sub_block="tree")),
        "one-head-one-chunk": (replace(SMALL, heads=1), Config(chunks_per_step=1, heads_per_step=1)),
    }
)
# Segments, both memory policies, unaligned widths, nothing saved, both backwards; every chip once.
COVERING = [
    ("segments", "v6e"), ("rematerializing", "tpu7x"), ("unaligned", "v5e"), ("forward-only", "v5p"), ("split", "v5p"),
]  # fmt: skip


def compiled(name: str, chip: str, monkeypatch: pytest.MonkeyPatch) -> Compiled:
    monkeypatch.setenv(INTERPRET_VARIABLE, "0")
    case, config = CLASSES[name]
    attention = with_options(config=config)
    return compile_for(kda_cases.program(attention, case), kda_cases.arguments(case, kda_cases.specs(case)), chip)


def launches(result: Compiled) -> int:
    return result.hlo.count('custom_call_target="tpu_custom_call"')


@pytest.mark.parametrize(("name", "chip"), COVERING)
def test_covering_subset(name, chip, monkeypatch):
    expected = {"forward-only": 1, "rematerializing": 3, "split": 4}.get(name, 2)
    assert launches(compiled(name, chip, monkeypatch)) == expected


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("name", CLASSES)
def test_every_class_on_every_chip(name, chip, monkeypatch):
    if (name, chip) in COVERING:
        pytest.skip("compiled by test_covering_subset")
    assert launches(compiled(name, chip, monkeypatch)) >= 1


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("name", ["seed-packed", "float32", "few-heads"])
def test_chosen_configuration_compiles_at_full_size(name, chip, monkeypatch):
    """What `choose` picks for the benchmarks' shapes fits: the VMEM estimate is not too small."""
    monkeypatch.setenv(INTERPRET_VARIABLE, "0")
    case = kda_cases.CASES[name]
    report = profile(kda_cases.program(with_options(), case), kda_cases.arguments(case, kda_cases.specs(case)), chip)
    assert {kernel.name for kernel in report.kernels} == {"kda_forward", "kda_backward"}
    for kernel in report.kernels:
        assert kernel.schedule.vmem.total <= vmem_limit_bytes(chip)


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [(), (500, 300, 200)], ids=["fixed", "segments"])
@pytest.mark.parametrize("backward", ["fused", "split"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_vmem_estimate_is_an_upper_bound(dtype, backward, lengths, monkeypatch):
    monkeypatch.setenv(INTERPRET_VARIABLE, "0")
    case = replace(SMALL, heads=4, tokens=1024, dtype=dtype, lengths=lengths)
    sub_block = "tree" if dtype == "float32" else "clamped"
    config = Config(chunks_per_step=2, heads_per_step=4, sub_block=sub_block, backward=backward)
    report = profile(
        kda_cases.program(with_options(config=config), case), kda_cases.arguments(case, kda_cases.specs(case)), "v6e"
    )
    shape = ProblemShape(4, 1, 1024, 128, 128, dtype, segmented=bool(lengths), lower_bound=case.lower_bound)
    estimate = vmem_bytes(config, shape)
    assert {kernel.name for kernel in report.kernels} == set(estimate)
    for kernel in report.kernels:
        total = kernel.schedule.vmem.total
        assert total <= estimate[kernel.name] <= 2 * total + MIB, kernel.name


def test_trace_does_not_grow_with_the_batch(monkeypatch):
    monkeypatch.setenv(INTERPRET_VARIABLE, "0")

    def equations(batch: int) -> int:
        case = replace(SMALL, batch=batch, **SEGMENTS)
        arguments = kda_cases.arguments(case, kda_cases.specs(case))
        jaxpr = jax.make_jaxpr(kda_cases.program(with_options(config=SMALL_CONFIG), case))(*arguments)
        return str(jaxpr).count("\n")

    assert equations(5) == equations(2)
