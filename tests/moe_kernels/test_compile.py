"""The kernels compiled for GPUs that are not there: no spills, wide accesses, no stray library calls."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ops.moe_comm_gpu import Config
from ops.moe_comm_gpu.nvshmem import ahead_of_time
from ops.moe_comm_gpu.nvshmem.ahead_of_time import CAPABILITIES, Code, compile_exchange
from ops.moe_comm_gpu.nvshmem.probe import find_library

KERNELS = ["dispatch_send", "dispatch_receive", "combine_send", "combine_receive"]
MODES = ("per_rank", "per_expert")
QUICK = (90, "per_rank", False, torch.bfloat16)
VARIANTS = [
    pytest.param(
        *variant,
        id=f"sm_{variant[0]}-{variant[1]}-{'stores' if variant[2] else 'puts'}-{variant[3]}",
        marks=[] if variant == QUICK else pytest.mark.slow,
    )
    for variant in (
        *((chip, mode, direct, torch.bfloat16) for chip in CAPABILITIES for mode in MODES for direct in (False, True)),
        (90, "per_rank", False, torch.float8_e4m3fn),
        (90, "per_expert", False, torch.float8_e4m3fn),
        (90, "per_rank", False, torch.float32),
    )
]


def compiled(capability: int, mode: str, direct: bool, dtype: torch.dtype) -> dict[str, Code]:
    """The code at the published size, with block scales if the rows are fp8."""
    config = Config(
        max_num_tokens=128,
        num_experts=256,
        experts_per_token=8,
        hidden=7168,
        world_size=8,
        mode=mode,
        in_dtype=dtype,
        scale_block=128 if dtype.itemsize == 1 else None,
    )
    library = find_library().device_library(capability)
    return {code.kernel: code for code in compile_exchange(config, capability, library, direct=direct)}


@pytest.mark.parametrize(("capability", "mode", "direct", "dtype"), VARIANTS)
def test_code(capability: int, mode: str, direct: bool, dtype: torch.dtype) -> None:
    codes = compiled(capability, mode, direct, dtype)
    assert list(codes) == KERNELS
    for name, code in codes.items():
        assert code.stack_bytes == code.spill_stores == code.spill_loads == 0, code
        assert code.wide_loads > 0, code
        assert code.wide_stores > 0, code
        # Receiving needs no library: waiting is a load, and nothing is sent.
        assert code.calls_library == name.endswith("send"), code


def test_a_missing_device_library_is_an_error() -> None:
    config = Config(max_num_tokens=1, num_experts=1, experts_per_token=1, hidden=8)
    with pytest.raises(FileNotFoundError):
        compile_exchange(config, 90, Path("/absent.bc"))


@pytest.mark.slow
def test_counts_are_read_from_real_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spilling is seen where there is spilling: the same kernel with hardly any registers."""
    monkeypatch.setattr(ahead_of_time, "MAX_REGISTERS", 24)
    config = Config(max_num_tokens=8, num_experts=4, experts_per_token=2, hidden=4096, world_size=2)
    codes = compile_exchange(config, 90, find_library().device_library(90), direct=True)
    assert any(code.spill_stores and code.stack_bytes for code in codes)
