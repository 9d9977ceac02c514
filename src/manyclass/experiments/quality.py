"""Compare sampled softmax with the full softmax after complete training runs: a sweep, a table and a figure."""

import math
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from .. import report
from ..bench.timing import write_csv
from ..train.atomic import replacing
from ..train.settings import NextItemSettings
from . import figures, reproduce
from .reproduce import BLOCKS, FULL, Job

#: Settings of `manyclass train next-item` in every run. Settings not named here have their defaults.
COMMON: dict[str, Any] = {"model": "feed-forward", "batch": 512, "evaluations": 4}
DATASETS: dict[str, dict[str, Any]] = {
    "diginetica": {"epochs": 3},
    # With the default rate and dropout the full softmax ends worse than it began: 16.5 nats on held-out data.
    "beauty": {"epochs": 20, "user_first": True, "lr": 0.01, "dropout": 0.5},
}
SAMPLERS: dict[str, dict[str, Any]] = {
    FULL: {"sampler": "full"},
    BLOCKS: {"sampler": "blocks"},
    "uniform": {"sampler": "uniform", "scope": "batch", "num_samples": 4096},
}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adagrad": {"optimizer": "adagrad"},
    "adam": {"optimizer": "adam", "lr": 0.002},
}
#: Names of the data sets in the names of run folders.
PREFIXES = {"diginetica": "dig", "beauty": "beauty"}
#: Settings that name files. A run may be moved here from a machine with other paths.
PATHS = ("interactions", "heldout")

CUTOFF = 20
MEASURES = tuple(f"{name}@{CUTOFF}" for name in ("recall", "mrr", "ndcg"))
#: Largest loss above the full softmax that passes, in nats.
TOLERANCE = 0.02
MISSING = "missing"
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
        chosen = DATASETS[self.dataset] | SAMPLERS[self.sampler] | OPTIMIZERS[self.optimizer]
        return {**COMMON, **chosen, "seed": self.seed}


class Result(NamedTuple):
    """A trial that is trained to the end and evaluated on all held-out examples."""

    trial: Trial
    run: report.Run

    @property
    def loss(self) -> float:
        """Held-out loss, in nats."""
        return self.measure("loss")

    @property
    def recall(self) -> float:
        """Recall at the cut-off."""
        return self.measure(MEASURES[0])

    @property
    def seconds(self) -> float:
        """Training time."""
        return self.run.rows[-1]["seconds"]

    def measure(self, name: str) -> float:
        """A value of ``evaluation.json``."""
        return (self.run.evaluation or {})[name]

    def row(self) -> list[object]:
        """A line of ``quality.csv``."""
        last = self.run.rows[-1]
        bias = "" if math.isnan(last["bias"]) else f"{last['bias']:.5f}"
        measures = [f"{self.measure(name):.5f}" for name in ("loss", *MEASURES)]
        return [*self.trial, *measures, f"{self.seconds:.2f}", int(last["step"]), bias]


def trials(datasets: Sequence[str], optimizers: Sequence[str], seeds: int) -> list[Trial]:
    """List the runs so that those to compare come one after another."""
    return [
        Trial(dataset, sampler, optimizer, seed)
        for dataset in datasets
        for optimizer in optimizers
        for seed in range(seeds)
        for sampler in SAMPLERS
    ]


def sweep(wanted: Sequence[Trial], data: Path | None, out: Path, jobs: int, console: Console) -> None:
    """Train and evaluate what is missing, ``jobs`` runs at a time; write ``quality.csv`` after each run."""
    waiting = [trial for trial in wanted if _result(out, trial) is None]
    untrained = {trial for trial in waiting if _trained(out, trial) is None}
    files = {name: _files(name, data) for name in DATASETS if any(trial.dataset == name for trial in untrained)}
    queue = []
    for trial in waiting:
        folder = out / "runs" / trial.name
        commands = [_evaluation(folder)]
        if trial in untrained:
            commands.insert(0, _training(trial, files[trial.dataset], folder))
        label = " ".join(map(str, trial))
        queue.append(Job(label, folder, tuple(commands), lambda: write(results(out), out / "quality.csv")))
    reproduce.run_jobs(queue, len(wanted) - len(waiting), jobs, console)


def _files(name: str, data: Path | None) -> dict[str, Path]:
    if data is None:
        raise ValueError(f"--data must be the folder with the files of {name}")
    return reproduce.find_files(name, data)


def _training(trial: Trial, files: Mapping[str, Path], folder: Path) -> list[str]:
    """Compose the arguments of `manyclass` that train a run, or resume it."""
    arguments = ["train", "next-item"]
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
    settings = NextItemSettings(interactions=Path(), **trial.settings)
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


def _result(out: Path, trial: Trial) -> Result | None:
    """Load a trial; None if it is not trained to the end, or not evaluated exactly on all held-out examples."""
    run = _trained(out, trial)
    if run is None or run.evaluation is None:
        return None
    # With a probe the ranking measures would be approximate.
    state = {"step": run.rows[-1]["step"], "examples": run.config["heldout_examples"], "probe": None}
    complete = all(run.evaluation.get(name) == value for name, value in state.items())
    return Result(trial, run) if complete and {"loss", *MEASURES} <= run.evaluation.keys() else None


def results(out: Path) -> list[Result]:
    """Load all finished runs below ``out``, whichever call made them."""
    endings = {path.name.rpartition("-")[2] for path in (out / "runs").glob("*-*")}
    seeds = 1 + max((int(ending) for ending in endings if ending.isdecimal()), default=-1)
    possible = trials(tuple(DATASETS), tuple(OPTIMIZERS), seeds)
    return [result for trial in possible if (result := _result(out, trial)) is not None]


def write(found: Sequence[Result], file: Path) -> None:
    """Write one line per finished run."""
    with replacing(file) as temporary:
        write_csv(temporary, HEADER, [result.row() for result in found])


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


def summarise(datasets: Sequence[str], optimizers: Sequence[str], seeds: int, out: Path, console: Console) -> None:
    """Write ``quality.csv`` and ``quality.png`` of the finished runs, and print a table per data set and optimiser."""
    found = results(out)
    write(found, out / "quality.csv")
    files, panels = [out / "quality.csv"], {}
    for dataset, optimizer in product(datasets, optimizers):
        groups = {
            sampler: [one for one in found if one.trial[:3] == (dataset, sampler, optimizer) and one.trial.seed < seeds]
            for sampler in SAMPLERS
        }
        title = f"{reproduce.DATASETS[dataset].title}, {optimizer}"
        console.print(table(title, groups, seeds))
        if any(groups.values()):
            curves = {sampler: [one.run for one in group] for sampler, group in groups.items()}
            panels[f"{title}\n{headline(groups)}"] = curves
    if panels:
        files.append(out / "quality.png")
        figures.against_time(panels, files[-1])
    for file in files:
        console.print(str(file), soft_wrap=True)


def headline(groups: Mapping[str, Sequence[Result]]) -> str:
    """Say in a line how blocks end."""
    comparison = compare(groups[BLOCKS], groups[FULL])
    if comparison is None:
        absent = [sampler for sampler in (FULL, BLOCKS) if not groups[sampler]]
        return f"{' and '.join(absent) or 'a common seed'}: {MISSING}"
    where = "above" if comparison.loss.mean > 0 else "below"
    return f"{BLOCKS} end {abs(comparison.loss.mean):.3f} nats {where} {FULL}, in {comparison.time:.2f} of its time"
