"""Time to quality: how long each method trains until it has the lowest held-out loss of the full softmax."""

import csv
import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from shutil import rmtree
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from ..bench.timing import write_csv
from ..train.atomic import replacing
from ..train.run import Run, read_metrics
from .comparison import METHODS as OPTIONS
from .reproduce import BLOCKS, FULL, Job, run_jobs

ADAPTIVE = "adaptive"
#: Methods and their colours. Their options are those of `manyclass compare`.
METHODS = {
    FULL: "#000000",
    BLOCKS: "#D55E00",
    "unigram pool": "#E69F00",
    ADAPTIVE: "#0072B2",
    "in_batch": "#009E73",
}
#: All methods have this model and optimiser. The rate is constant, so that no curve depends on when its run ends.
COMMON = "lm --features 128 --schedule constant --eval-examples 2000"
#: So that no method has to learn frequencies first. The clusters of the adaptive softmax know them already.
OFFSETS = "--offsets"
#: A sampled run has so many times the steps of the full softmax: its steps cost a small part.
LONGER = 3
FILE, PLOT = "pace.csv", "pace.png"


class Dataset(NamedTuple):
    """A text to train on."""

    title: str
    #: Options of `manyclass train`.
    options: str
    #: File below --data; None if the data come with Python.
    file: str | None
    #: Steps of the full softmax.
    steps: int


DATASETS = {
    "python": Dataset("Python's standard library", "--corpus python", None, 200),
    "text8": Dataset("text8", "--min-count 1", "text8/text8*", 1500),
    "linux": Dataset("Linux identifiers", "--split blanks --min-count 2", "linux-identifiers/idents.txt*", 400),
}


class Row(NamedTuple):
    """One evaluation of a run."""

    dataset: str
    method: str
    steps: int
    classes: int
    step: int
    seconds: float
    cpu_seconds: float
    heldout_loss: float


class Result(NamedTuple):
    """A method against the full softmax, whose lowest loss is the goal.

    Losses are the lowest up to a step: with a constant rate they go up and down, so the last one is chance.
    """

    method: str
    milliseconds: float
    #: Within as many steps as the full softmax made, and in the whole run.
    same_steps: float
    lowest: float
    #: Training time until the goal; infinite if it was not reached.
    seconds: float
    cpu_seconds: float


def sweep(
    names: Sequence[str], methods: Sequence[str], data: Path | None, out: Path, steps: int | None, console: Console
) -> None:
    """Train what ``pace.csv`` lacks, one run at a time; write it after each. A stopped run is resumed."""
    done = {(row.dataset, row.method, row.steps) for row in read(out)}
    wanted = [(name, method, steps or DATASETS[name].steps) for name in names for method in methods]
    queue = [_job(*trial, data, out) for trial in wanted if trial not in done]
    run_jobs(queue, len(wanted) - len(queue), 1, console)


def arguments(name: str, method: str, steps: int, data: Path | None, folder: Path) -> list[str]:
    """Compose the arguments of `manyclass` that train a run, or resume it."""
    dataset = DATASETS[name]
    source = [] if dataset.file is None else ["--text", str(_find(data, dataset.file))]
    longer, evaluations = (1, 20) if method == FULL else (LONGER, 10)
    length = ["--steps", str(longer * steps), "--evaluations", str(longer * min(steps, evaluations))]
    head = [*OPTIONS[method].split(), *([] if method == ADAPTIVE else [OFFSETS])]
    chosen = [*COMMON.split(), *dataset.options.split(), *source, *head, *length]
    return ["train", *chosen, "--threads", "1", "--checkpoint-every", "100", "--out", str(folder), "--resume"]


def _find(data: Path | None, pattern: str) -> Path:
    found = sorted(data.glob(pattern)) if data is not None else []
    if not found:
        raise FileNotFoundError(f"no file {pattern} below --data {data}")
    return found[0]


def _job(name: str, method: str, steps: int, data: Path | None, out: Path) -> Job:
    folder = out / "pace" / f"{name}-{method.replace(' ', '_')}-{steps}"

    def keep_curve() -> None:
        classes = Run(folder).config()["num_classes"]
        rows = [
            Row(name, method, steps, classes, int(row.step), row.seconds, row.cpu_seconds or 0.0, row.heldout_loss)
            for row in read_metrics(folder / "metrics.csv")
        ]
        write([*read(out), *rows], out)
        rmtree(folder)

    return Job(f"{name} {method}", folder, (arguments(name, method, steps, data, folder),), keep_curve)


def read(out: Path) -> list[Row]:
    """Read ``pace.csv``."""
    if not (out / FILE).exists():
        return []
    with (out / FILE).open(newline="") as handle:
        kinds = Row.__annotations__
        return [Row(**{name: kinds[name](cell) for name, cell in line.items()}) for line in csv.DictReader(handle)]


def write(rows: Sequence[Row], out: Path) -> None:
    """Write ``pace.csv``."""
    with replacing(out / FILE) as temporary:
        write_csv(temporary, Row._fields, rows)


def results(rows: Sequence[Row]) -> list[Result]:
    """Compare the methods of one data set; none without a run of the full softmax."""
    curves = {method: [row for row in rows if row.method == method] for method in METHODS}
    if not curves[FULL]:
        return []
    last, goal = curves[FULL][-1].step, min(row.heldout_loss for row in curves[FULL])
    return [
        Result(
            method,
            1e3 * curve[-1].cpu_seconds / curve[-1].step,
            min(row.heldout_loss for row in curve if row.step <= last),
            min(row.heldout_loss for row in curve),
            _time_to(goal, [(row.seconds, row.heldout_loss) for row in curve]),
            _time_to(goal, [(row.cpu_seconds, row.heldout_loss) for row in curve]),
        )
        for method, curve in curves.items()
        if curve
    ]


def _time_to(goal: float, curve: Sequence[tuple[float, float]]) -> float:
    """The first time with at most this loss, on the line between two evaluations; infinite if there is none."""
    for (before, above), (after, loss) in pairwise(curve):
        if loss <= goal:
            return after if above <= loss else before + (after - before) * (above - goal) / (above - loss)
    return math.inf


def summarise(names: Sequence[str], steps: int | None, out: Path, console: Console) -> None:
    """Print a table for each data set, and draw the curves."""
    rows = read(out)
    groups = {}
    for name in names:
        group = [row for row in rows if (row.dataset, row.steps) == (name, steps or DATASETS[name].steps)]
        if results(group):
            groups[name] = group
            console.print(table(name, group))
    if groups:
        _plot(groups, out / PLOT)
        console.print(f"{out / FILE}\n{out / PLOT}", soft_wrap=True)


def table(name: str, rows: Sequence[Row]) -> Table:
    """Lay out one data set, a row per method."""
    found = results(rows)
    title = f"{DATASETS[name].title}, {rows[0].classes:,} classes; full softmax: {rows[0].steps:,} steps"
    made = Table(title=title, caption="CPU time of training on one thread; the goal is the lowest loss of full")
    made.add_column("method")
    for label in (f"loss in {rows[0].steps:,} steps", "lowest loss", "ms/step", "CPU s to goal", "CPU: full / this"):
        made.add_column(label, justify="right")
    made.add_column("clock: full / this", justify="right")
    for one in found:
        ratios = [f"{found[0].cpu_seconds / one.cpu_seconds:.1f}×", f"{found[0].seconds / one.seconds:.1f}×"]
        reached = math.isfinite(one.seconds)
        times = [f"{one.cpu_seconds:.1f}", *ratios] if reached else ["not reached", "–", "–"]
        made.add_row(one.method, f"{one.same_steps:.3f}", f"{one.lowest:.3f}", f"{one.milliseconds:.1f}", *times)
    return made


def _plot(groups: Mapping[str, Sequence[Row]], file: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6 * len(groups), 4.5), layout="constrained")
    for axes, (name, rows) in zip(figure.subplots(1, len(groups), squeeze=False)[0], groups.items(), strict=True):
        for method, colour in METHODS.items():
            curve = [row for row in rows if row.method == method and row.step > 0]
            seconds, losses = [row.cpu_seconds for row in curve], [row.heldout_loss for row in curve]
            axes.plot(seconds, losses, color=colour, marker=".", label=method)
        title = f"{DATASETS[name].title}, {rows[0].classes:,} classes"
        axes.set(xscale="log", xlabel="training time (CPU seconds, one thread)", title=title)
        axes.set_ylabel("held-out loss over all classes (nats)")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    with replacing(file) as temporary:
        figure.savefig(temporary, dpi=110, format="png")
