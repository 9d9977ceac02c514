"""`manyclass compare`: all methods side by side."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from .options import Out, start


def compare(
    data: Annotated[
        Path | None, typer.Option(help="Folder with the data sets except synth; not needed for finished runs.")
    ] = None,
    preset: Annotated[
        Literal["quick", "full"], typer.Option(help="quick: 60 to 100 steps; full: the paper's epochs, for days.")
    ] = "quick",
    dataset: Annotated[
        list[str] | None, typer.Option(metavar="ptb|diginetica|synth", help="Repeatable; default: all.")
    ] = None,
    method: Annotated[
        list[str] | None, typer.Option(help="Repeatable; default: all but `fourier`, which is slow.")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each method, with the seeds 0, 1, …")] = 1,
    jobs: Annotated[int, typer.Option(min=1, help="Runs at a time. More than one disturb each other's times.")] = 1,
    out: Out = Path("out/compare"),
    only_report: Annotated[
        bool, typer.Option("--only-report", help="Do not train; report the results so far.")
    ] = False,
) -> None:
    """Train every sampler and loss on the same data, and compare quality, time, memory and bias.

    Repeat the command to resume: runs that are in comparison.csv are not trained again.
    """
    from .. import checks
    from ..experiments import comparison, comparison_report

    console = start(out, None)
    names = [checks.one_of("--dataset", name, comparison.DATASETS) for name in dataset or comparison.DATASETS]
    usual = [name for name in comparison.METHODS if name not in comparison.SLOW]
    methods = [checks.one_of("--method", name, tuple(comparison.METHODS)) for name in method or usual]
    trials = [comparison.Trial(preset, name, each, seed) for seed in range(seeds) for each in methods for name in names]
    if not only_report:
        comparison.sweep(trials, data, out, jobs, console)
    comparison_report.summarise(preset, names, out, console)
