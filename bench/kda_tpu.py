"""KDA benchmarks: ``python -m bench.kda_tpu``.

Without options: checks the backends that run here against the float64 reference, then times them (on a CPU ``xla`` and
``scan``; on a TPU ``pallas_tpu`` too). With ``--static``: what the TPU compiler makes of the Pallas kernels, for chips
that need not be there, against the figures they must reach; on a TPU the same cases are also timed.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from bench import timing
from ops import registry

if TYPE_CHECKING:
    from bench.kda_cases import Case

CHIP_CHOICES = ("v5e", "v6e", "v5p", "tpu7x")
DEFAULT_CHIPS = ("v6e", "tpu7x")
# Relative root mean square against float64, float32 inputs; a bench that computes something else times nothing.
CHECK_TOLERANCE = 2e-5
CHECKED_TOKENS = 256
LINEARITY_TOKENS = (512, 1024, 2048, 4096)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    options = _parse(arguments)
    on_tpu = _tpu_is_there()
    if not on_tpu:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")  # libtpu is installed for its compiler; it would look for a TPU
    if options.static:
        return _static(options, on_tpu)
    return _timed(options, on_tpu)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.kda_tpu", description=__doc__)
    parser.add_argument("--static", action="store_true", help="profile the compiler's schedule instead of timing")
    parser.add_argument("--case", action="append", help="static case, may repeat; default all")
    parser.add_argument("--chip", action="append", choices=CHIP_CHOICES, help=f"may repeat; default {DEFAULT_CHIPS}")
    parser.add_argument(
        "--peer", choices=("tokamax",), help="with --static: also profile another library on the same cases"
    )
    parser.add_argument("--default-layouts", action="store_true", help="static: let XLA lay out arguments and results")
    parser.add_argument("--jobs", type=int, default=1, help="compilations at a time")
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--out", default="out", help="folder of the JSON lines")
    return parser.parse_args(arguments)


def _tpu_is_there() -> bool:
    return any(s.backend.name == "pallas_tpu" and s.state == "usable" for s in registry.backends("kda"))


def _static(options: argparse.Namespace, on_tpu: bool) -> int:
    if importlib.util.find_spec("libtpu") is None:
        print('libtpu not installed: pip install "accelerator-ops[kda-tpu]"', file=sys.stderr)
        return 2
    from bench import kda_peer, kda_static
    from bench.kda_cases import CASES

    names = options.case or list(CASES)
    for name in names:
        if name not in CASES:
            print(f"--case: expected one of {', '.join(CASES)}, got {name!r}", file=sys.stderr)
            return 2
    lacking = kda_peer.missing(options.peer) if options.peer else None
    if lacking:
        print(lacking, file=sys.stderr)
        return 2
    # The compiler is wanted, whatever machine this is.
    os.environ["OPS_KDA_INTERPRET"] = "0"
    path = f"{options.out}/kda_tpu_static.jsonl"
    status = kda_static.run(
        names,
        options.chip or DEFAULT_CHIPS,
        path,
        kda_static.Options(options.jobs, options.peer, not options.default_layouts),
    )
    if on_tpu:
        rows = [_device_row(CASES[name]) for name in names]
        print(f"\n== measured on {_device_kind()}\n{timing.table(rows)}")
        timing.write_json_lines(f"{options.out}/kda_tpu_measured.jsonl", timing.environment(), rows)
    return status


def _timed(options: argparse.Namespace, on_tpu: bool) -> int:
    from bench.kda_cases import Case

    case = Case("timed", heads=options.heads, tokens=options.tokens, dtype="float32")
    names = ["xla", "scan", *(["pallas_tpu"] if on_tpu else [])]
    about = timing.environment(device=_device_kind(), case=f"{_title(case)}, median of {options.repeats}")
    print(timing.header("KDA, measured", about), flush=True)
    errors = {name: _error(name, replace(case, tokens=CHECKED_TOKENS)) for name in names}
    for name, error in errors.items():
        verdict = "ok" if error <= CHECK_TOLERANCE else f"WRONG, at most {CHECK_TOLERANCE:g}"
        print(f"  check {name}: output and gradients within {error:.1e} of float64 at T={CHECKED_TOKENS}: {verdict}")
    if max(errors.values()) > CHECK_TOLERANCE:
        return 1
    rows = _backend_rows(case, names, options.repeats)
    print(timing.table(rows), flush=True)
    linear = _linearity_rows(replace(case, name="linearity"), max(3, options.repeats // 4))
    print(f"xla, forward and backward, cost against T\n{timing.table(linear)}")
    path = timing.write_json_lines(f"{options.out}/kda_tpu.jsonl", about, [*rows, *linear])
    print(f"written to {path}")
    return 0


def _title(case: Case) -> str:
    return f"H={case.heads} B={case.batch} T={case.tokens} K={case.key_dim} V={case.value_dim} {case.dtype}"


def _device_kind() -> str:
    import jax

    return f"{jax.devices()[0].device_kind} ({jax.default_backend()})"


def _call(name: str, case: Case) -> Callable[[], Any]:
    """The compiled program of a backend, bound to seeded inputs on the device."""
    import jax

    from bench import kda_cases

    run = jax.jit(kda_cases.program(registry.select("kda", name), case))
    return functools.partial(run, *kda_cases.arguments(case, kda_cases.values(case)))


def _backend_rows(case: Case, names: Sequence[str], repeats: int) -> list[dict[str, object]]:
    import jax

    variants = {}
    for name in names:
        variants[f"{name} forward"] = _call(name, replace(case, part="forward"))
        variants[f"{name} forward+backward"] = _call(name, case)
    timings = timing.interleave(variants, repeats=repeats, wait=jax.block_until_ready, budget_seconds=120)
    first = timings["xla forward+backward"]
    return [
        timing.timing_row(t, times_xla_step=round(timing.ratio(t, first).median, 3), tokens=case.tokens)
        for t in timings.values()
    ]


def _linearity_rows(case: Case, repeats: int) -> list[dict[str, object]]:
    import jax

    variants = {f"T={tokens}": _call("xla", replace(case, tokens=tokens)) for tokens in LINEARITY_TOKENS}
    timings = timing.interleave(variants, repeats=repeats, wait=jax.block_until_ready, budget_seconds=120)
    rows = []
    for tokens, measured in zip(LINEARITY_TOKENS, timings.values(), strict=True):
        rows.append(timing.timing_row(measured, us_per_token=measured.spread.median / tokens * 1e6))
    return rows


def _device_row(case: Case) -> dict[str, object]:
    """A case timed on the device: programs are enqueued back to back, so the device is the bottleneck."""
    import jax

    once = _call("pallas_tpu", case)
    queued = 10

    def several() -> Any:
        return [once() for _ in range(queued)][-1]

    measured = timing.interleave({case.name: several}, wait=jax.block_until_ready)[case.name]
    spread = measured.spread
    return {"case": case.name, **{key: getattr(spread, key) / queued * 1e3 for key in ("median", "p10", "p90")}}


def _error(name: str, case: Case) -> float:
    """Largest relative root mean square error of output and gradients against the float64 reference."""
    import jax
    import numpy as np

    from bench import kda_cases
    from reference import kda

    arrays = kda_cases.values(case)
    _, d_output = kda_cases.arguments(case, arrays)
    output, gradients = jax.jit(kda_cases.program(registry.select("kda", name), case))(arrays, d_output)
    wide: dict[str, Any] = {key: np.asarray(array, np.float64) for key, array in arrays.items()}
    inputs = kda.Inputs(**wide, **case.options)
    expected, _ = kda.forward(inputs)
    exact = kda.backward(inputs, np.asarray(d_output, np.float64))
    pairs = [(output, expected), *((gradients[key], getattr(exact, key)) for key in gradients)]
    return max(_relative_rms(np.asarray(got, np.float64), want) for got, want in pairs)


def _relative_rms(got: Any, want: Any) -> float:
    import numpy as np

    difference = got - want.reshape(got.shape)
    return float(np.sqrt(np.mean(difference**2) / np.mean(want**2)))


if __name__ == "__main__":
    sys.exit(main())
