"""How many times too large the squares of sampled gradients are, for optimisers that divide by their root.

A class that is drawn with probability π has the weight 1/π, so that its gradient is right in the mean. The mean of the
square is then 1/π times too large, and Adam would take steps √π times as long as with the full softmax.
The part of a gradient from one draw, g = P/π, adds P²·(1/π − 1) to the mean square. Its estimate g²·(1 − π) is
subtracted, and what is left is right in the mean.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from .refresh import version
from .rows import after_backward
from .samplers.draw import Draw

#: Takes in a backward pass the rows that get a gradient, ascending, and how many times too large their squares are.
Note = Callable[[Tensor, Tensor], None]

# An attribute of sparse gradients, so that it lives as long as the gradient that it describes: the version of the
# parameter, and what each backward pass noted.
NAME = "excess"


def noting(tables: Iterable[nn.Embedding | None]) -> Note:
    """Return what a backward pass calls to note the excess at the gradients of ``tables``."""
    parameters = [table.weight for table in tables if table is not None]

    def note(rows: Tensor, excess: Tensor) -> None:
        after_backward(lambda: _attach(parameters, rows, excess))

    return note


def _attach(parameters: Iterable[Tensor], rows: Tensor, excess: Tensor) -> None:
    for parameter in parameters:
        grad, now = parameter.grad, version(parameter)
        if grad is not None and grad.is_sparse:
            before, passes = getattr(grad, NAME, (now, []))
            setattr(grad, NAME, (now, [*(passes if before == now else []), (rows, excess)]))


def keep(source: Tensor, grad: Tensor) -> Tensor:
    """Return a gradient that replaces ``source``, with what was noted there."""
    if hasattr(source, NAME):
        setattr(grad, NAME, getattr(source, NAME))
    return grad


def read(grad: Tensor, rows: Tensor) -> Tensor:
    """Return the excess of a gradient's ``rows (count,)``, at least 1, shape ``(count,)``.

    Of several passes it is the mean, where a pass without the row counts as 0.
    """
    _, passes = getattr(grad, NAME, (0, []))
    if not passes or not len(rows):
        return torch.ones(len(rows), device=rows.device)
    total = torch.zeros(len(rows), device=rows.device)
    for noted, excess in passes:
        place = torch.searchsorted(rows, noted).clamp(max=len(rows) - 1)
        total.index_add_(0, place, excess.float().where(rows[place] == noted, 0.0))
    return (total / len(passes)).clamp(min=1.0)


def excess_of(
    values: Tensor,  # shape: (rows, columns), the gradients
    own: tuple[Tensor, Tensor, Tensor],  # places in rows, squared lengths and log-counts of draws, shapes (draws,)
    pool: tuple[Tensor, Tensor, Tensor],  # places, lengths and log-counts of slots of the pool, shapes (slots,)
) -> Tensor:
    """Return how many times too large the squared lengths of gradients are, at least 1, shape ``(rows,)``.

    Each draw has a part of a gradient. Slots of the pool with the same class have the same part, and are one draw.
    """

    def summed(place: Tensor, part: Tensor) -> Tensor:
        return values.new_zeros(len(values)).index_add(0, place, part.to(values.dtype))

    place, square, log_count = own
    drawn, right = summed(place, square), summed(place, square * log_count.clamp(max=0).exp())
    place, length, log_count = pool
    square, weight = summed(place, length).square(), summed(place, (-log_count).exp())
    drawn, right = drawn + square, right + square / weight.clamp(min=1)
    total = values.square().sum(dim=1)
    # Of a row with a single draw nothing else is left; cancelling draws of others must not leave less.
    wanted = (total - drawn + right).maximum(right)
    return torch.where(wanted < total, total / wanted, 1.0)


class Squares:
    """Squared lengths of the gradients of single draws, which hooks collect in a backward pass without native code.

    A gradient may be None, which means 0.

    Args:
        note: called with the excess of all ``rows``.
        rows: ascending, that get a gradient.
        own: places of own negatives in ``rows``, shape ``(batch, own)``.
        pool: those of the pool.
        draw: what was drawn.
    """

    def __init__(self, note: Note, rows: Tensor, own: Tensor, pool: Tensor, draw: Draw) -> None:
        self.note, self.rows, self.draw = note, rows, draw
        self.own, self.pool = own, pool
        self.squares, self.lengths = torch.zeros_like(draw.log_count), torch.zeros_like(draw.pool_log_count)

    def of_own(self, query: Tensor, slopes: Tensor | None) -> None:
        """Take the derivatives by the logits of own negatives, shape ``(batch, own)``."""
        if slopes is not None:
            self.squares = slopes.square() * query.square().sum(dim=-1, keepdim=True)

    def of_pool(self, values: Tensor | None) -> None:
        """Take the gradients of the rows of the pool, shape ``(pool, in_features)``."""
        if values is not None:
            self.lengths = torch.linalg.vector_norm(values, dim=-1)

    def of_rows(self, values: Tensor | None) -> None:
        """Take the gradients of all rows, the last of the three."""
        if values is None:
            return
        own = (self.own.flatten(), self.squares.flatten(), self.draw.log_count.flatten())
        pool = (self.pool, self.lengths, self.draw.pool_log_count)
        self.note(self.rows, excess_of(values, own, pool))
