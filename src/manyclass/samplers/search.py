"""Search the tree of blocks for a query's best blocks, and score their classes exactly."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .. import checks, chunks, functional, ops
from .codes import Codes, native_tables, rows_of
from .draw import Best
from .partition import BRANCHING, Partition

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
        return query.split(max(1, chunks.MAX_LOGITS // (rows * self.partition.columns)))


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


def log_mass(mean: Tensor, variance: Tensor, size: float, prediction: str) -> Tensor:
    """Return the log of Σ exp(o) over ``size`` Gaussian outputs with this mean and variance.

    ``ln N + μ + σ²/2`` holds for infinitely many outputs. If σ > √(2·ln N), the largest of N outputs dominates the sum,
    and the log-mass is ``μ + σ·√(2·ln N)``, which is smaller (the random energy model).
    """
    log_size, deviation = math.log(size), variance.sqrt()
    limit = math.sqrt(2 * log_size)
    spread = torch.where(deviation <= limit, log_size + variance / 2, deviation * limit)
    return functional.output(mean, prediction) + spread


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
        check_finite(index, best.log_total)
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
    check_finite(index, best.log_total)
    return best


def check_finite(index: Index, log_total: Tensor) -> None:
    """Raise an error if an estimate of a mass is not finite, unless checks are off."""
    if index.validate and not checks.all_finite(log_total):
        raise ValueError("the masses of the blocks are not finite; class weights must be finite, and smaller")
