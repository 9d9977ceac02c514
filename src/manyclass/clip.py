"""Gradient clipping that counts sparse gradients."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from . import importance


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Clip dense and sparse gradients as `torch.nn.utils.clip_grad_norm_` does.

    Scales all gradients in place so that their total norm is at most ``max_norm``; returns the norm they had.
    A sparse gradient is coalesced first, since the norm of summands is not the norm of their sum. The norm includes all
    shards of a `distributed.ShardedSampledSoftmax`, so every rank has to call this.
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm must be positive, got {max_norm}")
    grads: list[Tensor] = []
    sharded: dict[Any, list[Tensor]] = {}
    for parameter in [parameters] if isinstance(parameters, Tensor) else parameters:
        if parameter.grad is None:
            continue
        group = getattr(parameter, "shard_group", None)
        found = grads if group is None else sharded.setdefault(group, [])
        grad = parameter.grad
        if grad.is_sparse:
            parameter.grad = importance.keep(grad, grad.coalesce())
            # a coalesced tensor's values are a view of it, which pyright cannot tell
            grad = parameter.grad._values()
        if grad.numel():  # an empty tensor has no largest value
            found.append(grad)
    total_norm = torch.nn.utils.get_total_norm(grads, norm_type, foreach=foreach)
    for group, parts in sharded.items():
        from .distributed.collectives import gathered  # torch may be built without torch.distributed

        own = torch.nn.utils.get_total_norm(parts, norm_type, foreach=foreach)
        everyone = torch.linalg.vector_norm(gathered(own, group, "norms of gradients"), norm_type)
        total_norm = torch.linalg.vector_norm(torch.stack([total_norm.to(everyone.device), everyone]), norm_type)
        grads += parts
    if error_if_nonfinite and not bool(torch.isfinite(total_norm)):
        raise RuntimeError(f"the norm of the gradients is {float(total_norm)}, and error_if_nonfinite=True")
    scale = (max_norm / (total_norm + 1e-6)).clamp(max=1.0)
    for grad in grads:
        grad.mul_(scale.to(grad.device))
    return total_norm
