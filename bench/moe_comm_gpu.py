"""Benchmarks of dispatch and combine: ``python -m bench.moe_comm_gpu``.

Each section checks its results before it times them, prints a table and writes the same records as JSON lines.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
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
        rows = section(options)
        path = timing.write_json_lines(Path(options.out) / f"moe_comm_gpu_{name}.jsonl", about, rows)
        print(timing.header(title(options), about))
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


# A section is a title and a function to records; both get the parsed options.
SECTIONS: dict[str, tuple[Callable[[argparse.Namespace], str], Callable[[argparse.Namespace], Rows]]] = {
    "gloo": (_gloo_title, _gloo),
}


if __name__ == "__main__":
    sys.exit(main())
