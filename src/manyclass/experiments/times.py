"""How long the paper's experiments train: CPU time per step of every sampler, measured in turns on one machine.

The runs of a sweep may be from several machines, so their own times do not compare.
"""

import csv
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from shutil import rmtree

from rich.console import Console

from ..bench.timing import write_csv
from ..train.atomic import replacing
from ..train.run import read_metrics
from .reproduce import (
    BLOCKS,
    PRESETS,
    Curve,
    Job,
    Point,
    check_options,
    command,
    fingerprint,
    points,
    run_jobs,
    sources,
)

#: Rounds in which all take turns, and steps of each run, of which the second half counts; the best round is kept.
ROUNDS, STEPS = 3, 60
HEADER = ("dataset", "sampler", "prediction", "negatives", "options", "milliseconds")

#: Milliseconds per step of runs, which are written with the seed 0.
Times = dict[Point, float]


def record(preset: str, out: Path) -> Path:
    """Return the file with the times of a preset."""
    return out / f"reproduce-{preset}-times.csv"


def measure(names: Sequence[str], preset: str, data: Path | None, out: Path, console: Console) -> None:
    """Time the runs of the first seed, one at a time, and write the `record`.

    All begin with the weights at the end of the run of blocks with the most negatives, since the time of a step
    can depend on how far the training is. An interrupted measurement of a data set begins again.
    """
    with console.status("data"):
        files = {name: sources(name, data, out) for name in names}
    for name in names:
        wanted = [point for point in points(name, PRESETS[preset]) if point.seed == 0]
        folder, found = out / "times" / preset / name, Times()
        last = max((point for point in wanted if point.sampler == BLOCKS), key=lambda point: point.negatives or 0)
        start = folder / "start"
        jobs = [Job(f"{name}: training", start, (("train", *command(last, preset, files[name], start)),), lambda: None)]
        short = f"--init {start} --steps {STEPS} --evaluations 2 --eval-examples 1".split()
        for _ in range(ROUNDS):
            for point in wanted:
                own = folder / point.name
                arguments = ("train", *command(point, preset, files[name], own), *short)
                jobs.append(Job(f"{name} {point.sampler}", own, (arguments,), _keep(point, own, found)))
        run_jobs(jobs, 0, 1, console)
        known = {point: value for point, value in read(preset, out).items() if point.dataset != name}
        write({**known, **found}, preset, out)


def _keep(point: Point, folder: Path, found: Times):
    def keep_time() -> None:
        half, end = read_metrics(folder / "metrics.csv")[-2:]
        milliseconds = 1e3 * ((end.cpu_seconds or 0.0) - (half.cpu_seconds or 0.0)) / (end.step - half.step)
        found[point] = min(milliseconds, found.get(point, milliseconds))
        rmtree(folder)

    return keep_time


def write(times: Mapping[Point, float], preset: str, out: Path) -> None:
    """Write the `record`."""
    rows = [(*point[:4], fingerprint(point.dataset, preset), f"{value:.2f}") for point, value in times.items()]
    with replacing(record(preset, out)) as temporary:
        write_csv(temporary, HEADER, rows)


def read(preset: str, out: Path) -> Times:
    """Read the times that `write` wrote; none if there is no record."""
    file, found = record(preset, out), Times()
    if not file.exists():
        return found
    with file.open(newline="") as handle:
        for row in csv.DictReader(handle):
            check_options(file, row["dataset"], preset, row.get("options"))
            found[Point.of(row)] = float(row["milliseconds"])
    return found


def timed(curves: Iterable[Curve], times: Times) -> list[Curve]:
    """Give each evaluation the training time until it, where that is known."""
    found = []
    for curve in curves:
        each = times.get(curve.point._replace(seed=0))
        rows = [row._replace(cpu_seconds=None if each is None else 1e-3 * each * row.step) for row in curve.rows]
        found.append(Curve(curve.point, rows))
    return found
