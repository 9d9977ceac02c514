"""Cumulant block sampling: blocks of classes that lie close together, drawn whole by an estimate of their mass."""

import itertools
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import checks, functional, ops
from .base import Draw, Incremental

SCOPES = ("example", "batch")
# A pool is designed from at most so many examples, and so many masses: any design is valid, and more than a few
# examples only lower the variance a little.
DESIGN_EXAMPLES = 32
DESIGN_MASSES = 1 << 20
# Share of the classes' uniform distribution in the masses: it bounds the importance weights.
DEFENSIVE = 0.02
# Updates after which classes are first dealt into new blocks; then after twice as many, and so on: embeddings move
# most at the start.
REBUILD = 10


class Blocks(Incremental):
    """Draws whole blocks of classes, without replacement, by the mass that a block's first two cumulants predict.

    A block C of classes with mean μ, scaled principal directions f_1 … f_r and isotropic rest σ² has about the mass
    ``ln|C| + ⟨μ, h⟩ + ½(Σ⟨f_r, h⟩² + σ²‖h‖²)``. Blocks enter the sample with probability π(C) = min(1, c·mass(C)), by
    systematic sampling; all classes of a drawn block are negatives with ``log_count = ln π(C)``. The summaries may be
    stale or rough: π is what was drawn from.

    Args:
        num_classes: n.
        in_features: size of the query, d.
        block_size: classes in a block, rounded so that the number of blocks is a power of two.
        rank: principal directions per block, r.
        scope: ``"batch"`` draws one pool of blocks that all examples share, with π from the root mean square of the
            examples' masses; ``"example"`` draws for each example by itself.
        prediction: whether blocks follow exp(o) or exp(|o|).
        bias: whether class weights come with offsets, as a further column.

    ``num_samples`` is the number of negatives, blocks times ``block_size``, per pool or per example. A draw costs
    O(n·r·d / block_size) per example that is designed for; memory is (1 + r)/block_size of the class weights.
    """

    order: Tensor
    block_of: Tensor
    mean: Tensor
    directions: Tensor
    spread: Tensor
    updates: Tensor

    def __init__(
        self,
        num_classes: int,
        in_features: int,
        block_size: int = 32,
        rank: int = 4,
        scope: str = "batch",
        *,
        prediction: str = "softmax",
        bias: bool = False,
    ) -> None:
        super().__init__(num_classes, in_features, bias)
        checks.positive_int("block_size", block_size)
        checks.one_of("scope", scope, SCOPES)
        checks.one_of("prediction", prediction, functional.PREDICTIONS)
        self.scope, self.prediction = scope, prediction
        self.rank = min(checks.positive_int("rank", rank, 0), self.columns)
        self.levels = min(max(0, round(math.log2(num_classes / block_size))), int(math.log2(num_classes)))
        self.blocks = 1 << self.levels
        self.block_size = math.ceil(num_classes / self.blocks)
        self.register_buffer("order", torch.arange(num_classes))
        self.register_buffer("block_of", torch.zeros(num_classes, dtype=torch.long))
        self.register_buffer("mean", torch.zeros(self.blocks, self.columns))
        self.register_buffer("directions", torch.zeros(self.blocks, self.rank, self.columns))
        self.register_buffer("spread", torch.zeros(self.blocks))
        self.register_buffer("updates", torch.zeros((), dtype=torch.long))
        self._deal(self.order)

    def update(self, weight: Tensor, rows: Tensor | None = None, *, bias: Tensor | None = None) -> None:
        """Follow the class weights: the summaries of the blocks of ``rows``, or of all; now and then, new blocks."""
        self._check_weight(weight, bias, self.mean)
        updates = int(self.updates)
        self.updates += 1
        if updates == 0 or (updates % REBUILD == 0 and (updates // REBUILD).bit_count() == 1):
            self._deal(bisect(_rows(weight.detach(), bias, slice(None)), self.levels))
            rows = None
        if rows is None:
            blocks, iterations = torch.arange(self.blocks, device=weight.device), 4
        else:
            blocks = self.block_of[checks.indices("rows", rows, self.num_classes)].unique()
            iterations = 1
        self._summarise(weight.detach(), bias, blocks, iterations)

    def _deal(self, order: Tensor) -> None:
        """Put classes into blocks: those at consecutive positions of ``order``."""
        self.order = order
        sizes = self._border(torch.arange(self.blocks + 1, device=order.device)).diff()
        blocks = torch.arange(self.blocks, device=order.device).repeat_interleave(sizes)
        self.block_of = torch.empty_like(order).index_copy(0, order, blocks)

    def _summarise(self, weight: Tensor, bias: Tensor | None, blocks: Tensor, iterations: int) -> None:
        """Mean, principal directions by warm subspace iteration, and the rest, of some blocks."""
        if ops.native_for(weight, self.mean):
            summaries, blocks = (self.mean, self.directions, self.spread), blocks.contiguous()
            offsets = weight.new_empty(0) if bias is None else bias.detach().contiguous()
            torch.ops.manyclass.summarise_(*summaries, weight.contiguous(), offsets, self.order, blocks, iterations)
            return
        for part in blocks.split(max(1, functional.MAX_LOGITS // (self.block_size * self.columns))):
            self._summarise_reference(weight, bias, part, iterations)

    def _summarise_reference(self, weight: Tensor, bias: Tensor | None, blocks: Tensor, iterations: int) -> None:
        classes, inside = self._members(blocks)
        size = inside.sum(dim=-1)
        members = _rows(weight, bias, classes).to(self.mean.dtype) * inside.unsqueeze(-1)
        mean = members.sum(dim=1) / size.unsqueeze(-1)
        members = (members - mean.unsqueeze(1)) * (inside / size.sqrt().unsqueeze(-1)).unsqueeze(-1)
        self.mean[blocks] = mean
        variance = members.square().sum(dim=(1, 2))
        if self.rank:
            start = self.directions[blocks]
            # Blocks that have no directions yet start from their own members.
            fresh = F.pad(members, (0, 0, 0, max(0, self.rank - members.shape[1])))[:, : self.rank]
            basis = torch.where(start.square().sum(dim=(1, 2), keepdim=True) > 0, start, fresh).mT
            for _ in range(iterations):
                basis = _orthonormal(members.mT @ (members @ basis))
            inner = members @ basis
            covariance = inner.mT @ inner
            jitter = 1e-6 * covariance.diagonal(dim1=-2, dim2=-1).sum(-1) + 1e-20
            scale = torch.linalg.cholesky(covariance + jitter[:, None, None] * torch.eye(self.rank).to(covariance))
            self.directions[blocks] = (basis @ scale).mT
            variance = variance - covariance.diagonal(dim1=-2, dim2=-1).sum(-1)
        self.spread[blocks] = variance.clamp(min=0) / self.columns

    def draw(
        self,
        query: Tensor,
        num_samples: int,
        *,
        exclude: Tensor | None = None,
        context: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> Draw:
        """Draw about ``num_samples`` classes as whole blocks; the rest is as in `Sampler.draw`."""
        checks.positive_int("num_samples", num_samples)
        flat, exclude, _ = self._flatten(query, exclude, context)
        numbers = 1 if self.scope == "batch" else len(flat)
        uniform = torch.rand(numbers, dtype=torch.float64, device=query.device, generator=generator)
        wanted = min(self.blocks, max(1, round(num_samples / self.block_size)))
        ids, log_count = self._draw_blocks(self._extended(flat, self.mean), wanted, uniform, exclude)
        shape = (*query.shape[:-1], ids.shape[-1])
        log_count = log_count.to(torch.promote_types(query.dtype, torch.float32))
        return Draw(ids.reshape(shape), log_count.reshape(shape))

    def _draw_blocks(
        self,
        query: Tensor,  # shape: (batch, columns)
        wanted: int,
        uniform: Tensor,  # shape: (batch,), or (1,) for a pool
        exclude: Tensor | None,  # shape: (batch,)
    ) -> tuple[Tensor, Tensor]:
        """The classes of ``wanted`` blocks and ln π of their blocks, both ``(batch, wanted · block_size)``."""
        if self.scope == "batch":
            # Examples at even distances stand for the batch.
            examples = max(1, min(DESIGN_EXAMPLES, DESIGN_MASSES // self.blocks))
            design = query[:: max(1, math.ceil(len(query) / examples))]
            mass = self._mass(design).square().mean(dim=0).sqrt() if len(design) else self._sizes() / self.num_classes
            pool = self._take(_inclusion((mass / mass.sum()).unsqueeze(0), wanted), uniform, wanted)
            classes, log_count = (part.expand(len(query), -1) for part in pool)
        else:
            chunks = self._chunks(self.blocks * (1 + self.rank), query, uniform, None)
            taken = [self._take(_inclusion(self._mass(part), wanted), numbers, wanted) for part, numbers, _ in chunks]
            classes, log_count = (torch.cat(parts) for parts in zip(*taken, strict=True))
        if exclude is not None:
            log_count = log_count.masked_fill(classes == exclude.unsqueeze(-1), math.inf)
        return classes, log_count

    def _take(self, inclusion: Tensor, uniform: Tensor, wanted: int) -> tuple[Tensor, Tensor]:
        """Draw blocks by ``inclusion (rows, blocks)``: their classes and ln π, both ``(rows, wanted · block_size)``."""
        blocks = _systematic(inclusion, uniform, wanted)
        classes, inside = self._members(blocks)
        log_count = torch.where(inside, inclusion.gather(-1, blocks).log().unsqueeze(-1), math.inf)
        return classes.flatten(1), log_count.flatten(1)

    def _log_prob(self, query, ids, exclude, context):
        """Log of the expected count of ``ids`` when each example draws one block for itself."""
        log_mass = self._mass(self._extended(query, self.mean)).double().log()
        return self._excluded(ids, exclude, log_mass.gather(-1, self.block_of[ids]))

    def _mass(self, query: Tensor) -> Tensor:
        """The share of each block in the distribution, shape ``(batch, blocks)``."""
        linear = query @ self.mean.T
        square = query.square().sum(dim=-1, keepdim=True) * self.spread
        for direction in self.directions.unbind(dim=1):
            square += (query @ direction.T).square_()
        if self.prediction == "absolute":
            linear = torch.logaddexp(linear, -linear)
        sizes = self._sizes()
        share = (linear + square / 2 + sizes.log()).softmax(dim=-1)
        if not bool(torch.isfinite(share.sum())):
            raise ValueError("the masses of the blocks are not finite; class weights must be finite, and smaller")
        return share.mul_(1 - DEFENSIVE).add_(sizes, alpha=DEFENSIVE / self.num_classes)

    def _members(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """The classes of blocks, one more dimension of ``block_size``, and which of them exist."""
        start, stop = self._border(blocks).unsqueeze(-1), self._border(blocks + 1).unsqueeze(-1)
        position = start + torch.arange(self.block_size, device=blocks.device)
        return self.order[position.minimum(stop - 1)], position < stop

    def _border(self, block: Tensor) -> Tensor:
        """The first position of a block in ``order``."""
        return block * self.num_classes // self.blocks

    def _sizes(self) -> Tensor:
        return self._border(torch.arange(self.blocks + 1, device=self.mean.device)).diff().to(self.mean.dtype)

    def extra_repr(self) -> str:
        """Show the blocks and what they cost."""
        held = sum(buffer.numel() for buffer in (self.mean, self.directions, self.spread))
        return (
            f"num_classes={self.num_classes}, in_features={self.in_features}, blocks={self.blocks}, "
            f"block_size={self.block_size}, rank={self.rank}, scope={self.scope!r}, prediction={self.prediction!r}, "
            f"summaries={held / (self.num_classes * self.in_features):.2f} × the class weights"
        )


def bisect(weight: Tensor, levels: int) -> Tensor:
    """Order classes so that ``2^levels`` equal runs of them are blocks of neighbours, shape ``(num_classes,)``.

    Each run is halved at the median along its principal direction, ``levels`` times. O(n·d·levels).
    """
    if ops.native_for(weight):
        return torch.ops.manyclass.bisect(weight.contiguous(), levels)
    num_classes = len(weight)
    order = torch.arange(num_classes, device=weight.device)
    for level in range(levels):
        borders = [j * num_classes // (1 << level) for j in range((1 << level) + 1)]
        for start, stop in itertools.pairwise(borders):
            members = weight[order[start:stop]].double()
            centred = members - members.mean(dim=0)
            direction = centred[centred.square().sum(dim=1).argmax()]
            for _ in range(4):
                direction = F.normalize(centred.T @ (centred @ direction), dim=0)
            order[start:stop] = order[start:stop][(centred @ direction).argsort(stable=True)]
    return order


def _rows(weight: Tensor, bias: Tensor | None, rows: Any) -> Tensor:
    """Rows of the class weights, with their offsets as a further column if there are any."""
    return weight[rows] if bias is None else torch.cat([weight[rows], bias.detach()[rows].unsqueeze(-1)], dim=-1)


def _orthonormal(basis: Tensor) -> Tensor:
    """Gram-Schmidt on the columns of ``(…, d, r)``; a column that vanishes stays zero."""
    columns: list[Tensor] = []
    for column in basis.unbind(dim=-1):
        for _ in range(2):  # the second time removes what rounding left
            for other in columns:
                column = column - (column * other).sum(dim=-1, keepdim=True) * other
        columns.append(F.normalize(column, dim=-1, eps=1e-20))
    return torch.stack(columns, dim=-1)


def _inclusion(mass: Tensor, wanted: int) -> Tensor:
    """π = min(1, c·mass) with Σπ = ``wanted``; mass ``(batch, blocks)``, positive, sums to 1."""
    mass = mass.double()
    certain = torch.zeros_like(mass, dtype=torch.bool)
    while True:
        rest = torch.where(certain, 0.0, mass)
        left = wanted - certain.sum(dim=-1, keepdim=True)
        inclusion = torch.where(certain, 1.0, rest * left / rest.sum(dim=-1, keepdim=True).clamp(min=1e-300))
        above = inclusion > 1
        if not bool(above.any()):
            return inclusion
        certain |= above


def _systematic(inclusion: Tensor, uniform: Tensor, wanted: int) -> Tensor:
    """Draw ``wanted`` distinct blocks with these inclusion probabilities, one uniform number per row."""
    cumulative = inclusion.cumsum(dim=-1)
    step = torch.arange(wanted, device=uniform.device)
    blocks = torch.searchsorted(cumulative, uniform.unsqueeze(-1) + step, right=True)
    # Points are a unit apart and intervals at most a unit long: only rounding can put two points into one interval, or
    # the last one beyond the end. Then the next block takes it.
    blocks = (blocks - step).cummax(dim=-1).values + step
    return blocks.minimum(inclusion.shape[-1] - wanted + step)
