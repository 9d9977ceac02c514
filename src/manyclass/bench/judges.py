"""Trained output layers to measure samplers on. Both models are trained with the full softmax."""

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, cast

import torch
from rich.progress import Progress
from torch import Tensor

from ..cli.console import Bar
from ..train import training
from ..train.data.synth import synthesise
from ..train.model import Model
from ..train.run import Run
from ..train.settings import LanguageSettings, NextItemSettings, Settings
from ..train.tasks import Task
from ..train.tasks.base import tensor
from ..train.tasks.language import Language
from ..train.tasks.next_item import NextItem

WORDS, SESSIONS = "words", "sessions"
EXAMPLES = 256
# Other batches, on which samplers are warmed up and timed.
OTHERS = 40
# Words of a passage; the last one is the target.
PASSAGE = 20
# Interactions of the sessions. After six epochs the logits spread about as those of real sessions do (Diginetica: 4.2).
ITEMS, USERS, LENGTH, FACTORS = 40_000, 11_000, 12, 4


class Examples(NamedTuple):
    """A batch for the output layer."""

    query: Tensor  # shape: (batch, in_features)
    target: Tensor  # shape: (batch,)
    #: The class before, for the bigram sampler.
    context: Tensor  # shape: (batch,)


class Judge(NamedTuple):
    """A trained output layer, a batch to measure on, and other batches."""

    model: str
    prediction: str
    weight: Tensor  # shape: (num_classes, in_features)
    measured: Examples
    others: list[Examples]
    #: Each training target and the class before it, for the static samplers.
    pairs: Tensor  # shape: (number, 2): class before, target


def reordered(judge: Judge, seed: int) -> Judge:
    """Return the same layer with its classes in another order."""
    order = torch.randperm(len(judge.weight), generator=torch.Generator().manual_seed(seed))
    place = order.argsort()

    def moved(ids: Tensor) -> Tensor:
        return place[ids.clamp(min=0)].where(ids >= 0, ids)  # documents have no class before

    measured, *others = (
        Examples(batch.query, moved(batch.target), moved(batch.context)) for batch in (judge.measured, *judge.others)
    )
    return Judge(judge.model, judge.prediction, judge.weight[order], measured, others, moved(judge.pairs))


def words(texts: list[Path] | None, prediction: Any, steps: int, seed: int, progress: Progress) -> Judge:
    """Train a language model; measure on held-out text, warm up on training text."""
    with TemporaryDirectory() as folder:
        settings = LanguageSettings(
            text=texts,
            corpus=None if texts else "python",
            prediction=prediction,
            sampler="full",
            steps=steps,
            schedule="constant",
            evaluations=1,
            eval_examples=5000,
            seed=seed,
            out=Path(folder) / "run",
        )
        task = cast(Language, training.prepare("lm", settings))
        heldout, text = tensor(task.heldout_streams).flatten(), tensor(task.text)
        if len(heldout) < 4 * EXAMPLES:
            raise ValueError(
                f"the text has {task.train_examples} words to train on and {len(heldout)} held out; "
                f"at least {4 * EXAMPLES} are needed there"
            )
        model = _trained(task, settings, f"training, {WORDS}, {prediction}", progress)
        pairs = torch.stack([text[:-1], text[1:]], dim=1)
    batches = [*_passages(heldout, 1), *_passages(text, OTHERS)]
    measured, *others = (_examples(model, (batch[:, :-1],), batch[:, -1], batch[:, -2]) for batch in batches)
    return Judge(WORDS, prediction, model.head.weight.detach().clone(), measured, others, pairs)


def sessions(epochs: float, seed: int, progress: Progress) -> Judge:
    """Train a recommender on synthetic interactions; every batch has one training target of each of some users."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "sessions.parquet"
        synthesise(file, items=ITEMS, users=USERS, length=LENGTH, factors=FACTORS, seed=seed)
        settings = NextItemSettings(
            interactions=file,
            split="last",
            model="feed-forward",
            sampler="full",
            dropout=0.0,
            optimizer="adagrad",
            lr=0.05,
            batch=EXAMPLES,
            epochs=epochs,
            schedule="constant",
            evaluations=1,
            seed=seed,
            out=Path(folder) / "run",
        )
        task = cast(NextItem, training.prepare("next-item", settings))
        model = _trained(task, settings, f"training, {SESSIONS}", progress)
        target, before = task.pairs()
        # Windows as long as a session end at one training target of each user.
        last = task.train.windows(LENGTH)[:]
        order = torch.randperm(len(last), generator=torch.Generator().manual_seed(seed))
        chosen = [last[rows.numpy()] for rows in order.split(EXAMPLES)[: 1 + OTHERS]]
        batches = [task.train.batch(places, task.history, 1) for places in chosen]
    measured, *others = (_examples(model, b.inputs, b.target.flatten(), b.inputs[0][:, -1]) for b in batches)
    weight = model.head.weight.detach().clone()
    return Judge(SESSIONS, "softmax", weight, measured, others, torch.stack([before, target], dim=1))


def _trained(task: Task[Any], settings: Settings, name: str, progress: Progress) -> Model:
    training.train(task, Bar(progress, name))
    return training.load(Run(settings.out))[0]


def _passages(text: Tensor, batches: int) -> Iterator[Tensor]:
    """Return the batches of passages at even distances, shape ``(EXAMPLES, PASSAGE)``; a batch spans the whole text."""
    number = batches * EXAMPLES
    passages = text.unfold(0, PASSAGE, max(1, (len(text) - PASSAGE) // number))[:number]
    return (passages[first::batches] for first in range(batches))


@torch.no_grad()
def _examples(model: Model, inputs: tuple[Tensor, ...], target: Tensor, context: Tensor) -> Examples:
    """Return the hidden states at the last place."""
    hidden = model.trunk(*inputs)
    hidden = hidden[0] if model.recurrent else hidden
    return Examples(hidden[:, -1], target, context)
