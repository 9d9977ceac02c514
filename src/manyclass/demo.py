"""`make demo`: full softmax against sampled softmax on the sources of the Python standard library."""

import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor, nn

from .bench.timing import write_csv
from .data import python_corpus
from .head import SampledSoftmax
from .models import LanguageModel
from .training import Record, train_language_model

FEATURES = 128
HELDOUT = 5_000
FULL = "full softmax"
NEGATIVES = {FULL: "all", "unigram": "64 each", "blocks": "4096 shared"}


class FullSoftmax(nn.Linear):
    """What people write today: a linear layer and the cross entropy over all classes."""

    def forward(self, input: Tensor, target: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Mean cross entropy of ``input (*batch, in_features)`` and ``target (*batch)``."""
        return F.cross_entropy(super().forward(input).flatten(0, -2), target.flatten())


def run(steps: int, out: Path, seed: int, console: Console) -> None:
    """Train the three models for ``steps`` steps each; print a table and write a CSV and a plot to ``out``."""
    with console.status("reading the Python standard library"):
        corpus = python_corpus()
    num_classes = len(corpus.vocabulary)
    heldout, train = corpus.tokens[-HELDOUT:], corpus.tokens[:-HELDOUT]
    console.print(
        f"{len(corpus.tokens):,} words and symbols of Python source, {num_classes:,} classes; "
        f"{steps} steps of 640 words, {torch.get_num_threads()} threads, seed {seed}"
    )
    counts = torch.bincount(train, minlength=num_classes) + 1
    heads: dict[str, Any] = {
        FULL: lambda: FullSoftmax(FEATURES, num_classes, bias=False),
        "unigram": lambda: SampledSoftmax(FEATURES, num_classes, "unigram", 64, counts=counts, power=0.75),
        "blocks": lambda: SampledSoftmax(FEATURES, num_classes),
    }
    runs: dict[str, list[Record]] = {}
    columns = ["{task.description:<12}", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()]
    with Progress(*columns, TextColumn("loss {task.fields[loss]:.3f}"), console=console) as progress:
        for name, make_head in heads.items():
            torch.manual_seed(seed)
            model = LanguageModel(num_classes, FEATURES, make_head())
            task = progress.add_task(name, total=steps, loss=math.nan)

            def advance(step: int, record: Record, task: Any = task) -> None:
                progress.update(task, completed=step, loss=record.loss)

            runs[name] = train_language_model(model, train, heldout, steps=steps, on_step=advance)

    console.print(_table(runs))
    rows = [(name, *record) for name, records in runs.items() for record in records]
    write_csv(out / "demo.csv", ("run", *Record._fields), rows)
    _plot(runs, out / "demo.png", num_classes)
    console.print(f"figures: {out / 'demo.csv'}\nplot:    {out / 'demo.png'}", soft_wrap=True)


def _table(runs: dict[str, list[Record]]) -> Table:
    table = Table(title="Held-out loss is always that of the full softmax")
    for column in ("output layer", "negatives", "loss (nats)", "perplexity", "steps/s", "speed-up"):
        table.add_column(column, justify="left" if column == "output layer" else "right")
    speeds = {name: records[-1].step / records[-1].seconds for name, records in runs.items()}
    for name, records in runs.items():
        loss = records[-1].loss
        ratio = f"{speeds[name] / speeds[FULL]:.1f}×"
        table.add_row(name, NEGATIVES[name], f"{loss:.3f}", f"{math.exp(loss):.0f}", f"{speeds[name]:.1f}", ratio)
    return table


def _plot(runs: dict[str, list[Record]], file: Path, num_classes: int) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    by_step, by_time = figure.subplots(1, 2, sharey=True)
    for name, records in runs.items():
        losses = [record.loss for record in records]
        by_step.plot([record.step for record in records], losses, marker="o", label=name)
        by_time.plot([record.seconds for record in records], losses, marker="o", label=name)
    by_step.set(xlabel="training steps", ylabel="held-out loss under the full softmax (nats)")
    by_time.set(xlabel="training time (seconds)")
    by_step.legend()
    for axes in (by_step, by_time):
        axes.grid(alpha=0.3)
    figure.suptitle(f"Predicting the next of {num_classes:,} words in Python source")
    figure.savefig(file, dpi=120)
