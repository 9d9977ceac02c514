"""All methods side by side: the same model, data, optimiser and seeds, and one exact evaluation."""

import csv
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from shutil import rmtree
from typing import NamedTuple

from rich.console import Console

from .. import report
from ..bench.timing import write_csv
from ..train.atomic import replacing
from . import reproduce
from .reproduce import FULL, Job

#: Options of `manyclass train` for each method, in the order of training. Pools have as many negatives as `blocks` has
#: by default.
METHODS: dict[str, str] = {
    FULL: "--sampler full",
    "blocks": "--sampler blocks",
    "unigram": "--sampler unigram --num-samples 64",
    "uniform": "--sampler uniform --num-samples 64",
    "quadratic": "--sampler quadratic --prediction absolute --num-samples 64",
    "in_batch": "--sampler in_batch",
    "unigram pool": "--sampler unigram --scope batch --num-samples 4096",
    "uniform pool": "--sampler uniform --scope batch --num-samples 4096",
    "adaptive": "--loss adaptive",
    "nce": "--loss nce --sampler unigram --scope batch --num-samples 4096",
    "sce": "--loss sce",
    "hierarchical": "--loss hierarchical",
    "hierarchical bisection": "--loss hierarchical",
    "head_tail": "--sampler head_tail --num-samples 64",
    "negative": "--loss negative --sampler unigram --power 0.75 --num-samples 64",
    "blackout": "--loss blackout --sampler unigram --power 0.75 --num-samples 64",
    "bigram": "--sampler bigram --num-samples 64",
    "ngram": "--sampler ngram --num-samples 64",
    "multi_index": "--sampler multi_index --num-samples 64",
    "lsh": "--sampler lsh --num-samples 64",
    "positive_features": "--sampler positive_features --num-samples 64",
    "taylor": "--loss taylor",
    "spherical": "--loss spherical",
    "two_pass": "--sampler two_pass --num-samples 64",
    "fourier": "--sampler fourier --num-samples 64",
}
#: The method whose class vectors make the tree of another. It is trained first, and its time is not included.
TREES = {"hierarchical bisection": "blocks"}
#: Left out by default: its draws are not native, and take seconds per step with tens of thousands of classes.
SLOW = ("fourier",)
DATASETS = ("ptb", "diginetica", "synth")
#: The presets of `reproduce` with the settings. Quick runs are shorter here, since there are more than 20 methods.
PRESETS = {"quick": "quick", "full": "paper"}
QUICK = {
    "ptb": "--steps 100 --evaluations 4 --eval-examples 1000",
    "diginetica": "--steps 80 --evaluations 4 --eval-examples 500",
    "synth": "--steps 60 --evaluations 4 --eval-examples 500",
}
#: Held-out examples of the final evaluation in a quick run, the same for all methods; a full one takes all.
LIMIT = 2_500

CUTOFF = 20
FILE, CURVES = "comparison.csv", "comparison-curves.csv"


class Trial(NamedTuple):
    """One training run of the comparison."""

    preset: str
    dataset: str
    method: str
    seed: int


class Result(NamedTuple):
    """A finished trial with its final evaluation: a line of ``comparison.csv``."""

    trial: Trial
    #: Exact held-out loss of the method's own model, in nats; for samplers that of the softmax over all classes.
    loss: float
    recall: float
    mrr: float
    steps: int
    #: Training time: that of the CPU, which other processes hardly change, and that of the clock.
    cpu_seconds: float
    seconds: float
    #: Peak memory of the process, torch and the data included.
    megabytes: float
    #: Measured bias of the sampled loss at the end, in nats; nan for a loss that is no estimate of the softmax loss.
    bias: float
    #: CPU seconds and losses on a part of the held-out examples.
    curve: tuple[tuple[float, float], ...]

    def row(self) -> list[object]:
        """Return the line as written to the CSV file."""
        return [*self.trial, *("" if math.isnan(value) else f"{value:.6g}" for value in self[1:-1])]

    def seconds_to(self, loss: float) -> float:
        """Return the CPU time of training until the loss is at most this; infinite if it never is."""
        return next((seconds for seconds, reached in self.curve if reached <= loss), math.inf)


HEADER = (*Trial._fields, "loss", f"recall@{CUTOFF}", f"mrr@{CUTOFF}", *Result._fields[4:-1])
CURVES_HEADER = (*Trial._fields, "cpu_seconds", "loss")


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
    if trial.preset == "quick":
        options += QUICK[trial.dataset].split()
    chosen = METHODS[trial.method].split()
    if trial.method in TREES:
        chosen += ["--tree", str(_classes(folder))]
    return ["train", *options, *chosen, "--seed", str(trial.seed), "--threads", "1", "--out", str(folder), "--resume"]


def _classes(folder: Path) -> Path:
    """Return where the run is that brings the class vectors for the run of a folder."""
    return folder.with_name(f"{folder.name}-classes")


def _job(trial: Trial, files: Mapping[str, Path], out: Path) -> Job:
    folder = out / "runs" / "-".join(map(str, trial)).replace(" ", "-")

    def keep_result() -> None:
        write([*read(out).values(), _result(trial, folder)], out)
        rmtree(folder)
        rmtree(_classes(folder), ignore_errors=True)

    limit = ["--limit", str(LIMIT)] if trial.preset == "quick" else []
    evaluation = ["evaluate", str(folder), "--k", str(CUTOFF), *limit, "--threads", "1"]
    commands = [arguments(trial, files, folder), evaluation]
    if trial.method in TREES:
        commands.insert(0, arguments(trial._replace(method=TREES[trial.method]), files, _classes(folder)))
    return Job(" ".join(map(str, trial)), folder, tuple(commands), keep_result)


def _result(trial: Trial, folder: Path) -> Result:
    run = report.load(folder)
    assert run.evaluation is not None
    loss, recall, mrr = (float(run.evaluation[name]) for name in ("loss", f"recall@{CUTOFF}", f"mrr@{CUTOFF}"))
    peak = json.loads((folder / "resources.json").read_text())["peak_bytes"]
    last = run.rows[-1]
    curve = tuple((row["cpu_seconds"], row["heldout_loss"]) for row in run.rows if row["step"] > 0)
    times = int(last["step"]), last["cpu_seconds"], last["seconds"]
    megabytes = math.nan if peak is None else peak / 2**20
    return Result(trial, loss, recall, mrr, *times, megabytes, last["bias"], curve)


def write(results: Sequence[Result], out: Path) -> None:
    """Write one line per result, and one per point of its curve."""
    points = [(*one.trial, f"{seconds:.2f}", f"{loss:.5f}") for one in results for seconds, loss in one.curve]
    for name, header, rows in ((CURVES, CURVES_HEADER, points), (FILE, HEADER, [one.row() for one in results])):
        with replacing(out / name) as temporary:
            write_csv(temporary, header, rows)


def read(out: Path) -> dict[Trial, Result]:
    """Read the CSV files of `write`, which may hold the results of several sessions."""
    curves: dict[Trial, list[tuple[float, float]]] = {}
    for trial, (seconds, loss) in _lines(out / CURVES, CURVES_HEADER):
        curves.setdefault(trial, []).append((seconds, loss))
    found = {}
    for trial, (loss, recall, mrr, steps, cpu_seconds, seconds, megabytes, bias) in _lines(out / FILE, HEADER):
        curve = tuple(curves.get(trial, ()))
        found[trial] = Result(trial, loss, recall, mrr, int(steps), cpu_seconds, seconds, megabytes, bias, curve)
    return found


def _lines(file: Path, header: Sequence[str]) -> Iterator[tuple[Trial, list[float]]]:
    """Yield the trial and the numbers of each line of a CSV file, nan for an empty cell."""
    if not file.exists():
        return
    with file.open(newline="") as handle:
        first, *lines = csv.reader(handle)
        if tuple(first) != tuple(header):
            raise ValueError(f"{file} must have the columns {', '.join(header)}, got {', '.join(first)}")
        for preset, dataset, method, seed, *numbers in lines:
            yield Trial(preset, dataset, method, int(seed)), [float(number or "nan") for number in numbers]
