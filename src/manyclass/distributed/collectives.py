"""Collectives with gradients, and errors that name the rank and what it waited for."""

import re
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

# The first is the new name of the second.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

#: Called with the name and the bytes that this process sends to others, for `manyclass bench distributed`.
observer: Callable[[str, int], object] | None = None


class LostContactError(RuntimeError):
    """Another process died, hangs, or did not join a collective call."""


@contextmanager
def together(what: str, group: dist.ProcessGroup, sent: Tensor | None = None):
    """Wrap a collective, so that an error names the rank and what it waited for."""
    if observer is not None and sent is not None:
        observer(what, sent.numel() * sent.element_size())
    try:
        yield
    except LostContactError:
        raise
    except RuntimeError as error:
        reason = re.sub(r"^\[\S*\] ", "", str(error).strip().splitlines()[0]).split(". ")[0]
        raise LostContactError(
            f"rank {dist.get_rank(group)} of {dist.get_world_size(group)} lost contact while it exchanged {what}: "
            f"another process died, hangs, or did not join this step ({reason})"
        ) from error


def gathered(part: Tensor, group: dist.ProcessGroup, what: str) -> Tensor:
    """Gather tensors of the same shape from all ranks: ``(ranks, *shape)``."""
    world = dist.get_world_size(group)
    out = part.new_empty(world, *part.shape)
    if out.numel():
        with together(what, group, part.expand(world - 1, *part.shape)):
            _all_gather(out.view(-1), part.reshape(-1), group=group)
    return out


def summed(part: Tensor, group: dist.ProcessGroup, what: str) -> Tensor:
    """Sum tensors of the same shape over all ranks."""
    out = part.clone()
    with together(what, group, out):
        dist.all_reduce(out, group=group)
    return out


def gathered_rows(parts: list[Tensor], group: dist.ProcessGroup, what: str) -> tuple[list[Tensor], list[int]]:
    """Gather rows of tensors from all ranks, in the order of the ranks; return them and the number of rows per rank.

    Ranks may have different numbers of rows, or none.
    """
    rows = gathered(torch.tensor(len(parts[0]), device=parts[0].device), group, f"the number of {what}").tolist()
    own, most = len(parts[0]), max(rows)

    def all_of(part: Tensor) -> Tensor:
        padded = part if own == most else torch.cat([part, part.new_zeros(most - own, *part.shape[1:])])
        found = gathered(padded, group, what)
        return torch.cat([block[:count] for block, count in zip(found, rows, strict=True)])

    return [all_of(part) for part in parts], rows


def mean_rows(rows: Tensor, values: Tensor, group: dist.ProcessGroup, what: str) -> tuple[Tensor, Tensor]:
    """Average sparse gradients over ranks: distinct ``rows (rows,)`` and ``values (rows, …)``; sorts rows."""
    (rows, values), counts = gathered_rows([rows, values], group, what)
    rows, place = torch.unique(rows, return_inverse=True)
    total = values.new_zeros(len(rows), *values.shape[1:])
    for part, where in zip(values.split(counts), place.split(counts), strict=True):
        total.index_add_(0, where, part)  # rank by rank: the same bits everywhere
    return rows, total / len(counts)


def _all_to_all(sent: Tensor, give: list[int], take: list[int], group: dist.ProcessGroup, what: str) -> Tensor:
    """Send ``give[r]`` consecutive rows of ``sent`` to rank r, receive ``take[r]`` from it: ``(sum(take), width)``."""
    width, rank = sent.shape[1], dist.get_rank(group)
    received = sent.new_empty(sum(take), width)
    if sum(give) or sum(take):
        with together(what, group, sent[: sum(give) - give[rank]]):
            sizes = [count * width for count in take], [count * width for count in give]
            dist.all_to_all_single(received.view(-1), sent.contiguous().view(-1), *sizes, group=group)
    return received


def to_owners(found: Tensor, rows: list[int], group: dist.ProcessGroup, what: str) -> Tensor:
    """Send results ``(all examples, width)`` to the ranks of the examples: ``(ranks, examples here, width)``."""
    own = rows[dist.get_rank(group)]
    received = _all_to_all(found, rows, [own] * len(rows), group, what)
    return received.view(len(rows), own, found.shape[1])


class _Queries(torch.autograd.Function):
    """The queries of all ranks. Backward: each rank gets the sum of the gradients of its queries over all ranks."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, everyone: Tensor, rows: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.rows, ctx.group = rows, group
        return everyone.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        # `_Exchange` divides gradients by the number of ranks, but a query belongs to one rank only.
        found = to_owners(grads[0], ctx.rows, ctx.group, "gradients of the queries")
        return found.sum(dim=0) * len(ctx.rows), None, None, None


def with_gradient(query: Tensor, everyone: Tensor, rows: list[int], group: dist.ProcessGroup) -> Tensor:
    """Return ``everyone``, the gathered queries of all ranks, as a function of this rank's ``query``."""
    return cast(Tensor, _Queries.apply(query, everyone, rows, group))


class _Exchange(torch.autograd.Function):
    """`to_owners` with a gradient.

    Backward divides by the number of ranks: class weights then get the mean of the ranks' gradients, which is what
    `DistributedDataParallel` gives to the other parameters.
    """

    @staticmethod
    def forward(ctx: Any, found: Tensor, rows: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.rows, ctx.group = rows, group
        return to_owners(found, rows, group, "log-sum-exps")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        own, world = grads[0].shape[1], len(ctx.rows)
        found = _all_to_all(grads[0].flatten(0, 1), [own] * world, ctx.rows, ctx.group, "slopes")
        return found / world, None, None


def exchanged(found: Tensor, rows: list[int], group: dist.ProcessGroup) -> Tensor:
    """Run `to_owners` with gradients."""
    return cast(Tensor, _Exchange.apply(found, rows, group))
