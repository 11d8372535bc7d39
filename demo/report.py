"""What the demo shows at its end: one table and a picture of the loss."""

from dataclasses import dataclass
from pathlib import Path

import matplotlib
from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Result:
    """One line of the table.

    Attributes:
        what: what ran.
        backend: the registry row it ran on.
        seconds: wall-clock time.
        outcome: the error against the oracle, or what the loss did.
        passed: whether the outcome is what it has to be.
    """

    what: str
    backend: str
    seconds: float
    outcome: str
    passed: bool


def draw_loss(bits_per_byte: list[float], path: Path) -> None:
    """Writes the picture of the training loss to ``path`` (PNG)."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.5), layout="constrained")
    axes.plot(range(1, len(bits_per_byte) + 1), bits_per_byte)
    axes.axhline(8, color="grey", linewidth=0.8, linestyle=":", label="a uniform guess")
    axes.set(xlabel="training step", ylabel="bits per byte", title="Byte-level KDA language model", ylim=(0, None))
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def print_table(results: list[Result]) -> None:
    """Prints the results, one a row."""
    table = Table(title="accelerator-ops demo")
    for heading in ("what ran", "backend", "time", "result", ""):
        table.add_column(heading, overflow="fold")
    for result in results:
        verdict = "[green]ok[/]" if result.passed else "[red]FAILED[/]"
        table.add_row(result.what, result.backend, f"{result.seconds:.1f} s", result.outcome, verdict)
    console = Console()
    Console(width=max(console.width, 100)).print(table)
