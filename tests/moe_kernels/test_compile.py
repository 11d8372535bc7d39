"""The kernels compiled for GPUs that are not there: no spills, wide accesses, no stray library calls."""

from __future__ import annotations

import contextlib
import io
import re
import tempfile
from collections import Counter
from pathlib import Path

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from bench import compile_check
from bench.compile_check import Launch

KERNELS = ["dispatch send", "dispatch receive", "combine send", "combine receive"]
QUICK = ("per_rank", 90)


#: A global load or store of PTX, with what stands between the operation and its operands.
_ACCESS = re.compile(r"\b(ld|st)((?:[.:]+\w+)*)\s")


def own_accesses(launch: Launch, arch: int) -> Counter[tuple[str, int]]:
    """Global loads ("ld") and stores ("st") of a kernel itself, without the device library's, by width in bits.

    The library is left out, and has wide accesses of its own; the assembler then refuses a kernel that calls it, but
    Triton has kept the PTX by then.
    """
    signature, constants, attributes = compile_check._specialise(launch)
    source = ASTSource(fn=launch.kernel, signature=signature, constexprs=constants, attrs=attributes)
    with tempfile.TemporaryDirectory() as folder, triton.knobs.cache.scope():
        triton.knobs.cache.dir = folder
        with contextlib.redirect_stdout(io.StringIO()):
            try:
                triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": launch.num_warps})
            except Exception as error:
                if "Unresolved extern" not in str(error):
                    raise
        (path,) = Path(folder).rglob("*.ptx")
        text = path.read_text()
    accesses: Counter[tuple[str, int]] = Counter()
    for operation, modifiers in _ACCESS.findall(text):
        parts = re.findall(r"\w+", modifiers)
        if "global" in parts:
            vector = next((int(part[1:]) for part in parts if re.fullmatch(r"v\d", part)), 1)
            accesses[operation, vector * int(parts[-1][1:])] += 1
    return accesses


def wide_accesses_needed(launch: Launch) -> tuple[int, int]:
    """16-byte loads and stores a thread that move all of a row's payload as often as the kernel's code has it."""
    layout, threads = launch.arguments["layout"], 32 * launch.num_warps

    def needed(row_bytes: int, times: int = 1) -> int:
        return times * -(-row_bytes // (16 * threads))

    if launch.label == "dispatch send":
        tokens = launch.arguments["tokens_ptr"]
        return needed(tokens.nbytes // len(tokens)), needed(layout.hidden * layout.dispatch_itemsize)
    if launch.label == "dispatch receive":
        copies = needed(layout.hidden * layout.dispatch_itemsize, layout.choices)
        return copies, copies
    row = layout.hidden * layout.combine_itemsize
    if launch.label == "combine send":
        return needed(row, 1 if layout.return_pairs else layout.choices), needed(row)
    out = launch.arguments["out_ptr"]
    return needed(row, layout.returns), needed(out.nbytes // len(out))


def payload_is_wide(launch: Launch, arch: int) -> bool:
    """Whether every byte of the rows is moved 16 at a time."""
    accesses = own_accesses(launch, arch)
    loads, stores = wide_accesses_needed(launch)
    return accesses["ld", 128] >= loads and accesses["st", 128] >= stores


def _variants() -> list:
    return [
        pytest.param(name, arch, id=f"{name}-sm_{arch}", marks=[] if (name, arch) == QUICK else pytest.mark.slow)
        for name in compile_check.VARIANTS
        for arch in compile_check.ARCHITECTURES
    ]


@pytest.mark.parametrize(("variant", "arch"), _variants())
def test_code(variant: str, arch: int) -> None:
    if arch < 89 and "quantise" in variant:
        pytest.skip("hardware before sm_89 does not convert to fp8")
    reports = list(compile_check.check([variant], [arch]))
    assert [report.label for report in reports] == KERNELS
    for report in reports:
        assert report.spill_bytes == 0, report
        assert report.stack_bytes == 0, report
        # Receiving needs no library: waiting is a load, and nothing is sent.
        assert report.library == report.label.endswith("send"), report


@pytest.mark.parametrize(
    "variant", [pytest.param(v, marks=[] if v == QUICK[0] else pytest.mark.slow) for v in compile_check.VARIANTS]
)
def test_rows_are_moved_16_bytes_at_a_time(variant: str) -> None:
    for launch in compile_check.record(variant):
        assert payload_is_wide(launch, 90), (launch.label, own_accesses(launch, 90), wide_accesses_needed(launch))


def test_a_kernel_that_packs_rows_4_bytes_at_a_time_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a promise of alignment for the staging memory alone; the library's put is as wide as ever."""
    launch = next(launch for launch in compile_check.record("per_rank") if launch.label == "dispatch send")
    specialise = compile_check._specialise
    staging = launch.kernel.arg_names.index("send_ptr")

    def unaligned(launch: Launch) -> tuple:
        signature, constants, attributes = specialise(launch)
        return signature, constants, {where: what for where, what in attributes.items() if where != (staging,)}

    monkeypatch.setattr(compile_check, "_specialise", unaligned)
    assert compile_check.compile_launch(launch, 90).stores.get(128, 0) > 0
    assert not payload_is_wide(launch, 90)
