"""The command line. Nothing heavy is imported before a command runs."""

import dataclasses
import inspect
import json
import math
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from .settings import ClassifySettings, LanguageSettings, NextItemSettings, Settings, panel

app = typer.Typer(
    invoke_without_command=True,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
train = typer.Typer(help="Train a model from your files; the run's folder holds all of it.", no_args_is_help=True)
bench = typer.Typer(help="Measure speed: alternatives side by side in one run, as ratios.", no_args_is_help=True)
app.add_typer(train, name="train")
app.add_typer(bench, name="bench")

Out = Annotated[Path, typer.Option(help="Folder for figures and plots; made if it is missing.")]
Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads; default: what torch chooses.")]
Seed = Annotated[int, typer.Option(help="Seed of the weights and the draws.")]
RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run, the --out of `manyclass train`.")]


def _start(out: Path, threads: int | None) -> Console:
    from .console import start

    out.mkdir(parents=True, exist_ok=True)  # first, so that a bad path does not cost the work
    return start(threads)


def _perplexity(loss: float) -> str:
    return f"{math.exp(loss):.1f}" if loss < 50 else "beyond all bounds"


def _train_command(name: str, kind: type[Settings]) -> None:
    """Make ``manyclass train NAME``: every field of its settings is an option."""

    def command(**options: Any) -> None:
        from . import console as show
        from . import processes

        settings = kind(**options)
        settings.resume = settings.resume or processes.restarted()
        joined = processes.join(settings.timeout)
        console = show.start(settings.threads, joined)
        task = show.prepare(name, settings, console, joined)
        console.print(
            f"{task.num_classes:,} classes; {task.train_examples:,} training and {task.heldout_examples:,} held-out "
            f"examples; {task.steps_per_epoch:,} steps per epoch",
            soft_wrap=True,
        )
        with show.progress_bars(console) as progress:
            rows, stopped = show.train(task, progress, settings.sampler)
        last = rows[-1]
        perplexity = f", perplexity {_perplexity(last.heldout_loss)}" if name == "lm" else ""
        console.print(
            f"evaluated at step {last.step}: held-out loss {last.heldout_loss:.4f} nats{perplexity}", soft_wrap=True
        )
        if stopped:
            console.print("stopped; give the same command with --resume to go on")
            raise typer.Exit(130)
        console.print(f"next: manyclass evaluate {settings.out}  or  manyclass predict {settings.out}", soft_wrap=True)

    keyword = inspect.Parameter.KEYWORD_ONLY
    fields = sorted(dataclasses.fields(kind), key=panel)
    parameters = [
        inspect.Parameter(
            field.name,
            keyword,
            annotation=field.type,
            default=inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default,
        )
        for field in fields
    ]
    command.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportFunctionMemberAccess]
    command.__annotations__ = {field.name: field.type for field in fields}
    command.__doc__ = kind.__doc__
    train.command(name)(command)


_train_command("lm", LanguageSettings)
_train_command("next-item", NextItemSettings)
_train_command("classify", ClassifySettings)


@app.callback()
def main(
    version: Annotated[bool, typer.Option("--version", help="Show the version and stop.")] = False,
) -> None:
    """Train a softmax over thousands to millions of classes by adaptive, kernel based sampling."""
    if version:
        from importlib.metadata import version as installed

        print(f"manyclass {installed('manyclass')}")
        raise typer.Exit


@app.command()
def evaluate(
    run: RunFolder,
    k: Annotated[list[int] | None, typer.Option(min=1, help="Cut-offs of the ranking measures.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Held-out examples; default: all.")] = None,
    probe: Annotated[
        int | None,
        typer.Option(min=1, help="Rank through this many blocks per query, for runs of `blocks`; default: exactly."),
    ] = None,
    threads: Threads = None,
) -> None:
    """Exact loss, recall, precision, MRR and NDCG over all classes, on the held-out data of a run; never sampled.

    With --probe the ranking measures are approximate and faster. The loss stays exact.
    """
    from rich.table import Table

    from . import training
    from .run import Run

    folder = Run(run)
    folder.config()
    console = _start(run, threads)
    with console.status("evaluating"):
        model, task, step = training.load(folder)
        found = training.evaluate(model, task, limit, tuple(k or (1, 5, 10)), probe)
    if task.recurrent:
        loss = found.pop("loss")
        found = {"loss": loss, "perplexity": math.exp(min(loss, 700)), **found}
    examples = min(limit or task.heldout_examples, task.heldout_examples)
    approximate = {} if probe is None else {"probe": probe}
    folder.write_json("evaluation.json", {"step": step, "examples": examples, **approximate, **found})
    what = f"{run}, step {step}: {examples:,} held-out examples, all {task.num_classes:,} classes"
    console.print(what, soft_wrap=True)
    if probe is not None:
        console.print(f"ranking through {probe:,} blocks per query: approximate; the loss is exact", soft_wrap=True)
    table = Table()
    table.add_column("measure")
    table.add_column("value", justify="right")
    for name, value in found.items():
        table.add_row(name, f"{value:.4f}")
    console.print(table)


@app.command()
def predict(
    run: RunFolder,
    queries: Annotated[
        list[str] | None,
        typer.Argument(help="Text, items of a history, or feature:value pairs; default: lines of the standard input."),
    ] = None,
    k: Annotated[int, typer.Option(min=1, help="Predictions for each.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="One line of json for each, for programs.")] = False,
) -> None:
    """The k most probable classes for texts, histories or documents, over all classes."""
    import torch

    from . import training
    from .run import Run

    model, task, _ = training.load(Run(run))
    for number, line in enumerate(queries or sys.stdin, 1):
        try:
            batch = task.encode(line.strip())
        except ValueError as error:
            raise ValueError(f"query {number}: {error}") from error
        with torch.no_grad():
            values, ids = model.head.topk(model.hidden(batch)[0][:, -1], min(k, task.num_classes))
        found = [
            (task.vocabulary.names[index], math.exp(value))
            for index, value in zip(ids[0].tolist(), values[0].tolist(), strict=True)
        ]
        if as_json:
            print(json.dumps({"query": line.strip(), "predictions": [{"class": c, "p": p} for c, p in found]}))
        else:
            print(line.strip())
            print("".join(f"  {p:8.4f}  {name}\n" for name, p in found), end="")


@app.command()
def export(
    run: RunFolder,
    to: Annotated[Literal["npy", "faiss", "safetensors"], typer.Option(help="Format.")] = "npy",
    out: Annotated[Path | None, typer.Option(help="Folder; default: RUN/export.")] = None,
) -> None:
    """Write the class embeddings and their names, to search or serve them elsewhere."""
    from . import export, training
    from .run import Run

    model, task, _ = training.load(Run(run))
    target = out or run / "export"
    target.mkdir(parents=True, exist_ok=True)
    head = model.head
    for file in export.export(head.weight.detach(), head.bias, task.vocabulary.names, head.prediction, to, target):
        print(file)


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs.")],
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("report.html"),
) -> None:
    """Compare runs on one page that needs nothing else: curves, tables, settings."""
    from . import report

    found = [report.load(run) for run in runs]
    Console().print(report.table(found))
    report.write(found, out)
    print(f"page: {out}")


@app.command()
def synth(
    out: Annotated[Path, typer.Argument(help="File: .csv, .tsv, .parquet, .jsonl, or .txt with a sequence per line.")],
    items: Annotated[int, typer.Option(min=2, max=10_000_000, help="Classes.")] = 100_000,
    users: Annotated[int, typer.Option(min=1, help="Users.")] = 50_000,
    length: Annotated[int, typer.Option(min=2, help="Interactions of each user.")] = 20,
    seed: Seed = 0,
) -> None:
    """Write interactions of a latent-factor model with Zipf popularity, to try everything at scale without data."""
    from rich.progress import Progress

    from .data.synth import synthesise

    with Progress(transient=True) as progress:
        bar = progress.add_task("interactions", total=users * length)
        synthesise(
            out, items=items, users=users, length=length, seed=seed, advance=lambda done: progress.advance(bar, done)
        )
    print(f"{users * length:,} interactions of {users:,} users with up to {items:,} items: {out}")
    print(f"next: manyclass train next-item --interactions {out}")


@app.command()
def demo(
    steps: Annotated[int, typer.Option(min=6, help="Training steps of each run.")] = 200,
    out: Out = Path("out"),
    seed: Seed = 0,
    threads: Threads = None,
) -> None:
    """Train a language model on the Python standard library's sources: full softmax against sampled softmax."""
    from . import demo

    demo.run(steps, out, seed, _start(out, threads))


@bench.command()
def bias(
    text: Annotated[
        list[Path] | None, typer.Option(help="Text files to train on; default: the Python standard library's sources.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Training steps of the language model.")] = 400,
    epochs: Annotated[float, typer.Option(min=0.0, help="Epochs of the recommender, on synthetic sessions.")] = 6.0,
    out: Out = Path("out"),
    seed: Annotated[int, typer.Option(help="Seed of the data, the weights and the order of batches.")] = 0,
    threads: Threads = None,
) -> None:
    """Error of every sampler on two trained models, against what it costs. About 20 minutes."""
    from .bench import bias

    bias.run(out, _start(out, threads), text, steps, epochs, seed)


@bench.command()
def distributed(
    classes: Annotated[int, typer.Option(min=64, help="Classes of all processes together.")] = 1_000_000,
    processes: Annotated[list[int] | None, typer.Option(min=1, help="Repeatable; default: 1, 2 and 4.")] = None,
    out: Out = Path("out"),
) -> None:
    """Steps of the sharded layer on some processes: time, bytes exchanged, memory; and on paper for 64 machines."""
    from .bench import distributed

    distributed.run(out, _start(out, None), classes, processes or [1, 2, 4])


@bench.command()
def draws(out: Out = Path("out"), threads: Threads = None) -> None:
    """Draws from class counts: the native alias kernel against its reference and against torch."""
    from .bench import draws

    draws.run(out, _start(out, threads))


@bench.command()
def optim(
    classes: Annotated[int, typer.Option(min=1000, help="Number of classes.")] = 1_000_000,
    out: Out = Path("out"),
    threads: Threads = None,
) -> None:
    """Whole training steps of the default layer with every optimiser, against sparse SGD. About 2 minutes."""
    from .bench import optim

    optim.run(out, _start(out, threads), classes)


@bench.command()
def stalls(
    classes: Annotated[int, typer.Option(min=1000, help="Number of classes.")] = 5_000_000,
    steps: Annotated[int, typer.Option(min=2, help="Timed steps, spread over the growth of a tree.")] = 300,
    out: Out = Path("out"),
    threads: Threads = None,
) -> None:
    """The slowest training step of blocks, while it replaces its tree. About 3 minutes."""
    from .bench import stalls

    stalls.run(out, _start(out, threads), classes, steps)


@bench.command()
def retrieval(
    classes: Annotated[
        list[int] | None, typer.Option(min=2000, help="Repeatable; default: 100,000 and 1,000,000.")
    ] = None,
    features: Annotated[int, typer.Option(min=1, help="Size of the class embeddings.")] = 64,
    queries: Annotated[int, typer.Option(min=1, help="Queries in one call.")] = 1000,
    out: Out = Path("out"),
    seed: Seed = 0,
    threads: Threads = None,
) -> None:
    """Recall against time per query: the tree that training leaves, exact search, and faiss."""
    from .bench import retrieval

    console = _start(out, threads)
    retrieval.run(out, console, classes or [100_000, 1_000_000], features, queries, seed)


@bench.command()
def step(out: Out = Path("out"), threads: Threads = None) -> None:
    """Whole training steps of every output layer from 10⁴ to 8·10⁶ classes, and a profile. About 10 minutes."""
    from .bench import step

    step.run(out, _start(out, threads))


@bench.command()
def tree(out: Out = Path("out"), threads: Threads = None) -> None:
    """The kernel tree against dense kernel sampling, uniform sampling and the full softmax. About 5 minutes."""
    from .bench import tree

    tree.run(out, _start(out, threads))


reproduce = typer.Typer(help="The paper's experiments, each figure with one command.", no_args_is_help=True)
app.add_typer(reproduce, name="reproduce")

DatasetNames = Annotated[
    list[str] | None,
    typer.Option(metavar="ptb|beauty|diginetica|synth", help="Repeatable; default: all. synth is made on the spot."),
]
Data = Annotated[
    Path | None,
    typer.Option(help="Folder with the data sets but synth, one folder each: docs/reproduction.md says where from."),
]
PresetName = Annotated[
    Literal["quick", "paper"], typer.Option(help="quick: under 90 minutes on 2 cores for everything; paper: days.")
]
Jobs = Annotated[int | None, typer.Option(min=1, help="Runs at a time, of one thread each; default: one per core.")]


def _reproduce_command(figure: str, help: str) -> None:
    """Make ``manyclass reproduce FIGURE``."""

    def command(
        data: Data = None,
        dataset: DatasetNames = None,
        preset: PresetName = "quick",
        out: Out = Path("out/reproduce"),
        jobs: Jobs = None,
    ) -> None:
        import os

        from . import checks, figures
        from . import reproduce as experiments

        console = _start(out, None)
        known = tuple(experiments.DATASETS)
        names = [checks.one_of("--dataset", name, known) for name in dataset or known]
        curves = experiments.sweep(names, preset, data, out / preset, jobs or os.cpu_count() or 1, console)
        experiments.write(curves, out / "reproduce.csv")
        for file in figures.draw(figure, curves, out, experiments.PRESETS[preset].note):
            console.print(str(file), soft_wrap=True)

    reproduce.command(
        figure, help=f"{help} All figures are drawn from the same runs; what is trained is not trained again."
    )(command)


_reproduce_command("bias", "Final quality against the number of negatives, for every sampler (Figure 2).")
_reproduce_command(
    "samples", "Convergence for varying numbers of negatives, against epochs and time (Figures 3, 5, 6)."
)
_reproduce_command(
    "distributions", "Convergence of the samplers at fixed numbers, against epochs and time (Figures 4, 7)."
)


@reproduce.command()
def quality(
    data: Annotated[
        Path | None, typer.Option(help="Folder with the data sets, one folder each; not needed for finished runs.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the runs, the table and the figure.")] = Path("out/quality"),
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each sampler, with the seeds 0, 1, …")] = 3,
    jobs: Jobs = None,
    datasets: Annotated[
        list[str] | None, typer.Option(metavar="diginetica|beauty", help="Repeatable; default: both.")
    ] = None,
    optimizers: Annotated[
        list[str] | None, typer.Option(metavar="adagrad|adam", help="Repeatable; default: both.")
    ] = None,
    only_report: Annotated[
        bool, typer.Option("--only-report", help="Train nothing; report the finished runs.")
    ] = False,
) -> None:
    """Train to the end with the full softmax, blocks and a uniform pool, and compare loss, Recall@20 and time.

    Takes hours. Give the same command again to resume: finished runs in OUT/runs are not trained again.
    """
    import os

    from . import checks
    from . import quality as comparison

    console = _start(out, None)
    names = [checks.one_of("--datasets", name, tuple(comparison.DATASETS)) for name in datasets or comparison.DATASETS]
    chosen = [
        checks.one_of("--optimizers", name, tuple(comparison.OPTIMIZERS))
        for name in optimizers or comparison.OPTIMIZERS
    ]
    if not only_report:
        wanted = comparison.trials(names, chosen, seeds)
        comparison.sweep(wanted, data, out, jobs or os.cpu_count() or 1, console)
    comparison.summarise(names, chosen, seeds, out, console)
