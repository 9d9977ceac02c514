"""The kernel tree against dense kernel sampling, the full softmax and uniform sampling, as the classes grow."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import nn

from .. import kernels, samplers
from ..sampled import SampledSoftmax
from .step import training_step
from .timing import best_of, write_csv

CLASSES = (10_000, 100_000, 1_000_000)
FEATURES = (32, 64, 128)
BATCH = 256
NUM_SAMPLES = 64

PARTS = ("build", "draw", "update", "dense draw")
STEPS = ("tree step", "dense step", "uniform step", "full softmax step")


class Row(NamedTuple):
    """Seconds of one operation at one size."""

    in_features: int
    num_classes: int
    what: str
    seconds: float


def run(out: Path, console: Console) -> None:
    """Time all parts and whole steps at all sizes; print tables, write a CSV and a plot."""
    rows: list[Row] = []
    memory: dict[tuple[int, int], float] = {}
    with Progress(console=console) as progress:
        task = progress.add_task("sizes", total=len(CLASSES) * len(FEATURES))
        for in_features in FEATURES:
            for num_classes in CLASSES:
                seconds, memory[in_features, num_classes] = _measure(num_classes, in_features)
                rows += [Row(in_features, num_classes, what, s) for what, s in seconds.items()]
                progress.advance(task)
    write_csv(out / "tree.csv", Row._fields, rows)
    _print(rows, memory, console)
    _print_bias(console)
    _plot(rows, out / "tree.png")
    console.print(f"figures: {out / 'tree.csv'}\nplot:    {out / 'tree.png'}", soft_wrap=True)


def _measure(num_classes: int, in_features: int) -> tuple[dict[str, float], float]:
    """Return the seconds of each part and step, and the sampler's memory in units of the class weights."""
    torch.manual_seed(0)
    query, target = torch.randn(BATCH, in_features), torch.randint(num_classes, (BATCH,))
    kernel = kernels.Quadratic()
    tree, dense = samplers.KernelTree(kernel, num_classes, in_features), samplers.Kernel(kernel)
    heads = {
        "tree step": SampledSoftmax(in_features, num_classes, tree, NUM_SAMPLES, prediction="absolute"),
        "dense step": SampledSoftmax(in_features, num_classes, dense, NUM_SAMPLES, prediction="absolute"),
        "uniform step": SampledSoftmax(in_features, num_classes, "uniform", NUM_SAMPLES, prediction="absolute"),
    }
    steps = {
        name: training_step(head.parameters(), lambda q, head=head: head(q, target), query)
        for name, head in heads.items()
    }
    full = nn.Parameter(heads["tree step"].weight.detach().clone())
    steps["full softmax step"] = training_step([full], lambda q: F.linear_cross_entropy(q, full, target), query)

    weight = heads["tree step"].weight
    tree.update(weight)
    dense.update(weight)
    rows = torch.cat([target, tree.draw(query, NUM_SAMPLES, exclude=target).ids.flatten()])
    parts: dict[str, Callable[[], object]] = {
        "build": lambda: tree.update(weight),
        "draw": lambda: tree.draw(query, NUM_SAMPLES, exclude=target),
        "update": lambda: tree.update(weight, rows),
        "dense draw": lambda: dense.draw(query, NUM_SAMPLES, exclude=target),
    }
    held = sum(buffer.numel() * buffer.element_size() for buffer in tree.buffers())
    return best_of(parts | steps), held / (weight.numel() * weight.element_size())


def _print(rows: list[Row], memory: dict[tuple[int, int], float], console: Console) -> None:
    seconds = {(row.in_features, row.num_classes, row.what): row.seconds for row in rows}
    setting = f"batch {BATCH}, m = {NUM_SAMPLES}, {torch.get_num_threads()} threads, best of up to 7, milliseconds"
    table = Table("d", "classes", *PARTS, "µs/sample", "memory / W", title=f"Parts of the quadratic tree: {setting}")
    steps = Table("d", "classes", *STEPS, title=f"Whole training steps: {setting} (ratio to the tree's step)")
    for d in FEATURES:
        for n in CLASSES:
            sample = seconds[d, n, "draw"] / (BATCH * NUM_SAMPLES) * 1e6
            cells = [f"{seconds[d, n, what] * 1e3:.1f}" for what in PARTS]
            table.add_row(str(d), f"{n:,}", *cells, f"{sample:.2f}", f"{memory[d, n]:.2f}")
            own = seconds[d, n, STEPS[0]]
            cells = [f"{seconds[d, n, what] * 1e3:.1f} ({seconds[d, n, what] / own:.2f}×)" for what in STEPS]
            steps.add_row(str(d), f"{n:,}", *cells)
    console.print(table)
    console.print(steps)
    doublings = math.log2(CLASSES[-1] / CLASSES[0])
    for d in FEATURES:
        first, last = (seconds[d, n, "draw"] * 1e3 for n in (CLASSES[0], CLASSES[-1]))
        console.print(
            f"d = {d}: a draw takes {(last - first) / doublings:.2f} ms more for each doubling of the classes; "
            f"{CLASSES[-1] // CLASSES[0]}× the classes cost {last / first:.1f}× the time",
            soft_wrap=True,
        )


@torch.no_grad()
def _print_bias(console: Console, num_classes: int = 10_000, in_features: int = 64) -> None:
    """Print the bias of log Ẑ for the absolute softmax, on weights whose logits have standard deviation 2."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(BATCH, in_features, generator=generator)
    weight = torch.randn(num_classes, in_features, generator=generator) * (2 / math.sqrt(in_features))
    output = (query @ weight.T).abs()
    exact = output.logsumexp(-1)
    kernel = kernels.Quadratic()
    ways = {
        "dense, one class per draw": samplers.Kernel(kernel),
        "tree, one class per draw": samplers.KernelTree(kernel, num_classes, in_features),
        "tree, whole leaf per draw": samplers.KernelTree(kernel, num_classes, in_features, ending="leaf"),
        "uniform": samplers.Uniform(num_classes),
    }
    draws = (1, 4, 16, 64)
    title = f"Bias of log Ẑ in nats, {num_classes:,} classes, d = {in_features}, mean of {20 * BATCH:,} samples"
    table = Table("draws per example", *map(str, draws), title=title)
    for name, sampler in ways.items():
        sampler.update(weight)
        cells = []
        for m in draws:
            errors = []
            for _ in range(20):
                draw = sampler.draw(query, m * sampler.classes_per_draw, generator=generator)
                errors.append((output.gather(-1, draw.ids) - draw.log_count).logsumexp(-1) - exact)
            error = torch.stack(errors)
            cells.append(f"{error.mean():.4f} ± {error.std() / math.sqrt(error.numel()):.4f}")
        table.add_row(name, *cells)
    console.print(table)


def _plot(rows: list[Row], file: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    panels = dict(zip(("draw", "step"), figure.subplots(1, 2), strict=True))
    drawn = {"draw": ("draw", "dense draw", "update"), "step": STEPS}
    styles = dict(zip(FEATURES, ("dotted", "solid", "dashed"), strict=True))
    for kind, axes in panels.items():
        for index, what in enumerate(drawn[kind]):
            for d, style in styles.items():
                own = [row for row in rows if (row.in_features, row.what) == (d, what)]
                x, y = [row.num_classes for row in own], [row.seconds * 1e3 for row in own]
                label = what if style == "solid" else None
                axes.plot(x, y, color=f"C{index}", linestyle=style, marker="o", markersize=4, label=label)
        axes.set(xscale="log", yscale="log", xlabel="classes", ylabel="milliseconds")
        axes.grid(alpha=0.3)
        axes.legend()
    panels["draw"].set_title(f"{BATCH} × {NUM_SAMPLES} draws from the quadratic kernel")
    panels["step"].set_title("whole training step")
    figure.suptitle(", ".join(f"{style}: d = {d}" for d, style in styles.items()), fontsize=9)
    figure.savefig(file, dpi=120)
