"""Search the tree of blocks for a query's best blocks, and score their classes exactly."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .. import functional, ops
from .codes import Codes, native_tables, rows_of
from .draw import Best, as_hidden
from .partition import BRANCHING, Partition, log_mass
from .pool import UNIFORM, pool_count

# A search of 1/TRIAL of the width tells whether an example needs own negatives. It needs none if the classes of all
# visited blocks have at most FLAT of the variance of a draw with the pool alone.
FLAT, TRIAL = 0.2, 4
# A search for k classes scores the best 2·k + RESCORED candidates by code exactly.
RESCORED = 64


class Index(NamedTuple):
    """The data of a search: the tree of blocks, the codes of the classes, and the present class weights."""

    partition: Partition
    codes: Codes
    weight: Tensor  # shape: (num_classes, in_features)
    bias: Tensor | None  # shape: (num_classes,)
    prediction: str
    #: Whether to check that masses are finite.
    validate: bool = True

    def native(self) -> tuple[Tensor, ...]:
        """Return the tensors that the native searches take."""
        mean, codes, tables = self.partition.mean, self.codes, native_tables(self.weight, self.bias)
        return mean.code, mean.scale, self.partition.spread, codes.code, codes.scale, *tables, self.partition.order

    def outputs(self, query: Tensor, ids: Tensor) -> Tensor:
        """Return the exact outputs of classes ``ids (batch, k)`` for queries ``(batch, columns)``."""
        logits = torch.einsum("bkc,bc->bk", rows_of(self.weight, self.bias, ids), query)
        return functional.output(logits, self.prediction)

    def sizes(self) -> tuple[int, int, int]:
        """Return the sizes that the native searches take."""
        return self.partition.outliers, self.partition.blocks, self.partition.widths[0]

    def chunks(self, query: Tensor, width: int) -> tuple[Tensor, ...]:
        """Split the queries, so that the reference gathers a bounded number of rows at a time."""
        rows = self.partition.widths[0] + self.partition.outliers + (BRANCHING + self.partition.block_size) * width
        return query.split(max(1, functional.MAX_LOGITS // (rows * self.partition.columns)))


class Visited(NamedTuple):
    """Blocks and classes that each example visited."""

    blocks: Tensor  # shape: (batch, width), ascending
    #: The outliers, then the members of the blocks; −1 where a block has no further member.
    ids: Tensor  # shape: (batch, candidates)
    #: Outputs of outliers are exact, the others come from the codes of the classes.
    outputs: Tensor  # shape: (batch, candidates), −inf where there is none
    #: Estimated log-mass of all classes that were not visited.
    pruned: Tensor  # shape: (batch,)
    #: Estimated log-masses of the visited blocks.
    mass: Tensor  # shape: (batch, width)


class Own(NamedTuple):
    """Negatives that each example draws from the classes that it visits."""

    ids: Tensor  # shape: (batch, number)
    log_count: Tensor  # shape: (batch, number), +inf for an empty slot
    #: Slots of the pool whose class the example's own draw accounts for, as in `Draw.hidden`.
    hidden: Tensor
    log_total: Tensor  # shape: (batch,)


def beam_width(partition: Partition, nodes: int, width: int) -> int:
    """Return how many of the ``nodes`` of a level an example follows on its way to ``width`` blocks.

    Above the leaves a beam of half the width does nearly as well, if it keeps at least the same share of its level.
    """
    if nodes == partition.blocks:
        return width
    return max(math.ceil(width / 2), math.ceil(min(width, partition.blocks) * nodes / partition.blocks))


def visit(index: Index, query: Tensor, width: int) -> Visited:
    """Walk down to the ``width`` best blocks, in plain PyTorch; query ``(batch, columns)``."""
    partition, norm = index.partition, query.square().sum(dim=-1, keepdim=True)
    nodes = mass = None
    pruned = []
    for first, number in zip(partition.firsts, partition.widths, strict=True):
        if nodes is None:
            nodes = torch.arange(number, device=query.device).expand(len(query), -1)
        else:
            nodes = (nodes.unsqueeze(-1) * BRANCHING + torch.arange(BRANCHING, device=query.device)).flatten(1)
        mean = partition.mean.dots(query, first + nodes)
        score = log_mass(mean, norm * partition.spread[first + nodes], partition.inside / number, index.prediction)
        score = score.nan_to_num(math.nan, posinf=math.nan)
        mass, best = score.topk(min(beam_width(partition, number, width), score.shape[1]), dim=-1)
        pruned.append(score.scatter(1, best, -math.inf).logsumexp(dim=-1))
        nodes = nodes.gather(1, best)
    assert nodes is not None
    assert mass is not None
    blocks, place = nodes.sort(dim=-1)
    members, inside = partition.members(blocks)
    members, inside = members.flatten(1), inside.flatten(1)
    outliers = partition.order[: partition.outliers].long().expand(len(query), -1)
    by_code = functional.output(index.codes.dots(query, members), index.prediction).masked_fill(~inside, -math.inf)
    ids = torch.cat([outliers, members.where(inside, -1)], dim=1)
    outputs = torch.cat([index.outputs(query, outliers), by_code], dim=1)
    return Visited(blocks, ids, outputs, torch.stack(pruned).logsumexp(0), mass.gather(1, place))


def best_classes(index: Index, query: Tensor, width: int, k: int) -> Best:
    """Find the ``k`` classes with the largest outputs in the ``width`` best blocks; query ``(batch, columns)``."""
    if ops.native_for(query, index.weight):
        options = (width, k, index.prediction == "absolute")
        best = Best(*torch.ops.manyclass.best_classes(query.contiguous(), *index.native(), *index.sizes(), *options))
        _check_finite(index, best.log_total)
        return best
    parts = []
    for part in index.chunks(query, width):
        found = visit(index, part, width)
        # Codes are rounded, and may be stale.
        rescored = found.outputs.topk(min(2 * k + RESCORED, found.outputs.shape[1]), dim=-1).indices
        exact = index.outputs(part, found.ids.gather(1, rescored).clamp(min=0))
        exact = exact.masked_fill(found.ids.gather(1, rescored) < 0, -math.inf)
        every = found.outputs.scatter(1, rescored, exact)
        outputs, place = every.topk(k, dim=-1)
        total = torch.logaddexp(every.logsumexp(dim=-1), found.pruned)
        parts.append((outputs, found.ids.gather(1, place), total, found.mass.amin(dim=-1)))
    best = Best(*(torch.cat(part) for part in zip(*parts, strict=True)))
    _check_finite(index, best.log_total)
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

    A visited class is drawn with probability min(1, c·exp(o)), if that is at least its expected count in the pool.
    Otherwise the pool accounts for it. So the largest classes are certain. An example whose softmax is nearly flat
    draws from the outliers only, since own negatives would hardly reduce its error.
    """
    exclude = torch.full_like(uniform, -1, dtype=torch.long) if exclude is None else exclude
    if ops.native_for(query, index.weight):
        numbers = (*index.sizes(), width, number, UNIFORM, index.prediction == "absolute")
        draw = (query.contiguous(), exclude.contiguous(), uniform.contiguous(), *index.native())
        own = Own(*torch.ops.manyclass.own_draw(*draw, index.partition.sums, pool, *numbers))
        _check_finite(index, own.log_total)
        return own
    ids, log_count, hidden, total, first = [], [], [], [], 0
    for part in index.chunks(query, width):
        examples = slice(first, first + len(part))
        found = visit(index, part, width)
        outputs = found.outputs.masked_fill(found.ids == exclude[examples].unsqueeze(-1), -math.inf)
        flat, rest = _flat(index, part, exclude[examples], width, len(pool))
        outputs[:, index.partition.outliers :].masked_fill_(flat.unsqueeze(-1), -math.inf)
        chance = _chances(index.partition, found, outputs, len(pool), number)
        ends = chance.cumsum(dim=-1)
        point = uniform[examples].unsqueeze(-1) + torch.arange(number, device=query.device)
        place = torch.searchsorted(ends, point, right=True)
        taken = place < ends.shape[1]
        place = place.clamp(max=ends.shape[1] - 1)
        ids.append(found.ids.gather(1, place).where(taken, 0))
        log_count.append(chance.gather(1, place).log().where(taken, math.inf).to(query.dtype))
        hidden.append(_hidden(index.partition, found.blocks, chance, pool))
        total.append(torch.logaddexp(outputs.logsumexp(dim=-1), torch.where(flat, rest, found.pruned)))
        first += len(part)
    _check_finite(index, torch.cat(total))
    return Own(torch.cat(ids), torch.cat(log_count), as_hidden(torch.cat(hidden)), torch.cat(total))


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


def _check_finite(index: Index, log_total: Tensor) -> None:
    if index.validate and not bool(torch.isfinite(log_total).all()):
        raise ValueError("the masses of the blocks are not finite; class weights must be finite, and smaller")
