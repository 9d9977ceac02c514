"""One rank's part of the sum over classes, for the examples of all ranks."""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from .. import functional
from ..samplers import Draw, Sampler
from . import collectives


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
    bias: Tensor | None,  # shape: (classes of the shard,)
    target: Tensor,
    prediction: str,
    margin: functional.Margin | None,
    replicas: dist.ProcessGroup | None,
) -> tuple[Tensor, Tensor]:
    """Return the log-sum-exp of this shard and the positive's output, 0 if elsewhere; both ``(batch,)``.

    With several positives ``(batch, k)`` both have this shape, and each sum leaves the other positives out.
    The sum of the first over shards, in the log domain, less the sum of the second is the loss. The gradients of the
    class weights are dense.
    """
    weight, bias = _whole(weight, bias, replicas)
    labels = target if target.dim() == 2 else target.unsqueeze(-1)
    positive = functional.positive_outputs(query, weight, bias, labels, prediction).reshape(target.shape)
    positive = positive if margin is None else margin(positive)
    if margin is None and target.dim() == 1:
        log_z = functional.log_partition(query, weight, bias, prediction=prediction)
    else:
        rest = functional.log_partition(query, weight, bias, prediction=prediction, exclude=labels)
        rest = rest.unsqueeze(-1).expand_as(labels).reshape(target.shape)
        log_z = torch.where(target >= 0, torch.logaddexp(rest, positive), rest)
    return log_z, torch.where(target >= 0, positive, 0.0)


def outputs(
    query: Tensor, weight: Tensor, bias: Tensor | None, prediction: str, replicas: dist.ProcessGroup | None
) -> Tensor:
    """Return the outputs of all classes of the shard, shape ``(batch, classes of the shard)``."""
    weight, bias = _whole(weight, bias, replicas)
    return functional.output(functional.linear(query, weight, bias), prediction)


def _whole(weight: Tensor, bias: Tensor | None, replicas: dist.ProcessGroup | None) -> tuple[Tensor, Tensor | None]:
    if replicas is None:
        return weight, bias
    parts = (weight, bias)
    return tuple(None if part is None else _Whole.apply(part, replicas) for part in parts)  # pyright: ignore


def draw_each(
    sampler: Sampler,
    query: Tensor,
    target: Tensor,
    context: Tensor | None,
    numbers: Tensor,  # shape: (batch,), draws of each example
    generator: torch.Generator | None,
) -> Draw:
    """Draw for examples that differ in the number of draws, or in having a positive here, in groups of equal ones."""
    kinds = 2 * numbers + (target >= 0)
    found = []
    for kind in kinds.unique().tolist():
        chosen = (kinds == kind).nonzero().squeeze(-1)
        exclude = target[chosen] if kind % 2 else None
        own = None if context is None else context[chosen]
        draw = sampler.draw(query[chosen], kind // 2, exclude=exclude, context=own, generator=generator)
        found.append((chosen, draw))
    width = max((draw.ids.shape[1] for _, draw in found), default=0)
    ids = target.new_zeros(len(query), width)
    log_count = query.new_full((len(query), width), math.inf)
    for chosen, draw in found:
        ids[chosen, : draw.ids.shape[1]] = draw.ids
        log_count[chosen, : draw.ids.shape[1]] = draw.log_count.to(log_count.dtype)
    return Draw.each(ids, log_count)
