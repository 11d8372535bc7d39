"""The static profile: byte counts by hand, schedules of small kernels, four chips."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from bench.static_profile import hlo, schedule, traffic
from bench.static_profile.chips import CHIPS, chip_named
from bench.static_profile.compiler import CompilationError
from bench.static_profile.profile import compile_for, profile
from bench.static_profile.report import DISCLAIMER, records, table

V6E = CHIPS["v6e"]
F32 = jnp.float32
BLOCK_BYTES = 256 * 128 * 2
RESULT_BLOCK_BYTES = 128 * 128 * 4


def spec(shape, dtype):
    return jax.ShapeDtypeStruct(shape, dtype)


def gathered_matmul(steps, x, weight):
    """Step i takes the tile `steps[i]` of x: two products of 128 rows, seven exponentials, both in loops."""

    def kernel(steps_ref, x_ref, weight_ref, out_ref, sum_ref):
        sum_ref[...] = jnp.zeros_like(sum_ref)

        def add(j, carry):
            rows = x_ref[pl.ds(j * 128, 128), :]
            sum_ref[...] += jnp.dot(rows, weight_ref[...], preferred_element_type=F32)
            return carry

        def grow(j, carry):
            sum_ref[...] = jnp.exp(sum_ref[...])
            return carry

        jax.lax.fori_loop(0, 2, add, 0)
        jax.lax.fori_loop(0, 7, grow, 0)
        out_ref[...] = sum_ref[...]

    grid_spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1,
        grid=(2, 6),
        in_specs=[
            pl.BlockSpec((None, 256, 128), lambda b, i, steps: (b, steps[i], 0)),
            pl.BlockSpec((128, 128), lambda b, i, steps: (0, 0)),
        ],
        out_specs=pl.BlockSpec((None, 128, 128), lambda b, i, steps: (b, steps[i], 0)),
        scratch_shapes=[pltpu.VMEM((128, 128), F32)],
    )
    return pl.pallas_call(kernel, grid_spec=grid_spec, out_shape=spec((2, 512, 128), F32), name="gathered_matmul")(
        steps, x, weight
    )


def program(lengths, x, weight):
    """The step table is computed inside the program, as the kernels' launchers do."""
    steps = jnp.cumsum((lengths > 3).astype(jnp.int32)) - 1
    y = jax.jit(gathered_matmul)(steps, x, weight)
    return y.astype(jnp.bfloat16) * 2


ARGUMENTS = (spec((2, 1024, 128), jnp.bfloat16), spec((128, 128), jnp.bfloat16))
LENGTHS = np.array([5, 0, 5, 1, 2, 9], np.int32)  # step table 0 0 1 1 1 2: three tiles


def traffic_of(lengths):
    arguments = (lengths, *ARGUMENTS)
    return traffic.pallas_calls(jax.jit(program).trace(*arguments).jaxpr, arguments, V6E)


def test_known_step_table_counts_block_changes_only():
    (call,) = traffic_of(LENGTHS)
    assert (call.grid, call.steps) == ((2, 6), 12)
    assert [operand.copies for operand in call.operands] == [2 * 3, 1, 2 * 3]
    assert call.operands[0].moved_bytes == 6 * BLOCK_BYTES
    assert call.operands[2].is_output
    assert call.notes == ()
    assert call.dot_flop == 2 * (2 * 128**3)
    assert call.loop_trips == (2, 7)


def test_unknown_step_table_counts_every_step_and_says_so():
    (call,) = traffic_of(spec((6,), jnp.int32))
    assert [operand.copies for operand in call.operands] == [12, 1, 12]
    assert len(call.notes) == 2
    assert "every step" in call.notes[0]


def test_least_bytes_are_unpadded_and_moved_bytes_padded():
    def copy(x_ref, out_ref):
        out_ref[...] = x_ref[...]

    def narrow(x):
        block = pl.BlockSpec((8, 1), lambda i: (i, 0))
        return pl.pallas_call(copy, grid=(4,), in_specs=[block], out_specs=block, out_shape=x, name="narrow")(x)

    x = spec((32, 1), F32)
    (call,) = traffic.pallas_calls(jax.jit(narrow).trace(x).jaxpr, (x,), V6E)
    assert call.least_bytes == 2 * 32 * 4
    assert call.moved_bytes == 2 * 32 * 128 * 4


def test_a_kernel_without_a_name_is_called_like_its_function():
    def copying(x_ref, out_ref):
        out_ref[...] = x_ref[...]

    x = spec((8, 128), F32)
    report = profile(lambda x: pl.pallas_call(copying, out_shape=x)(x), (x,), "v6e")
    assert [kernel.name for kernel in report.kernels] == ["copying"]


def test_two_kernels_of_one_name_are_refused():
    def call(x, factor):
        def scaled(x_ref, out_ref):
            out_ref[...] = x_ref[...] * factor

        return pl.pallas_call(scaled, out_shape=spec((8, 128), F32), name="scaled")(x)

    x = spec((8, 128), F32)
    closed = jax.jit(lambda x: call(call(x, 2.0), 3.0)).trace(x).jaxpr
    with pytest.raises(ValueError, match="both called 'scaled'"):
        traffic.pallas_calls(closed, (x,), V6E)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ("bf16[16,8192,128]{2,1,0:T(8,128)(2,1)}", 16 * 8192 * 128 * 2),
        ("f32[64,1]{1,0:T(8,128)}", 64 * 128 * 4),
        ("f32[64,1]{0,1:T(1,128)}", 128 * 4),
        ("(f32[8,128]{1,0:T(8,128)}, pred[8,128]{1,0:T(8,128)})", 8 * 128 * 5),
        ("f32[8,128]{1,0:T(8,128)S(1)}", 0),
    ],
)
def test_bytes_of_a_tiled_shape(shape, expected):
    assert hlo.array_bytes(shape) == expected


HLO = """\
HloModule jit_f
%fused (p0: f32[8,128], p1: f32[64,128]) -> f32[8,128] {
  %p0 = f32[8,128]{1,0} parameter(0)
  %p1 = f32[64,128]{1,0} parameter(1)
  %slice.1 = f32[8,128]{1,0} slice(%p1), slice={[0:8], [0:128]}
  ROOT %add = f32[8,128]{1,0} add(%p0, %slice.1)
}
%body (t: (s32[], f32[8,128])) -> (s32[], f32[8,128]) {
  %t = (s32[], f32[8,128]{1,0}) parameter(0)
  %x = f32[8,128]{1,0} get-tuple-element(%t), index=1
  %k.1 = f32[8,128]{1,0} custom-call(%x), custom_call_target="tpu_custom_call", metadata={source_line=7}
  %neg = f32[8,128]{1,0} negate(%k.1)
  ROOT %r = (s32[], f32[8,128]{1,0}) tuple(%i, %neg)
}
ENTRY %main (a: f32[8,128], b: f32[64,128]) -> f32[8,128] {
  %a = f32[8,128]{1,0} parameter(0)
  %b = f32[64,128]{1,0} parameter(1)
  %f = f32[8,128]{1,0} fusion(%a, %b), kind=kLoop, calls=%fused
  %s = ((s8[9999]{0}), s8[4096]{0:S(1)}, s32[]{:S(2)}) slice-start(%b), slice={[0:4096]}
  ROOT %w = (s32[], f32[8,128]{1,0}) while(%f), condition=%c, body=%body, backend_config={"known_trip_count":{"n":"5"}}
}
"""


def test_hlo_counts_loops_and_what_a_fusion_takes_of_its_operands():
    read = hlo.read(HLO)
    one = 8 * 128 * 4
    assert read.kernels == {"k.1": (7, 5)}
    assert {o.name: o.moved_bytes for o in read.operations} == {"f": 3 * one, "neg": 5 * 2 * one, "s": 4096}
    assert (read.xla_bytes, read.overlapping_bytes) == (13 * one, 4096)
    assert read.notes == ()


def bundles(*lines):
    return [schedule.Bundle(depth, label, text) for depth, label, text in lines]


def exit_test(counter, bound, step):
    return f"%p = scmp.ge.s32.totalorder {counter}, {bound} /* loop exit test */ ;; {counter} = sadd.s32 {step}, %s9"


def test_loops_of_a_schedule_are_told_apart_and_counted():
    outside, loop_of = schedule._loops(
        bundles(
            (0, "", "start"),
            (1, "LB", "grid"),
            (2, "LB", exit_test("%s1", 8, 2)),
            (2, "", "end of the first"),
            (2, "LB", exit_test("%s2", 7, 1)),
            (1, "", "between"),
            (2, "LB", "no constant bound"),
            (1, "", exit_test("%s3", 26, 1)),
            (0, "", "end"),
        )
    )
    (grid,) = outside.inner
    assert grid.trips == 26
    assert [loop.trips for loop in grid.inner] == [4, 7, None]
    assert [loop.depth for loop in loop_of] == [0, 1, 2, 2, 2, 1, 2, 1, 0]
    assert loop_of[2] is loop_of[3] is not loop_of[4]


def test_a_turn_counts_the_trips_of_the_loops_inside():
    inner = schedule.Loop(2, bundles=3, cycles=10, issued={"VALU": 5}, trips=4)
    loop = schedule.Loop(1, bundles=7, cycles=100, issued={"VALU": 1}, inner=[inner])
    assert (loop.turn("bundles"), loop.turn("cycles"), loop.turn("issued", "VALU")) == (19, 140, 21)


def test_stall_cycles_belong_to_the_bundle_before():
    issue = [(0, 0, 0, n) for n in range(1, 9)]
    stall = (1, 0, 0, 0)
    cycles = [issue[0], stall, stall, *issue[1:5], stall, *issue[5:]]
    assert schedule._owners(issue, cycles) == [0, 0, 0, 1, 2, 3, 4, 4, 5, 6, 7]
    assert schedule._owners(issue, [(0, 0, 0, 50 + n) for n in range(8)]) is None


def test_profile_of_a_kernel_with_a_step_table_and_loops():
    report = profile(program, (LENGTHS, *ARGUMENTS), "v6e")
    (kernel,) = report.kernels
    add, grow = kernel.grid_loop.inner
    assert (add.trips, grow.trips) == (2, 7)
    assert kernel.cycles_per_step == kernel.grid_loop.cycles + 2 * add.cycles + 7 * grow.cycles
    assert kernel.bundles_per_step <= kernel.cycles_per_step
    assert kernel.cycles >= 12 * kernel.cycles_per_step
    assert kernel.schedule.stalls_known
    assert 0 < kernel.utilization("EUP") <= 1
    # Seven exponentials of 16 vector registers; XLA may add none and drop none.
    assert grow.issued["EUP"] == 16
    assert kernel.schedule.vmem.scratch == RESULT_BLOCK_BYTES
    assert kernel.schedule.vmem.windows >= 2 * BLOCK_BYTES  # double-buffered
    assert kernel.ms == max(kernel.core_ms, kernel.hbm_ms)
    assert report.program.xla_bytes > 0
    text = table(report)
    assert DISCLAIMER in text
    assert "gathered_matmul" in text
    whole, row, *_ = records(report, case="test")
    assert whole["case"] == row["case"] == "test"
    assert whole["ms"] == pytest.approx(row["ms"] + whole["xla_ms"], abs=1e-4)


def test_compiler_errors_carry_the_compilers_words():
    def too_large(x):
        def copy(x_ref, out_ref, scratch_ref):
            scratch_ref[pl.ds(0, 8), :] = x_ref[...]
            out_ref[...] = scratch_ref[pl.ds(0, 8), :]

        scratch = [pltpu.VMEM((1 << 16, 1024), F32)]
        return pl.pallas_call(copy, out_shape=x, scratch_shapes=scratch, name="too_large")(x)

    with pytest.raises(CompilationError, match=r"(?i)v6e: .*vmem"):
        compile_for(too_large, (spec((8, 1024), F32),), "v6e")


def test_unknown_chip_lists_the_known_ones():
    with pytest.raises(ValueError, match="v5e, v6e, v5p, tpu7x"):
        chip_named("v7x")


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
def test_every_chip(chip):
    def kernel(x_ref, out_ref):
        out_ref[...] = jnp.exp(x_ref[...]) * 2

    def exponential(x):
        block = pl.BlockSpec((128, 128), lambda i, j: (i, j))
        parallel = pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary"))
        return pl.pallas_call(
            kernel, grid=(8, 4), in_specs=[block], out_specs=block, out_shape=x, name="exponential",
            compiler_params=parallel,
        )(x)  # fmt: skip

    report = profile(exponential, (spec((1024, 512), F32),), chip)
    (kernel_report,) = report.kernels
    assert kernel_report.launches == 1
    assert kernel_report.call.moved_bytes == kernel_report.call.least_bytes == 2 * 1024 * 512 * 4
    # Two cores of one device share a parallel axis of the grid.
    assert kernel_report.steps_per_core == 32 // CHIPS[chip].cores
    assert report.ms >= report.chip.hbm_ms(report.least_bytes)
