"""One rank's part of the sum over classes: its drawn classes, for the examples of all ranks."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from .. import functional, ops
from ..fused import native_pool, select_rows
from . import collectives

# The log-count of an empty slot: finite, so that a stratum of empty slots has a finite gradient, 0.
EMPTY = 1e30

#: Takes the rows of the class weights that get a gradient.
Touched = Callable[[Tensor], object]


class Replicas:
    """The ranks that hold the same classes and see other data, and what has to be told when their rows change.

    Args:
        group: these ranks, or None if there is only one.
        touched: told which rows get a gradient; the same on all these ranks.
    """

    def __init__(self, group: dist.ProcessGroup | None, touched: Touched) -> None:
        self.group, self.touched = group, touched

    def mean(self, rows: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """The mean over the ranks of sparse gradients: sorted, distinct rows and their values."""
        if self.group is not None:
            rows, values = collectives.mean_rows(rows, values, self.group, "gradients of class weights")
        self.touched(rows)
        return rows, values


class _Whole(torch.autograd.Function):
    """All of a parameter; its gradient is the mean over replicas."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return weight.view_as(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # pyright: ignore
        total = collectives.summed(grads[0], ctx.group, "gradients of class weights")
        return total / dist.get_world_size(ctx.group), None


def sampled(
    query: Tensor,  # shape: (batch, in_features)
    weight: Tensor,  # shape: (classes of the shard, in_features)
    bias: Tensor | None,  # shape: (classes of the shard, 1)
    target: Tensor,  # shape: (batch,), −1 where the positive belongs to another rank
    ids: Tensor,  # shape: (batch, num_samples), or (num_samples,) for a pool
    log_count: Tensor,  # shape of ids
    *,
    prediction: str,
    sparse: bool,
    replicas: Replicas,
) -> tuple[Tensor, Tensor]:
    """Log-sum-exp of the corrected negatives of this shard, and of the positive if it is here; and its output, or 0.

    Both ``(batch,)``. The sum of the first over shards, in the log domain, less the sum of the second is the loss.
    """
    if ids.dim() == 1 and ops.native_for(query, weight):
        arguments = (query, weight, bias, target, ids, log_count, prediction == "absolute", sparse, replicas.mean)
        loss, positive = native_pool(*arguments)
        return loss + positive, positive
    own = target >= 0
    rows, place = torch.unique(torch.cat([target[own], ids.flatten()]), return_inverse=True)
    positives, negatives = place[: int(own.sum())], place[int(own.sum()) :].view(ids.shape)
    drawn = select_rows(weight, rows, sparse, replicas.mean).to(query.dtype)
    positive = (query[own] * F.embedding(positives, drawn)).sum(dim=-1)
    if ids.dim() == 1:
        negative = query @ F.embedding(negatives, drawn).T
    else:
        negative = torch.einsum("bd,bkd->bk", query, F.embedding(negatives, drawn))
    if bias is not None:
        offsets = select_rows(bias, rows, sparse, replicas.mean).to(query.dtype).squeeze(-1)
        positive, negative = positive + offsets[positives], negative + offsets[negatives]
    positive, negative = (functional.output(part, prediction) for part in (positive, negative))
    log_count = log_count.clamp(max=EMPTY).masked_fill(ids == target.unsqueeze(-1), EMPTY)
    return _with_positive(negative - log_count, positive, own)


def exact(
    query: Tensor,
    weight: Tensor,
    bias: Tensor | None,  # shape: (classes of the shard, 1)
    target: Tensor,
    *,
    prediction: str,
    replicas: Replicas,
) -> tuple[Tensor, Tensor]:
    """`sampled` with all classes of the shard; the gradients of the class weights are dense."""
    weight, bias = _whole(weight, bias, replicas)
    offsets = None if bias is None else bias.squeeze(-1)
    own = target >= 0
    positive = (query[own] * weight[target[own]].to(query.dtype)).sum(dim=-1)
    if offsets is not None:
        positive = positive + offsets[target[own]].to(query.dtype)
    log_z = functional.log_partition(query, weight, offsets, prediction=prediction)
    return log_z, _spread(functional.output(positive, prediction), own)


def outputs(query: Tensor, weight: Tensor, bias: Tensor | None, prediction: str, replicas: Replicas) -> Tensor:
    """Outputs of all classes of the shard, shape ``(batch, classes of the shard)``."""
    weight, bias = _whole(weight, bias, replicas)
    logits = query @ weight.to(query.dtype).T
    return functional.output(logits if bias is None else logits + bias.squeeze(-1).to(query.dtype), prediction)


def _whole(weight: Tensor, bias: Tensor | None, replicas: Replicas) -> tuple[Tensor, Tensor | None]:
    if replicas.group is None:
        return weight, bias
    parts = (weight, bias)
    return tuple(None if part is None else _Whole.apply(part, replicas.group) for part in parts)  # pyright: ignore


def _with_positive(negative: Tensor, positive: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
    first = torch.full_like(negative[:, :1], -EMPTY).masked_scatter(own.unsqueeze(-1), positive)
    return torch.cat([first, negative], dim=-1).logsumexp(dim=-1), _spread(positive, own)


def _spread(values: Tensor, where: Tensor) -> Tensor:
    return values.new_zeros(where.shape).masked_scatter(where, values)
