"""The paper's experiments (Section 4 and its appendix): a sweep of `manyclass train`, and figures of it."""

import csv
import hashlib
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from shutil import rmtree
from typing import NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ..__main__ import main
from ..bench.timing import write_csv
from ..train.atomic import replacing
from ..train.data.synth import synthesise
from ..train.run import Metrics, read_metrics

FULL = "full"
SAMPLERS = ("uniform", "unigram", "bigram", "quadratic", "quartic", "softmax")
#: Numbers of negatives of the figures at a fixed m.
FIXED = (10, 40, 160)
#: The symmetric kernels, which the paper trains with the absolute softmax.
ABSOLUTE = ("quadratic", "quartic")
BLOCKS = "blocks"
#: Samplers that are trained first, and get several seeds: ours, the paper's, and the usual one.
DECISIVE = (BLOCKS, "quadratic", "uniform")
#: Half of the negatives of `blocks` are an example's own, but no more than this; the pool has all others.
MOST_OWN = 32
NEXT_ITEM = (
    "next-item --split last --model feed-forward --features 64 --dropout 0 --optimizer adagrad --lr 0.05 --batch"
)


class Dataset(NamedTuple):
    """A data set and its training options."""

    title: str
    #: Files that the user brings, each with a name of an option and a pattern below --data.
    files: dict[str, str]
    #: Options of `manyclass train` in all presets, …
    options: str
    #: … and in each preset that the data set has.
    presets: dict[str, str]
    perplexity: bool = False
    #: Samplers that only the paper's setting has: they score all classes for each example, as the full softmax does.
    slow: tuple[str, ...] = ()
    #: Instead of files: items, users and interactions per user of synthetic data, as from `manyclass synth`.
    made: tuple[int, int, int] | None = None
    #: At most so many seeds, …
    seeds: int = 3
    #: … and what gets more than one besides the plain full softmax: decisive samplers, with their numbers of
    #: negatives; None: all of them, and the absolute full softmax.
    repeated: Mapping[str, tuple[int, ...]] | None = None


DATASETS = {
    "ptb": Dataset(
        "Penn Tree Bank, 10k words",
        {"--text": "ptb.train.txt*", "--heldout": "ptb.valid.txt*"},
        "lm --split blanks --min-count 1 --features 200 --layers 2 --batch 20 --optimizer sgd",
        {
            # The TensorFlow tutorial sums the loss over 35 words and takes lr 1 and norm 5; ours is a mean.
            "paper": "--length 35 --lr 35 --clip 0.143 --schedule exponential --epochs 39 --dropout 0.5 "
            "--evaluations 39 --eval-examples 80000",
            # Few epochs, so that a sweep takes hours, not days. The learning rate falls to 0 over the second half.
            # Sequences of 20 words make more steps of an epoch than 35 do, at the same cost.
            "converged": "--length 20 --lr 20 --clip 0.25 --schedule linear --epochs 4 --evaluations 4 "
            "--eval-examples 80000",
            # The paper's schedule would lower the learning rate too early in a short run.
            "quick": "--length 35 --lr 20 --clip 0.25 --schedule linear --steps 60 --evaluations 3 "
            "--eval-examples 2000",
        },
        perplexity=True,
        repeated={BLOCKS: (10, 40, 160, 640), "quadratic": (10,), "uniform": (640,)},
    ),
    "beauty": Dataset(
        "Amazon Beauty, 12k items",
        {"--interactions": "sequences.txt*"},
        f"{NEXT_ITEM} 256 --user-first",
        {
            "paper": "--epochs 39 --evaluations 39 --eval-examples 30000",
            "converged": "--optimizer sgd --lr 12 --clip 0.1 --schedule linear --epochs 4 --evaluations 4 "
            "--eval-examples 30000",
            "quick": "--steps 150 --evaluations 3 --eval-examples 2000",
        },
    ),
    "diginetica": Dataset(
        "Diginetica, 43k items",
        {"--interactions": "train.txt*", "--heldout": "test.txt*"},
        f"{NEXT_ITEM} 512",
        {
            "paper": "--epochs 39 --evaluations 39 --eval-examples 60000",
            "quick": "--steps 30 --evaluations 3 --eval-examples 1000",
        },
        slow=("quartic",),
    ),
    "synth": Dataset(
        "Synthetic, 82k items",
        {},
        f"{NEXT_ITEM} 256",
        {
            "paper": "--epochs 39 --evaluations 39 --eval-examples 50000",
            "converged": "--optimizer sgd --lr 12 --clip 0.1 --schedule linear --epochs 1 --evaluations 4 "
            "--eval-examples 50000",
            "quick": "--steps 30 --evaluations 3 --eval-examples 1000",
        },
        slow=("quartic", "softmax"),
        made=(100_000, 50_000, 20),
        seeds=1,
    ),
}


class Preset(NamedTuple):
    """The extent of a sweep."""

    #: How many negatives each example is compared with.
    negatives: tuple[int, ...]
    #: Runs of the full softmax, whose spread shows the noise, and of the decisive samplers. Others have one run.
    baselines: int
    decisive: int
    #: Whether slow samplers are left out.
    hurry: bool
    note: str


PRESETS = {
    "paper": Preset((10, 20, 40, 80, 160, 320, 640, 1280), 3, 1, False, "the paper's setting"),
    "converged": Preset((10, 40, 160, 640), 3, 3, True, "converged preset: SGD for all, trained to the end"),
    "quick": Preset((10, 160), 1, 1, True, "quick preset: a smoke test, far from converged"),
}


class Point(NamedTuple):
    """One training run of a sweep."""

    dataset: str
    sampler: str
    prediction: str
    #: None for the full softmax.
    negatives: int | None
    seed: int

    @property
    def name(self) -> str:
        """Of its folder."""
        return f"{self.sampler}-{self.prediction}-{self.negatives or 'all'}-{self.seed}"

    @staticmethod
    def of(row: Mapping[str, str]) -> "Point":
        """Read it from a row of a record; a row without a seed is of seed 0."""
        negatives = int(row["negatives"]) if row["negatives"] else None
        return Point(row["dataset"], row["sampler"], row["prediction"], negatives, int(row.get("seed", 0)))


HEADER = (*Point._fields, "options", "step", "epoch", "heldout_loss")


class Curve(NamedTuple):
    """A run that is done."""

    point: Point
    rows: list[Metrics]


def points(dataset: str, preset: Preset) -> list[Point]:
    """Return all runs that the figures of a data set are made of, the decisive runs of the first seed first."""
    skipped = DATASETS[dataset].slow if preset.hurry else ()
    others = [sampler for sampler in SAMPLERS if sampler not in (*DECISIVE, *skipped)]
    found = []
    for seed in range(min(DATASETS[dataset].seeds, max(preset.baselines, preset.decisive))):
        repeated = DATASETS[dataset].repeated if seed > 0 else None
        if seed < preset.baselines:
            predictions = ("softmax", "absolute") if repeated is None else ("softmax",)
            found += [Point(dataset, FULL, prediction, None, seed) for prediction in predictions]
        if seed < preset.decisive:
            found += [
                point
                for point in _sampled(dataset, DECISIVE, preset, seed)
                if repeated is None or point.negatives in repeated.get(point.sampler, ())
            ]
        if seed == 0:
            found += _sampled(dataset, others, preset, seed)
    return found


def _sampled(dataset: str, samplers: Sequence[str], preset: Preset, seed: int) -> list[Point]:
    return [
        Point(dataset, sampler, "absolute" if sampler in ABSOLUTE else "softmax", number, seed)
        for number in preset.negatives
        for sampler in samplers
    ]


def command(point: Point, preset: str, files: Mapping[str, Path], out: Path) -> list[str]:
    """Return the options of `manyclass train` for a run."""
    dataset = DATASETS[point.dataset]
    options = [*dataset.options.split(), *dataset.presets[preset].split()]
    for option, file in files.items():
        options += [option, str(file)]
    options += ["--sampler", point.sampler, "--prediction", point.prediction]
    if point.sampler == BLOCKS and point.negatives is not None:
        own = min(point.negatives // 2, MOST_OWN)
        options += ["--own", str(own), "--num-samples", str(point.negatives - own)]
    elif point.negatives is not None:
        options += ["--num-samples", str(point.negatives)]
    return [*options, "--seed", str(point.seed), "--threads", "1", "--out", str(out), "--resume"]


def sources(name: str, data: Path | None, out: Path) -> dict[str, Path]:
    """Return the files of a data set, each with its option. Synthetic files are written below ``out``."""
    dataset = DATASETS[name]
    if dataset.made:
        file = out / name / "interactions.txt"
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            items, users, length = dataset.made
            synthesise(file, items=items, users=users, length=length)
        return {"--interactions": file}
    if data is None:
        raise ValueError(f"--data must be the folder with the files of {name}; only --dataset synth needs none")
    return find_files(name, data)


def find_files(name: str, data: Path) -> dict[str, Path]:
    """Find the files of a data set below ``data``, each with its option."""
    return {option: _find(data, name, pattern) for option, pattern in DATASETS[name].files.items()}


def _find(data: Path, dataset: str, pattern: str) -> Path:
    for folder in (data / dataset, data / f"amazon-{dataset}", data):
        found = sorted(folder.glob(pattern))
        if found:
            return found[0]
    raise FileNotFoundError(f"no file {pattern} in {data} or {data / dataset}")


class Job(NamedTuple):
    """Commands of `manyclass` that run one after another."""

    label: str
    #: Gets ``log.txt``, what the commands print.
    folder: Path
    commands: tuple[Sequence[str], ...]
    #: Called after the last command.
    finish: Callable[[], None]


def run_jobs(waiting: Iterable[Job], done: int, limit: int, console: Console) -> None:
    """Run jobs with a progress bar, at most ``limit`` at a time; stop all of them if one fails, or at Ctrl-C.

    ``done`` counts the jobs of earlier calls, for the bar.
    """
    waiting, running = list(waiting), list[tuple[Job, BaseProcess]]()
    columns = ["runs", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.fields[now]}")]
    handler = signal.signal(signal.SIGTERM, signal.default_int_handler)  # else the jobs would outlive this process
    try:
        with Progress(*columns, console=console) as progress:
            bar = progress.add_task("", total=done + len(waiting), completed=done, now="")
            while waiting or running:
                while waiting and len(running) < limit:
                    job = waiting.pop(0)
                    running.append((job, _launch(job)))
                progress.update(bar, now=", ".join(job.label for job, _ in running))
                time.sleep(0.2)
                for job, process in list(running):
                    if process.exitcode is None:
                        continue
                    running.remove((job, process))
                    _check(job, process.exitcode)
                    if len(job.commands) > 1:
                        following = job._replace(commands=job.commands[1:])
                        running.append((following, _launch(following)))
                    else:
                        job.finish()
                        progress.advance(bar)
            progress.update(bar, now="")
    finally:
        for _, process in running:
            process.terminate()
        for _, process in running:
            process.join()
        signal.signal(signal.SIGTERM, handler)


def _launch(job: Job) -> BaseProcess:
    """Start the first command of a job, on one thread.

    It is a fork of a server that has imported torch and run nothing: each import would take seconds of CPU time.
    The server imports no polars, whose threads would not survive the fork.
    """
    log = job.folder / "log.txt"
    job.folder.mkdir(parents=True, exist_ok=True)
    log.touch()  # for `_check`, if the process is killed before it prints
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["manyclass.distributed"])
    process = context.Process(target=_run, args=([*map(str, job.commands[0])], log))
    process.start()
    return process


def _run(arguments: list[str], log: Path) -> None:
    """Be a process of `manyclass` with these arguments, which prints to a file."""
    with log.open("ab") as file:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(file.fileno(), stream.fileno())
    os.environ |= {"OMP_NUM_THREADS": "1", "POLARS_MAX_THREADS": "1"}
    sys.argv = ["manyclass", *arguments]
    main()


def _check(job: Job, code: int) -> None:
    """Raise an error with the last line of the log if a command failed."""
    if code != 0:
        last = (job.folder / "log.txt").read_text("utf-8", errors="replace").strip().splitlines()[-1:]
        raise ValueError(f"the run {job.folder} ended with code {code}: {' '.join(last)}")


def record(preset: str, out: Path) -> Path:
    """Return the file with all finished runs of a preset, from which a sweep resumes, also on another machine."""
    return out / f"reproduce-{preset}.csv"


def sweep(names: Sequence[str], preset: str, data: Path | None, out: Path, jobs: int, console: Console) -> None:
    """Train what the `record` lacks, ``jobs`` runs at a time, one thread each; write it after each run."""
    wanted = _wanted(names, preset)
    with console.status("data"):
        files = {name: sources(name, data, out) for name in names}
    done = {curve.point for curve in read(preset, out)}
    waiting = [point for point in wanted if point not in done]
    queue = [_job(point, preset, files[point.dataset], out) for point in waiting]
    run_jobs(queue, len(wanted) - len(waiting), jobs, console)


def finished(names: Sequence[str], preset: str, out: Path) -> list[Curve]:
    """Return the curves of the runs that are trained to the end, in the order of training."""
    curves = {curve.point: curve for curve in read(preset, out)}
    return [curves[point] for point in _wanted(names, preset) if point in curves]


def _wanted(names: Sequence[str], preset: str) -> list[Point]:
    """List the runs in the order of training: first those that decide, of all data sets; further seeds last."""
    found = [point for name in names for point in points(name, PRESETS[preset])]
    return sorted(found, key=lambda point: (point.seed > 0, point.sampler not in (FULL, *DECISIVE)))


def _job(point: Point, preset: str, files: Mapping[str, Path], out: Path) -> Job:
    folder = out / preset / point.dataset / point.name

    def keep_curve() -> None:
        write([*read(preset, out), Curve(point, read_metrics(folder / "metrics.csv"))], preset, out)
        rmtree(folder)

    label = f"{point.dataset} {point.sampler} {point.negatives or ''}"
    return Job(label, folder, (("train", *command(point, preset, files, folder)),), keep_curve)


def fingerprint(dataset: str, preset: str) -> str:
    """Identify the options of a data set in a preset, so that `check_options` notices others."""
    options = f"{DATASETS[dataset].options} {DATASETS[dataset].presets[preset]}"
    return hashlib.sha256(options.encode()).hexdigest()[:8]


def check_options(file: Path, dataset: str, preset: str, found: str | None) -> None:
    """Raise an error if a line of a record is of runs whose options differ from those that a preset has now."""
    if found != fingerprint(dataset, preset):
        raise ValueError(
            f"{file} has runs of {dataset} with other options than --preset {preset} has now; give another --out"
        )


def write(curves: Iterable[Curve], preset: str, out: Path) -> None:
    """Write all curves to the `record`."""
    rows = [
        (*point, fingerprint(point.dataset, preset), int(row.step), f"{row.epoch:.5f}", f"{row.heldout_loss:.5f}")
        for point, rows in curves
        for row in rows
    ]
    with replacing(record(preset, out)) as temporary:
        write_csv(temporary, HEADER, rows)


def read(preset: str, out: Path) -> list[Curve]:
    """Read the curves that `write` wrote; none if there is no record."""
    file, found = record(preset, out), dict[Point, list[Metrics]]()
    if not file.exists():
        return []
    with file.open(newline="") as handle:
        for row in csv.DictReader(handle):
            point = Point.of(row)
            check_options(file, point.dataset, preset, row.get("options"))
            epoch, loss = float(row["epoch"]), float(row["heldout_loss"])
            found.setdefault(point, []).append(
                Metrics(int(row["step"]), epoch, 0.0, 0.0, 0.0, loss, None, point.negatives)
            )
    return [Curve(point, rows) for point, rows in found.items()]
