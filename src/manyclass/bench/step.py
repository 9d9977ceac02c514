"""Whole training steps of every output layer, as the classes grow."""

import gc
import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor, nn

from ..budget import NUM_SAMPLES
from ..sampled import SampledSoftmax
from . import profiling, tensorflow_step
from .timing import best_of, settle, write_csv

# Numbers of classes, by the size of the query.
CLASSES = {64: (10_000, 100_000, 1_000_000, 8_000_000), 128: (100_000, 1_000_000)}
# The growth from the first to the second number of classes is printed; the step is profiled at the first.
GROWTH = (1_000_000, 8_000_000)
BATCH = 256
# The default setting of blocks: negatives of each example, and those that the batch shares.
OWN, POOL = 32, NUM_SAMPLES["batch"]
# Negatives of samplers without a pool.
EACH = NUM_SAMPLES["example"]
LOG_UNIFORM_POOL = 4096
FULL, BLOCKS = "full softmax", f"blocks, {OWN} own + pool of {POOL}"
# The same in a process of its own, which gives freed memory back to the system, as a Python program does by default.
PLAIN = "full softmax, plain process"
# The same with classes in clusters, as after a training: here each example needs own negatives.
CLUSTERED = f"{BLOCKS}, clustered classes"
EQUAL_NEGATIVES = f"uniform pool of {OWN + POOL}"
EQUAL_ROWS = f"uniform pool of {OWN * BATCH + POOL}"
LOG_UNIFORM = f"log-uniform pool of {LOG_UNIFORM_POOL}"
TENSORFLOW = f"TensorFlow, log-uniform pool of {LOG_UNIFORM_POOL}"
# The adaptive softmax, the kernel tree and TensorFlow beyond it would not leave room for the others.
LARGEST = 1_000_000
# Steps of blocks before the timing: by then it follows recent queries.
WARM_UP = 100
# Consecutive steps in one timing, since steps of blocks differ; fewer if they take longer than this in seconds.
CONSECUTIVE, LONGEST = 8, 0.4


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
    """Run a training step: forward with the sampler's update, backward to weights and query, SGD."""
    optimizer = torch.optim.SGD(parameters, lr=lr)

    def step() -> None:
        optimizer.zero_grad()
        loss(query.detach().requires_grad_()).backward()
        optimizer.step()

    return step


def time_steps(steps: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Return the seconds per step: means over consecutive steps, the best of several rounds in turn."""
    counts = {}
    for name, seconds in best_of(steps, repeats=1).items():
        counts[name] = max(1, min(CONSECUTIVE, int(LONGEST / seconds)))

    def several(name: str) -> None:
        for _ in range(counts[name]):
            steps[name]()

    found = best_of({name: lambda name=name: several(name) for name in steps})
    return {name: seconds / counts[name] for name, seconds in found.items()}


def run(out: Path, console: Console) -> None:
    """Time the layers at all sizes and profile blocks; print tables and ratios, write CSVs and a plot."""
    rows: list[Row] = []
    with Progress(console=console) as progress:
        task = progress.add_task("sizes", total=sum(map(len, CLASSES.values())))
        for in_features, sizes in CLASSES.items():
            for num_classes in sizes:
                if _room_for_full(num_classes):
                    rows.append(Row(in_features, num_classes, PLAIN, _plain(num_classes, in_features), 0.0))
                steps, memory = _steps(num_classes, in_features)
                for layer, seconds in time_steps(steps).items():
                    rows.append(Row(in_features, num_classes, layer, seconds, memory.get(layer, 0.0)))
                del steps
                gc.collect()
                progress.advance(task)
    profile = profiling.profile(GROWTH[0], next(iter(CLASSES)), BATCH, OWN, POOL)
    write_csv(out / "step.csv", Row._fields, rows)
    write_csv(out / "profile.csv", profiling.Part._fields, profile)
    _print(rows, console)
    profiling.show(profile, f"A step of blocks: {GROWTH[0]:,} clustered classes, d = {next(iter(CLASSES))}", console)
    _plot(rows, out / "step.png")
    for line in [
        *_ratios(rows),
        f"figures: {out / 'step.csv'}, {out / 'profile.csv'}",
        f"plot:    {out / 'step.png'}",
    ]:
        console.print(line, soft_wrap=True)


def _room_for_full(num_classes: int) -> bool:
    """Return whether the logits of the full softmax take less than an eighth of the memory."""
    return BATCH * num_classes * 4 < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 8


def _full(num_classes: int, query: Tensor, target: Tensor) -> Callable[[], None]:
    """Return a training step of the full softmax."""
    in_features = query.shape[1]
    weight = nn.Parameter(torch.rand(num_classes, in_features) / in_features**0.5)
    return training_step([weight], lambda q: F.linear_cross_entropy(q, weight, target), query)


def _plain(num_classes: int, in_features: int) -> float:
    """Time the full softmax in a plain process."""
    call = f"print_full({num_classes}, {in_features}, {torch.get_num_threads()})"
    program = [sys.executable, "-c", f"from {__name__} import print_full; {call}"]
    return float(subprocess.run(program, capture_output=True, text=True, check=True).stdout)


def print_full(num_classes: int, in_features: int, threads: int) -> None:
    """Print the seconds of a step of the full softmax."""
    torch.set_num_threads(threads)
    query, target = torch.randn(BATCH, in_features), torch.randint(num_classes, (BATCH,))
    print(time_steps({FULL: _full(num_classes, query, target)})[FULL])


def _steps(num_classes: int, in_features: int) -> tuple[dict[str, Callable[[], object]], dict[str, float]]:
    """Return a training step for each output layer, and the memory of the samplers in units of the class weights."""
    torch.manual_seed(0)
    query, target = torch.randn(BATCH, in_features), torch.randint(num_classes, (BATCH,))
    steps: dict[str, Callable[[], object]] = {}
    if _room_for_full(num_classes):
        steps[FULL] = _full(num_classes, query, target)
    if num_classes <= LARGEST:
        cutoffs = [num_classes // 50, num_classes // 5]
        adaptive = nn.AdaptiveLogSoftmaxWithLoss(in_features, num_classes, cutoffs)
        steps["adaptive softmax"] = training_step(adaptive.parameters(), lambda q: adaptive(q, target).loss, query)
    memory, table = {}, None
    for name, (sampler, number, options) in _samplers(num_classes).items():
        of_head = query
        # Static samplers read no class weights, so their layers can share a table.
        shared = {} if sampler in ("blocks", "quadratic") else {"embedding": table}
        head = SampledSoftmax(in_features, num_classes, sampler, number, **shared, **options)
        table = head.embedding if shared else table
        if name == CLUSTERED:
            of_head = profiling.cluster(head, target)
        step = training_step(head.parameters(), lambda q, head=head: head(q, target), of_head)
        for _ in range(WARM_UP if sampler == "blocks" else 1):  # the first step builds trees and blocks
            step()
        settle(head.sampler)
        steps[name] = step
        held = sum(buffer.numel() * buffer.element_size() for buffer in head.sampler.buffers())
        memory[name] = held / (head.weight.numel() * head.weight.element_size())
    # TensorFlow draws every class at most once.
    if tensorflow_step.available() and LOG_UNIFORM_POOL < num_classes <= LARGEST:
        steps[TENSORFLOW] = tensorflow_step.make(num_classes, LOG_UNIFORM_POOL, query, target)
    return steps, memory


def _samplers(num_classes: int) -> dict[str, tuple[str, int, dict[str, Any]]]:
    """Return the name, the number of samples and the options of each layer's sampler."""
    counts = (1e9 / torch.arange(1, num_classes + 1)).long()
    pool = {"scope": "batch"}
    found: dict[str, tuple[str, int, dict[str, Any]]] = {
        "uniform": ("uniform", EACH, {}),
        "unigram": ("unigram", EACH, {"counts": counts}),
        "quadratic": ("quadratic", EACH, {"prediction": "absolute"}),
        EQUAL_NEGATIVES: ("uniform", OWN + POOL, pool),
        EQUAL_ROWS: ("uniform", OWN * BATCH + POOL, pool),
        LOG_UNIFORM: ("log_uniform", LOG_UNIFORM_POOL, pool),
        BLOCKS: ("blocks", POOL, {"own": OWN}),
        CLUSTERED: ("blocks", POOL, {"own": OWN}),
    }
    if num_classes > LARGEST:
        del found["quadratic"]
    return found


def _ratios(rows: list[Row]) -> list[str]:
    """Compare blocks with themselves at more classes, and with pools of as many negatives or rows."""
    seconds = {(row.in_features, row.num_classes, row.layer): row.seconds for row in rows}
    lines = []
    for (d, sizes), (name, blocks) in itertools.product(CLASSES.items(), {"": BLOCKS, " clustered": CLUSTERED}.items()):
        first, last = (seconds.get((d, n, blocks)) for n in GROWTH)
        if first and last:
            times = f"{GROWTH[1] / GROWTH[0]:g} times the{name} classes, {GROWTH[0]:,} to {GROWTH[1]:,}"
            lines.append(f"blocks, d = {d}: {times}, take {last / first:.2f} times as long")
        for n in sizes:
            others = [
                layer for layer in (EQUAL_NEGATIVES, EQUAL_ROWS, LOG_UNIFORM, TENSORFLOW) if (d, n, layer) in seconds
            ]
            ratios = ", ".join(f"{seconds[d, n, blocks] / seconds[d, n, layer]:.2f} ({layer})" for layer in others)
            lines.append(f"blocks / other pools, d = {d}, {n:,}{name} classes: {ratios}")
    if not tensorflow_step.available():
        lines.append("TensorFlow was left out, since it is not installed: pip install tensorflow-cpu")
    return lines


def _print(rows: list[Row], console: Console) -> None:
    seconds = {(row.in_features, row.num_classes, row.layer): row.seconds for row in rows}
    for d, sizes in CLASSES.items():
        title = (
            f"d = {d}: training steps in milliseconds (full softmax / this), batch {BATCH}, {EACH} negatives "
            f"per example where there is no pool, {torch.get_num_threads()} threads"
        )
        table = Table("layer", *(f"{n:,} classes" for n in sizes), title=title)
        for layer in dict.fromkeys(row.layer for row in rows):
            cells = []
            for n in sizes:
                this, full = seconds.get((d, n, layer)), seconds.get((d, n, FULL))
                ratio = f" ({full / this:.1f}×)" if this and full else ""
                cells.append(f"{this * 1e3:.1f}{ratio}" if this else "left out")
            table.add_row(layer, *cells)
        console.print(table)
    held = {row.layer: row.sampler_memory for row in rows if row.num_classes == LARGEST and row.sampler_memory}
    listed = ", ".join(f"{layer}: {share:.2f}" for layer, share in held.items())
    console.print(f"memory of the samplers at {LARGEST:,} classes, in units of the class weights: {listed}")


def _plot(rows: list[Row], file: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6 * len(CLASSES), 5.5), layout="constrained")
    panels = figure.subplots(1, len(CLASSES), sharey=True, squeeze=False)[0]
    for d, axes in zip(CLASSES, panels, strict=True):
        for layer in dict.fromkeys(row.layer for row in rows):
            line = [row for row in rows if (row.in_features, row.layer) == (d, layer)]
            axes.plot([row.num_classes for row in line], [row.seconds * 1e3 for row in line], marker="o", label=layer)
        axes.set(xscale="log", yscale="log", xlabel="classes", ylabel="milliseconds per step", title=f"d = {d}")
        axes.grid(alpha=0.3)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=9)
    figure.savefig(file, dpi=120)
