"""One rank's part of the sum over classes: its drawn classes, for the examples of all ranks."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from .. import functional
from . import collectives

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


def exact(
    query: Tensor,
    weight: Tensor,
    bias: Tensor | None,  # shape: (classes of the shard, 1)
    target: Tensor,
    *,
    prediction: str,
    replicas: Replicas,
) -> tuple[Tensor, Tensor]:
    """Log-sum-exp of all classes of this shard, and the output of the positive if it is here, or 0; both ``(batch,)``.

    The sum of the first over shards, in the log domain, less the sum of the second is the loss. The gradients of the
    class weights are dense.
    """
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


def _spread(values: Tensor, where: Tensor) -> Tensor:
    return values.new_zeros(where.shape).masked_scatter(where, values)
