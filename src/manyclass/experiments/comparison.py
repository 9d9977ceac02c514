"""All methods side by side: the same model, data, optimiser and seeds, and one exact evaluation."""

import csv
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from shutil import rmtree
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from .. import report
from ..bench.timing import write_csv
from ..train.atomic import replacing
from . import reproduce
from .reproduce import FULL, Job

#: Options of `manyclass train` for each method. Pools have as many negatives as `blocks` has by default.
METHODS: dict[str, str] = {
    FULL: "--sampler full",
    "blocks": "--sampler blocks",
    "uniform": "--sampler uniform --num-samples 64",
    "uniform pool": "--sampler uniform --scope batch --num-samples 4096",
    "unigram": "--sampler unigram --num-samples 64",
    "unigram pool": "--sampler unigram --scope batch --num-samples 4096",
    "in_batch": "--sampler in_batch",
    "bigram": "--sampler bigram --num-samples 64",
    "ngram": "--sampler ngram --num-samples 64",
    "quadratic": "--sampler quadratic --prediction absolute --num-samples 64",
    "head_tail": "--sampler head_tail --num-samples 64",
    "two_pass": "--sampler two_pass --num-samples 64",
    "lsh": "--sampler lsh --num-samples 64",
    "multi_index": "--sampler multi_index --num-samples 64",
    "positive_features": "--sampler positive_features --num-samples 64",
    "fourier": "--sampler fourier --num-samples 64",
    "nce": "--loss nce --sampler unigram --scope batch --num-samples 4096",
    "negative": "--loss negative --sampler unigram --power 0.75 --num-samples 64",
    "blackout": "--loss blackout --sampler unigram --power 0.75 --num-samples 64",
    "sce": "--loss sce",
    "hierarchical": "--loss hierarchical",
    "adaptive": "--loss adaptive",
    "spherical": "--loss spherical",
    "taylor": "--loss taylor",
}
#: Left out by default: its draws are not native, and take seconds per step with tens of thousands of classes.
SLOW = ("fourier",)
DATASETS = ("ptb", "diginetica", "synth")
#: The presets of `reproduce` that have the settings.
PRESETS = {"quick": "quick", "full": "paper"}

CUTOFF = 20
#: Time is measured up to a held-out loss of so many nats above the end of the full softmax.
NEAR = 0.1
#: Methods that end further above the full softmax are not in the plot.
SHOWN = 2.0
FILE, CURVES, PLOT = "comparison.csv", "comparison-curves.csv", "comparison.png"


class Trial(NamedTuple):
    """One training run of the comparison."""

    preset: str
    dataset: str
    method: str
    seed: int


class Result(NamedTuple):
    """A finished trial, evaluated on all held-out examples: a line of ``comparison.csv``."""

    trial: Trial
    #: Exact held-out loss of the method's own model, in nats; for samplers that of the softmax over all classes.
    loss: float
    recall: float
    mrr: float
    #: Training time, steps, and the peak memory of the process in megabytes.
    seconds: float
    steps: int
    megabytes: float
    #: Measured bias of the sampled loss at the end, in nats; nan for a loss that is no estimate of the softmax loss.
    bias: float
    #: Seconds and losses on a part of the held-out examples.
    curve: tuple[tuple[float, float], ...]

    def row(self) -> list[object]:
        """The line as it is written."""
        numbers = (self.loss, self.recall, self.mrr, self.seconds, self.steps, self.megabytes, self.bias)
        return [*self.trial, *("" if math.isnan(value) else f"{value:.6g}" for value in numbers)]

    def seconds_to(self, loss: float) -> float:
        """Training time until the held-out loss is at most ``loss``; infinite if it never is."""
        return next((seconds for seconds, reached in self.curve if reached <= loss), math.inf)


HEADER = (*Trial._fields, "loss", f"recall@{CUTOFF}", f"mrr@{CUTOFF}", "seconds", "steps", "megabytes", "bias")
CURVES_HEADER = (*Trial._fields, "seconds", "loss")


def sweep(trials: Sequence[Trial], data: Path | None, out: Path, jobs: int, console: Console) -> None:
    """Train and evaluate what ``comparison.csv`` lacks; write it after each run. A stopped run is resumed."""
    written = read(out)
    waiting = [trial for trial in trials if trial not in written]
    files = {name: reproduce.sources(name, data, out / "data") for name in dict.fromkeys(t.dataset for t in waiting)}
    queue = [_job(trial, files[trial.dataset], out) for trial in waiting]
    reproduce.run_jobs(queue, len(trials) - len(waiting), jobs, console)


def arguments(trial: Trial, files: Mapping[str, Path], folder: Path) -> list[str]:
    """Compose the arguments of `manyclass` that train a run, or resume it."""
    dataset = reproduce.DATASETS[trial.dataset]
    options = [*dataset.options.split(), *dataset.presets[PRESETS[trial.preset]].split()]
    for option, file in files.items():
        options += [option, str(file)]
    chosen = METHODS[trial.method].split()
    return ["train", *options, *chosen, "--seed", str(trial.seed), "--threads", "1", "--out", str(folder), "--resume"]


def _job(trial: Trial, files: Mapping[str, Path], out: Path) -> Job:
    folder = out / "runs" / "-".join(map(str, trial)).replace(" ", "-")

    def keep_result() -> None:
        write([*read(out).values(), _result(trial, folder)], out)
        rmtree(folder)

    evaluation = ["evaluate", str(folder), "--k", str(CUTOFF), "--threads", "1"]
    return Job(" ".join(map(str, trial)), folder, (arguments(trial, files, folder), evaluation), keep_result)


def _result(trial: Trial, folder: Path) -> Result:
    run = report.load(folder)
    assert run.evaluation is not None
    loss, recall, mrr = (float(run.evaluation[name]) for name in ("loss", f"recall@{CUTOFF}", f"mrr@{CUTOFF}"))
    peak = json.loads((folder / "resources.json").read_text())["peak_bytes"]
    last = run.rows[-1]
    curve = tuple((row["seconds"], row["heldout_loss"]) for row in run.rows if row["step"] > 0)
    megabytes = math.nan if peak is None else peak / 2**20
    return Result(trial, loss, recall, mrr, last["seconds"], int(last["step"]), megabytes, last["bias"], curve)


def write(results: Sequence[Result], out: Path) -> None:
    """Write one line per result, and one per point of its curve."""
    points = [(*one.trial, f"{seconds:.2f}", f"{loss:.5f}") for one in results for seconds, loss in one.curve]
    for name, header, rows in ((CURVES, CURVES_HEADER, points), (FILE, HEADER, [one.row() for one in results])):
        with replacing(out / name) as temporary:
            write_csv(temporary, header, rows)


def read(out: Path) -> dict[Trial, Result]:
    """Read what `write` wrote, which may come from several sessions."""
    curves: dict[Trial, list[tuple[float, float]]] = {}
    for trial, (seconds, loss) in _lines(out / CURVES, CURVES_HEADER):
        curves.setdefault(trial, []).append((seconds, loss))
    found = {}
    for trial, (loss, recall, mrr, seconds, steps, megabytes, bias) in _lines(out / FILE, HEADER):
        curve = tuple(curves.get(trial, ()))
        found[trial] = Result(trial, loss, recall, mrr, seconds, int(steps), megabytes, bias, curve)
    return found


def _lines(file: Path, header: Sequence[str]) -> Iterator[tuple[Trial, list[float]]]:
    """The trial and the numbers of each line of a CSV file, nan for an empty cell."""
    if not file.exists():
        return
    with file.open(newline="") as handle:
        first, *lines = csv.reader(handle)
        if tuple(first) != tuple(header):
            raise ValueError(f"{file} must have the columns {', '.join(header)}, got {', '.join(first)}")
        for preset, dataset, method, seed, *numbers in lines:
            yield Trial(preset, dataset, method, int(seed)), [float(number or "nan") for number in numbers]


def summarise(preset: str, datasets: Sequence[str], out: Path, console: Console) -> None:
    """Print a table for each data set, and draw the plot."""
    found = list(read(out).values())
    groups = {
        name: [one for one in found if one.trial.preset == preset and one.trial.dataset == name] for name in datasets
    }
    groups = {name: results for name, results in groups.items() if results}
    for name, results in groups.items():
        console.print(table(name, results))
    files = [out / FILE, out / CURVES]
    if groups:
        files.append(out / PLOT)
        plot(groups, files[-1])
    for file in files:
        console.print(str(file), soft_wrap=True)


def full_loss(results: Sequence[Result]) -> float:
    """Mean loss of the full softmax; nan if it is missing."""
    values = [one.loss for one in results if one.trial.method == FULL]
    return sum(values) / len(values) if values else math.nan


def end_of_full(results: Sequence[Result]) -> float:
    """Where the curves of the full softmax end, on a part of the held-out examples; nan if they are missing."""
    values = [one.curve[-1][1] for one in results if one.trial.method == FULL and one.curve]
    return sum(values) / len(values) if values else math.nan


def table(dataset: str, results: Sequence[Result]) -> Table:
    """Lay out one data set, a line per method, best loss first: means over seeds."""
    baseline, near = full_loss(results), end_of_full(results) + NEAR
    made = Table(title=reproduce.DATASETS[dataset].title, caption="means over seeds; times on one thread")
    header = ("method", "seeds", "loss", "Δ full", f"recall@{CUTOFF}", "ms/step", f"s to full+{NEAR}", "MB", "bias")
    for number, name in enumerate(header):
        made.add_column(name, justify="left" if number == 0 else "right")
    methods: dict[str, list[Result]] = {}
    for one in results:
        methods.setdefault(one.trial.method, []).append(one)
    for method, runs in sorted(methods.items(), key=lambda item: mean(one.loss for one in item[1])):
        loss = mean(one.loss for one in runs)
        cells = (
            f"{loss:.3f}",
            _cell(loss - baseline, "+.3f"),
            f"{mean(one.recall for one in runs):.4f}",
            f"{mean(1000 * one.seconds / one.steps for one in runs):.1f}",
            _cell(mean(one.seconds_to(near) for one in runs), ".0f"),
            _cell(mean(one.megabytes for one in runs), ".0f"),
            _cell(mean(one.bias for one in runs), "+.3f"),
        )
        made.add_row(method, str(len(runs)), *cells)
    return made


def mean(values: Iterator[float]) -> float:
    """The mean of at least one number."""
    numbers = list(values)
    return sum(numbers) / len(numbers)


def _cell(value: float, style: str) -> str:
    return f"{value:{style}}" if math.isfinite(value) else "–"


def plot(groups: Mapping[str, Sequence[Result]], file: Path) -> None:
    """Draw held-out loss against seconds, one panel per data set, one line per run, its name at the end."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7 * len(groups), 6), layout="constrained")
    panels = figure.subplots(1, len(groups), squeeze=False)[0]
    for (dataset, results), axes in zip(groups.items(), panels, strict=True):
        end = end_of_full(results)
        limit = end + SHOWN if math.isfinite(end) else math.inf
        missing = sorted({one.trial.method for one in results if not one.curve or one.curve[-1][1] > limit})
        for one in results:
            if one.trial.method not in missing:
                (line,) = axes.plot(*zip(*one.curve, strict=True), linewidth=1, marker=".")
                axes.annotate(one.trial.method, one.curve[-1], fontsize="x-small", color=line.get_color())
        title = reproduce.DATASETS[dataset].title
        note = f"\nnot shown, ending more than {SHOWN} above full: {', '.join(missing)}" if missing else ""
        axes.set_title(title + note, fontsize="small", wrap=True)
        axes.set(xscale="log", xlabel="training time (s)", ylabel="held-out loss (nats)")
        if math.isfinite(limit):
            axes.set_ylim(top=limit)
        axes.grid(alpha=0.3)
    with replacing(file) as temporary:
        figure.savefig(temporary, dpi=110, format="png")
