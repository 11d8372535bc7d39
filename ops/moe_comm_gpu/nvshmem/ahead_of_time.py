"""Compiles the kernels for a GPU that need not be there, and reads registers, spills and access widths from the code.

The exchange itself says what to compile: it runs on a runtime that compiles each launch instead of running it, so the
argument types are those of production. What is read from machine code is a property of the code, not a measurement.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ops.moe_comm_gpu.batch import CombineRequest, DispatchRequest
from ops.moe_comm_gpu.contract import Config
from ops.moe_comm_gpu.device import watchdog
from ops.moe_comm_gpu.kernel_exchange import KernelExchange
from ops.moe_comm_gpu.kernels.common import MAX_REGISTERS

CAPABILITIES = (80, 90, 100)
_TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.uint32: "u32",
    torch.int64: "i64",
}


@dataclass(frozen=True)
class Code:
    """What one kernel became.

    Attributes:
        kernel: its name.
        capability: of the GPU, 90 for sm_90.
        registers: of a thread.
        stack_bytes: of a thread; what does not fit into registers is spilled there.
        spill_stores, spill_loads: instructions that access the stack.
        wide_loads, wide_stores: instructions that move 16 bytes of global memory.
        narrow_loads, narrow_stores: instructions that move less.
        calls_library: whether NVSHMEM's device library is part of it.
    """

    kernel: str
    capability: int
    registers: int
    stack_bytes: int
    spill_stores: int
    spill_loads: int
    wide_loads: int
    wide_stores: int
    narrow_loads: int
    narrow_stores: int
    calls_library: bool


def compile_exchange(config: Config, capability: int, device_library: Path, *, direct: bool = False) -> list[Code]:
    """The code of the four kernels of an exchange, in the order of their calls.

    Args:
        config: of the exchange.
        capability: of the GPU, 90 for sm_90.
        device_library: NVSHMEM's bitcode.
        direct: as for the exchange.
    """
    compiler = _Compiler(config, capability, device_library)
    exchange = KernelExchange(config, compiler, num_programs=1, direct=direct)
    choices = (config.max_num_tokens, config.experts_per_token)
    request = DispatchRequest(
        tokens=torch.empty(config.max_num_tokens, config.hidden, dtype=config.in_dtype),
        row_dtype=config.in_dtype,
        scales=torch.empty(config.max_num_tokens, config.num_scales) if config.num_scales else None,
        ids=torch.empty(choices, dtype=torch.int32),
        weights=torch.empty(choices),
    )
    handle = exchange._finish_dispatch(exchange._start_dispatch(request))
    rows = torch.empty(*config.rows_prefix, config.hidden, dtype=config.out_dtype)
    combined = CombineRequest(handle=handle, expert_rows=rows, weights=request.weights, weights_sent=True)
    exchange._finish_combine(exchange._start_combine(combined))
    return compiler.code


class _Compiler:
    """A runtime of rank 0 that compiles what it is to launch."""

    def __init__(self, config: Config, capability: int, device_library: Path) -> None:
        self.my_pe, self.n_pes = 0, config.world_size
        self.device = torch.device("cpu")
        self.max_resident_programs = 1
        self.watchdog = torch.zeros(watchdog.NUM_WORDS, dtype=torch.int64)
        self.code: list[Code] = []
        self._capability, self._libraries = capability, {"nvshmem": str(device_library)}

    def allocate(self, num_bytes: int, name: str = "", *, zeroed: bool = True) -> torch.Tensor:
        """Memory that nothing touches."""
        return torch.empty(num_bytes, dtype=torch.uint8)

    def free(self, tensor: torch.Tensor) -> None:
        """Nothing to do."""

    def launch(
        self, kernel: Any, grid: tuple[int, ...], *args: Any, num_warps: int = 4, label: str = "", **constexprs: Any
    ) -> None:
        """Compiles the kernel for arguments of these types."""
        names = kernel.arg_names
        given = dict(zip(names, args, strict=False)) | constexprs
        types = {name: _type(given[name]) if name not in constexprs else "constexpr" for name in names}
        constants = {name: given[name] for name in names if types[name] == "constexpr"}
        aligned: dict[tuple[int, ...], Any] = {
            (position,): [["tt.divisibility", 16]] for position, name in enumerate(names) if types[name].startswith("*")
        }
        compiled = triton.compile(
            ASTSource(kernel, types, constants, aligned),
            target=GPUTarget("cuda", self._capability, 32),
            options={
                "num_warps": num_warps,
                "maxnreg": MAX_REGISTERS,
                "launch_cooperative_grid": True,
                "extern_libs": self._libraries,
            },
        )
        library = "nvshmemi_device_state_d" in compiled.asm["ptx"]
        self.code.append(_read(compiled.asm["cubin"], kernel.fn.__name__, self._capability, library))

    def synchronize(self) -> None:
        """Nothing to do."""

    def barrier(self) -> None:
        """Nothing to do."""

    def all_gather(self, value: Any) -> list[Any]:
        """As if every rank said what this one says, each under its own number."""
        return [(rank, *value[1:]) for rank in range(self.n_pes)]

    def set_operations(self, names: Sequence[str]) -> None:
        """Nothing to do."""

    def set_timeout(self, seconds: float) -> None:
        """Nothing to do."""


def _type(argument: Any) -> str:
    if argument is None:
        return "constexpr"
    return f"*{_TYPES[argument.dtype]}" if isinstance(argument, torch.Tensor) else "i32"


def _read(cubin: bytes, kernel: str, capability: int, calls_library: bool) -> Code:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _tool("cuobjdump", "--dump-resource-usage", file.name)
        text = _tool("nvdisasm", "--print-code", file.name)
    found = re.search(rf"Function {kernel}:\s+REG:(\d+) STACK:(\d+)", usage)
    if found is None:
        raise RuntimeError(f"{kernel}: expected its resource usage, got {usage!r}")

    def count(pattern: str) -> int:
        return len(re.findall(pattern, text))

    wide_loads, wide_stores = count(r"\bLDG\.E\S*\.128\b"), count(r"\bSTG\.E\S*\.128\b")
    return Code(
        kernel=kernel,
        capability=capability,
        registers=int(found[1]),
        stack_bytes=int(found[2]),
        spill_stores=count(r"\bSTL\b"),
        spill_loads=count(r"\bLDL\b"),
        wide_loads=wide_loads,
        wide_stores=wide_stores,
        narrow_loads=count(r"\bLDG\.E") - wide_loads,
        narrow_stores=count(r"\bSTG\.E") - wide_stores,
        calls_library=calls_library,
    )


def _tool(name: str, *arguments: str) -> str:
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    return subprocess.run([str(path), *arguments], capture_output=True, text=True, check=True).stdout
