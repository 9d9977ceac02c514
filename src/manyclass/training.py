"""A training loop that reads from top to bottom."""

import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .clip import clip_grad_norm_
from .models import LanguageModel


class Record(NamedTuple):
    """The state of a run at one evaluation."""

    step: int
    #: Training time so far, evaluations not counted.
    seconds: float
    #: Mean loss per held-out token under the full softmax, in nats.
    loss: float


def windows(tokens: Tensor, batch: int, length: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Cut a text into ``batch`` streams and walk along them, ``length`` tokens at a time, for ever.

    Yields tokens and the tokens that follow them, both ``(batch, length)``.
    """
    streams = tokens[: (len(tokens) - 1) // batch * batch].view(batch, -1)
    if streams.shape[1] <= length:
        raise ValueError(f"a text of {len(tokens)} tokens is too short for batch={batch} and length={length}")
    while True:
        for start in range(0, streams.shape[1] - length, length):
            part = streams[:, start : start + length + 1]
            yield part[:, :-1], part[:, 1:]


def train_language_model(
    model: LanguageModel,
    train: Tensor,  # shape: (length,)
    heldout: Tensor,  # shape: (length,)
    *,
    steps: int,
    evaluations: int = 5,
    batch: int = 32,
    length: int = 20,
    lr: float = 0.05,
    max_norm: float = 5.0,
    on_step: Callable[[int, Record], None] = lambda step, record: None,
) -> list[Record]:
    """Train with Adagrad, which takes dense and sparse gradients alike, and evaluate at even intervals."""
    optimizer = torch.optim.Adagrad(model.parameters(), lr=lr)
    records = [Record(0, 0.0, evaluate_language_model(model, heldout))]
    milestones = {round(steps * (i + 1) / evaluations) for i in range(evaluations)}
    batches, state, seconds = windows(train, batch, length), None, 0.0
    for step in range(1, steps + 1):
        started = time.perf_counter()
        tokens, target = next(batches)
        loss, state = model(tokens, target, state)
        optimizer.zero_grad()
        loss.backward()
        clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        seconds += time.perf_counter() - started
        if step in milestones:
            records.append(Record(step, seconds, evaluate_language_model(model, heldout)))
        on_step(step, records[-1])
    return records


@torch.no_grad()
def evaluate_language_model(model: LanguageModel, tokens: Tensor, length: int = 50, batch: int = 16) -> float:
    """Mean loss per token of a text, shape ``(length,)``, under the exact softmax."""
    model.eval()
    streams = tokens[: len(tokens) // batch * batch].view(batch, -1)
    state, total, count = None, 0.0, 0
    for start in range(0, streams.shape[1] - 1, length):
        part = streams[:, start : start + length + 1]
        loss, state = model(part[:, :-1], part[:, 1:], state)
        total += float(loss) * part[:, 1:].numel()
        count += part[:, 1:].numel()
    model.train()
    return total / count
