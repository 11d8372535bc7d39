"""Both operators on real text, end to end, in under two minutes: trains, checks, routes, and reports."""

import os
import sys
import time
from pathlib import Path

import numpy as np
from tqdm import tqdm

from demo import text
from demo.report import Result, draw_loss, print_table
from ops import registry

STEPS = 100
NUM_TOKENS = 1024
MAX_SEGMENTS = 6
PICTURE = Path("out/demo_loss.png")


def main() -> int:
    """Runs the three parts; returns the process's exit status."""
    if registry.backends("kda")[0].state != "usable" and not Path("/proc/driver/nvidia").exists():
        os.environ.setdefault("JAX_PLATFORMS", "cpu")  # there is nothing else here; libtpu would look for it, aloud
    kda_backend = registry.choose("kda").name
    documents = text.documents()
    rng = np.random.default_rng(0)
    embedding, trained = _train(documents, rng, kda_backend)
    sample = text.pack(documents, 4096, 4, rng).tokens
    results = [trained, _packed(kda_backend), _route(embedding, sample)]
    print_table(results)
    print(f"picture of the loss: {PICTURE}")
    return 0 if all(result.passed for result in results) else 1


def _train(documents: list[bytes], rng: np.random.Generator, backend: str) -> tuple[np.ndarray, Result]:
    from demo.language_model import train

    print(f"1/3  training a byte-level KDA language model on {len(documents)} documents, packed")
    batches = [text.pack(documents, NUM_TOKENS, MAX_SEGMENTS, rng) for _ in range(STEPS)]
    begun = time.perf_counter()
    with tqdm(total=STEPS, unit="step", file=sys.stdout) as progress:

        def on_step(bits: float) -> None:
            progress.set_postfix_str(f"{bits:.2f} bits/byte")
            progress.update()

        trained = train(batches, MAX_SEGMENTS, on_step)
    losses = trained.bits_per_byte
    draw_loss(losses, PICTURE)
    first, last = float(np.mean(losses[:5])), float(np.mean(losses[-10:]))
    outcome = f"loss {first:.2f} -> {last:.2f} bits/byte"
    seconds = time.perf_counter() - begun
    passed = last < 0.7 * first
    what = f"language model, {STEPS} steps of {NUM_TOKENS} packed bytes"
    return np.asarray(trained.parameters["embedding"]), Result(what, backend, seconds, outcome, passed)


def _packed(backend: str) -> Result:
    from demo import packed

    lengths = ",".join(map(str, packed.LENGTHS))
    print(f"2/3  KDA forward and backward over packed lengths {lengths}, one head against float64")
    given = packed.inputs()
    d_output = np.asarray(np.random.default_rng(1).standard_normal(given.value.shape, np.float32))
    begun = time.perf_counter()
    output, gradients = packed.forward_and_backward(given, d_output)
    seconds = time.perf_counter() - begun
    checked = packed.check_head(given, d_output, output, gradients, head=packed.HEADS // 2)
    outcome = f"relative RMS error: output {checked.output:.1e}, gradients {checked.gradient:.1e}"
    passed = checked.output < 2e-5 and checked.gradient < 2e-5
    what = f"KDA forward and backward, {lengths}, H={packed.HEADS}, K=V={packed.HEAD_DIM}, compiling included"
    return Result(what, backend, seconds, outcome, passed)


def _route(embedding: np.ndarray, sample: np.ndarray) -> Result:
    from demo import experts

    print(f"3/3  routing token embeddings to {experts.NUM_EXPERTS} experts on {experts.WORLD_SIZE} processes")
    begun = time.perf_counter()
    reports = experts.run(embedding, sample)
    seconds = time.perf_counter() - begun
    rows = sum(report.rows_received for report in reports)
    sent = experts.WORLD_SIZE * experts.TOKENS_PER_RANK * experts.EXPERTS_PER_TOKEN
    misrouted = sum(report.misrouted for report in reports)
    error = float(np.sqrt(sum(r.squared_error for r in reports) / sum(r.squared_norm for r in reports)))
    exchange = max(report.seconds for report in reports)
    outcome = f"{rows} of {sent} rows, {misrouted} wrong, relative RMS error {error:.1e}, exchange {exchange:.2f} s"
    passed = rows == sent and misrouted == 0 and error < 4e-3  # rows and sums are rounded to bfloat16 once each
    what = f"MoE dispatch and combine, {experts.WORLD_SIZE} ranks, top {experts.EXPERTS_PER_TOKEN}"
    return Result(what, reports[0].backend, seconds, outcome, passed)


if __name__ == "__main__":
    sys.exit(main())
