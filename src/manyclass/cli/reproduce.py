"""`manyclass reproduce`: the paper's figures, and the comparison of complete trainings."""

import os
from pathlib import Path
from typing import Annotated, Literal

import typer

from .options import Out, start

app = typer.Typer(help="The paper's experiments, each figure with one command.", no_args_is_help=True)

DatasetNames = Annotated[
    list[str] | None,
    typer.Option(metavar="ptb|beauty|diginetica|synth", help="Repeatable; default: all that the preset has."),
]
Data = Annotated[
    Path | None,
    typer.Option(help="Folder with the data sets except synth, one folder each; see docs/reproduction.md."),
]
PresetName = Annotated[
    Literal["quick", "converged", "paper"],
    typer.Option(help="quick: a smoke test; converged: SGD to the end, for many hours; paper: its setting, for days."),
]
OnlyReport = Annotated[bool, typer.Option("--only-report", help="Do not train; report the finished runs.")]
Jobs = Annotated[int | None, typer.Option(min=1, help="Runs at a time, of one thread each; default: one per core.")]


def _reproduce_command(figure: str, help: str) -> None:
    """Make ``manyclass reproduce FIGURE``."""

    def command(
        data: Data = None,
        dataset: DatasetNames = None,
        preset: PresetName = "quick",
        out: Out = Path("out/reproduce"),
        jobs: Jobs = None,
        only_report: OnlyReport = False,
    ) -> None:
        from ..experiments import figures, times
        from ..experiments import reproduce as experiments

        console = start(out, None)
        names = _names(dataset, preset)
        if not only_report:
            experiments.sweep(names, preset, data, out, jobs or os.cpu_count() or 1, console)
        curves = times.timed(experiments.finished(names, preset, out), times.read(preset, out))
        for file in figures.draw(figure, curves, out, experiments.PRESETS[preset].note):
            console.print(str(file), soft_wrap=True)

    app.command(figure, help=f"{help} All figures use the same runs, and finished runs are not trained again.")(command)


def _names(wanted: list[str] | None, preset: str) -> list[str]:
    from .. import checks
    from ..experiments.reproduce import DATASETS

    known = tuple(name for name, each in DATASETS.items() if preset in each.presets)
    return [checks.one_of("--dataset", name, known) for name in wanted or known]


_reproduce_command("bias", "Final quality against the number of negatives, for every sampler (Figure 2).")
_reproduce_command(
    "samples", "Convergence for varying numbers of negatives, against epochs and, after times, time (Figures 3, 5, 6)."
)
_reproduce_command(
    "distributions",
    "Convergence of the samplers at fixed numbers, against epochs and, after times, time (Figures 4, 7).",
)


@app.command()
def times(
    data: Data = None,
    dataset: DatasetNames = None,
    preset: PresetName = "quick",
    out: Out = Path("out/reproduce"),
) -> None:
    """Time a training step of every sampler, for the figures against time.

    Use a machine that does nothing else. The runs of the other commands may be from several machines.
    """
    from ..experiments import times as experiment

    console = start(out, None)
    experiment.measure(_names(dataset, preset), preset, data, out, console)
    console.print(str(experiment.record(preset, out)), soft_wrap=True)


@app.command()
def quality(
    data: Annotated[
        Path | None, typer.Option(help="Folder with the data sets, one folder each; not needed for finished runs.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the runs, the table and the figure.")] = Path("out/quality"),
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each sampler, with the seeds 0, 1, …")] = 3,
    jobs: Jobs = None,
    datasets: Annotated[
        list[str] | None, typer.Option(metavar="diginetica|beauty|ptb", help="Repeatable; default: all.")
    ] = None,
    optimizers: Annotated[
        list[str] | None, typer.Option(metavar="adagrad|adam|adamw", help="Repeatable; default: all.")
    ] = None,
    samplers: Annotated[
        list[str] | None,
        typer.Option(metavar="blocks|uniform", help="To compare with the full softmax. Repeatable; default: both."),
    ] = None,
    only_report: OnlyReport = False,
) -> None:
    """Train to the end with the full softmax, blocks and a uniform pool, and compare loss, Recall@20 and time.

    Takes hours. Repeat the command to resume: finished runs in OUT/runs are not trained again.
    """
    from .. import checks
    from ..experiments import quality as comparison

    console = start(out, None)
    names = [checks.one_of("--datasets", name, tuple(comparison.DATASETS)) for name in datasets or comparison.DATASETS]
    chosen = [
        checks.one_of("--optimizers", name, comparison.OPTIMIZERS) for name in optimizers or comparison.OPTIMIZERS
    ]
    sampled = tuple(comparison.SAMPLERS)[1:]
    heads = [comparison.FULL, *(checks.one_of("--samplers", name, sampled) for name in samplers or sampled)]
    if not only_report:
        wanted = comparison.trials(names, chosen, heads, seeds)
        comparison.sweep(wanted, data, out, jobs or os.cpu_count() or 1, console)
    comparison.summarise(names, chosen, heads, seeds, out, console)


@app.command()
def pace(
    data: Annotated[
        Path | None, typer.Option(help="Folder with the texts, one folder each; not needed for python.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the runs, the table and the figure.")] = Path("out/pace"),
    dataset: Annotated[
        list[str] | None, typer.Option(metavar="python|text8|linux", help="Repeatable; default: text8 and linux.")
    ] = None,
    method: Annotated[
        list[str] | None, typer.Option(help="Repeatable; default: full, blocks, unigram pool, adaptive, in_batch.")
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Steps of the full softmax; default: an hour or so. Others take more.")
    ] = None,
    only_report: OnlyReport = False,
) -> None:
    """Time to quality: how many times faster each method reaches the lowest loss of the full softmax.

    Give the same command again to resume. `--dataset python` is small and needs no files.
    """
    from .. import checks
    from ..experiments import pace as experiment

    console = start(out, None)
    names = [checks.one_of("--dataset", name, tuple(experiment.DATASETS)) for name in dataset or ("text8", "linux")]
    methods = [checks.one_of("--method", name, tuple(experiment.METHODS)) for name in method or experiment.METHODS]
    if not only_report:
        experiment.sweep(names, methods, data, out, steps, console)
    experiment.summarise(names, steps, out, console)
