"""Compiles every communication kernel for GPUs that need not be here, and reads what the compiler made of it.

The launches are recorded from an exchange of production size, so signatures and compile-time arguments are those of
real calls; each is compiled to a cubin with the device library of the installed NVSHMEM. Registers come from the
cubin's resource usage, spills from the assembler's report; the widths of accesses to memory are counted in the machine
code: instructions, not how often they run. Nothing here is measured on a device.

    python -m bench.compile_check                      # all kernels, sm_80, sm_90 and sm_100
    python -m bench.compile_check --arch 90 --json out/compile.jsonl
"""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import mangle_type

from bench.timing import environment, header, table, write_json_lines
from ops.moe_comm_gpu.contract import Config
from ops.moe_comm_gpu.kernel_exchange import KernelExchange
from ops.moe_comm_gpu.kernels.common import MAX_REGISTERS
from ops.moe_comm_gpu.nvshmem.probe import find_library

ARCHITECTURES = (80, 90, 100)
#: The first architecture whose hardware converts to fp8; Triton refuses e4m3 below it.
_FIRST_WITH_FP8 = 89


@dataclass(frozen=True)
class Launch:
    """One call of a kernel, as the host made it.

    Attributes:
        variant: the exchange it belongs to.
        label: what the host calls it.
        kernel: the jit function.
        arguments: by name, tensors, numbers and compile-time arguments alike.
        num_warps: warps of a program.
    """

    variant: str
    label: str
    kernel: Any
    arguments: dict[str, Any]
    num_warps: int


@dataclass(frozen=True)
class Report:
    """What the compiler made of one launch for one architecture.

    Attributes:
        registers: of each thread.
        stack_bytes: of each thread.
        spill_bytes: stored because registers ran out, and as many loaded or more, in all functions.
        shared_bytes: static shared memory.
        loads: global loads by width in bits.
        stores: global stores by width in bits.
        library: whether it calls NVSHMEM's device library.
        cubin_bytes: size of the code.
        seconds: what compiling took.
    """

    variant: str
    label: str
    arch: int
    registers: int
    stack_bytes: int
    spill_bytes: int
    shared_bytes: int
    loads: dict[int, int]
    stores: dict[int, int]
    library: bool
    cubin_bytes: int
    seconds: float

    def row(self) -> dict[str, object]:
        """A line of the table."""
        return {
            "variant": self.variant,
            "kernel": self.label,
            "arch": f"sm_{self.arch}",
            "registers": self.registers,
            "spill bytes": self.spill_bytes,
            "stack": self.stack_bytes,
            "shared": self.shared_bytes,
            "loads 128/64/32/<32": _widths(self.loads),
            "stores 128/64/32/<32": _widths(self.stores),
            "nvshmem": "yes" if self.library else "no",
            "KiB": round(self.cubin_bytes / 1024, 1),
            "compile s": round(self.seconds, 1),
        }


def _widths(counts: dict[int, int]) -> str:
    narrow = sum(n for width, n in counts.items() if width < 32)
    return "/".join(str(n) for n in (counts.get(128, 0), counts.get(64, 0), counts.get(32, 0), narrow))


@dataclass
class _Recorder:
    """A runtime that notes launches in place of running them."""

    my_pe: int
    n_pes: int
    variant: str
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    max_resident_programs: int = 132
    watchdog: torch.Tensor = field(default_factory=lambda: torch.zeros(8, dtype=torch.int64))
    launches: list[Launch] = field(default_factory=list)

    def allocate(self, num_bytes: int, name: str = "", *, zeroed: bool = True) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def free(self, tensor: torch.Tensor) -> None: ...

    def launch(
        self, kernel: Any, grid: tuple[int, ...], *args: Any, num_warps: int = 4, label: str = "", **constexprs: Any
    ) -> None:
        arguments = dict(zip(kernel.arg_names, args, strict=False)) | constexprs
        self.launches.append(Launch(self.variant, label or kernel.fn.__name__, kernel, arguments, num_warps))

    def synchronize(self) -> None: ...

    def barrier(self) -> None: ...

    def all_gather(self, value: Any, what: str = "all_gather") -> list[Any]:
        # The other ranks would say the same, each beginning with its own number where one does.
        numbered = isinstance(value, tuple) and value[0] == self.my_pe
        return [(rank, *value[1:]) if numbered else value for rank in range(self.n_pes)]

    def set_operations(self, names: Sequence[str]) -> None: ...

    def set_timeout(self, seconds: float) -> None: ...


#: Variants of the exchange at the size the published figures are for: 128 tokens, 8 of 256 experts, 8 ranks.
PRODUCTION = Config(max_num_tokens=128, num_experts=256, experts_per_token=8, hidden=7168, world_size=8)
_FP8 = {"in_dtype": torch.float8_e4m3fn, "scale_block": 128}
_CONTIGUOUS = {"dp_size": 2, "layout": "contiguous", "row_multiple": 128}


@dataclass(frozen=True)
class Variant:
    """What one dispatch and combine uses.

    Attributes:
        config: changes to :data:`PRODUCTION`.
        direct: stores through peer pointers (NVLink) rather than puts.
        quantise: dispatch rounds 16-bit tokens to fp8.
        weights_late: weights come with combine.
        every_option: a bound on the tokens, a bias, and a sum added to what ``out`` holds.
    """

    config: dict[str, Any] = field(default_factory=dict)
    direct: bool = False
    quantise: bool = False
    weights_late: bool = False
    every_option: bool = False


VARIANTS: dict[str, Variant] = {
    "per_rank": Variant(),
    "per_rank direct": Variant(direct=True),
    "per_rank fp8": Variant(_FP8),
    "per_rank quantise": Variant(_FP8, quantise=True),
    "per_rank contiguous": Variant(_CONTIGUOUS, weights_late=True, every_option=True),
    "per_expert": Variant({"mode": "per_expert"}),
    "per_expert direct": Variant({"mode": "per_expert"}, direct=True),
    "per_expert fp8": Variant({"mode": "per_expert", **_FP8}),
    "per_expert contiguous": Variant({"mode": "per_expert", **_CONTIGUOUS}, weights_late=True, every_option=True),
}


def record(name: str) -> list[Launch]:
    """The launches of one dispatch and combine of a variant at production size."""
    variant = VARIANTS[name]
    config = replace(PRODUCTION, **variant.config)
    runtime = _Recorder(config.rank, config.world_size, name)
    exchange = KernelExchange(config, runtime, direct=variant.direct)
    tokens = torch.zeros(
        config.max_num_tokens, config.hidden, dtype=torch.bfloat16 if variant.quantise else config.in_dtype
    )
    ids = torch.zeros(config.max_num_tokens, config.experts_per_token, dtype=torch.int32)
    weights, late = torch.zeros(ids.shape), variant.weights_late
    scales = (
        torch.zeros(config.max_num_tokens, config.num_scales) if config.num_scales and not variant.quantise else None
    )
    bound = torch.ones(1, dtype=torch.int32) if variant.every_option else None
    handle = exchange.dispatch(tokens, ids, weights=None if late else weights, scales=scales, bound=bound)
    rows = torch.empty(handle.rows.shape, dtype=config.out_dtype)
    out = torch.zeros(config.max_num_tokens, config.hidden, dtype=config.out_dtype)
    extra: dict[str, Any] = (
        {"out": out, "accumulate": True, "bias": torch.zeros_like(out)} if variant.every_option else {}
    )
    exchange.combine(handle, rows, weights if late else None, **extra)
    return runtime.launches


def compile_launch(launch: Launch, arch: int) -> Report:
    """Compiles one launch to a cubin for ``sm_<arch>`` and reads it."""
    signature, constants, attributes = _specialise(launch)
    source = ASTSource(fn=launch.kernel, signature=signature, constexprs=constants, attrs=attributes)
    library = find_library().device_library(arch)
    options = {
        "num_warps": launch.num_warps,
        "maxnreg": MAX_REGISTERS,
        "extern_libs": {"nvshmem": str(library)},
        "launch_cooperative_grid": True,
    }
    knobs, log = triton.knobs, io.StringIO()
    with tempfile.TemporaryDirectory() as folder, knobs.cache.scope(), knobs.nvidia.scope():
        # The device primitives are builtins to Triton, which its cache does not know the contents of.
        knobs.cache.dir = folder
        knobs.nvidia.dump_ptxas_log = True
        start = time.perf_counter()
        with contextlib.redirect_stdout(log):
            compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
        seconds = time.perf_counter() - start
        cubin = Path(folder, "kernel.cubin")
        cubin.write_bytes(compiled.asm["cubin"])
        usage = _tool("cuobjdump", "--dump-resource-usage", str(cubin))
        code = _tool("nvdisasm", "-c", str(cubin))
    if "bytes spill stores" not in log.getvalue():
        raise RuntimeError(f"ptxas: expected a report of spills, got {log.getvalue()!r}")
    loads, stores = _accesses(code)
    resources = re.search(rf"Function {launch.kernel.fn.__name__}:\s*REG:(\d+) STACK:(\d+) SHARED:(\d+)", usage)
    if resources is None:
        raise RuntimeError(f"cuobjdump: expected the resource usage of {launch.kernel.fn.__name__}, got {usage!r}")
    return Report(
        variant=launch.variant,
        label=launch.label,
        arch=arch,
        registers=int(resources[1]),
        stack_bytes=int(resources[2]),
        spill_bytes=sum(map(int, re.findall(r"(\d+) bytes spill (?:stores|loads)", log.getvalue()))),
        shared_bytes=int(resources[3]) + compiled.metadata.shared,
        loads=loads,
        stores=stores,
        library="nvshmem" in compiled.asm["ptx"],
        cubin_bytes=len(compiled.asm["cubin"]),
        seconds=seconds,
    )


def _specialise(launch: Launch) -> tuple[dict[str, str], dict[str, Any], dict[tuple[int, ...], Any]]:
    """(signature, constants, attributes) of a launch: pointers are aligned to 16 bytes, no number is special."""
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    compile_time = {p.name for p in launch.kernel.params if p.is_constexpr}
    for index, name in enumerate(launch.kernel.arg_names):
        value = launch.arguments[name]
        if name in compile_time or value is None:
            signature[name], constants[name] = "constexpr", value
            continue
        signature[name] = mangle_type(value)
        if isinstance(value, torch.Tensor):
            attributes[(index,)] = [["tt.divisibility", 16]]
    return signature, constants, attributes


def _tool(name: str, *arguments: str) -> str:
    """Runs one of the CUDA binary tools that come with Triton."""
    path = getattr(triton.knobs.nvidia, name).path
    return subprocess.run([path, *arguments], check=True, capture_output=True, text=True, timeout=120).stdout


_GLOBAL = re.compile(r"\b(LDG|STG|LD|ST)\.E((?:\.\w+)*)")


def _accesses(code: str) -> tuple[dict[int, int], dict[int, int]]:
    """(loads by width in bits, stores by width) of some machine code."""
    loads: Counter[int] = Counter()
    stores: Counter[int] = Counter()
    for match in _GLOBAL.finditer(code):
        parts = match[2].split(".")
        width = next((int(p) for p in parts if p in ("64", "128", "256")), 32)
        width = next((int(p[1:]) for p in parts if p in ("U8", "S8", "U16", "S16")), width)
        (loads if match[1].startswith("LD") else stores)[width] += 1
    return dict(loads), dict(stores)


def check(variants: Iterable[str], architectures: Iterable[int]) -> Iterator[Report]:
    """The report of every kernel of every variant for every architecture that can run it."""
    for variant in variants:
        for launch in record(variant):
            for arch in architectures:
                if _runs_on(launch, arch):
                    yield compile_launch(launch, arch)


def _runs_on(launch: Launch, arch: int) -> bool:
    row_type = launch.arguments.get("row_type")
    return arch >= _FIRST_WITH_FP8 or row_type is None or row_type.primitive_bitwidth > 8


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table and writes the same as JSON lines."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", type=int, action="append", choices=ARCHITECTURES, help="architecture, repeatable")
    parser.add_argument("--variant", action="append", choices=sorted(VARIANTS), help="variant, repeatable")
    parser.add_argument("--json", default="out/compile_check.jsonl", help="file to write")
    options = parser.parse_args(arguments)
    reports = list(check(options.variant or VARIANTS, options.arch or ARCHITECTURES))
    about = environment(nvshmem=find_library().version, size=str(PRODUCTION))
    print(header("communication kernels, compiled without a device", about))
    print(table([report.row() for report in reports]))
    write_json_lines(options.json, about, map(vars, reports))


if __name__ == "__main__":
    main()
