"""Adaptive softmax: torch's layer, with the interface of the layers here."""

import math

import torch
from torch import Tensor, nn

from .. import checks, chunks, functional
from ..shard import Shard


class AdaptiveSoftmax(nn.Module):
    """`torch.nn.AdaptiveLogSoftmaxWithLoss` as it is: frequent classes in a head, all others in clusters below it.

    Its probabilities are normalised, so the loss is exact in training, too. Here classes may have any order, the loss
    has a ``reduction`` and an ``ignore_index``, and there is a ``topk``.

    Grave, Joulin, Cissé, Grangier and Jégou, Efficient softmax approximation for GPUs (ICML 2017).

    Args:
        in_features: size of the query, d.
        num_classes: n, at least 3.
        counts: class frequencies, shape ``(num_classes,)``; the 2% most frequent are in the head, the next 18% in the
            first cluster.
        reduction: ``"mean"`` over the targets that are not ignored, ``"sum"`` or ``"none"``.
        ignore_index: a target to leave out.
    """

    rank: Tensor

    def __init__(
        self, in_features: int, num_classes: int, *, counts: Tensor, reduction: str = "mean", ignore_index: int = -100
    ) -> None:
        super().__init__()
        self.in_features = checks.positive_int("in_features", in_features)
        self.num_classes = checks.positive_int("num_classes", num_classes, 3)
        counts = checks.counts("counts", counts, num_classes)
        self.reduction = checks.one_of("reduction", reduction, functional.REDUCTIONS)
        self.ignore_index = checks.integer("ignore_index", ignore_index)
        #: All classes are in one process.
        self.shard = Shard(num_classes)
        rank = torch.empty(num_classes, dtype=torch.long)
        rank[counts.argsort(descending=True, stable=True)] = torch.arange(num_classes)
        self.register_buffer("rank", rank)
        cutoffs = sorted({max(1, num_classes // 50), max(2, num_classes // 5)})
        # torch's default is 4, which would leave the last cluster of a very small layer without any feature.
        divisor = min(4.0, math.sqrt(in_features))
        self.layer = nn.AdaptiveLogSoftmaxWithLoss(in_features, num_classes, cutoffs, divisor)

    def forward(
        self,
        input: Tensor,  # shape: (*batch, in_features)
        target: Tensor,  # shape: (*batch)
        *,
        context: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Return the exact loss; ``context`` and ``generator`` are not used."""
        checks.queries("input", input, self.in_features)
        target = checks.indices("target", target, self.num_classes, batch_of=input, ignore=self.ignore_index)
        kept = (target.flatten() != self.ignore_index).nonzero().squeeze(-1)
        query, labels = input.reshape(-1, self.in_features)[kept], self.rank[target.flatten()[kept]]
        losses = -self.layer(query, labels).output if len(kept) else query.sum(dim=-1)
        if self.reduction == "none":
            return losses.new_zeros(target.numel()).index_copy(0, kept, losses).reshape(target.shape)
        return functional.reduce(losses, self.reduction)

    def log_prob(self, input: Tensor) -> Tensor:
        """Return the log probability of every class, shape ``(*batch, num_classes)``."""
        query = checks.queries("input", input, self.in_features)
        found = self.layer.log_prob(query.reshape(-1, self.in_features))[:, self.rank]
        return found.reshape(*query.shape[:-1], self.num_classes)

    @torch.no_grad()
    def topk(self, input: Tensor, k: int, *, probe: int | None = None) -> tuple[Tensor, Tensor]:
        """Return the ``k`` most probable classes, best first: log probabilities and ids, both ``(*batch, k)``."""
        if probe is not None:
            raise ValueError(f"probe must be None: AdaptiveSoftmax has no index to search; got {probe}")
        flat = checks.queries("input", input, self.in_features).reshape(-1, self.in_features)
        parts = flat.split(max(1, chunks.MAX_LOGITS // self.num_classes))
        values, ids = zip(*(self.log_prob(part).topk(k, dim=-1) for part in parts), strict=True)
        return torch.cat(values).reshape(*input.shape[:-1], k), torch.cat(ids).reshape(*input.shape[:-1], k)
