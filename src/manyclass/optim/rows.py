"""The step of an optimiser on single rows of a parameter: a native kernel, and its PyTorch reference."""

from typing import NamedTuple

import torch
from torch import Tensor

from .. import ops


class RowUpdate(NamedTuple):
    """The coefficients of a step on rows.

    Without a first moment the gradient takes its place. Without a second moment it is 1.
    """

    rate: float
    decay1: float = 0.0
    gain1: float = 1.0
    decay2: float = 1.0
    gain2: float = 1.0
    root: float = 1.0
    eps: float = 0.0
    #: Share of the weights that a step takes.
    weight_decay: float = 0.0


def update_rows_(
    weight: Tensor,  # shape: (num_rows, columns)
    first: Tensor | None,  # shape: (num_rows, columns)
    second: Tensor | None,  # shape: (num_rows, columns), or (num_rows, 1) for one number per row
    rows: Tensor,  # shape: (count,), ascending
    grad: Tensor,  # shape: (count, columns)
    missed: Tensor,  # shape: (count, 5): scale, move, decay1, decay2 and share of each row
    update: RowUpdate,
) -> None:
    """Change ``rows`` of ``weight``, ``first`` and ``second`` in place, O(count · columns).

    - ``weight = scale · (weight − move · first / (√second · root + eps))``
    - ``first = decay1 · first + gain1 · grad``
    - ``second = decay2 · second + gain2 · share · grad²``, or the mean of the squares for one number per row
    - ``weight = weight − rate · first / (√second · root + eps)``

    Without ``first``, the last line has at least ``grad²`` as ``second``. So no step is longer than ``rate``, for any
    share.
    """
    if not ops.native_for(weight, grad):
        return update_rows_reference_(weight, first, second, rows, grad, missed, update)
    none = weight.new_empty(0, weight.shape[1])
    first, second = none if first is None else first, none.clone() if second is None else second
    numbers = (update.gain1, update.gain2, update.rate, update.root, update.eps)
    torch.ops.manyclass.update_rows_(weight, first, second, rows, grad.contiguous(), missed, *numbers)
    torch.autograd.graph.increment_version(weight)  # a native kernel does not, and samplers follow it
    return None


def update_rows_reference_(
    weight: Tensor,
    first: Tensor | None,
    second: Tensor | None,
    rows: Tensor,
    grad: Tensor,
    missed: Tensor,
    update: RowUpdate,
) -> None:
    """Compute `update_rows_` in plain PyTorch."""
    scale, move, decay1, decay2, share = missed.unsqueeze(-1).unbind(1)
    size = 1.0 if second is None else second[rows].sqrt() * update.root + update.eps
    values, step = weight[rows], grad
    if first is not None:
        values = values - move * first[rows] / size
        step = decay1 * first[rows] + update.gain1 * grad
        first[rows] = step
    if second is not None:
        square = grad.square() if second.shape == weight.shape else grad.square().mean(dim=1, keepdim=True)
        sums = decay2 * second[rows] + update.gain2 * share * square
        second[rows] = sums
        size = (sums.maximum(square) if first is None else sums).sqrt() * update.root + update.eps
    weight[rows] = scale * values - update.rate * step / size
