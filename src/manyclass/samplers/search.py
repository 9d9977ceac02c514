"""Walk down the tree of blocks to those that matter for a query, and score their classes exactly."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .. import functional, ops
from .draw import Best
from .partition import BRANCHING, Partition, rows_of
from .pool import UNIFORM, pool_count


class Index(NamedTuple):
    """What a search reads: the tree of blocks and the class weights as they are now."""

    partition: Partition
    weight: Tensor  # shape: (num_classes, in_features)
    bias: Tensor | None  # shape: (num_classes,)
    prediction: str

    def native(self) -> tuple[Tensor, ...]:
        """The tensors that the native searches take."""
        bias = self.weight.new_empty(0) if self.bias is None else self.bias.contiguous()
        return self.partition.mean, self.partition.spread, self.weight.contiguous(), bias, self.partition.order

    def sizes(self) -> tuple[int, int, int]:
        """Numbers that go with them."""
        return self.partition.outliers, self.partition.blocks, self.partition.widths[0]

    def chunks(self, query: Tensor, width: int) -> tuple[Tensor, ...]:
        """The queries in parts, so that the reference gathers a bounded number of rows at a time."""
        rows = self.partition.widths[0] + self.partition.outliers + (BRANCHING + self.partition.block_size) * width
        return query.split(max(1, functional.MAX_LOGITS // (rows * self.partition.columns)))


class Visited(NamedTuple):
    """What each example met on its way down."""

    blocks: Tensor  # shape: (batch, width), ascending
    #: The outliers, then the members of the blocks; −1 where a block has no further member.
    ids: Tensor  # shape: (batch, candidates)
    outputs: Tensor  # shape: (batch, candidates), −inf where there is none
    #: Estimated log-mass of all classes that were not visited.
    pruned: Tensor  # shape: (batch,)
    #: Smallest estimated log-mass of a visited block.
    cutoff: Tensor  # shape: (batch,)


class Own(NamedTuple):
    """Negatives that each example draws from the classes that it visits."""

    ids: Tensor  # shape: (batch, number)
    log_count: Tensor  # shape: (batch, number), +inf for an empty slot
    #: Pairs of an example and a slot of the pool whose class the example's own draw accounts for.
    hidden: Tensor  # shape: (2, pairs)
    log_total: Tensor  # shape: (batch,)


def log_mass(mean: Tensor, variance: Tensor, size: float, prediction: str) -> Tensor:
    """Log of Σ exp(o) over ``size`` Gaussian outputs with this mean and variance.

    ``ln N + μ + σ²/2`` is right for infinitely many. N of them have no more than their maximum, ``μ + σ·√(2·ln N)``,
    which is smaller where σ > √(2·ln N): the random energy model.
    """
    log_size, deviation = math.log(size), variance.sqrt()
    limit = math.sqrt(2 * log_size)
    spread = torch.where(deviation <= limit, log_size + variance / 2, deviation * limit)
    return functional.output(mean, prediction) + spread


def visit(index: Index, query: Tensor, width: int) -> Visited:
    """Follow the ``width`` best nodes of every level, in plain PyTorch; query ``(batch, columns)``."""
    partition, norm = index.partition, query.square().sum(dim=-1, keepdim=True)
    nodes = cutoff = None
    pruned = []
    for first, number in zip(partition.firsts, partition.widths, strict=True):
        if nodes is None:
            nodes = torch.arange(number, device=query.device).expand(len(query), -1)
        else:
            nodes = (nodes.unsqueeze(-1) * BRANCHING + torch.arange(BRANCHING, device=query.device)).flatten(1)
        mean = torch.einsum("bkc,bc->bk", partition.mean[first + nodes], query)
        score = log_mass(mean, norm * partition.spread[first + nodes], partition.inside / number, index.prediction)
        score = score.nan_to_num(math.nan, posinf=math.nan)
        cutoff, best = score.topk(min(width, score.shape[1]), dim=-1)
        pruned.append(score.scatter(1, best, -math.inf).logsumexp(dim=-1))
        nodes = nodes.gather(1, best)
    assert nodes is not None
    assert cutoff is not None
    blocks = nodes.sort(dim=-1).values
    members, inside = partition.members(blocks)
    outliers = partition.order[: partition.outliers].long().expand(len(query), -1)
    ids = torch.cat([outliers, torch.where(inside, members, -1).flatten(1)], dim=1)
    logits = torch.einsum("bkc,bc->bk", rows_of(index.weight, index.bias, ids.clamp(min=0)), query)
    outputs = functional.output(logits, index.prediction).masked_fill(ids < 0, -math.inf)
    return Visited(blocks, ids, outputs, torch.stack(pruned).logsumexp(0), cutoff[:, -1])


def best_classes(index: Index, query: Tensor, width: int, k: int) -> Best:
    """Find the ``k`` classes with the largest outputs in the ``width`` best blocks; query ``(batch, columns)``."""
    if ops.native_for(query, index.weight):
        options = (width, k, index.prediction == "absolute")
        best = Best(*torch.ops.manyclass.best_classes(query.contiguous(), *index.native(), *index.sizes(), *options))
        _check_finite(best.log_total)
        return best
    parts = []
    for part in index.chunks(query, width):
        found = visit(index, part, width)
        outputs, place = found.outputs.topk(k, dim=-1)
        total = torch.logaddexp(found.outputs.logsumexp(dim=-1), found.pruned)
        parts.append((outputs, found.ids.gather(1, place), total, found.cutoff))
    best = Best(*(torch.cat(part) for part in zip(*parts, strict=True)))
    _check_finite(best.log_total)
    return best


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

    A visited class is drawn with the probability min(1, c·exp(o)), if that is at least its expected count in the pool;
    otherwise the pool accounts for it. So the largest are certain, and the sum over all of them is exact.
    """
    exclude = torch.full_like(uniform, -1, dtype=torch.long) if exclude is None else exclude
    if ops.native_for(query, index.weight):
        numbers = (*index.sizes(), width, number, UNIFORM, index.prediction == "absolute")
        draw = (query.contiguous(), exclude.contiguous(), uniform.contiguous(), *index.native())
        own = Own(*torch.ops.manyclass.own_draw(*draw, index.partition.sums, pool, *numbers))
        _check_finite(own.log_total)
        return own
    ids, log_count, hidden, total, first = [], [], [], [], 0
    for part in index.chunks(query, width):
        examples = slice(first, first + len(part))
        found = visit(index, part, width)
        outputs = found.outputs.masked_fill(found.ids == exclude[examples].unsqueeze(-1), -math.inf)
        chance = _chances(index.partition, found, outputs, len(pool), number)
        ends = chance.cumsum(dim=-1)
        point = uniform[examples].unsqueeze(-1) + torch.arange(number, device=query.device)
        place = torch.searchsorted(ends, point, right=True)
        taken = place < ends.shape[1]
        place = place.clamp(max=ends.shape[1] - 1)
        ids.append(found.ids.gather(1, place).where(taken, 0))
        log_count.append(chance.gather(1, place).log().where(taken, math.inf).to(query.dtype))
        hidden.append(_hidden(index.partition, found.blocks, chance, pool) + torch.tensor([[first], [0]]).to(pool))
        total.append(torch.logaddexp(outputs.logsumexp(dim=-1), found.pruned))
        first += len(part)
    _check_finite(torch.cat(total))
    return Own(torch.cat(ids), torch.cat(log_count), torch.cat(hidden, dim=1), torch.cat(total))


def _chances(partition: Partition, found: Visited, outputs: Tensor, samples: int, number: int) -> Tensor:
    """Probabilities of the visited classes to be drawn, float64; 0 for those that are left to the pool."""
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
    c = number / e.sum(dim=-1, keepdim=True).clamp(min=1e-300)
    everything = (e > 0).sum(dim=-1, keepdim=True) <= number
    while True:  # who is certain lets the others have more
        certain = c * e >= 1
        left = number - certain.sum(dim=-1, keepdim=True)
        rest = torch.where(certain, 0.0, e).sum(dim=-1, keepdim=True)
        more = torch.where(rest > 0, left / rest.clamp(min=1e-300), c)
        if not bool(((more > c * (1 + 1e-12)) & ~everything).any()):
            break
        c = more.maximum(c)
    return torch.where(everything, (e > 0).double(), (c * e).clamp(max=1))


def _hidden(partition: Partition, blocks: Tensor, chance: Tensor, pool: Tensor) -> Tensor:
    """Pairs of an example and a slot of the pool that holds a class which the example draws for itself."""
    # Stretches of positions that were visited: the outliers, and each block; and the first candidate of each.
    begin = torch.cat([torch.zeros_like(blocks[:, :1]), partition.border(blocks)], dim=1)
    end = torch.cat([torch.full_like(blocks[:, :1], partition.outliers), partition.border(blocks + 1)], dim=1)
    start = torch.arange(blocks.shape[1], device=pool.device) * partition.block_size + partition.outliers
    start = torch.cat([start.new_zeros(1), start])
    first, last = torch.searchsorted(pool, begin), torch.searchsorted(pool, end)
    count = (last - first).flatten()
    pair = torch.arange(len(count), device=pool.device).repeat_interleave(count)
    slot = first.flatten()[pair] + torch.arange(len(pair), device=pool.device) - (count.cumsum(0) - count)[pair]
    example = pair // begin.shape[1]
    candidate = start[pair % begin.shape[1]] + pool[slot] - begin.flatten()[pair]
    own = chance[example, candidate] > 0
    return torch.stack([example[own], slot[own]])


def _check_finite(log_total: Tensor) -> None:
    if not bool(torch.isfinite(log_total).all()):
        raise ValueError("the masses of the blocks are not finite; class weights must be finite, and smaller")
