"""Baseline rankings without a network: by popularity, and by the items that followed an item."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .evaluation import ranking
from .model import without
from .tasks import Batch, NextItem, Task
from .tasks.base import tensor

POPULARITY, ITEM_TO_ITEM = "popularity", "item-to-item"
#: Largest distance between two items of a pair, in training and in a history. A pair weighs one over its distance.
REACH = 5

#: The classes of each row of a batch, best first: shape ``(batch, number)``.
Ranker = Callable[[Batch, int], Tensor]


def evaluate_baselines(
    task: Task[Any], limit: int | None, k: tuple[int, ...], *, test: bool = False, exclude_seen: bool = False
) -> dict[str, dict[str, float]]:
    """Return the ranking measures of each baseline, on the examples that `evaluate` takes."""
    popular = popularity(task)
    rankers: dict[str, Ranker] = {POPULARITY: lambda batch, number: popular[:number].expand(len(batch.target), -1)}
    if isinstance(task, NextItem):
        rankers[ITEM_TO_ITEM] = ItemToItem(task, popular)
    found = {}
    for name, ranker in rankers.items():
        sums: dict[str, float] = {}
        queries = 0
        for batch in task.heldout(limit, test, exclude_seen):
            target = batch.target[:, -1] if isinstance(task, NextItem) else batch.target.flatten(0, 1)
            number = max(k) + (0 if batch.seen is None else batch.seen.shape[1])
            ids = ranker(batch, min(number, task.num_classes))
            if len(ids) < len(target):  # a text predicts at every place
                ids = ids.repeat_interleave(len(target) // len(ids), dim=0)
            if batch.seen is not None:
                ids = without(ids, batch.seen)[1]
            queries += len(target)
            for measure, value in ranking(ids[:, : max(k)], target, k).items():
                sums[measure] = sums.get(measure, 0.0) + value
        found[name] = {measure: value / queries for measure, value in sums.items()}
    return found


def popularity(task: Task[Any]) -> Tensor:
    """Return the classes by how often they are a training target, the most frequent first."""
    return torch.bincount(task.pairs()[0], minlength=task.num_classes).argsort(descending=True, stable=True)


class ItemToItem:
    """Score an item by how often it came after the last items of the history, at most `REACH` places behind.

    Each pair weighs one over its distance, in training and in the history. Ties go to the more popular item. Memory:
    about 40 bytes for each training interaction and place.

    Args:
        task: what to count.
        popular: all items, the most popular first.
    """

    def __init__(self, task: NextItem, popular: Tensor) -> None:
        part, size = task.train, task.num_classes
        places = part.targets[:]
        starts = part.offsets[np.searchsorted(part.offsets, places, side="right") - 1]
        keys, weights = [], []
        for distance in range(1, REACH + 1):
            ends = places[places - distance >= starts]
            keys.append(part.items[ends - distance].astype(np.int64) * size + part.items[ends])
            weights.append(np.full(len(ends), 1 / distance))
        pairs, which = np.unique(np.concatenate(keys), return_inverse=True)
        self._weights = np.bincount(which, weights=np.concatenate(weights))
        self._after = pairs % size
        self._first = np.searchsorted(pairs // size, np.arange(size + 1))
        self._popular, self._place = popular.numpy(), np.argsort(popular.numpy())

    def __call__(self, batch: Batch, number: int) -> Tensor:
        """Rank items for each row of a batch; items without a score are last, by popularity."""
        return tensor(np.stack([self._rank(row[row >= 0], number) for row in batch.inputs[0].numpy()]))

    def _rank(self, history: np.ndarray, number: int) -> np.ndarray:
        score = np.zeros(len(self._popular))
        for distance, item in enumerate(history[: -REACH - 1 : -1], 1):
            behind = slice(self._first[item], self._first[item + 1])
            score[self._after[behind]] += self._weights[behind] / distance
        known = np.flatnonzero(score)
        ranked = known[np.lexsort((self._place[known], -score[known]))][:number]
        if len(ranked) < number:
            others = self._popular[score[self._popular] == 0]
            ranked = np.concatenate([ranked, others[: number - len(ranked)]])
        return ranked
