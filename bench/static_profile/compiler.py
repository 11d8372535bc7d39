"""Compiling StableHLO with libtpu, each time in a worker process of its own.

libtpu reads its flags once per process and ends the process on some errors, so every compilation gets a process with
the right environment, a memory limit and a timeout. The worker is this module run as a program:
``python -m bench.static_profile.compiler REQUEST.json``.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import resource
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.static_profile.chips import Chip

# Passes whose dumps are read; without the filter one kernel writes about seventy files.
_DUMPED_PASSES = "(final_bundles|per-bundle|vmem_report)"
_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",  # the worker only compiles; nothing runs
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # several workers at a time
    "TPU_ACCELERATOR_TYPE": "v6e-1",
    "TPU_WORKER_HOSTNAMES": "localhost",
}
_MEMORY_LIMIT_BYTES = 10 << 30


class CompilationError(RuntimeError):
    """The TPU compiler refused the program, crashed or ran out of time; the message is its own."""


@dataclass(frozen=True)
class Request:
    """What the worker reads: files, the chip's topology, whether arguments and results are row-major."""

    stablehlo: str
    result: str
    topology: str
    dump: str | None
    row_major: bool


@dataclass(frozen=True)
class Compiled:
    """What the compiler made of a program.

    Attributes:
        seconds: compile time in the worker, libtpu's start excluded.
        hlo: the optimised program as text.
        memory: temporary, argument, output and code bytes.
        dump: folder of the schedules, if asked for.
        stablehlo: the text that was compiled; locations in ``hlo`` are its lines.
    """

    seconds: float
    hlo: str
    memory: dict[str, int] = field(default_factory=dict)
    dump: Path | None = None
    stablehlo: str = ""


def compile_text(
    stablehlo: str,
    chip: Chip,
    work: Path,
    *,
    dump: bool,
    row_major: bool = True,
    timeout_seconds: float = 1800.0,
) -> Compiled:
    """Compiles a StableHLO module for ``chip`` in a worker process.

    Args:
        stablehlo: the module's text.
        chip: target.
        work: empty folder for the exchange and the dumps.
        dump: whether the compiler writes the schedules.
        row_major: fixes the layout of arguments and results; if false XLA chooses it.
        timeout_seconds: the worker is ended after this time.

    Raises:
        CompilationError: refused, crashed or too slow.
    """
    source, result, log = work / "program.mlir", work / "result.json", work / "worker.log"
    source.write_text(stablehlo)
    dump_path = work / "dump" if dump else None
    if dump_path:
        dump_path.mkdir()
    request = work / "request.json"
    request.write_text(
        json.dumps(
            dataclasses.asdict(
                Request(str(source), str(result), chip.topology, str(dump_path) if dump_path else None, row_major)
            )
        )
    )
    command = [sys.executable, "-m", __name__, str(request)]
    root = str(Path(__file__).resolve().parents[2])
    environment = {
        **os.environ,
        **_ENVIRONMENT,
        "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]),
    }
    with log.open("w") as output:
        try:
            code = subprocess.run(
                command, stdout=output, stderr=output, env=environment, timeout=timeout_seconds, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            raise CompilationError(f"{chip.name}: no result after {timeout_seconds:.0f} s of compiling") from None
    if not result.exists():
        raise CompilationError(f"{chip.name}: the compiler's process ended with {code}: {_cause(log.read_text())}")
    answer = json.loads(result.read_text())
    if "error" in answer:
        raise CompilationError(f"{chip.name}: {answer['error']}")
    return Compiled(answer["seconds"], answer["hlo"], answer["memory"], dump_path, stablehlo)


def _cause(log: str) -> str:
    fatal = re.search(r"^F\d{4} .*?\] (.*)", log, re.MULTILINE)
    return fatal[1][:600] if fatal else log.strip()[-600:]


def _work(request: Request) -> dict[str, Any]:
    """Runs in the worker: compiles and describes, or returns the compiler's error."""
    flags = []
    if request.dump:
        flags += [f"--xla_jf_dump_to={request.dump}", "--xla_jf_dump_llo_text=true"]
        flags += [f"--xla_jf_dump_llo_pass_label_regex={_DUMPED_PASSES}"]
    os.environ["LIBTPU_INIT_ARGS"] = " ".join(flags)
    resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY_LIMIT_BYTES, _MEMORY_LIMIT_BYTES))

    import numpy as np
    from jax._src import compiler
    from jax._src.interpreters import mlir
    from jax.errors import JaxRuntimeError
    from jax.experimental import topologies
    from jaxlib import xla_client
    from jaxlib.mlir import ir

    device: Any = topologies.get_topology_desc(request.topology, platform="tpu").devices[0]
    options = compiler.get_compile_options(
        num_replicas=1, num_partitions=1, device_assignment=np.array([[device.id]]), backend=device.client
    )
    start = time.perf_counter()
    try:
        with mlir.make_ir_context():
            module = ir.Module.parse(Path(request.stablehlo).read_text())
            if request.row_major:
                _make_row_major(module, ir)
            devices = xla_client.DeviceList((device,))
            executable = device.client.compile(module, executable_devices=devices, compile_options=options)
    except JaxRuntimeError as error:
        return {"error": str(error)[:4000]}
    stats = executable.get_compiled_memory_stats()
    memory = {
        name: int(getattr(stats, f"{name}_size_in_bytes")) for name in ("temp", "argument", "output", "generated_code")
    }
    return {
        "seconds": round(time.perf_counter() - start, 2),
        "memory": memory,
        "hlo": executable.hlo_modules()[0].to_string(),
    }


def _make_row_major(module: Any, ir: Any) -> None:
    """Fixes the layouts of the program's arguments and results."""
    entry = next(op for op in module.body.operations if ir.StringAttr(op.attributes["sym_name"]).value == "main")
    for key, types in (("arg_attrs", entry.type.inputs), ("res_attrs", entry.type.results)):
        present = (
            list(ir.ArrayAttr(entry.attributes[key])) if key in entry.attributes else [ir.DictAttr.get({})] * len(types)
        )
        fixed = []
        for attributes, kind in zip(present, types, strict=True):
            named = {entry.name: entry.attr for entry in ir.DictAttr(attributes)}
            order = ",".join(str(axis) for axis in reversed(range(ir.RankedTensorType(kind).rank)))
            named["mhlo.layout_mode"] = ir.StringAttr.get(f"{{{order}}}")
            fixed.append(ir.DictAttr.get(named))
        entry.attributes[key] = ir.ArrayAttr.get(fixed)


def main(request_path: str) -> None:
    """Entry of the worker process."""
    request = Request(**json.loads(Path(request_path).read_text()))
    Path(request.result).write_text(json.dumps(_work(request)))


if __name__ == "__main__":
    main(sys.argv[1])
