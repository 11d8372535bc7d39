"""Kernels in Python compute what a GPU computes, and leave Triton as it was."""

import subprocess
import sys

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from ops.moe_comm_gpu.emulation import interpreter
from ops.moe_comm_gpu.emulation.floats import NARROW, narrow, widen

FLOATS = {
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float8_e4m3fn: tl.float8e4nv,
    torch.float8_e5m2: tl.float8e5,
    torch.float32: tl.float32,
}


def run(kernel, grid, *args, **constexprs):
    """Runs every program of a kernel."""
    with interpreter.language():
        arguments = interpreter.bind(kernel, args, constexprs)
        for program in range(grid):
            interpreter.run_program(kernel, arguments, (program, 0, 0), (grid, 1, 1))


def bits(tensor):
    """The raw bits, so that NaN equals NaN and -0 differs from 0."""
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


@pytest.mark.parametrize("name", NARROW)
def test_widening_is_exact_for_every_code(name):
    codes = np.arange(1 << (8 * torch.empty(0, dtype=NARROW[name]).element_size()))
    codes = codes.astype(np.uint16 if name == "bf16" else np.uint8)
    want = torch.from_numpy(codes.view(np.int16 if name == "bf16" else np.uint8)).view(NARROW[name]).float().numpy()
    np.testing.assert_array_equal(widen(codes, name), want)


@pytest.mark.parametrize("name", NARROW)
def test_narrowing_rounds_to_nearest_even_and_saturates(name):
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(20000, generator=generator) * torch.exp2(torch.randint(-20, 20, (20000,), generator=generator))
    neighbours = torch.from_numpy(widen(np.arange(0, 120, dtype=np.uint8 if name != "bf16" else np.uint16), name))
    ties = (neighbours[1:] + neighbours[:-1]) / 2
    values = torch.cat([values, ties, -ties, torch.tensor([0.0, -0.0, 1e38, -1e38])])
    limit = torch.finfo(NARROW[name]).max
    want = values if name == "bf16" else values.clamp(-limit, limit)
    np.testing.assert_array_equal(
        narrow(values.numpy(), name),
        bits(want.to(NARROW[name])).numpy().view(np.uint16 if name == "bf16" else np.uint8),
    )
    assert np.isnan(widen(narrow(np.array([np.nan]), name), name)).all()
    top = widen(narrow(np.array([np.inf, -np.inf]), name), name)
    assert (top == ([np.inf, -np.inf] if name == "bf16" else [limit, -limit])).all()


@triton.jit
def _convert(source, target, n, dtype: tl.constexpr, BLOCK: tl.constexpr):
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + lane, tl.load(source + lane, mask=lane < n).to(dtype), mask=lane < n)


@pytest.mark.parametrize("target", FLOATS)
@pytest.mark.parametrize("source", FLOATS)
def test_conversions_agree_with_torch(source, target):
    values = (torch.randn(100, generator=torch.Generator().manual_seed(1)) * 30).to(source)
    out = torch.full((100,), float("nan")).to(target)
    run(_convert, 4, values, out, 100, dtype=FLOATS[target], BLOCK=32)
    wide = values.float()
    if target in (torch.float8_e4m3fn, torch.float8_e5m2):
        limit = torch.finfo(target).max
        wide = wide.clamp(-limit, limit)
    assert torch.equal(bits(out), bits(wide.to(target)))


@triton.jit
def _arithmetic(a, b, out, n, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    mask = lane < n
    x, y = tl.load(a + lane, mask=mask, other=0.0), tl.load(b + lane, mask=mask, other=0.0)
    tl.store(out + lane, x + y, mask=mask)
    tl.store(out + n + lane, x * y - y, mask=mask)
    tl.store(out + 2 * n + lane, -x, mask=mask)
    tl.store(out + 3 * n + lane, tl.where(x < y, x, y), mask=mask)
    tl.store(out + 4 * n, tl.max(tl.where(mask, x, -100.0), 0).to(out.dtype.element_ty))
    tl.store(out + 4 * n + 1, tl.sum(x, 0).to(out.dtype.element_ty))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_arithmetic_rounds_after_each_operation(dtype):
    n = 50
    a, b = (torch.randn(n, generator=torch.Generator().manual_seed(s)).to(dtype) for s in (2, 3))
    out = torch.zeros(4 * n + 2, dtype=dtype)
    run(_arithmetic, 1, a, b, out, n, BLOCK=64)
    want = torch.cat([a + b, a * b - b, -a, torch.minimum(a, b), a.max()[None]])
    assert torch.equal(bits(out[:-1]), bits(want))
    torch.testing.assert_close(out[-1].float(), a.float().sum(), rtol=2e-2, atol=2e-2)


@triton.jit
def _integers(a, b, out, n, big, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    x, y = tl.load(a + lane), tl.load(b + lane)
    results = out + lane
    tl.store(results, x + y)
    tl.store(results + n, x - 3)
    tl.store(results + 2 * n, 3 - x)
    tl.store(results + 3 * n, x * y)
    tl.store(results + 4 * n, x // y)
    tl.store(results + 5 * n, x % y)
    tl.store(results + 6 * n, (x < y).to(tl.int64))
    tl.store(results + 7 * n, ((x >= 0) & (y != 2) | (x == y)).to(tl.int64))
    tl.store(results + 8 * n, tl.where(x > 2, x, -1))
    tl.store(results + 9 * n, x.to(tl.int64) * big + 1)
    tl.store(results + 10 * n, tl.cumsum(x, 0))
    tl.store(results + 11 * n, tl.load(a + (BLOCK - 1) - lane))
    grid = x[:, None] + y[None, :]
    tl.store(results + 12 * n, tl.sum(grid, 1))
    tl.store(results + 13 * n, tl.max((x[:, None] == y[None, :]).to(tl.int32), 0))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_integer_operations(dtype):
    n, big = 32, 1 << 33
    generator = torch.Generator().manual_seed(4)
    a, b = torch.randint(-9, 10, (n,), generator=generator), torch.randint(1, 5, (n,), generator=generator)
    out = torch.zeros(14, n, dtype=torch.int64)
    run(_integers, 1, a.to(dtype), b.to(dtype), out, n, big, BLOCK=n)
    remainder = torch.fmod(a, b)  # as C: towards zero
    want = [
        a + b, a - 3, 3 - a, a * b, (a - remainder) // b, remainder, a < b, (a >= 0) & (b != 2) | (a == b),
        torch.where(a > 2, a, -1), a * big + 1, a.cumsum(0), a.flip(0), a * n + b.sum(),
        (a[:, None] == b[None, :]).any(0),
    ]  # fmt: skip
    for row, (got, wanted) in enumerate(zip(out, want, strict=True)):
        assert torch.equal(got, wanted.to(torch.int64)), row


def test_leaving_restores_triton():
    owners = (tl, tl.core, tl.tensor, tl.math, tl.dtype, triton.runtime.jit.JITFunction)
    before = [dict(vars(owner)) for owner in owners]
    with interpreter.language():
        assert tl.load is not before[0]["load"]
        with interpreter.language():
            pass
        assert tl.load is not before[0]["load"]
    assert [dict(vars(owner)) for owner in owners] == before
    with pytest.raises(ValueError, match=r"triton\.jit"):
        tl.arange(0, 4)


def test_importing_changes_nothing():
    program = (
        "import triton, triton.language as tl\n"
        "import triton.runtime.interpreter as ti\n"
        "owners = (tl, tl.core, tl.tensor, ti, triton.runtime.jit.JITFunction)\n"
        "before = [dict(vars(o)) for o in owners]\n"
        "import ops.moe_comm_gpu.emulation.simulator, ops.moe_comm_gpu.emulation.processes\n"
        "assert [dict(vars(o)) for o in owners] == before\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_missing_and_unknown_arguments_are_named():
    with pytest.raises(TypeError, match="dtype"):
        interpreter.bind(_convert, (torch.zeros(1), torch.zeros(1), 1), {"BLOCK": 32})
    with pytest.raises(TypeError, match="unknown"):
        interpreter.bind(
            _convert, (torch.zeros(1), torch.zeros(1), 1), {"dtype": tl.float32, "BLOCK": 32, "unknown": 1}
        )
