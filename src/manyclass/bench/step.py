"""Whole training steps of every output layer, as the classes grow."""

import gc
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor, nn

from ..head import SampledSoftmax
from .timing import best_of, write_csv

# Numbers of classes, by the size of the query.
CLASSES = {64: (10_000, 100_000, 1_000_000, 4_000_000, 8_000_000), 128: (10_000, 100_000, 1_000_000, 4_000_000)}
BATCH = 256
NUM_SAMPLES = 64
POOL = 4096
FULL = "full softmax"
# The adaptive softmax and the tree beyond it would not leave room for the others.
LARGEST = 4_000_000


class Row(NamedTuple):
    """One layer's step at one size."""

    in_features: int
    num_classes: int
    layer: str
    seconds: float
    #: What the sampler holds, in units of the class weights.
    sampler_memory: float


def training_step(
    parameters: Iterable[Tensor], loss: Callable[[Tensor], Tensor], query: Tensor, lr: float = 0.1
) -> Callable[[], None]:
    """A whole training step: forward, backward (to the query too), SGD; a sampler's update is part of the forward."""
    optimizer = torch.optim.SGD(parameters, lr=lr)

    def step() -> None:
        optimizer.zero_grad()
        loss(query.detach().requires_grad_()).backward()
        optimizer.step()

    return step


def run(out: Path, console: Console) -> None:
    """Time the layers at all sizes; print a table, write a CSV and a plot."""
    rows: list[Row] = []
    with Progress(console=console) as progress:
        task = progress.add_task("sizes", total=sum(map(len, CLASSES.values())))
        for in_features, sizes in CLASSES.items():
            for num_classes in sizes:
                steps, memory = _steps(num_classes, in_features)
                for layer, seconds in best_of(steps).items():
                    rows.append(Row(in_features, num_classes, layer, seconds, memory.get(layer, 0.0)))
                del steps
                gc.collect()
                progress.advance(task)
    write_csv(out / "step.csv", Row._fields, rows)
    _print(rows, console)
    _plot(rows, out / "step.png")
    console.print(f"figures: {out / 'step.csv'}\nplot:    {out / 'step.png'}", soft_wrap=True)


def _steps(num_classes: int, in_features: int) -> tuple[dict[str, Callable[[], object]], dict[str, float]]:
    """A training step for each output layer, and the memory of the samplers in units of the class weights.

    There is no full softmax where its logits take an eighth of the memory or more.
    """
    torch.manual_seed(0)
    query, target = torch.randn(BATCH, in_features), torch.randint(num_classes, (BATCH,))
    steps: dict[str, Callable[[], object]] = {}
    if BATCH * num_classes * 4 < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 8:
        full = nn.Parameter(torch.rand(num_classes, in_features) / in_features**0.5)
        steps[FULL] = training_step([full], lambda q: F.linear_cross_entropy(q, full, target), query)
    if num_classes <= LARGEST:
        cutoffs = [num_classes // 50, num_classes // 5]
        adaptive = nn.AdaptiveLogSoftmaxWithLoss(in_features, num_classes, cutoffs)
        steps["adaptive softmax"] = training_step(adaptive.parameters(), lambda q: adaptive(q, target).loss, query)
    counts = (1e9 / torch.arange(1, num_classes + 1)).long()
    options: dict[str, dict[str, Any]] = {
        "uniform": {"num_samples": NUM_SAMPLES},
        "unigram": {"num_samples": NUM_SAMPLES, "counts": counts},
        "quadratic": {"num_samples": NUM_SAMPLES, "prediction": "absolute"},
        "blocks": {"num_samples": POOL},
    }
    if num_classes > LARGEST:
        del options["quadratic"]
    memory = {}
    for name, chosen in options.items():
        head = SampledSoftmax(in_features, num_classes, name, **chosen)
        step = training_step(head.parameters(), lambda q, head=head: head(q, target), query)
        step()  # the first step builds trees and blocks
        steps[name] = step
        held = sum(buffer.numel() * buffer.element_size() for buffer in head.sampler.buffers())
        memory[name] = held / (head.weight.numel() * head.weight.element_size())
    return steps, memory


def _print(rows: list[Row], console: Console) -> None:
    seconds = {(row.in_features, row.num_classes, row.layer): row.seconds for row in rows}
    layers = list(dict.fromkeys(row.layer for row in rows))
    title = (
        f"Training steps in milliseconds (full softmax / this): batch {BATCH}, {NUM_SAMPLES} negatives per example, "
        f"blocks: a pool of {POOL}, {torch.get_num_threads()} threads, best of up to 7"
    )
    memory = {row.layer: row.sampler_memory for row in rows if row.num_classes == LARGEST}
    table = Table("d", "classes", *layers, title=title)
    for d, sizes in CLASSES.items():
        for n in sizes:
            cells = []
            for layer in layers:
                own, full = seconds.get((d, n, layer)), seconds.get((d, n, FULL))
                ratio = f" ({full / own:.1f}×)" if own and full else ""
                cells.append(f"{own * 1e3:.1f}{ratio}" if own else "left out")
            table.add_row(str(d), f"{n:,}", *cells)
    held = ", ".join(f"{layer} {share:.2f}" for layer, share in memory.items() if share)
    console.print(table)
    console.print(f"memory of the samplers at {LARGEST:,} classes, in units of the class weights: {held}")


def _plot(rows: list[Row], file: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6 * len(CLASSES), 4.5), layout="constrained")
    for d, axes in zip(CLASSES, figure.subplots(1, len(CLASSES), sharey=True, squeeze=False)[0], strict=True):
        for layer in dict.fromkeys(row.layer for row in rows):
            own = [row for row in rows if (row.in_features, row.layer) == (d, layer)]
            axes.plot([row.num_classes for row in own], [row.seconds * 1e3 for row in own], marker="o", label=layer)
        axes.set(xscale="log", yscale="log", xlabel="classes", ylabel="milliseconds per step", title=f"d = {d}")
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(file, dpi=120)
