"""Own and shared negatives: each example draws from its best blocks, and a pool covers all other classes."""

import math
from typing import Any

import torch
from torch import Tensor

from .. import checks, functional
from ..counters import Counters
from .base import Incremental, Sampler
from .codes import Codes, encode
from .description import options as declared
from .draw import Best, Draw, Part
from .line import Line
from .own import own_draw
from .partition import Partition
from .pool import pool_draw
from .recent import NEW, Recent
from .search import Index, best_classes
from .strays import admit

# The first new tree begins after this many updates. Each later one begins when the updates have grown by a quarter,
# since embeddings move most at the start.
REBUILD = 10
# A tree aims to be complete when the updates have grown by another quarter. It grows by at most FASTEST slices per
# update in the first YOUNG updates, since a tree of random weights must not stay, and by at most LATER afterwards.
FASTEST, YOUNG, LATER = 32, 1000, 4


class Blocks(Counters, Incremental):
    """Own negatives for each example from its best blocks, and a shared pool for all other classes.

    A tree sorts the classes into blocks of neighbours, its leaves. Each example searches the tree for its ``probe``
    best blocks with a beam of half that width, and scores the classes in them. From these classes it draws ``own``
    negatives by systematic sampling with probabilities min(1, c·exp(o)), so the largest are certain. One pool of
    ``num_samples`` classes per batch covers all other classes. The pool is a systematic draw in the order of the
    blocks. Its shares follow recent queries. Each example masks its own negatives out of the pool, so every class has
    one exact expected count. Summaries, shares and the tree may be stale, since the reported counts are those of the
    actual draw.

    Args:
        num_classes: n.
        in_features: size of the query, d.
        own: number of own negatives of each example.
        probe: number of blocks that each example visits.
        block_size: classes in a block, rounded so that the number of blocks is a power of two.
        prediction: whether blocks follow exp(o) or exp(|o|).
        bias: whether class weights have offsets, stored as a further column.

    A draw costs O(probe · (block_size + 4·log n) · d) per example and O(num_samples · log n) per batch. Codes, the
    tree and its successor take about d · (1 + 2.3 / block_size) + 30 bytes per class.
    """

    q = "own negatives ∝ exp(o) from the best blocks, and a shared pool"
    cost = "O(probe·d·log n) per example"
    use = "[the default](docs/blocks.md)"
    scope = "batch"
    replacement = False
    sweeps = True

    counters = ("updates", "rebuild_at")

    def __init__(
        self,
        num_classes: int,
        in_features: int,
        own: int = 32,
        probe: int = 96,
        block_size: int = 8,
        *,
        prediction: str = "softmax",
        bias: bool = False,
    ) -> None:
        super().__init__(num_classes, in_features, bias)
        self.own = checks.positive_int("own", own, maximum=checks.MAX_CLASSES)
        self.probe = checks.positive_int("probe", probe)
        checks.positive_int("block_size", block_size)
        self.prediction = checks.one_of("prediction", prediction, functional.PREDICTIONS)
        self.partition = Partition(num_classes, self.columns, block_size)
        self.growing = Partition(num_classes, self.columns, block_size)
        self.codes = Codes(num_classes, self.columns)
        self.recent = Recent(self.columns)
        self.updates, self.rebuild_at = 0, REBUILD
        self.line = Line(self.partition.blocks)
        self._tables: tuple[Tensor, Tensor | None] | None = None

    @classmethod
    def restrict(cls, options: dict[str, Any], part: Part) -> tuple[type[Sampler], dict[str, Any]]:
        """Divide ``own`` and ``probe`` between the parts."""
        totals = {name: value for name, value in {**declared(cls), **options}.items() if name in ("own", "probe")}
        shared = {name: math.ceil(checks.positive_int(name, total) / part.shards) for name, total in totals.items()}
        return cls, {**options, **shared}

    def update(self, weight: Tensor, rows: Tensor | None = None, *, bias: Tensor | None = None) -> None:
        """Refresh some blocks of changed ``rows``; without ``rows``, build a new tree at once.

        The sampler reads the weights when it draws, so it keeps a reference to them. Each update adds a slice to a new
        tree, which replaces the present one when it is complete.
        """
        self._check_weight(weight, bias, self.recent.query)
        rows = None if rows is None else self._check_rows(rows)
        self.attach(weight, bias, rows)
        self.updates += 1
        if rows is None or self.updates == 1:
            self.growing.grown = 0
            self._grow(self.growing.slices)
            self._swap()
            if self.updates == 1 and self.columns > self.in_features:
                self._expect_offsets()
        else:
            self.line.join(self.partition.block_of.index_select(0, rows).long())
            if self.updates % 2 == 0:  # and `observe` acts in the others
                self._refresh(self.line.due())
            if self.growing.grown or self.updates > self.rebuild_at:
                self._grow_some()

    def attach(self, weight: Tensor, bias: Tensor | None, rows: Tensor | None = None) -> None:
        """Read these class weights from now on; update the codes of ``rows (k,)``."""
        self._tables = weight.detach(), None if bias is None else bias.detach()
        if rows is not None:
            encode(self.codes, *self._tables, rows)

    def _grow(self, slices: int) -> None:
        assert self._tables is not None
        for _ in range(slices):
            if (blocks := self.growing.grow(*self._tables, self.codes)) is not None:
                self._share(self.growing, blocks)

    def _grow_some(self) -> None:
        slices = self.growing.slices
        fastest = FASTEST if self.updates <= YOUNG else LATER
        self._grow(min(fastest, math.ceil(4 * slices / self.updates), slices - self.growing.grown))
        if self.growing.grown == slices:
            self._swap()
            self._admit(self.growing.order[: self.growing.outliers].long())  # they may have moved since the scan

    def _swap(self) -> None:
        """Replace the tree by the new one, in which no block is due for a refresh."""
        self.partition, self.growing = self.growing, self.partition
        self.growing.grown = 0
        self.rebuild_at = max(REBUILD, self.updates + self.updates // 4)
        self.line.clear()

    def _expect_offsets(self) -> None:
        """Set all shares by the offsets alone: no query was observed yet, and queries start near 0."""
        query = self._extended(self.recent.query[:1, : self.in_features], self.recent.query)
        self.recent.fill(query, self._best(query, 1, self.probe))
        self._share(self.partition, torch.arange(self.partition.blocks, device=query.device))

    def _admit(self, ids: Tensor) -> None:
        """Make outliers of those ``ids (k,)`` that left their blocks."""
        self.line.join(admit(self._index(), self.recent, ids))

    def observe(self, query: Tensor, target: Tensor) -> None:
        """Follow targets that left their blocks, and in every other update queries, which the pool's shares follow."""
        if self.updates % 2 == 0:
            self._admit(target.flatten())
        elif len(query):
            query = self._extended(query[:: math.ceil(len(query) / NEW)].detach(), self.recent.query)
            self.recent.replace(self.updates // 2, query, self._best(query, 1, self.probe))

    def _refresh(self, blocks: Tensor) -> None:
        assert self._tables is not None
        self.partition.summarise(*self._tables, blocks, self.codes)
        self._share(self.partition, blocks)

    def _share(self, partition: Partition, blocks: Tensor) -> None:
        """Set the shares of summarised blocks in the pool."""
        partition.set_shares(blocks, self.recent.shares(partition, blocks, self.prediction))
        partition.refreshed[blocks] = self.updates

    def draw(
        self,
        query: Tensor,
        num_samples: int,
        *,
        exclude: Tensor | None = None,
        context: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> Draw:
        """Draw ``own`` negatives for each example and a pool of ``num_samples``; the rest is as in `Sampler.draw`."""
        checks.positive_int("num_samples", num_samples, maximum=checks.MAX_CLASSES)
        flat, exclude, _ = self._flatten(query, exclude, context)
        uniform = torch.rand(1 + len(flat), dtype=torch.float64, device=query.device, generator=generator)
        return self._draw_parts(flat, num_samples, exclude, uniform, query.shape[:-1])

    def _draw_parts(
        self, query: Tensor, num_samples: int, exclude: Tensor | None, uniform: Tensor, shape: torch.Size
    ) -> Draw:
        """Map uniform numbers, one for the pool and one for each example, to a draw. A pure function."""
        dtype = torch.promote_types(query.dtype, torch.float32)
        position, pool_log_count = pool_draw(self.partition, uniform[:1], num_samples)
        pool = self.partition.order.index_select(0, position).long()
        extended = self._extended(query, self.recent.query)
        width = min(self.probe, self.partition.blocks)
        own = own_draw(self._index(), extended, exclude, uniform[1:], position, width, self.own)
        ids, log_count = (part.reshape((*shape, self.own)) for part in own[:2])
        return Draw(ids, log_count.to(dtype), pool, pool_log_count.to(dtype), own.hidden)

    def search(self, query: Tensor, k: int, probe: int) -> Best:
        """Find the ``k`` classes with the largest outputs in the ``probe`` best blocks of each query.

        Query ``(*batch, in_features)``; results have the same leading shape. Raises if the blocks hold fewer than k.
        """
        flat, _, _ = self._flatten(query, None, None)
        checks.positive_int("k", k)
        if k > (most := self.visited(checks.positive_int("probe", probe))):
            raise ValueError(f"k must be at most {most}, the classes that probe = {probe} visits, got {k}")
        found = self._best(self._extended(flat, self.recent.query), k, probe)
        return Best(*(part.reshape((*query.shape[:-1], *part.shape[1:])) for part in found))

    def visited(self, probe: int) -> int:
        """Return how many classes a search of ``probe`` blocks visits at least."""
        if probe >= self.partition.blocks:
            return self.num_classes
        return self.partition.outliers + self.partition.inside // self.partition.blocks * probe

    def _best(self, query: Tensor, k: int, width: int) -> Best:
        return best_classes(self._index(), query, min(width, self.partition.blocks), k)

    def _index(self) -> Index:
        if self._tables is None:
            raise ValueError("Blocks has seen no class weights yet: call update(weight) first")
        return Index(self.partition, self.codes, *self._tables, self.prediction, self.validate)

    def log_total(self, query: Tensor) -> Tensor:
        """Return the estimate of log Σ exp(o), or of exp(|o|), over all classes."""
        return self.search(query, 1, self.probe).log_total.to(query.dtype)

    def log_prob(self, *args: Any, **kwargs: Any) -> Tensor:
        """Raise: a class is drawn as an own negative or with the pool, and only a `Draw` has its count."""
        raise ValueError("Blocks has no single distribution; see the log_count of a Draw")

    def staleness(self) -> float:
        """Return the mean number of updates since a block was summarised."""
        return float((self.updates - self.partition.refreshed).double().mean())

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the class weights, which belong to the layer."""
        return {**super().__getstate__(), "_tables": None}  # pyright: ignore

    def extra_repr(self) -> str:
        """Show the sizes and what they cost."""
        held = sum(buffer.numel() * buffer.element_size() for buffer in self.buffers())
        return (
            f"num_classes={self.num_classes}, in_features={self.in_features}, own={self.own}, probe={self.probe}, "
            f"blocks={self.partition.blocks}, block_size={self.partition.block_size}, prediction={self.prediction!r}, "
            f"memory={held / (4 * self.num_classes * self.in_features):.2f} × the class weights in float32"
        )
