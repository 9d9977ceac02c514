"""Own negatives: what each example draws from the classes of the blocks that it visits."""

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from .. import ops
from .draw import as_hidden, either_hidden, same_class
from .partition import Partition
from .pool import UNIFORM, pool_count
from .search import Index, Visited, check_finite, visit

# A search of 1/TRIAL of the width tells whether an example needs own negatives. It needs none if the classes of all
# visited blocks have at most FLAT of the variance of a draw with the pool alone.
FLAT, TRIAL = 0.2, 4
# If none of about this many examples, evenly spaced in the batch, needs own negatives, the others are not searched.
TRIED = 32


class Own(NamedTuple):
    """Negatives that each example draws from the classes that it visits."""

    ids: Tensor  # shape: (batch, number)
    log_count: Tensor  # shape: (batch, number), +inf for an empty slot
    #: Slots of the pool whose class is excluded or accounted for by the example's own draw, as in `Draw.hidden`.
    hidden: Tensor
    #: Estimate of the log of the whole mass, 0 for an example that was not searched.
    log_total: Tensor  # shape: (batch,)


def own_draw(
    index: Index,
    query: Tensor,  # shape: (batch, columns)
    exclude: Tensor | None,  # shape: (batch,)
    uniform: Tensor,  # shape: (batch,), float64
    pool: Tensor,  # shape: (samples,): positions of the shared pool, ascending
    width: int,
    number: int,
) -> Own:
    """Draw ``number`` negatives for each example from the classes of its ``width`` best blocks.

    A visited class is drawn with probability min(1, c·exp(o)), if that is at least its expected count in the pool.
    Otherwise the pool accounts for it. So the largest classes are certain. An example whose softmax is nearly flat
    draws from the outliers only, since own negatives would hardly reduce its error. If that holds for all of `TRIED`
    examples, it is taken to hold for the batch.
    """
    exclude = torch.full_like(uniform, -1, dtype=torch.long) if exclude is None else exclude
    if ops.native_for(query, index.weight):
        numbers = (*index.sizes(), width, number, UNIFORM, index.prediction == "absolute")
        draw = (query.contiguous(), exclude.contiguous(), uniform.contiguous(), *index.native())
        own = Own(*torch.ops.manyclass.own_draw(*draw, index.partition.block_of, index.partition.sums, pool, *numbers))
        check_finite(index, own.log_total)
        return own
    chunks = index.chunks(query, width)
    sizes = [len(part) for part in chunks]
    excluded = exclude.split(sizes)
    flat, rest = _joined(_flat(index, *part, width, len(pool)) for part in zip(chunks, excluded, strict=True))
    tried = torch.arange(len(query), device=query.device) % max(1, math.ceil(len(query) / TRIED)) == 0
    skipped = ~tried & (flat | ~tried).all()
    flat = (flat | skipped).split(sizes)
    ids, log_count, hidden, total = _joined(
        _own_part(index, *part, pool, width, number)
        for part in zip(chunks, excluded, uniform.split(sizes), flat, rest.split(sizes), strict=True)
    )
    total = torch.where(skipped, 0 * total, total)
    check_finite(index, total)
    slots = same_class(index.partition.order[pool].long(), exclude)
    return Own(ids, log_count, either_hidden(as_hidden(hidden), slots), total)


def _joined(parts: Iterable[tuple[Tensor, ...]]) -> list[Tensor]:
    return [torch.cat(part) for part in zip(*parts, strict=True)]


def _own_part(
    index: Index,
    query: Tensor,
    exclude: Tensor,
    uniform: Tensor,
    flat: Tensor,
    rest: Tensor,
    pool: Tensor,
    width: int,
    number: int,
) -> tuple[Tensor, ...]:
    """Compute `own_draw` of some examples in plain PyTorch, with a mask for the slots that their draws account for."""
    found = visit(index, query, width)
    outputs = found.outputs.masked_fill(found.ids == exclude.unsqueeze(-1), -math.inf)
    outputs[:, index.partition.outliers :].masked_fill_(flat.unsqueeze(-1), -math.inf)
    chance = _chances(index.partition, found, outputs, len(pool), number)
    ends = chance.cumsum(dim=-1)
    point = uniform.unsqueeze(-1) + torch.arange(number, device=query.device)
    place = torch.searchsorted(ends, point, right=True)
    taken = place < ends.shape[1]
    place = place.clamp(max=ends.shape[1] - 1)
    ids = found.ids.gather(1, place).where(taken, 0)
    log_count = chance.gather(1, place).log().where(taken, math.inf).to(query.dtype)
    total = torch.logaddexp(outputs.logsumexp(dim=-1), torch.where(flat, rest, found.pruned))
    return ids, log_count, _hidden(index.partition, found.blocks, chance, pool), total


def _flat(index: Index, query: Tensor, exclude: Tensor, width: int, samples: int) -> tuple[Tensor, Tensor]:
    """Return whether own negatives would hardly help, and the log-mass of all but the outliers, both ``(batch,)``.

    A class has the variance e²·(1/π − 1) in a draw with the pool alone. The best blocks are scored, and the other
    blocks of the width are taken to have as much each. All that was pruned, of mass P, has at least about
    P²·(1/samples − 1/classes), by the inequality of Cauchy and Schwarz.
    """
    partition, found = index.partition, visit(index, query, math.ceil(width / TRIAL))
    outputs = found.outputs.masked_fill(found.ids == exclude.unsqueeze(-1), -math.inf)[:, partition.outliers :]
    squares = (2 * (outputs - found.pruned.unsqueeze(-1))).double().exp().unflatten(1, (-1, partition.block_size))
    odds = 1 / pool_count(partition, found.blocks, samples).clamp(max=1) - 1
    variance = (squares.sum(dim=-1) * odds).sum(dim=-1)
    flat = variance <= FLAT / TRIAL * max(0.0, 1 / samples - 1 / partition.inside)
    flat = flat & (found.pruned > -math.inf) & (width < partition.blocks)  # a visit of all classes has no error at all
    return flat, torch.logaddexp(found.mass.logsumexp(dim=-1), found.pruned)


def _chances(partition: Partition, found: Visited, outputs: Tensor, samples: int, number: int) -> Tensor:
    """Return the draw probabilities of the visited classes, float64; 0 for classes that are left to the pool."""
    of_pool = pool_count(partition, found.blocks, samples).clamp(max=1).repeat_interleave(partition.block_size, dim=1)
    of_outliers = of_pool.new_full((len(outputs), partition.outliers), float(samples >= partition.num_classes))
    of_pool = torch.cat([of_outliers, of_pool], dim=1)
    e = (outputs - outputs.amax(dim=-1, keepdim=True).clamp(min=-1e30)).double().exp()
    low = number / e.sum(dim=-1, keepdim=True).clamp(min=1e-300)
    high = torch.full_like(low, 1e36)

    def belongs(c: Tensor) -> Tensor:
        return ((c * e).clamp(max=1) >= of_pool) & (e > 0)

    for _ in range(60):  # the largest c for which at most `number` are expected
        middle = (low.log() + high.log()).div(2).exp()
        few = ((middle * e).clamp(max=1) * belongs(middle)).sum(dim=-1, keepdim=True) <= number
        low, high = torch.where(few, middle, low), torch.where(few, high, middle)
    e = e * belongs(low)
    everything = (e > 0).sum(dim=-1, keepdim=True) <= number
    # The largest are certain as long as c·e ≥ 1 for the c that is left for them and all smaller ones.
    largest, place = e.sort(dim=-1, descending=True)
    rest = largest.flip(-1).cumsum(dim=-1).flip(-1).clamp(min=1e-300)
    left = number - torch.arange(e.shape[1], device=e.device)
    certain = (left * largest >= rest).cumprod(dim=-1).bool()
    rank = certain.sum(dim=-1, keepdim=True).clamp(max=e.shape[1] - 1)
    c = left[rank] / rest.gather(1, rank)
    chance = torch.where(certain, 1.0, (c * largest).clamp(0, 1))
    return torch.where(everything, (e > 0).double(), torch.zeros_like(e).scatter(1, place, chance))


def _hidden(partition: Partition, blocks: Tensor, chance: Tensor, pool: Tensor) -> Tensor:
    """Return a mask ``(batch, samples)`` of the pool's slots that hold an own negative of the example."""
    # The block that holds the position; negative for an outlier, which all examples visit.
    block = ((pool - partition.outliers + 1) * partition.blocks - 1) // partition.inside
    block = block.expand(len(blocks), -1).contiguous()
    place = torch.searchsorted(blocks, block).clamp(max=blocks.shape[1] - 1)
    candidate = partition.outliers + place * partition.block_size + pool - partition.border(block)
    candidate = torch.where(block < 0, pool, candidate)
    visited = (block < 0) | (blocks.gather(1, place) == block)
    return visited & (chance.gather(1, torch.where(visited, candidate, 0)) > 0)
