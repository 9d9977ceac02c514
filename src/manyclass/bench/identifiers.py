"""The next word of a text with many words, whose embeddings a network makes from characters: ways to draw negatives."""

import copy
import csv
import json
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from ..clip import clip_grad_norm_
from ..train import optimizers, training
from ..train.atomic import replacing
from ..train.data import Vocabulary
from ..train.model import Model
from ..train.records import read_json
from ..train.settings import LanguageSettings
from ..train.tasks import Language
from .timing import write_csv

#: Ways to draw negatives, and their colours.
METHODS: dict[str, tuple[dict[str, Any], str]] = {
    "full softmax": ({"sampler": "full"}, "#000000"),
    "in-batch, logQ by a stream": ({"sampler": "in_batch", "num_samples": 640}, "#0072B2"),
    "uniform pool": ({"sampler": "uniform", "scope": "batch", "num_samples": 2048}, "#999999"),
    "unigram pool": ({"sampler": "unigram", "scope": "batch", "num_samples": 2048}, "#E69F00"),
    "blocks": ({"sampler": "blocks", "own": 4, "num_samples": 1024}, "#D55E00"),
}
#: Most classes that every step of the full softmax can encode.
FITS = 20_000


class Row(NamedTuple):
    """An evaluation."""

    method: str
    classes: int
    step: int
    #: CPU seconds of training, without evaluations.
    seconds: float
    heldout_loss: float
    #: Classes that a step encodes with gradients.
    encoded: float


def run(
    out: Path,
    console: Console,
    text: Sequence[Path],
    min_count: int,
    features: int,
    seconds: float,
    every: int,
    positions: int,
) -> None:
    """Train every method that the CSV file in ``out`` does not have yet; print a table, write CSV and plot."""
    settings = {"text": list(text), "min_count": min_count, "output": "characters", "features": features}
    settings |= {"schedule": "constant", "eval_examples": positions, "out": out / "identifiers"}
    task = _task(LanguageSettings(**settings), every, console)
    file = out / "identifiers.csv"
    rows = _read(file)
    for name, (options, _) in METHODS.items():
        if options["sampler"] == "full" and task.num_classes > FITS:
            console.print(f"{name}: left out, since each step would encode {task.num_classes:,} words", soft_wrap=True)
            continue
        done = [row for row in rows if row.method == name]
        if done and done[-1].seconds >= seconds:
            console.print(f"{name}: in {file} already", soft_wrap=True)
            continue
        task.settings = LanguageSettings(**settings, **options)
        rows = [row for row in rows if row.method != name] + _train(name, task, seconds, every, console)
        with replacing(file) as temporary:
            write_csv(temporary, Row._fields, rows)
    console.print(_table(rows, task, positions))
    _plot(rows, out / "identifiers.png", f"{task.num_classes:,} words, {positions:,} held-out positions")
    console.print(f"figures: {file}, {out / 'identifiers.png'}", soft_wrap=True)


def _task(settings: LanguageSettings, every: int, console: Console) -> Language:
    """Read the text, or find it in the folder of an earlier call with the same settings."""
    folder, names, made = settings.out, "vocabulary.parquet", "settings.json"
    asked = settings.to_json() | {"every": every}
    del asked["out"]  # the folder may be moved
    if not folder.exists():
        with console.status("reading the text"), replacing(folder) as temporary:
            temporary.mkdir(parents=True)
            Language.prepare(settings, temporary, lambda size: None).write(temporary / names)
            (temporary / made).write_text(json.dumps(asked))
    before = read_json(folder / made)
    for option in [name for name in asked if asked[name] != before.get(name)]:
        raise ValueError(
            f"{folder} was begun with {option}={before.get(option)}, so it cannot continue with "
            f"{option}={asked[option]}: give another --out"
        )
    return Language(settings, folder, Vocabulary.read(folder / names))


def _train(name: str, task: Language, seconds: float, every: int, console: Console) -> list[Row]:
    """Train one method for some CPU seconds; the batches are the same for all."""
    torch.manual_seed(task.settings.seed)
    model, asked, state, spent, step = Model(task, task.settings), [], None, 0.0, 0

    def count(module: nn.Module, ids: tuple[Tensor]) -> None:
        # The backward pass encodes chunks again, and the cache is refreshed without gradients: neither counts.
        if torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:
            asked.append(len(ids[0]))

    model.head.classes.register_forward_pre_hook(count)
    optimizer, rows = optimizers.make(model, task.settings), []
    began = time.process_time()
    model.head.refresh()
    console.print(f"{name}: all classes encoded in {time.process_time() - began:.1f} CPU seconds", soft_wrap=True)
    while spent < seconds:
        began = time.process_time()
        loss, state = model(task.batch(step), state)
        model.zero_grad()
        loss.backward()
        clip_grad_norm_(model.parameters(), task.settings.clip)
        optimizer.step()
        step, spent = step + 1, spent + time.process_time() - began
        if step % every == 0 or spent >= seconds:
            encoded = sum(asked) / step
            # Of a copy: an evaluation encodes all classes, and training would draw from them at no cost.
            found = training.evaluate(copy.deepcopy(model), task, task.settings.eval_examples)["loss"]
            rows.append(Row(name, task.num_classes, step, round(spent, 1), round(found, 4), round(encoded)))
            console.print(f"{name}: step {step}, {spent:.0f} s, held-out loss {found:.4f}", soft_wrap=True)
    return rows


def _read(file: Path) -> list[Row]:
    if not file.exists():
        return []
    with file.open(newline="") as handle:
        return [
            Row(row[0], int(row[1]), int(row[2]), float(row[3]), float(row[4]), float(row[5]))
            for row in list(csv.reader(handle))[1:]
        ]


def _table(rows: Sequence[Row], task: Language, positions: int) -> Table:
    """Compare at the last step that all methods were evaluated at, and at the longest time that all were trained."""
    found = {name: [row for row in rows if row.method == name] for name in METHODS}
    curves = {name: curve for name, curve in found.items() if curve}
    step = max(set.intersection(*({row.step for row in curve} for curve in curves.values())), default=0)
    seconds = min(curve[-1].seconds for curve in curves.values())
    title = f"{task.num_classes:,} words, exact held-out loss of {positions:,} positions"
    table = Table("negatives", "words encoded", "CPU ms per step", title=title)
    table.add_column(f"loss after {step:,} steps")
    table.add_column(f"loss after {seconds:.0f} s")
    table.add_column("steps by then")
    for name, curve in curves.items():
        same = next((f"{row.heldout_loss:.3f}" for row in curve if row.step == step), "–")
        speed = curve[-1].seconds / curve[-1].step
        loss = _at(curve, seconds)
        shown = "–" if loss is None else f"{loss:.3f}"
        table.add_row(name, f"{curve[-1].encoded:,.0f}", f"{speed * 1e3:.0f}", same, shown, f"{seconds / speed:,.0f}")
    return table


def _at(curve: Sequence[Row], seconds: float) -> float | None:
    """Interpolate the loss at a time between evaluations; None before the first."""
    for before, after in pairwise(curve):
        if before.seconds <= seconds <= after.seconds:
            share = (seconds - before.seconds) / max(after.seconds - before.seconds, 1e-9)
            return before.heldout_loss + share * (after.heldout_loss - before.heldout_loss)
    return curve[-1].heldout_loss if seconds == curve[-1].seconds else None


def _plot(rows: Sequence[Row], file: Path, title: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    for axes, label in zip(figure.subplots(1, 2, sharey=True), ("steps", "training time (CPU seconds)"), strict=True):
        for name, (_, colour) in METHODS.items():
            curve = [row for row in rows if row.method == name]
            x = [row.step if label == "steps" else row.seconds for row in curve]
            axes.plot(x, [row.heldout_loss for row in curve], color=colour, marker=".", label=name)
        axes.set(xlabel=label)
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    figure.supylabel("exact held-out loss (nats)", fontsize="medium")
    figure.suptitle(title, fontsize="medium")
    with replacing(file) as temporary:
        figure.savefig(temporary, dpi=110)
