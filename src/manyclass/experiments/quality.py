"""Compare sampled softmax with the full softmax after complete training runs: a sweep, a table and a figure."""

import csv
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from .. import report
from ..bench.timing import write_csv
from ..train.atomic import replacing
from ..train.settings import LanguageSettings, NextItemSettings, Settings
from . import figures, reproduce
from .reproduce import BLOCKS, FULL, Job

#: Settings in every run. Settings not named here and below have their defaults.
COMMON: dict[str, Any] = {"evaluations": 4}
NEXT_ITEM: dict[str, Any] = {"model": "feed-forward", "batch": 512, "split": "last", "dropout": 0.1}
DATASETS: dict[str, dict[str, Any]] = {
    "diginetica": {**NEXT_ITEM, "epochs": 3},
    "beauty": {**NEXT_ITEM, "epochs": 20, "user_first": True, "dropout": 0.5},
    "ptb": {"split": "blanks", "min_count": 1, "epochs": 1, "tied": True},
}
#: Commands of `manyclass train`, and the option that names the file to train on.
TASKS: dict[str, tuple[str, type[Settings], dict[str, Any]]] = {
    "diginetica": ("next-item", NextItemSettings, {"interactions": Path()}),
    "beauty": ("next-item", NextItemSettings, {"interactions": Path()}),
    "ptb": ("lm", LanguageSettings, {"text": [Path()]}),
}
#: What is compared, and settings that depend on the optimiser. On Beauty larger rates end above the loss of the start.
#: Tied embeddings make all gradients of the full softmax dense, so that its AdamW is torch's own.
PAIRS: dict[tuple[str, str], dict[str, Any]] = {
    ("diginetica", "adagrad"): {"lr": 0.05},
    ("diginetica", "adam"): {"lr": 0.002},
    ("beauty", "adagrad"): {"lr": 0.01},
    ("beauty", "adam"): {"lr": 0.0005},
    ("beauty", "adamw"): {"lr": 0.001, "epochs": 5, "tied": True},
    ("ptb", "adamw"): {"lr": 0.002},
}
OPTIMIZERS = ("adagrad", "adam", "adamw")
SAMPLERS: dict[str, dict[str, Any]] = {
    FULL: {"sampler": "full"},
    BLOCKS: {"sampler": "blocks"},
    "uniform": {"sampler": "uniform", "scope": "batch", "num_samples": 4096},
}
#: Names of the data sets in the names of run folders.
PREFIXES = {"diginetica": "dig", "beauty": "beauty", "ptb": "ptb"}
#: Settings that name files. A run may be moved here from a machine with other paths.
PATHS = ("interactions", "text", "heldout")

CUTOFF = 20
MEASURES = tuple(f"{name}@{CUTOFF}" for name in ("recall", "mrr", "ndcg"))
#: Largest loss above the full softmax that passes, in nats.
TOLERANCE = 0.02
MISSING = "missing"
FILE, CURVES = "quality.csv", "quality-curves.csv"
CURVES_HEADER = ("dataset", "sampler", "optimizer", "seed", "seconds", "heldout_loss")
HEADER = ("dataset", "sampler", "optimizer", "seed", "heldout_loss", *MEASURES, "seconds", "steps", "bias")


class Trial(NamedTuple):
    """One training run of the comparison."""

    dataset: str
    sampler: str
    optimizer: str
    seed: int

    @property
    def name(self) -> str:
        """The name of its folder."""
        return f"{PREFIXES[self.dataset]}-{self.sampler}-{self.optimizer}-{self.seed}"

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that identify the run."""
        chosen = SAMPLERS[self.sampler] | {"optimizer": self.optimizer} | PAIRS[self.dataset, self.optimizer]
        return {**COMMON, **DATASETS[self.dataset], **chosen, "seed": self.seed}


class Point(NamedTuple):
    """The loss on a part of the held-out examples after some training time."""

    seconds: float
    loss: float


class Result(NamedTuple):
    """A trial that is trained to the end and evaluated on all held-out examples: a line of ``quality.csv``."""

    trial: Trial
    loss: float
    recall: float
    mrr: float
    ndcg: float
    #: Training time.
    seconds: float
    steps: int
    #: Measured bias of the sampled loss at the end, in nats; nan for the full softmax.
    bias: float
    curve: tuple[Point, ...]

    def row(self) -> list[object]:
        """Return the line as written to the CSV file."""
        measures = [f"{value:.5f}" for value in (self.loss, self.recall, self.mrr, self.ndcg)]
        bias = "" if math.isnan(self.bias) else f"{self.bias:.5f}"
        return [*self.trial, *measures, f"{self.seconds:.2f}", self.steps, bias]


def pairs(datasets: Sequence[str], optimizers: Sequence[str]) -> list[tuple[str, str]]:
    """List the data sets with the optimisers that are compared there.

    Raises:
        ValueError: there is none.
    """
    found = [pair for pair in product(datasets, optimizers) if pair in PAIRS]
    if not found:
        raise ValueError(f"nothing compares {', '.join(optimizers)} on {', '.join(datasets)}")
    return found


def trials(datasets: Sequence[str], optimizers: Sequence[str], samplers: Sequence[str], seeds: int) -> list[Trial]:
    """List the runs, grouped so that runs to compare are adjacent."""
    return [
        Trial(dataset, sampler, optimizer, seed)
        for dataset, optimizer in pairs(datasets, optimizers)
        for seed in range(seeds)
        for sampler in samplers
    ]


def sweep(wanted: Sequence[Trial], data: Path | None, out: Path, jobs: int, console: Console) -> None:
    """Train and evaluate what is missing, ``jobs`` runs at a time; write ``quality.csv`` after each run."""
    written = read(out)
    waiting = [trial for trial in wanted if _result(out, trial, written) is None]
    untrained = {trial for trial in waiting if _trained(out, trial) is None}
    files = {name: _files(name, data) for name in DATASETS if any(trial.dataset == name for trial in untrained)}
    queue = []
    for trial in waiting:
        folder = out / "runs" / trial.name
        commands = [_evaluation(folder)]
        if trial in untrained:
            commands.insert(0, _training(trial, files[trial.dataset], folder))
        label = " ".join(map(str, trial))
        queue.append(Job(label, folder, tuple(commands), lambda: write(results(out), out)))
    reproduce.run_jobs(queue, len(wanted) - len(waiting), jobs, console)


def _files(name: str, data: Path | None) -> dict[str, Path]:
    if data is None:
        raise ValueError(f"--data must be the folder with the files of {name}")
    return reproduce.find_files(name, data)


def _training(trial: Trial, files: Mapping[str, Path], folder: Path) -> list[str]:
    """Compose the arguments of `manyclass` that train a run, or resume it."""
    arguments = ["train", TASKS[trial.dataset][0]]
    for option, file in files.items():
        arguments += [option, str(file)]
    for name, value in trial.settings.items():
        option = f"--{name.replace('_', '-')}"
        arguments += [option] if value is True else [option, str(value)]
    return [*arguments, "--threads", "1", "--out", str(folder), "--resume"]


def _evaluation(folder: Path) -> list[str]:
    return ["evaluate", str(folder), "--k", str(CUTOFF), "--threads", "1"]


def _trained(out: Path, trial: Trial) -> report.Run | None:
    """Load the run of a trial; None if it is not trained to the end.

    Raises:
        ValueError: the folder holds a run with other settings, so it cannot be compared.
    """
    folder = out / "runs" / trial.name
    if not all((folder / name).exists() for name in ("config.json", "metrics.csv")):
        return None
    run = report.load(folder)
    _, kind, files = TASKS[trial.dataset]
    settings = kind(**files, **trial.settings)
    for name in settings.differences(run.config["settings"]):
        if name not in PATHS:
            old, new = run.config["settings"].get(name), settings.to_json()[name]
            raise ValueError(
                f"{folder} was trained with {name}={old} instead of {name}={new}: move it, or change --out"
            )
    last = run.rows[-1]
    if last["step"] == 0:
        return None
    steps_per_epoch = last["step"] / last["epoch"]
    return run if last["step"] >= round(settings.epochs * steps_per_epoch) else None


def _result(out: Path, trial: Trial, written: Mapping[Trial, Result]) -> Result | None:
    """Load a trial from its folder, or from ``quality.csv`` if it has none; None if it is not complete."""
    if not (out / "runs" / trial.name).exists():
        return written.get(trial)
    run = _trained(out, trial)
    if run is None or run.evaluation is None:
        return None
    last = run.rows[-1]
    # With a probe the ranking measures would be approximate.
    state = {"step": last["step"], "examples": run.config["heldout_examples"], "probe": None}
    complete = all(run.evaluation.get(name) == value for name, value in state.items())
    if not complete or not {"loss", *MEASURES} <= run.evaluation.keys():
        return None
    loss, recall, mrr, ndcg = (run.evaluation[name] for name in ("loss", *MEASURES))
    curve = tuple(Point(row["seconds"], row["heldout_loss"]) for row in run.rows if row["step"] > 0)
    return Result(trial, loss, recall, mrr, ndcg, last["seconds"], int(last["step"]), last["bias"], curve)


def read(out: Path) -> dict[Trial, Result]:
    """Read ``quality.csv`` and ``quality-curves.csv``, which may come from other sessions and machines."""
    curves: dict[Trial, list[Point]] = {}
    for row in _lines(out / CURVES, CURVES_HEADER):
        curves.setdefault(_trial(row), []).append(Point(float(row["seconds"]), float(row["heldout_loss"])))
    found = {}
    for row in _lines(out / FILE, HEADER):
        trial = _trial(row)
        loss, recall, mrr, ndcg, seconds = (float(row[name]) for name in ("heldout_loss", *MEASURES, "seconds"))
        bias = float(row["bias"] or "nan")
        curve = tuple(curves.get(trial, ()))
        found[trial] = Result(trial, loss, recall, mrr, ndcg, seconds, int(row["steps"]), bias, curve)
    return found


def _lines(file: Path, header: Sequence[str]) -> Iterator[dict[str, str]]:
    if not file.exists():
        return
    with file.open(newline="") as handle:
        reader = csv.DictReader(handle)
        if tuple(reader.fieldnames or ()) != tuple(header):
            raise ValueError(f"{file} must have the columns {', '.join(header)}, got {reader.fieldnames}")
        yield from reader


def _trial(row: Mapping[str, str]) -> Trial:
    return Trial(row["dataset"], row["sampler"], row["optimizer"], int(row["seed"]))


def results(out: Path) -> list[Result]:
    """Load all finished trials: those with a folder below ``out``, and those of ``quality.csv``."""
    written = read(out)
    endings = {path.name.rpartition("-")[2] for path in (out / "runs").glob("*-*")}
    seeds = {int(ending) for ending in endings if ending.isdecimal()} | {trial.seed for trial in written}
    possible = trials(tuple(DATASETS), OPTIMIZERS, tuple(SAMPLERS), 1 + max(seeds, default=-1))
    return [result for trial in possible if (result := _result(out, trial, written)) is not None]


def write(found: Sequence[Result], out: Path) -> None:
    """Write one line per finished trial, and one per point of its curve."""
    points = [
        [*result.trial, f"{point.seconds:.2f}", f"{point.loss:.5f}"] for result in found for point in result.curve
    ]
    tables = {FILE: (HEADER, [result.row() for result in found]), CURVES: (CURVES_HEADER, points)}
    for name, (header, rows) in tables.items():
        with replacing(out / name) as temporary:
            write_csv(temporary, header, rows)


class Estimate(NamedTuple):
    """A mean over seeds, and its standard error; nan for a single seed."""

    mean: float
    error: float

    def text(self, sign: str = "") -> str:
        """Format it for the table."""
        error = "" if math.isnan(self.error) else f" ± {self.error:.4f}"
        return f"{self.mean:{sign}.4f}{error}"


def estimate(values: Sequence[float]) -> Estimate:
    """Estimate the mean of at least one value."""
    mean, count = sum(values) / len(values), len(values)
    if count == 1:
        return Estimate(mean, math.nan)
    return Estimate(mean, math.sqrt(sum((value - mean) ** 2 for value in values) / (count - 1) / count))


class Comparison(NamedTuple):
    """A sampler against the full softmax, over the seeds that both have."""

    loss: Estimate
    recall: Estimate
    #: Training time, divided by that of the full softmax.
    time: float

    @property
    def loss_passes(self) -> bool:
        """Whether the mean loss is at most `TOLERANCE` above that of the full softmax."""
        return self.loss.mean <= TOLERANCE

    @property
    def recall_passes(self) -> bool:
        """Whether the mean recall is at most a standard error below that of the full softmax."""
        slack = 0.0 if math.isnan(self.recall.error) else self.recall.error
        return self.recall.mean >= -slack


def compare(sampled: Sequence[Result], full: Sequence[Result]) -> Comparison | None:
    """Compare runs seed by seed; None if they have no seed in common."""
    baseline = {result.trial.seed: result for result in full}
    pairs = [(result, baseline[result.trial.seed]) for result in sampled if result.trial.seed in baseline]
    if not pairs:
        return None
    return Comparison(
        estimate([one.loss - other.loss for one, other in pairs]),
        estimate([one.recall - other.recall for one, other in pairs]),
        sum(one.seconds for one, _ in pairs) / sum(other.seconds for _, other in pairs),
    )


def table(title: str, groups: Mapping[str, Sequence[Result]], seeds: int) -> Table:
    """Lay out one data set and optimiser, a column per sampler."""
    made = Table(title=title, caption="± is the standard error over seeds; Δ is the difference to full, seed by seed")
    labels = ("seeds", "loss (nats)", f"recall@{CUTOFF}", "Δ loss", "Δ recall", "time / full time")
    verdicts = (f"loss ≤ full + {TOLERANCE}", "recall ≥ full - SE")
    columns = {sampler: _column(sampler, found, groups[FULL], seeds) for sampler, found in groups.items()}
    made.add_column("")
    for sampler in columns:
        made.add_column(sampler, justify="right")
    for label, *cells in zip((*labels, *verdicts), *columns.values(), strict=True):
        made.add_row(label, *cells)
    return made


def _column(sampler: str, found: Sequence[Result], full: Sequence[Result], seeds: int) -> list[str]:
    if not found:
        return [MISSING] * 8
    means = [estimate([one.loss for one in found]).text(), estimate([one.recall for one in found]).text()]
    compared = [""] * 5 if sampler == FULL else _differences(compare(found, full))
    return [_seeds(found, seeds), *means, *compared]


def _differences(comparison: Comparison | None) -> list[str]:
    if comparison is None:
        return [MISSING] * 5
    passes = (comparison.loss_passes, comparison.recall_passes)
    verdicts = ["[green]PASS" if one else "[red]FAIL" for one in passes]
    return [comparison.loss.text("+"), comparison.recall.text("+"), f"{comparison.time:.2f}", *verdicts]


def _seeds(found: Sequence[Result], seeds: int) -> str:
    there = [one.trial.seed for one in found]
    absent = [str(seed) for seed in range(seeds) if seed not in there]
    return ", ".join(map(str, there)) + (f" ({', '.join(absent)} {MISSING})" if absent else "")


def summarise(
    datasets: Sequence[str],
    optimizers: Sequence[str],
    samplers: Sequence[str],
    seeds: int,
    out: Path,
    console: Console,
) -> None:
    """Write ``quality.csv`` and ``quality.png`` of the finished runs, and print a table per data set and optimiser."""
    found = results(out)
    write(found, out)
    files, panels = [out / FILE, out / CURVES], {}
    for dataset, optimizer in pairs(datasets, optimizers):
        groups = {
            sampler: [one for one in found if one.trial[:3] == (dataset, sampler, optimizer) and one.trial.seed < seeds]
            for sampler in samplers
        }
        title = f"{reproduce.DATASETS[dataset].title}, {optimizer}"
        console.print(table(title, groups, seeds))
        if any(groups.values()):
            curves = {sampler: [one.curve for one in group if one.curve] for sampler, group in groups.items()}
            panels[f"{title}\n{headline(groups)}"] = curves
    if panels:
        files.append(out / "quality.png")
        figures.against_time(panels, files[-1])
    for file in files:
        console.print(str(file), soft_wrap=True)


def headline(groups: Mapping[str, Sequence[Result]]) -> str:
    """Summarise the result of blocks in a line."""
    comparison = compare(groups.get(BLOCKS, ()), groups[FULL])
    if comparison is None:
        absent = [sampler for sampler in (FULL, BLOCKS) if not groups.get(sampler)]
        return f"{' and '.join(absent) or 'a common seed'}: {MISSING}"
    where = "above" if comparison.loss.mean > 0 else "below"
    return f"{BLOCKS} end {abs(comparison.loss.mean):.3f} nats {where} {FULL}, in {comparison.time:.2f} of its time"
