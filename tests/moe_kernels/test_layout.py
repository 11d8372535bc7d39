"""The geometry of a buffer set: sizes, alignment, nothing on top of anything else."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st

from ops.moe_comm_gpu import Config
from ops.moe_comm_gpu.emulation import interpreter
from ops.moe_comm_gpu.kernels import common
from ops.moe_comm_gpu.kernels.layout import ALIGNMENT, Layout, source_protocol_bytes

PUBLISHED = {"max_num_tokens": 128, "num_experts": 256, "experts_per_token": 8, "hidden": 7168, "world_size": 8}


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    world_size = draw(st.integers(1, 9))
    return Layout.of(
        Config(
            max_num_tokens=draw(st.integers(1, 200)),
            num_experts=draw(st.integers(1, 40)),
            experts_per_token=draw(st.integers(1, 10)),
            hidden=draw(st.integers(1, 3000)),
            world_size=world_size,
            dp_size=draw(st.sampled_from([size for size in range(1, world_size + 1) if world_size % size == 0])),
            in_dtype=draw(st.sampled_from([torch.bfloat16, torch.float32, torch.float8_e4m3fn])),
            scale_block=draw(st.sampled_from([None, 1, 100, 128])),
            mode=draw(st.sampled_from(["per_rank", "per_expert"])),
            late_weights=draw(st.booleans()),
        )
    )


@given(layouts())
def test_parts_of_a_row_follow_one_another_aligned(layout: Layout) -> None:
    assert layout.hidden * layout.dispatch_itemsize <= layout.scales_offset
    assert layout.scales_offset + 4 * layout.num_scales <= layout.header_offset
    assert layout.header_offset + 4 == layout.experts_offset
    assert layout.experts_offset + 4 * layout.choices == layout.weights_offset
    assert layout.weights_offset + 4 * layout.choices <= layout.row_bytes
    for number in (layout.scales_offset, layout.header_offset, layout.row_bytes, layout.return_bytes):
        assert number % ALIGNMENT == 0


@given(layouts())
def test_regions_are_apart_and_inside(layout: Layout) -> None:
    end = 0
    for offset, size in layout.regions.values():
        assert offset >= end
        assert offset % ALIGNMENT == 0
        end = offset + size
    assert end <= layout.symmetric_bytes


@given(layouts())
def test_words_are_apart(layout: Layout) -> None:
    sizes = [layout.num_sources, layout.num_sources, layout.max_num_tokens, layout.world_size, 1]
    starts = [0, layout.arrivals_word, layout.returns_word, layout.flags_word, layout.barrier_word]
    assert starts == [sum(sizes[:number]) for number in range(len(sizes))]
    assert layout.num_signals == sum(sizes)
    assert layout.num_local_words == layout.expected_returns_word + 2 * layout.max_num_tokens


def test_every_token_and_choice_has_a_place_of_its_own() -> None:
    layout = Layout.of(Config(max_num_tokens=5, num_experts=8, experts_per_token=3, hidden=8, world_size=4, dp_size=2))
    assert layout.share * layout.dp_size >= layout.max_num_tokens
    assert layout.num_received == 4 * layout.share
    assert layout.returns == 3
    pairs = {token // 2 * 3 + choice for token in range(1, 5, 2) for choice in range(3)}
    assert len(pairs) == 2 * 3


def test_symmetric_memory_of_the_published_shape() -> None:
    """At most 64 MiB a rank and buffer set, where the protocol it is measured against takes about 2 GiB."""
    layout = Layout.of(Config(**PUBLISHED))
    assert layout.symmetric_bytes <= 64 << 20
    assert source_protocol_bytes(Config(**PUBLISHED)) > 1.8 * (1 << 30)


def test_symmetric_memory_where_weights_come_with_combine() -> None:
    """Results in pairs share the memory of summed ones: 126 MiB for them in place of 28."""
    layout = Layout.of(Config(**PUBLISHED, late_weights=True))
    assert layout.symmetric_bytes == 148_729_088  # 141.8 MiB
    pairs = replace(layout, return_pairs=True)
    assert pairs.regions == layout.regions
    assert pairs.regions["return_staging"][1] == 8 * 128 * 8 * layout.return_bytes
    assert pairs.regions["returned"][1] == 128 * 8 * layout.return_bytes


@triton.jit
def _store_offset(out_ptr: tl.tensor, row: tl.tensor, row_bytes: tl.constexpr) -> None:
    tl.store(out_ptr, common.row_offset(row, row_bytes))


@pytest.mark.parametrize(("row", "hidden"), [(524_288, 4096), (2**31 - 1, 7168), (0, 4096)])
def test_row_offsets_are_64_bits_wide(row: int, hidden: int) -> None:
    """Row 524,288 of hidden 4096 begins at element 2**31, byte 2**32."""
    out = torch.zeros(1, dtype=torch.int64)
    with interpreter.language():
        arguments = interpreter.bind(_store_offset, (out, row, 2 * hidden), {})
        interpreter.run_program(_store_offset, arguments, (0, 0, 0), (1, 1, 1))
    assert int(out) == row * 2 * hidden
    assert np.int64(int(out)) >= 0
