"""Whole training steps of every output layer, as the classes grow."""

import gc
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor, nn

from ..head import SampledSoftmax
from .timing import best_of, write_csv

CLASSES = (10_000, 100_000, 1_000_000, 4_000_000)
FEATURES = (64, 128)
BATCH = 256
NUM_SAMPLES = 64
POOL = 1280
FULL = "full softmax"


class Row(NamedTuple):
    """Seconds of one layer's step at one size."""

    in_features: int
    num_classes: int
    layer: str
    seconds: float


def training_step(parameters: Iterable[Tensor], loss: Callable[[Tensor], Tensor], query: Tensor) -> Callable[[], None]:
    """A whole training step: forward, backward (to the query too), SGD; a sampler's update is part of the forward."""
    optimizer = torch.optim.SGD(parameters, lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        loss(query.detach().requires_grad_()).backward()
        optimizer.step()

    return step


def run(out: Path, console: Console) -> None:
    """Time the layers at all sizes; print a table, write a CSV and a plot."""
    rows: list[Row] = []
    with Progress(console=console) as progress:
        task = progress.add_task("sizes", total=len(CLASSES) * len(FEATURES))
        for in_features in FEATURES:
            for num_classes in CLASSES:
                seconds = best_of(_steps(num_classes, in_features))
                rows += [Row(in_features, num_classes, layer, s) for layer, s in seconds.items()]
                gc.collect()
                progress.advance(task)
    write_csv(out / "step.csv", Row._fields, rows)
    _print(rows, console)
    _plot(rows, out / "step.png")
    console.print(f"figures: {out / 'step.csv'}\nplot:    {out / 'step.png'}", soft_wrap=True)


def _steps(num_classes: int, in_features: int) -> dict[str, Callable[[], object]]:
    """A training step for each output layer; no full softmax where its logits take an eighth of the memory or more."""
    torch.manual_seed(0)
    query, target = torch.randn(BATCH, in_features), torch.randint(num_classes, (BATCH,))
    steps: dict[str, Callable[[], object]] = {}
    if BATCH * num_classes * 4 < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 8:
        full = nn.Parameter(torch.rand(num_classes, in_features) / in_features**0.5)
        steps[FULL] = training_step([full], lambda q: F.linear_cross_entropy(q, full, target), query)
    cutoffs = [num_classes // 50, num_classes // 5]
    adaptive = nn.AdaptiveLogSoftmaxWithLoss(in_features, num_classes, cutoffs)
    steps["adaptive softmax"] = training_step(adaptive.parameters(), lambda q: adaptive(q, target).loss, query)
    counts = (1e9 / torch.arange(1, num_classes + 1)).long()
    layers = {
        "uniform": SampledSoftmax(in_features, num_classes, "uniform", NUM_SAMPLES),
        "unigram": SampledSoftmax(in_features, num_classes, "unigram", NUM_SAMPLES, counts=counts),
        "quadratic": SampledSoftmax(in_features, num_classes, "quadratic", NUM_SAMPLES, prediction="absolute"),
        "blocks": SampledSoftmax(in_features, num_classes, "blocks", POOL),
    }
    for name, head in layers.items():
        step = training_step(head.parameters(), lambda q, head=head: head(q, target), query)
        step()  # the first step builds trees and blocks
        steps[name] = step
    return steps


def _print(rows: list[Row], console: Console) -> None:
    seconds = {(row.in_features, row.num_classes, row.layer): row.seconds for row in rows}
    layers = list(dict.fromkeys(row.layer for row in rows))
    title = (
        f"Training steps in milliseconds (full softmax / this): batch {BATCH}, {NUM_SAMPLES} negatives per example, "
        f"blocks: a pool of {POOL}, {torch.get_num_threads()} threads, best of up to 7"
    )
    table = Table("d", "classes", *layers, title=title)
    for d in FEATURES:
        for n in CLASSES:
            cells = []
            for layer in layers:
                own, full = seconds.get((d, n, layer)), seconds.get((d, n, FULL))
                ratio = f" ({full / own:.1f}×)" if own and full else ""
                cells.append(f"{own * 1e3:.1f}{ratio}" if own else "left out")
            table.add_row(str(d), f"{n:,}", *cells)
    console.print(table)


def _plot(rows: list[Row], file: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6 * len(FEATURES), 4.5), layout="constrained")
    for d, axes in zip(FEATURES, figure.subplots(1, len(FEATURES), sharey=True, squeeze=False)[0], strict=True):
        for layer in dict.fromkeys(row.layer for row in rows):
            own = [row for row in rows if (row.in_features, row.layer) == (d, layer)]
            axes.plot([row.num_classes for row in own], [row.seconds * 1e3 for row in own], marker="o", label=layer)
        axes.set(xscale="log", yscale="log", xlabel="classes", ylabel="milliseconds per step", title=f"d = {d}")
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(file, dpi=120)
