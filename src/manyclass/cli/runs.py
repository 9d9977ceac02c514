"""Commands for trained runs: evaluate, predict, export and report."""

import json
import math
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from .options import Threads, start

RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run, the --out of `manyclass train`.")]


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

    from ..train import training
    from ..train.run import Run

    folder = Run(run)
    folder.config()
    console = start(run, threads)
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

    from ..train import training
    from ..train.run import Run

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
    """Compare runs on one page that needs nothing else: curves, tables, settings."""
    from .. import report

    found = [report.load(run) for run in runs]
    Console().print(report.table(found))
    report.write(found, out)
    print(f"page: {out}")
