"""Cumulant block sampling: blocks of classes that lie close together, drawn whole by an estimate of their mass."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import checks, functional, ops
from . import systematic
from .base import SCOPES, Draw, Incremental
from .moments import moments
from .partition import bisect

# Groups of blocks that an example looks into; of the others it knows only the group's mass. In a pool the others make
# up for what one has missed.
LOOK_INTO = {"batch": 8, "example": 16}
MIN_GROUP = 16
# One of so many blocks of a pool is certain: outliers, which their block's summary does not predict.
CERTAIN = 8
# Share of the classes' uniform distribution in the masses: it bounds the importance weights.
DEFENSIVE = 0.02
ENDINGS = ("block", "class")
# Updates after which classes are first dealt into new blocks; then after twice as many, and so on: embeddings move
# most at the start.
REBUILD = 10


class Blocks(Incremental):
    """Draws whole blocks of classes, without replacement, by the mass that a block's first two cumulants predict.

    A block C of classes with mean μ, scaled principal directions f_1 … f_r and isotropic rest σ² has about the mass
    ``ln|C| + ⟨μ, h⟩ + ½(Σ⟨f_r, h⟩² + σ²‖h‖²)``. Neighbouring blocks form groups with a mean, an isotropic spread and
    their longest row; an example estimates all groups, looks into the blocks of the best few, and takes the blocks of
    each other group as equal. Blocks enter the sample with probability π(C) = min(1, c·mass(C)), by systematic
    sampling; all classes of a drawn block are negatives with ``log_count = ln π(C)``. Estimates may be stale or rough:
    π is what was drawn from.

    Args:
        num_classes: n.
        in_features: size of the query, d.
        block_size: classes in a block, rounded so that the number of blocks is a power of two.
        rank: principal directions per block, r.
        scope: ``"batch"`` draws one pool of blocks that all examples share, with π from the root mean square of the
            examples' masses; ``"example"`` draws for each example by itself.
        ending: ``"block"`` returns all classes of a drawn block; ``"class"``, only in ``scope="example"``, one class of
            it, ∝ exp(o) or exp(|o|) among those that are not excluded.
        prediction: whether blocks follow exp(o) or exp(|o|).
        bias: whether class weights come with offsets, as a further column.

    ``num_samples`` is the number of negatives per pool or per example: of blocks times ``block_size``, or of blocks if
    one class of each is drawn. With s blocks, a draw costs O(d·(1 + r)·√s) per example, and O(s) once per pool; memory
    is (1 + r)/block_size of the class weights. One class per block costs O(d·block_size) more for each, and a copy of
    the class weights.
    """

    order: Tensor
    block_of: Tensor
    mean: Tensor
    directions: Tensor
    spread: Tensor
    power: Tensor
    group_mean: Tensor
    group_spread: Tensor
    farthest: Tensor
    reach: Tensor
    group_outlier: Tensor
    updates: Tensor
    log_size: Tensor
    weight: Tensor

    def __init__(
        self,
        num_classes: int,
        in_features: int,
        block_size: int = 16,
        rank: int = 2,
        scope: str = "batch",
        ending: str = "block",
        *,
        prediction: str = "softmax",
        bias: bool = False,
    ) -> None:
        super().__init__(num_classes, in_features, bias)
        checks.positive_int("block_size", block_size)
        self.scope = checks.one_of("scope", scope, SCOPES)
        self.ending = checks.one_of("ending", ending, ENDINGS)
        # Blocks are drawn without replacement, but the count of a single class does not tell its block's probability.
        self.distinct = ending == "block"
        if (scope, ending) == ("batch", "class"):
            raise ValueError("ending='class' needs scope='example': which class of a block it is depends on the query")
        self.prediction = checks.one_of("prediction", prediction, functional.PREDICTIONS)
        self.rank = min(checks.positive_int("rank", rank, 0), self.columns)
        self.levels = min(max(0, round(math.log2(num_classes / block_size))), int(math.log2(num_classes)))
        self.blocks = 1 << self.levels
        self.block_size = math.ceil(num_classes / self.blocks)
        # An example scores `groups` groups and `look_into · group` blocks. A group costs less: one vector, and a matrix
        # product for all examples. So there are more groups than would make the two numbers alike.
        alike = math.log2(max(1, self.blocks / LOOK_INTO[scope])) / 2
        self.group = min(self.blocks, max(MIN_GROUP, 1 << max(0, round(alike) - 1)))
        self.groups = self.blocks // self.group
        self.look_into = min(self.groups, LOOK_INTO[scope])
        self.register_buffer("order", torch.arange(num_classes))
        self.register_buffer("block_of", torch.zeros(num_classes, dtype=torch.long))
        self.register_buffer("mean", torch.zeros(self.blocks, self.columns))
        self.register_buffer("directions", torch.zeros(self.blocks, self.rank, self.columns))
        self.register_buffer("spread", torch.zeros(self.blocks))
        self.register_buffer("power", torch.zeros(self.blocks))  # mean square of the entries of a block's rows
        self.register_buffer("group_mean", torch.zeros(self.groups, self.columns))
        self.register_buffer("group_spread", torch.zeros(self.groups))
        # The class with the longest row of each block, the square of its length, and the longest row of each group.
        self.register_buffer("farthest", torch.zeros(self.blocks, dtype=torch.long))
        self.register_buffer("reach", torch.zeros(self.blocks))
        self.register_buffer("group_outlier", torch.zeros(self.groups, self.columns))
        self.register_buffer("updates", torch.zeros((), dtype=torch.long))
        sizes = self._border(torch.arange(self.blocks + 1)).diff()
        self.register_buffer("log_size", sizes.to(self.mean.dtype).log(), persistent=False)
        if ending == "class":
            self.register_buffer("weight", torch.zeros(num_classes, self.columns))
        self._deal(self.order)

    @property
    def unit(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """A block's classes are drawn together, unless one stands for all."""
        return self.block_size if self.ending == "block" else 1

    def update(self, weight: Tensor, rows: Tensor | None = None, *, bias: Tensor | None = None) -> None:
        """Follow the class weights: the summaries of the blocks of ``rows``, or of all; now and then, new blocks."""
        self._check_weight(weight, bias, self.mean)
        if self.ending == "class":
            picked = slice(None) if rows is None else checks.indices("rows", rows, self.num_classes)
            self.weight[picked] = _rows(weight.detach(), bias, picked).to(self.weight.dtype)
        updates = int(self.updates)
        self.updates += 1
        if updates == 0 or (updates % REBUILD == 0 and (updates // REBUILD).bit_count() == 1):
            # A pool takes the outliers whole; an example that draws a few blocks has to tell them apart.
            outliers_first = self.scope == "batch"
            self._deal(bisect(_rows(weight.detach(), bias, slice(None)), self.levels, outliers_first))
            rows = None
        if rows is None:
            blocks, iterations = torch.arange(self.blocks, device=weight.device), 4
        else:
            blocks = self.block_of[checks.indices("rows", rows, self.num_classes)].unique()
            iterations = 1
        self._summarise(weight.detach(), bias, blocks, iterations)
        self._summarise_groups(weight.detach(), bias, blocks)

    def _deal(self, order: Tensor) -> None:
        """Put classes into blocks: those at consecutive positions of ``order``."""
        self.order = order
        sizes = self._border(torch.arange(self.blocks + 1, device=order.device)).diff()
        blocks = torch.arange(self.blocks, device=order.device).repeat_interleave(sizes)
        self.block_of = torch.empty_like(order).index_copy(0, order, blocks)

    def _summarise(self, weight: Tensor, bias: Tensor | None, blocks: Tensor, iterations: int) -> None:
        """Mean, principal directions by warm subspace iteration, and the rest, of some blocks."""
        if ops.native_for(weight, self.mean):
            offsets = weight.new_empty(0) if bias is None else bias.detach().contiguous()
            members = (weight.contiguous(), offsets, self.order, blocks.contiguous())
            torch.ops.manyclass.summarise_(*self._summaries(), self.farthest, self.reach, *members, iterations)
            return
        for part in blocks.split(max(1, functional.MAX_LOGITS // (self.block_size * self.columns))):
            self._summarise_reference(weight, bias, part, iterations)

    def _summarise_reference(self, weight: Tensor, bias: Tensor | None, blocks: Tensor, iterations: int) -> None:
        classes, inside = self._members(blocks)
        members = _rows(weight, bias, classes).to(self.mean.dtype) * inside.unsqueeze(-1)
        self.reach[blocks], longest = members.square().sum(dim=-1).masked_fill(~inside, -1.0).max(dim=-1)
        self.farthest[blocks] = classes.gather(1, longest.unsqueeze(-1)).squeeze(-1)
        found = moments(members, inside, self.directions[blocks], iterations)
        for own, new in zip(self._summaries(), found, strict=True):
            own[blocks] = new

    def _summarise_groups(self, weight: Tensor, bias: Tensor | None, blocks: Tensor) -> None:
        """Mean, isotropic spread and longest row of the groups of ``blocks``, from the summaries of their blocks."""
        square = self.mean[blocks].square().sum(dim=-1) + self.directions[blocks].square().sum(dim=(-2, -1))
        self.power[blocks] = square / self.columns + self.spread[blocks]
        groups = (blocks // self.group).unique()
        members = groups.unsqueeze(-1) * self.group + torch.arange(self.group, device=blocks.device)
        self.group_mean[groups] = mean = F.embedding_bag(members, self.mean, mode="mean")
        power = self.power[members].mean(dim=-1)
        self.group_spread[groups] = (power - mean.square().sum(dim=-1) / self.columns).clamp(min=0)
        place = self.reach[members].argmax(dim=-1, keepdim=True)
        outlier = self.farthest[members.gather(1, place).squeeze(-1)]
        self.group_outlier[groups] = _rows(weight, bias, outlier).to(self.mean.dtype)

    def draw(
        self,
        query: Tensor,
        num_samples: int,
        *,
        exclude: Tensor | None = None,
        context: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> Draw:
        """Draw about ``num_samples`` classes, as whole blocks or one of each; the rest is as in `Sampler.draw`."""
        checks.positive_int("num_samples", num_samples)
        flat, exclude, _ = self._flatten(query, exclude, context)
        wanted = min(self.blocks, max(1, round(num_samples / self.unit)))
        numbers = (1 if self.scope == "batch" else len(flat), 1 if self.ending == "block" else 1 + wanted)
        uniform = torch.rand(numbers, dtype=torch.float64, device=query.device, generator=generator)
        ids, log_count = self._draw_blocks(self._extended(flat, self.mean), wanted, uniform, exclude)
        shape = (*query.shape[:-1], ids.shape[-1])
        log_count = log_count.to(torch.promote_types(query.dtype, torch.float32))
        return Draw(ids.reshape(shape), log_count.reshape(shape))

    def _draw_blocks(
        self,
        query: Tensor,  # shape: (batch, columns)
        wanted: int,
        uniform: Tensor,  # shape: (batch or 1 for a pool, 1, or 1 + wanted if one class of each block is drawn)
        exclude: Tensor | None,  # shape: (batch,)
    ) -> tuple[Tensor, Tensor]:
        """The classes of ``wanted`` blocks and their log-counts, both ``(batch, wanted · unit)``."""
        if self.scope == "batch":
            mass = self._pooled_mass(query).unsqueeze(0)
            # The first blocks hold the classes that lie farthest out: more than all other mass makes them certain.
            mass[:, : wanted // CERTAIN] = 1.0
            single = torch.ones_like(mass, dtype=torch.long)
            blocks, _, probability = systematic.draw(mass, single, wanted, uniform[:, 0])
            classes, log_count = self._whole(blocks, probability)
        else:
            work = self._scores() + (0 if self.ending == "block" else self._inner(wanted))
            chunks = self._chunks(work, query, uniform, exclude)
            drawn = [self._draw_each(part, wanted, numbers, positive) for part, numbers, positive in chunks]
            classes, log_count = (torch.cat(parts) for parts in zip(*drawn, strict=True))
        classes, log_count = (part.expand(len(query), -1) for part in (classes, log_count))
        if exclude is not None:
            log_count = log_count.masked_fill(classes == exclude.unsqueeze(-1), math.inf)
        return classes, log_count

    def _draw_each(self, query: Tensor, wanted: int, uniform: Tensor, exclude: Tensor | None) -> tuple[Tensor, Tensor]:
        """What each example draws for itself, as `_draw_blocks`."""
        outside, best, inside = self._shares(query)
        # Cells: groups, of which those that were looked into are empty, then the blocks of these.
        count = torch.full_like(outside, self.group, dtype=torch.long).scatter(1, best, 0)
        count = torch.cat([count, torch.ones_like(inside.flatten(1), dtype=torch.long)], dim=1)
        mass = self._defended(torch.cat([outside, inside.flatten(1)], dim=1))
        cell, place, probability = systematic.draw(mass, count, wanted, uniform[:, 0])
        seen = (cell - self.groups).clamp(min=0)
        looked_into = best.gather(1, seen // self.group) * self.group + seen % self.group
        blocks = torch.where(cell < self.groups, cell * self.group + place, looked_into)
        if self.ending == "block":
            return self._whole(blocks, probability)
        classes, log_share = self._inside(query, blocks, exclude)
        cumulative = log_share.exp().cumsum(dim=-1)
        point = uniform[:, 1:].unsqueeze(-1) * cumulative[..., -1:]
        slot = torch.searchsorted(cumulative, point, right=True).clamp(max=self.block_size - 1)
        log_share = log_share.gather(-1, slot).squeeze(-1)
        # A block of the positive alone leaves an empty slot.
        log_count = torch.where(log_share > -math.inf, probability.log() + log_share, math.inf)
        return classes.gather(-1, slot).squeeze(-1), log_count

    def _whole(self, blocks: Tensor, probability: Tensor) -> tuple[Tensor, Tensor]:
        """All classes of blocks ``(batch, k)`` and ln π of their blocks, both ``(batch, k · block_size)``."""
        classes, inside = self._members(blocks)
        return classes.flatten(1), torch.where(inside, probability.log().unsqueeze(-1), math.inf).flatten(1)

    def _inside(self, query: Tensor, blocks: Tensor, exclude: Tensor | None) -> tuple[Tensor, Tensor]:
        """The classes of blocks ``(batch, k)`` and ln P(class | block), both ``(batch, k, block_size)``."""
        classes, inside = self._members(blocks)
        if exclude is not None:
            inside = inside & (classes != exclude[:, None, None])
        logits = torch.einsum("bksc,bc->bks", F.embedding(classes, self.weight), query).double()
        outputs = functional.output(logits, self.prediction).masked_fill(~inside, -math.inf)
        return classes, outputs - outputs.logsumexp(dim=-1, keepdim=True).clamp(min=-1e300)

    def _pooled_mass(self, query: Tensor) -> Tensor:
        """Root mean square of the examples' shares of each block, normalised, shape ``(blocks,)``."""
        square = self.mean.new_zeros(self.groups, self.group)
        for part in query.split(max(1, functional.MAX_LOGITS // self._scores())):
            outside, best, inside = self._shares(part)
            square += outside.square_().sum(dim=0).unsqueeze(-1)
            square.index_add_(0, best.flatten(), inside.square_().flatten(0, 1))
        mass = square.double().flatten().sqrt() if len(query) else self.log_size.double().exp()
        return self._defended(mass / mass.sum())

    def _log_prob(self, query, ids, exclude, context):
        """Log of the expected count of ``ids`` when each example draws one block for itself."""
        results = []
        work = self.blocks + (0 if self.ending == "block" else self._inner(ids.shape[-1]))
        for part, chunk, positive in self._chunks(work, self._extended(query, self.mean), ids, exclude):
            blocks = self.block_of[chunk]
            log_prob = self._mass(part).double().log().gather(-1, blocks)
            if self.ending == "class":
                classes, log_share = self._inside(part, blocks, positive)
                log_prob += log_share.masked_fill(classes != chunk.unsqueeze(-1), -math.inf).amax(dim=-1)
            results.append(log_prob)
        return torch.cat(results)

    def _mass(self, query: Tensor) -> Tensor:
        """The share of each block in an example's distribution, shape ``(batch, blocks)``."""
        outside, best, inside = self._shares(query)
        share = outside.unsqueeze(-1).repeat(1, 1, self.group)
        return self._defended(share.scatter(1, best.unsqueeze(-1).expand_as(inside), inside).flatten(1))

    def _shares(self, query: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Shares of blocks in each example's distribution.

        Returns the share of any one block of each group ``(batch, groups)``, 0 for the groups that the example looks
        into; these groups ``(batch, looked into)``; the shares of their blocks ``(batch, looked into, group)``.
        """
        outside, best, inside, total = self._log_shares(query)
        outside = outside.sub_(total[:, None] + math.log(self.group)).exp_()
        return outside, best, inside.sub_(total[:, None, None]).exp_()

    def log_total(self, query: Tensor) -> Tensor:
        """The estimate of log Σ exp(o), or of exp(|o|), over all classes."""
        parts = self._extended(query, self.mean).split(max(1, functional.MAX_LOGITS // self._scores()))
        return torch.cat([self._log_shares(part)[-1].to(query.dtype) for part in parts])

    def _log_shares(self, query: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Log-masses of groups and of the blocks looked into, as in `_shares`, and of all together ``(batch,)``."""
        norm = query.square().sum(dim=-1, keepdim=True)
        outside = self._log_mass(query @ self.group_mean.T, norm * self.group_spread)
        outside += math.log(self.num_classes / self.groups)
        if self.scope == "example":
            # One class that stands out can outweigh the other hundreds of its group, and two moments do not show it.
            # In a pool such classes are in blocks of their own.
            outlier = functional.output(query @ self.group_outlier.T, self.prediction)
            outside = torch.maximum(outside, outlier, out=outside)
        best = outside.topk(self.look_into, dim=-1, sorted=False).indices
        inside = self._look_into(query, best) + self.log_size.view(self.groups, self.group)[best]
        outside.scatter_(1, best, -math.inf)
        total = torch.logaddexp(outside.logsumexp(dim=-1), inside.flatten(1).logsumexp(dim=-1))
        if not bool(torch.isfinite(total).all()):
            raise ValueError("the masses of the blocks are not finite; class weights must be finite, and smaller")
        return outside, best, inside, total

    def _look_into(self, query: Tensor, groups: Tensor) -> Tensor:
        """Log-mass per class of the blocks of ``groups (batch, k)``, shape ``(batch, k, group)``."""
        if ops.native_for(query, self.mean):
            absolute = self.prediction == "absolute"
            return torch.ops.manyclass.block_masses(
                query.contiguous(), groups, self.mean, self.directions, self.spread, self.group, absolute
            )
        mean, directions, spread = (part.unflatten(0, (-1, self.group))[groups] for part in self._summaries())
        square = query.square().sum(dim=-1)[:, None, None] * spread
        square = square + torch.einsum("bkgrc,bc->bkgr", directions, query).square().sum(dim=-1)
        return self._log_mass(torch.einsum("bkgc,bc->bkg", mean, query), square)

    def _log_mass(self, linear: Tensor, square: Tensor) -> Tensor:
        """Log-mass per class of a set of classes, from its mean logit and the variance of its logits."""
        both = torch.logaddexp(linear, -linear) if self.prediction == "absolute" else linear
        return both + square / 2

    def _defended(self, share: Tensor) -> Tensor:
        return share.mul_(1 - DEFENSIVE).add_(DEFENSIVE / self.blocks)

    def _summaries(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.mean, self.directions, self.spread

    def _scores(self) -> int:
        """Numbers that the estimate of one example's masses holds at a time."""
        gathered = 1 if ops.native_for(self.mean) else (1 + self.rank) * self.columns
        return self.groups + self.look_into * self.group * gathered

    def _inner(self, blocks: int) -> int:
        """Numbers that scoring the classes of ``blocks`` blocks of one example holds at a time."""
        return blocks * self.block_size * self.columns

    def _members(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """The classes of blocks, one more dimension of ``block_size``, and which of them exist."""
        start, stop = self._border(blocks).unsqueeze(-1), self._border(blocks + 1).unsqueeze(-1)
        position = start + torch.arange(self.block_size, device=blocks.device)
        return self.order[position.minimum(stop - 1)], position < stop

    def _border(self, block: Tensor) -> Tensor:
        """The first position of a block in ``order``."""
        return block * self.num_classes // self.blocks

    def extra_repr(self) -> str:
        """Show the blocks and what they cost."""
        held = sum(buffer.numel() for buffer in self._summaries())
        return (
            f"num_classes={self.num_classes}, in_features={self.in_features}, blocks={self.blocks}, "
            f"block_size={self.block_size}, rank={self.rank}, scope={self.scope!r}, ending={self.ending!r}, "
            f"prediction={self.prediction!r}, "
            f"summaries={held / (self.num_classes * self.in_features):.2f} × the class weights"
        )


def _rows(weight: Tensor, bias: Tensor | None, rows: Any) -> Tensor:
    """Rows of the class weights, with their offsets as a further column if there are any."""
    return weight[rows] if bias is None else torch.cat([weight[rows], bias.detach()[rows].unsqueeze(-1)], dim=-1)
