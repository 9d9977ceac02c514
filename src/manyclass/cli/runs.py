"""Commands for trained runs: evaluate, predict, export and report."""

import json
import math
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from .options import Device, Threads, protocol, start, warn_of_device

RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run, the --out of `manyclass train`.")]


ExcludeSeen = Annotated[
    bool,
    typer.Option("--exclude-seen", help="Recommenders: leave the items that the user had before out of the ranking."),
]


def evaluate(
    run: RunFolder,
    k: Annotated[list[int] | None, typer.Option(min=1, help="Cut-offs of the ranking measures.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Examples; default: all.")] = None,
    on: Annotated[
        Literal["heldout", "test"] | None, typer.Option(help="Which examples; default: test, if the run has test data.")
    ] = None,
    exclude_seen: ExcludeSeen = False,
    baselines: Annotated[
        bool, typer.Option("--baselines", help="Also rank by popularity, and by the items that followed an item.")
    ] = False,
    probe: Annotated[
        int | None,
        typer.Option(min=1, help="Rank through this many blocks per query, for runs of `blocks`; default: exactly."),
    ] = None,
    threads: Threads = None,
    device: Device = "cpu",
) -> None:
    """Compute the exact loss, recall, precision, MRR and NDCG of a run over all classes, on held-out or test data.

    Uses the best checkpoint, if the run selects one, or the last. With --probe the ranking measures are approximate and
    faster, and the loss is exact.
    """
    from rich.table import Table

    from ..train import training
    from ..train.baselines import evaluate_baselines
    from ..train.run import Run

    folder = Run(run)
    folder.config()
    console = start(run, threads)
    warn_of_device(device)
    cutoffs = tuple(k or (1, 5, 10))
    with console.status("evaluating"):
        model, task, step = training.load(folder, device)
        test = task.test_examples > 0 if on is None else on == "test"
        if test and not task.test_examples:
            raise ValueError(f"{run} has no test data")
        options = {"test": test, "exclude_seen": exclude_seen}
        found = training.evaluate(model, task, limit, cutoffs, probe, **options)
        others = evaluate_baselines(task, limit, cutoffs, **options) if baselines else {}
    if task.recurrent:
        loss = found.pop("loss")
        found = {"loss": loss, "perplexity": math.exp(min(loss, 700)), **found}
    available = task.test_examples if test else task.heldout_examples
    examples = min(limit or available, available)
    how = {"on": "test" if test else "heldout", "exclude_seen": exclude_seen, **({"probe": probe} if probe else {})}
    content = {"step": step, "examples": examples, **how, **found, **({"baselines": others} if others else {})}
    folder.write_json("evaluation.json", content)
    which = "test" if test else "held-out"
    what = f"{run}, step {step}: {examples:,} {which} examples, all {task.num_classes:,} classes"
    console.print(what, soft_wrap=True)
    if task.name == "next-item":
        console.print(protocol(exclude_seen), soft_wrap=True)
    if probe is not None:
        console.print(f"ranking through {probe:,} blocks per query: approximate; the loss is exact", soft_wrap=True)
    table = Table()
    table.add_column("measure")
    for name in ("model", *others) if others else ("value",):
        table.add_column(name, justify="right")
    for name, value in found.items():
        table.add_row(name, f"{value:.4f}", *(f"{one[name]:.4f}" if name in one else "" for one in others.values()))
    console.print(table)


def predict(
    run: RunFolder,
    queries: Annotated[
        list[str] | None,
        typer.Argument(help="Text, items of a history, or feature:value pairs; default: lines of the standard input."),
    ] = None,
    k: Annotated[int, typer.Option(min=1, help="Predictions for each.")] = 5,
    exclude_seen: ExcludeSeen = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON per query.")] = False,
    device: Device = "cpu",
) -> None:
    """Print the k most probable classes for texts, histories or documents, over all classes.

    A query that cannot be parsed gets an error message, and the others are still answered.
    """
    from ..train import training
    from ..train.run import Run

    warn_of_device(device)
    model, task, _ = training.load(Run(run), device)
    if exclude_seen:
        task.recommends()
    ranks = {"exclude_seen": exclude_seen} if task.name == "next-item" else {}
    if ranks and not as_json:
        print(protocol(exclude_seen))
    failed = answered = 0
    for line in map(str.strip, queries or sys.stdin):
        try:
            (found,) = model.predict([line], k, exclude_seen)
            unknown = task.unknown(line)
            answered += 1
            answer = {"predictions": [{"class": name, "p": p} for name, p in found]}
            answer |= {"unknown": unknown} if unknown else {}
        except ValueError as error:
            failed, found, answer, unknown = failed + 1, [], {"error": str(error)}, []
        if as_json:
            print(json.dumps({"query": line, **answer, **ranks}))
            continue
        print(line)
        if "error" in answer:
            print(f"  error: {answer['error']}")
        if unknown:
            print(f"  unknown, so left out: {' '.join(unknown)}")
        print("".join(f"  {p:8.4f}  {name}\n" for name, p in found), end="")
    if failed and not answered:
        raise typer.Exit(2)


def similar(
    run: RunFolder,
    names: Annotated[list[str], typer.Argument(metavar="CLASS...", help="Items, words or labels.")],
    k: Annotated[int, typer.Option(min=1, help="Classes for each.")] = 5,
) -> None:
    """Print the k classes whose weights have the largest cosine with those of a class. Unknown classes are reported."""
    from ..train import training
    from ..train.run import Run

    model, failed = training.load(Run(run))[0], 0
    for name in names:
        print(name)
        try:
            found = model.similar(name, k)
        except ValueError as error:
            failed += 1
            print(f"  error: {error}")
            continue
        print("".join(f"  {cosine:8.4f}  {other}\n" for other, cosine in found), end="")
    if failed == len(names):
        raise typer.Exit(2)


def export(
    run: RunFolder,
    to: Annotated[Literal["npy", "faiss", "safetensors"], typer.Option(help="Format.")] = "npy",
    out: Annotated[Path | None, typer.Option(help="Folder; default: RUN/export.")] = None,
) -> None:
    """Write the class embeddings and their names, to search or serve them elsewhere."""
    from ..train import export, training
    from ..train.run import Run

    model, task, _ = training.load(Run(run))
    target = out or run / "export"
    target.mkdir(parents=True, exist_ok=True)
    head = model.head
    if len(getattr(head, "weight", ())) != task.num_classes:
        raise ValueError(f"{run} has no class embeddings to export: it was trained with --loss {task.settings.loss}")
    for file in export.export(head.weight.detach(), head.bias, task.vocabulary.names, head.prediction, to, target):
        print(file)


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs.")],
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("report.html"),
) -> None:
    """Compare runs on one self-contained HTML page: curves, tables, settings."""
    from .. import report

    found = [report.load(run) for run in runs]
    Console().print(report.table(found))
    report.write(found, out)
    print(f"page: {out}")
