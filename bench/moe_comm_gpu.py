"""Benchmarks of dispatch and combine: ``python -m bench.moe_comm_gpu``.

Each section checks its results before it times them, prints a table and writes the same records as JSON lines.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from bench import timing
from reference.moe_cases import Shape

Rows = list[dict[str, object]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the sections asked for and returns the exit status."""
    options = _parse(arguments)
    about = timing.environment()
    for name in options.section or SECTIONS:
        title, section = SECTIONS[name]
        print(timing.header(title(options), about), flush=True)
        rows = section(options)
        path = timing.write_json_lines(Path(options.out) / f"moe_comm_gpu_{name}.jsonl", about, rows)
        print(timing.table(rows))
        print(f"  written to {path}\n")
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.moe_comm_gpu", description=__doc__)
    # [] is what argparse holds against the choices when no section is named
    parser.add_argument("section", nargs="*", choices=[[], *SECTIONS], help="sections to run; all by default")
    parser.add_argument("--ranks", type=int, default=8, help="R, local processes")
    parser.add_argument("--tokens", type=int, default=8, help="M, tokens of a rank")
    parser.add_argument("--experts", type=int, default=256, help="E")
    parser.add_argument("--choices", type=int, default=8, help="J, experts of a token")
    parser.add_argument("--hidden", type=int, default=7168, help="D")
    parser.add_argument("--repeats", type=int, default=20, help="rounds that count")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds for the rounds of a section")
    parser.add_argument(
        "--arch", type=int, nargs="+", default=[80, 90, 100], help="GPU architectures to compile for, 90 for sm_90"
    )
    parser.add_argument("--out", default="out", help="folder for the JSON lines")
    return parser.parse_args(arguments)


def _shape(options: argparse.Namespace) -> Shape:
    return Shape(options.experts, options.choices, options.hidden, options.tokens, options.ranks)


def _gloo_title(options: argparse.Namespace) -> str:
    return (
        f"Exchange over gloo, {options.ranks} processes, {options.tokens} tokens a rank, {options.experts} experts, "
        f"{options.choices} choices, hidden {options.hidden}, bfloat16; bytes and messages of all ranks together"
    )


def _gloo(options: argparse.Namespace) -> Rows:
    from bench import moe_gloo

    return moe_gloo.rows(moe_gloo.Options(_shape(options), options.repeats, options.budget))


def _emulated_shape(options: argparse.Namespace) -> Shape:
    """The same world, cut to what an interpreter can do in seconds."""
    return replace(
        _shape(options),
        world_size=min(options.ranks, 4),
        num_experts=min(options.experts, 32),
        max_num_tokens=min(options.tokens, 16),
        hidden=min(options.hidden, 256),
    )


def _emulated_title(options: argparse.Namespace) -> str:
    shape = _emulated_shape(options)
    return (
        f"GPU kernels on the emulation (times are of an interpreter), {shape.world_size} processes, "
        f"{shape.max_num_tokens} tokens a rank, {shape.num_experts} experts, {shape.experts_per_token} choices, "
        f"hidden {shape.hidden}, bfloat16; to other ranks, of all ranks together"
    )


def _emulated(options: argparse.Namespace) -> Rows:
    from bench import moe_emulated

    return moe_emulated.rows(moe_emulated.Options(_emulated_shape(options), min(options.repeats, 5)))


def _compile_title(options: argparse.Namespace) -> str:
    from bench import compile_check

    return f"GPU kernels compiled without a device, nothing measured; {compile_check.PRODUCTION}"


def _compile(options: argparse.Namespace) -> Rows:
    from bench import compile_check

    return [report.row() for report in compile_check.check(compile_check.VARIANTS, options.arch)]


# A section is a title and a function to records; both get the parsed options.
SECTIONS: dict[str, tuple[Callable[[argparse.Namespace], str], Callable[[argparse.Namespace], Rows]]] = {
    "gloo": (_gloo_title, _gloo),
    "emulated": (_emulated_title, _emulated),
    "compile": (_compile_title, _compile),
}


if __name__ == "__main__":
    sys.exit(main())
