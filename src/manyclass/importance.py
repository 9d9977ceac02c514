"""How many times too large a row's gradient is because a pool drew its class: what optimisers with squares need.

A pool that holds a class with probability π weighs it by 1/π, so that its gradient is right in the mean. The mean of
the square is then 1/π times too large, and Adam or Adagrad would take steps √π times as long as with the full softmax.
Divided by the weight, the square is right in the mean as well.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from .refresh import version
from .samplers.draw import Draw

# An attribute of sparse gradients, so that it lives as long as the gradient that it describes: the version of the
# parameter, and for each backward pass drawn classes and their weights.
NAME = "drawn"


def watch(loss: Tensor, tables: Iterable[nn.Embedding | None], draw: Draw) -> None:
    """Let the backward pass of ``loss`` note the weights of drawn classes at the gradients that it leaves.

    Classes that are targets or own negatives of some example are left out: most of their gradient has the weight 1.
    """
    if not loss.requires_grad or not len(draw.pool):
        return
    parameters = [table.weight for table in tables if table is not None]
    loss.register_hook(lambda _: torch.autograd.Variable._execution_engine.queue_callback(note))  # pyright: ignore

    def note() -> None:
        drawn = draw.pool, (-draw.pool_log_count).exp().masked_fill(draw.hidden_slots(), 0.0)
        for parameter in parameters:
            grad, now = parameter.grad, version(parameter)
            if grad is not None and grad.is_sparse:
                before, passes = getattr(grad, NAME, (now, []))
                setattr(grad, NAME, (now, [*(passes if before == now else []), drawn]))


def keep(source: Tensor, grad: Tensor) -> Tensor:
    """Return a gradient that replaces ``source``, with what was noted there."""
    if hasattr(source, NAME):
        setattr(grad, NAME, getattr(source, NAME))
    return grad


def weights(grad: Tensor, rows: Tensor) -> Tensor | None:
    """Return the weight of each of a gradient's ``rows (count,)``, at least 1, shape ``(count,)``; None if all are 1.

    Of several passes it is the mean, where a pass that did not draw a row counts as 0.
    """
    _, passes = getattr(grad, NAME, (0, []))
    if not passes or not len(rows):
        return None
    total = torch.zeros(len(rows), dtype=torch.float64, device=rows.device)
    for classes, weight in passes:
        place = torch.searchsorted(rows, classes).clamp(max=len(rows) - 1)
        total.index_add_(0, place, weight.double().where(rows[place] == classes, 0.0))
    return (total / len(passes)).clamp(min=1.0)
