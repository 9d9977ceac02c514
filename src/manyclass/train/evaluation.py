"""Exact loss and ranking measures over all classes, never over sampled ones; ranking may be approximate on request."""

from typing import Any

import torch
from torch import Tensor

from ..samplers import Blocks
from .model import Model, best
from .processes import Processes
from .tasks import Task
from .tasks.base import IGNORE, own_part


@torch.no_grad()
def evaluate(
    model: Model,
    task: Task[Any],
    limit: int | None = None,
    k: tuple[int, ...] = (),
    probe: int | None = None,
    *,
    test: bool = False,
    exclude_seen: bool = False,
) -> dict[str, float]:
    """Compute the exact held-out loss over all classes, and the measures of `ranking` at each ``k``.

    Several processes divide the examples, and all get the result.

    Args:
        model: what to evaluate.
        task: the data.
        limit: about how many examples; None: all.
        k: cut-offs of the ranking measures.
        probe: rank through this many blocks per query, so that the ranking measures are approximate.
        test: evaluate on the test data instead.
        exclude_seen: leave the items that the user had before out of the ranking, but not out of the loss.
    """
    if probe is not None:
        _check_probe(model, task)
    training, processes = model.training, Processes(*task.part)
    model.eval()
    model.refresh()
    sums: dict[str, float] = {}
    targets = queries = 0
    state = None
    for batch in task.heldout(limit, test, exclude_seen):
        batch = batch.to(model.device)
        hidden, state = model.hidden(batch, state)
        wanted = batch.target != IGNORE
        kept = wanted.any(dim=-1)
        queries, targets = queries + int(kept.sum()), targets + int(wanted.sum())
        query, target = (own_part(rows, task.part) for rows in (hidden[kept], batch.target[kept]))
        loss = model.head(query.unsqueeze(1).expand(*target.shape, -1), target)
        # The losses of several processes have the loss of all their examples as their mean.
        found = {"loss": float(loss) * int(wanted.sum()) / processes.world}
        if k:
            seen = None if batch.seen is None else own_part(batch.seen, task.part)
            found |= ranking(best(model.head, query, max(k), seen, probe)[1], target, k)
        sums = {name: sums.get(name, 0.0) + value for name, value in found.items()}
    model.train(training)
    sums = dict(zip(sums, processes.sums(list(sums.values())), strict=True))
    return {name: value / (targets if name == "loss" else queries) for name, value in sums.items()}


def _check_probe(model: Model, task: Task[Any]) -> None:
    if task.part[1] > 1:
        raise ValueError(
            "probe searches one tree over all classes, but several processes have a tree each; leave it out"
        )
    if not isinstance(getattr(model.head, "sampler", None), Blocks):
        raise ValueError(f"probe needs a model trained with sampler='blocks', not {task.settings.sampler!r}")


def ranking(best: Tensor, target: Tensor, cutoffs: tuple[int, ...]) -> dict[str, float]:
    """Return the sums over queries of recall, precision, MRR and NDCG at each cut-off.

    Args:
        best: classes, best first, ``(queries, at least max(cutoffs))``.
        target: the classes that are right, ``(queries, labels)``, padded with `IGNORE`.
        cutoffs: the k.
    """
    hit = (best.unsqueeze(-1) == target.unsqueeze(1)).any(dim=-1).double()
    right = (target != IGNORE).sum(dim=-1)
    discount = 1 / torch.arange(2, best.shape[1] + 2, dtype=torch.double, device=best.device).log2()
    sums = {}
    for k in cutoffs:
        first = hit[:, :k]
        place = first.argmax(dim=-1) + 1
        ideal = discount[:k].cumsum(0)[right.clamp(max=min(k, best.shape[1])) - 1]
        sums[f"recall@{k}"] = float((first.sum(dim=-1) / right).sum())
        sums[f"precision@{k}"] = float(first.sum() / k)
        sums[f"mrr@{k}"] = float((first.amax(dim=-1) / place).sum())
        sums[f"ndcg@{k}"] = float(((first * discount[:k]).sum(dim=-1) / ideal).sum())
    return sums
