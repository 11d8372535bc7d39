"""Offline tuner of the Pallas kernels: ``python -m bench.tune_kda --chip v6e --heads 16``.

Profiles one training step per way to cut the problem (chunks a step, heads a step) from the compiler's schedule, and
keeps the fastest. Forward and backward share the chunks of a step but not its heads, so their best heads are chosen
apart. With ``--write`` the choice goes to ``ops/kda_tpu/pallas/tuned.json``, from where
:func:`ops.kda_tpu.pallas.config.choose` takes it. What decides accuracy (the form of a sub-block) is not tuned. Nothing
here is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bench import timing
from ops.kda_tpu.pallas import config as kernels
from ops.kda_tpu.pallas.config import Config, ProblemShape

CHUNKS = (1, 2, 4, 8, 16)
# Chunks times heads of a step: below, latencies show; above, the code grows without getting faster.
LEAST_UNITS, MOST_UNITS = 16, 64


@dataclass(frozen=True)
class Trial:
    """One cut and the estimated milliseconds of its kernels, infinite where the compiler refused it."""

    chunks: int
    heads: int
    forward_ms: float
    backward_ms: float
    note: str = ""


def candidates(shape: ProblemShape, chip: str) -> Iterator[Config]:
    """Every legal cut worth profiling, forward and backward with the same heads."""
    base = kernels.rule(shape)
    divisors = [heads for heads in range(1, 17) if shape.heads % heads == 0]
    most_heads = max(divisors)
    for heads in divisors:
        for chunks in CHUNKS:
            units = heads * chunks
            if not min(LEAST_UNITS, most_heads * CHUNKS[-1]) <= units <= MOST_UNITS:
                continue
            config = replace(base, chunks_per_step=chunks, heads_per_step=heads, backward_heads_per_step=None)
            if kernels.why_illegal(config, shape, chip) is None:
                yield config


def best(trials: Sequence[Trial], base: Config) -> tuple[Config, float]:
    """The cut with the least sum of forward and backward, heads chosen apart, and that sum.

    Raises:
        ValueError: the compiler refused every trial.
    """
    options = []
    for chunks in sorted({trial.chunks for trial in trials}):
        same = [trial for trial in trials if trial.chunks == chunks]
        forward = min(same, key=lambda trial: trial.forward_ms)
        backward = min(same, key=lambda trial: trial.backward_ms)
        options.append((forward.forward_ms + backward.backward_ms, chunks, forward.heads, backward.heads))
    ms, chunks, heads, backward_heads = min(options, default=(float("inf"), 0, 0, 0))
    if ms == float("inf"):
        raise ValueError("trials: expected one that compiles, got none")
    apart = None if backward_heads == heads else backward_heads
    return replace(base, chunks_per_step=chunks, heads_per_step=heads, backward_heads_per_step=apart), ms


def run_trial(shape: ProblemShape, config: Config, chip: str) -> Trial:
    """Profiles one training step of ``shape`` cut by ``config``."""
    from bench import kda_cases
    from bench.static_profile.compiler import CompilationError
    from bench.static_profile.profile import profile
    from ops.kda_tpu.pallas.backend import with_options

    case = kda_cases.Case(
        "tuning",
        heads=shape.heads,
        batch=shape.batch,
        tokens=shape.tokens,
        key_dim=shape.key_dim,
        value_dim=shape.value_dim,
        dtype=shape.dtype,
        gate="softplus" if shape.lower_bound is None else "bounded",
        lower_bound=shape.lower_bound or 0.0,
    )
    program = kda_cases.program(with_options(config=config), case)
    refused = float("inf")
    try:
        report = profile(program, kda_cases.arguments(case, kda_cases.specs(case)), chip)
    except CompilationError as error:
        return Trial(config.chunks_per_step, config.heads_per_step, refused, refused, str(error)[:200])
    forward, backward = (
        sum(kernel.launches * kernel.ms for kernel in report.matching(name)) for name in ("forward", "backward")
    )
    return Trial(config.chunks_per_step, config.heads_per_step, forward, backward)


def store(path: Path, chip: str, shape: ProblemShape, choice: Config, ms: float) -> None:
    """Writes one choice and its estimate into the tuner's data file."""
    data = json.loads(path.read_text())
    cut = {name: getattr(choice, name) for name in ("chunks_per_step", "heads_per_step", "backward_heads_per_step")}
    for part, value in (("choices", cut), ("estimated_ms", round(ms, 4))):
        data.setdefault(part, {}).setdefault(chip, {})[shape.shape_class] = value
    path.write_text(json.dumps(data, indent=2, sort_keys=True) + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.tune_kda", description=__doc__)
    parser.add_argument("--chip", default="v6e", choices=sorted(kernels.VMEM_BYTES))
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--key-dim", type=int, default=128)
    parser.add_argument("--value-dim", type=int, default=128)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--lower-bound", type=float, default=-5.0, help="of the bounded gate, in nats")
    parser.add_argument("--cut", action="append", metavar="HEADSxCHUNKS", help="try only these, may repeat")
    parser.add_argument("--write", action="store_true", help="store the choice in tuned.json")
    options = parser.parse_args(arguments)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ["OPS_KDA_INTERPRET"] = "0"
    shape = ProblemShape(
        options.heads,
        1,
        options.tokens,
        options.key_dim,
        options.value_dim,
        options.dtype,
        lower_bound=options.lower_bound,
    )
    trials = []
    for config in candidates(shape, options.chip):
        if options.cut and f"{config.heads_per_step}x{config.chunks_per_step}" not in options.cut:
            continue
        trials.append(run_trial(shape, config, options.chip))
        print(timing.table([vars(trials[-1])]), flush=True)
    choice, ms = best(trials, kernels.rule(shape))
    print(f"{options.chip}, {shape.shape_class}: {choice}, {ms:.3f} ms (compiler's schedule)")
    if options.write:
        store(Path(kernels.__file__).with_name("tuned.json"), options.chip, shape, choice, ms)
    return 0


if __name__ == "__main__":
    sys.exit(main())
