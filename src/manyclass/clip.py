"""Gradient clipping that counts sparse gradients."""

from collections.abc import Iterable

import torch
from torch import Tensor


@torch.no_grad()
def clip_grad_norm_(parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor:
    """`torch.nn.utils.clip_grad_norm_` for parameters of which some have sparse gradients.

    Scales all gradients in place so that their total norm is at most ``max_norm``; returns the norm they had.
    A sparse gradient is coalesced first, since the norm of summands is not the norm of their sum.
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm must be positive, got {max_norm}")
    grads = []
    for parameter in [parameters] if isinstance(parameters, Tensor) else parameters:
        if parameter.grad is None:
            continue
        if parameter.grad.is_sparse:
            parameter.grad = parameter.grad.coalesce()
            # pyright does not know that a coalesced tensor's values are a view of it.
            grads.append(parameter.grad._values())
        else:
            grads.append(parameter.grad)
    total_norm = torch.nn.utils.get_total_norm(grads, norm_type)
    scale = (max_norm / (total_norm + 1e-6)).clamp(max=1.0)
    for grad in grads:
        grad.mul_(scale.to(grad.device))
    return total_norm
