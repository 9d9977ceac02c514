"""The paper's experiments (Section 4 and its appendix): a sweep of `manyclass train`, and figures of it."""

import csv
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from shutil import rmtree
from typing import NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from .atomic import replacing
from .bench.timing import write_csv
from .data.synth import synthesise
from .run import Metrics

FULL = "full"
SAMPLERS = ("uniform", "unigram", "bigram", "quadratic", "quartic", "softmax")
#: Numbers of negatives of the figures at a fixed m.
FIXED = (10, 40, 160)
#: The symmetric kernels, which the paper trains with the absolute softmax.
ABSOLUTE = ("quadratic", "quartic")
POOLED = "blocks, pool"
NEXT_ITEM = "next-item --model feed-forward --features 64 --dropout 0 --lr 0.05 --batch"


class Dataset(NamedTuple):
    """What to train on, and how."""

    title: str
    #: Files that the user brings, each with a name of an option and a pattern below --data.
    files: dict[str, str]
    #: Options of `manyclass train` in both presets, …
    options: str
    #: … and in each of them.
    presets: dict[str, str]
    perplexity: bool = False
    #: Samplers that a quick sweep leaves out: D is larger than n, so they score all classes for each example.
    slow: tuple[str, ...] = ()
    #: Instead of files: items, users and interactions of each, to be made as by `manyclass synth`.
    made: tuple[int, int, int] | None = None


DATASETS = {
    "ptb": Dataset(
        "Penn Tree Bank, 10k words",
        {"--text": "ptb.train.txt*", "--heldout": "ptb.valid.txt*"},
        "lm --split blanks --min-count 1 --features 200 --layers 2 --batch 20 --length 35 --optimizer sgd",
        {
            # The TensorFlow tutorial sums the loss over 35 words and takes lr 1 and norm 5; ours is a mean.
            "paper": "--lr 35 --clip 0.143 --schedule exponential --epochs 39 --dropout 0.5 --evaluations 39 "
            "--eval-examples 80000",
            # The paper's schedule would be done with learning before a short run has begun.
            "quick": "--lr 20 --clip 0.25 --schedule linear --steps 800 --eval-examples 5000",
        },
        perplexity=True,
    ),
    "beauty": Dataset(
        "Amazon Beauty, 12k items",
        {"--interactions": "sequences.txt*"},
        f"{NEXT_ITEM} 256 --user-first",
        {"paper": "--epochs 39 --evaluations 39 --eval-examples 30000", "quick": "--steps 800 --eval-examples 5000"},
    ),
    "diginetica": Dataset(
        "Diginetica, 43k items",
        {"--interactions": "train.txt*", "--heldout": "test.txt*"},
        f"{NEXT_ITEM} 512",
        {
            "paper": "--epochs 39 --evaluations 39 --eval-examples 60000",
            "quick": "--steps 500 --evaluations 6 --eval-examples 3000",
        },
        slow=("quartic",),
    ),
    "synth": Dataset(
        "Synthetic, 82k items",
        {},
        f"{NEXT_ITEM} 256",
        {
            "paper": "--epochs 39 --evaluations 39 --eval-examples 50000",
            "quick": "--steps 250 --evaluations 6 --eval-examples 3000",
        },
        slow=("quartic",),
        made=(100_000, 50_000, 20),
    ),
}


class Preset(NamedTuple):
    """How much of it."""

    negatives: tuple[int, ...]
    #: Of the pool of blocks, which the batch shares.
    pools: tuple[int, ...]
    #: Runs of each sampler, and of the full softmax, whose spread tells what is noise.
    seeds: int
    baselines: int
    #: Whether slow samplers are left out.
    hurry: bool
    note: str


PRESETS = {
    "paper": Preset((10, 20, 40, 80, 160, 320, 640, 1280), (640, 1280, 2560, 5120), 1, 3, False, "the paper's setting"),
    "quick": Preset(
        (10, 40, 160, 640),
        (640, 2560),
        1,
        2,
        True,
        "quick preset: few steps, few m, no dropout, a part of the held-out data, quartic on small sets only; "
        "the paper trains to convergence",
    ),
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
        kind = self.sampler.replace(", ", "-")
        return f"{kind}-{self.prediction}-{self.negatives or 'all'}-{self.seed}"


class Curve(NamedTuple):
    """A run that is done."""

    point: Point
    rows: list[Metrics]


def points(dataset: str, preset: Preset) -> list[Point]:
    """All runs that the figures of a data set are made of."""
    found = [
        Point(dataset, FULL, prediction, None, seed)
        for prediction in ("softmax", "absolute")
        for seed in range(preset.baselines)
    ]
    for sampler in (*SAMPLERS, "blocks", POOLED):
        if preset.hurry and sampler in DATASETS[dataset].slow:
            continue
        prediction = "absolute" if sampler in ABSOLUTE else "softmax"
        numbers = preset.pools if sampler == POOLED else preset.negatives
        found += [Point(dataset, sampler, prediction, m, seed) for m in numbers for seed in range(preset.seeds)]
    return found


def command(point: Point, preset: str, files: Mapping[str, Path], out: Path) -> list[str]:
    """The options of `manyclass train` for a run."""
    dataset = DATASETS[point.dataset]
    options = [*dataset.options.split(), *dataset.presets[preset].split()]
    for option, file in files.items():
        options += [option, str(file)]
    options += ["--sampler", point.sampler.split(",")[0], "--prediction", point.prediction]
    if point.negatives is not None:
        options += ["--num-samples", str(point.negatives)]
    if point.sampler == "blocks":
        options += ["--scope", "example"]
    return [*options, "--seed", str(point.seed), "--threads", "1", "--out", str(out), "--resume"]


def sources(name: str, data: Path | None, out: Path) -> dict[str, Path]:
    """The files of a data set, each with its option: found below ``data``, or made below ``out``."""
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
    return {option: _find(data, name, pattern) for option, pattern in dataset.files.items()}


def _find(data: Path, dataset: str, pattern: str) -> Path:
    for folder in (data / dataset, data / f"amazon-{dataset}", data):
        found = sorted(folder.glob(pattern))
        if found:
            return found[0]
    raise FileNotFoundError(f"no file {pattern} in {data} or {data / dataset}")


def sweep(names: Sequence[str], preset: str, data: Path | None, out: Path, jobs: int, console: Console) -> list[Curve]:
    """Train what is not trained yet, ``jobs`` runs at a time, one thread each; returns all curves."""
    waiting = [point for name in names for point in points(name, PRESETS[preset])]
    with console.status("data"):
        files = {name: sources(name, data, out) for name in names}
    total = len(waiting)
    done = [point for point in waiting if _result(out, point).exists()]
    waiting = [point for point in waiting if point not in done]
    running: dict[Point, subprocess.Popen[bytes]] = {}
    columns = ["runs", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.fields[now]}")]
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that nothing goes on training alone
    try:
        with Progress(*columns, console=console) as progress:
            bar = progress.add_task("", total=total, completed=len(done), now="")
            while waiting or running:
                while waiting and len(running) < jobs:
                    point = waiting.pop(0)
                    running[point] = _launch(point, preset, files[point.dataset], out)
                for point, process in list(running.items()):
                    if process.poll() is not None:
                        del running[point]
                        _collect(point, process.returncode, out)
                        progress.advance(bar)
                now = ", ".join(f"{point.dataset} {point.sampler} {point.negatives or ''}" for point in running)
                progress.update(bar, now=now)
                time.sleep(0.2)
    finally:
        for process in running.values():
            process.terminate()
        for process in running.values():
            process.wait()
    return [Curve(point, _read(_result(out, point))) for name in names for point in points(name, PRESETS[preset])]


def _folder(out: Path, point: Point) -> Path:
    return out / point.dataset / point.name


def _result(out: Path, point: Point) -> Path:
    return out / point.dataset / f"{point.name}.csv"


def _launch(point: Point, preset: str, files: Mapping[str, Path], out: Path) -> "subprocess.Popen[bytes]":
    folder = _folder(out, point)
    folder.mkdir(parents=True, exist_ok=True)
    arguments = [sys.executable, "-m", "manyclass", "train", *command(point, preset, files, folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "POLARS_MAX_THREADS": "1"}
    with (folder / "log.txt").open("wb") as log:
        return subprocess.Popen(arguments, stdout=log, stderr=subprocess.STDOUT, env=environment)


def _collect(point: Point, code: int, out: Path) -> None:
    """Keep the curve of a run that has ended, and drop the rest of its folder."""
    folder = _folder(out, point)
    if code != 0:
        last = (folder / "log.txt").read_text("utf-8", errors="replace").strip().splitlines()[-1:]
        raise ValueError(f"the run {folder} ended with code {code}: {' '.join(last)}")
    with replacing(_result(out, point)) as file:
        file.write_bytes((folder / "metrics.csv").read_bytes())
    rmtree(folder)


def _read(file: Path) -> list[Metrics]:
    with file.open(newline="") as handle:
        return [
            Metrics(*(float(row[name]) if row[name] else None for name in Metrics._fields))  # pyright: ignore
            for row in csv.DictReader(handle)
        ]


def write(curves: Iterable[Curve], file: Path) -> None:
    """All curves as one table."""
    header = ("dataset", "sampler", "prediction", "negatives", "seed", "step", "epoch", "seconds", "heldout_loss")
    rows = [
        (*point, int(row.step), f"{row.epoch:.4f}", f"{row.seconds:.2f}", f"{row.heldout_loss:.5f}")
        for point, rows in curves
        for row in rows
    ]
    write_csv(file, header, rows)


def read(file: Path) -> list[Curve]:
    """The curves that `write` wrote, to draw them again."""
    found: dict[Point, list[Metrics]] = {}
    with file.open(newline="") as handle:
        for row in csv.DictReader(handle):
            number = int(row["negatives"]) if row["negatives"] else None
            point = Point(row["dataset"], row["sampler"], row["prediction"], number, int(row["seed"]))
            step, epoch, seconds, loss = (float(row[name]) for name in ("step", "epoch", "seconds", "heldout_loss"))
            found.setdefault(point, []).append(Metrics(int(step), epoch, seconds, 0.0, 0.0, loss, None, number))
    return [Curve(point, rows) for point, rows in found.items()]
