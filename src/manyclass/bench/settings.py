"""Error and cost of settings of blocks on models from your runs. The defaults were chosen by it."""

from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.progress import Progress

from .. import samplers
from ..train import Run, load
from ..train.model import Model
from ..train.tasks import Task
from ..train.tasks.base import IGNORE
from . import bias
from .bias import UNIFORM, UNIGRAM, Alternative, Row
from .judges import EXAMPLES, OTHERS, Examples, Judge
from .step import OWN, POOL
from .timing import write_csv


class Setting(NamedTuple):
    """Options of blocks."""

    own: int
    probe: int
    pool: int

    @property
    def name(self) -> str:
        """How it is called in the table."""
        return f"blocks, probe={self.probe}"


DEFAULT = Setting(OWN, 96, POOL)
SETTINGS = (
    DEFAULT,
    DEFAULT._replace(own=16),
    DEFAULT._replace(own=64),
    DEFAULT._replace(probe=48),
    DEFAULT._replace(probe=192),
    DEFAULT._replace(pool=1024),
    DEFAULT._replace(pool=2048),
)


def run(out: Path, console: Console, folders: list[Path]) -> None:
    """Measure static pools and settings of blocks on each run, print a table, write a CSV."""
    rows: list[Row] = []
    with Progress(console=console) as progress:
        for folder in folders:
            judge = judge_of(folder)
            full = bias.full_seconds(judge)
            for alternative in progress.track(list(_alternatives(judge)), description=judge.model):
                rows += bias.measure(judge, alternative, full)
    write_csv(out / "settings.csv", Row._fields, rows)
    bias.show(rows, console)
    console.print(f"{torch.get_num_threads()} threads, training batches of {EXAMPLES}", soft_wrap=True)
    console.print(f"figures: {out / 'settings.csv'}", soft_wrap=True)


def judge_of(folder: Path) -> Judge:
    """Take the output layer of a run and some of its training batches."""
    model, task, _ = load(Run(folder))
    batches = list(islice(_batches(model, task), 1 + OTHERS))
    if len(batches) < 2:
        raise ValueError(f"{folder} has too few examples: at least {2 * EXAMPLES} are needed")
    target, before = task.pairs()
    weight, pairs = model.head.weight.detach().clone(), torch.stack([before, target], dim=1)
    return Judge(folder.resolve().name, task.settings.prediction, weight, batches[0], batches[1:], pairs)


@torch.no_grad()
def _batches(model: Model, task: Task[Any]) -> Iterator[Examples]:
    """Yield hidden states and targets of one epoch, `EXAMPLES` at a time; no step gives more than one batch."""
    kept: list[Examples] = []
    state = None
    for step in range(task.steps_per_epoch):
        batch = task.batch(step)
        hidden, state = model.hidden(batch, state)
        place = (batch.target != IGNORE).nonzero()
        place = place[torch.randperm(len(place), generator=torch.Generator().manual_seed(step))[:EXAMPLES]]
        row, time, label = place.unbind(dim=1)
        target = batch.target[row, time, label]
        kept.append(Examples(hidden[row, time], target, target))
        if sum(len(examples.target) for examples in kept) >= EXAMPLES:
            joined = [torch.cat(part)[:EXAMPLES] for part in zip(*kept, strict=True)]
            kept = []
            yield Examples(*joined)


def _alternatives(judge: Judge) -> Iterable[Alternative]:
    n, d = judge.weight.shape
    counts = torch.bincount(judge.pairs[:, 1], minlength=n) + 1
    yield Alternative(UNIFORM, samplers.Uniform(n, scope="batch"), (OWN + POOL,))
    yield Alternative(UNIGRAM, samplers.Unigram(counts, scope="batch"), (OWN + POOL,))
    for setting in SETTINGS:
        sampler = samplers.Blocks(n, d, own=setting.own, probe=setting.probe, prediction=judge.prediction)
        yield Alternative(setting.name, sampler, (setting.pool,))
