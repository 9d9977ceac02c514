"""The tree of blocks: the order of the classes, the summaries of its nodes, and building a new tree in slices."""

import math

import torch
from torch import Tensor

from .. import chunks, ops
from ..counters import Counters
from .bisection import bisect, direction
from .codes import Codes, native_tables, rows_of

# Number of bisections between two stored levels.
BRANCHING = 8
# Nodes of the top level, of which every example scores all.
TOP = 512
# Number of outliers, which every example scores, since means do not predict them. Half of them are the classes farthest
# from the centre. The others are any classes at first, and give way to those that leave their block; see `strays`.
OUTLIERS = 128
# Classes that one step of growth sorts into blocks, so that no training step stalls.
SLICE = 4096
# Rows that estimate the centre of all classes, or the direction of a split.
SAMPLE = 1024


class Partition(Counters):
    """Classes in ``2^levels`` blocks of neighbours, which are the leaves of a balanced tree.

    Every node stores the mean of its classes and their variance per column. A few outliers belong to no block: at
    first those farthest from the centre, then places for strays.
    ``sums`` holds the pool's share of each block, and the sums of these shares at the nodes above.

    Args:
        num_classes: n.
        columns: of the class weights, with one for their offsets.
        block_size: classes in a block, rounded so that the number of blocks is a power of two.
    """

    order: Tensor
    block_of: Tensor
    spread: Tensor
    sums: Tensor
    refreshed: Tensor
    vector: Tensor
    farthest: Tensor
    square: Tensor

    counters = ("grown",)

    def __init__(self, num_classes: int, columns: int, block_size: int) -> None:
        super().__init__()
        self.num_classes, self.columns = num_classes, columns
        self.outliers = min(OUTLIERS, num_classes // 16)
        self.strays = self.outliers // 2
        self.inside = num_classes - self.outliers
        self.levels = min(max(0, round(math.log2(self.inside / block_size))), int(math.log2(self.inside)))
        self.blocks = 1 << self.levels
        self.block_size = math.ceil(self.inside / self.blocks)
        widths = [self.blocks]
        while widths[0] > TOP:
            widths.insert(0, widths[0] // BRANCHING)
        #: Nodes of each level that is kept, from the top to the blocks, and the first node of each.
        self.widths, self.firsts = widths, [sum(widths[:i]) for i in range(len(widths))]
        nodes = sum(widths)
        # Classes in the order of their blocks, after the outliers; the block of each, −1 for an outlier.
        self.register_buffer("order", torch.arange(num_classes, dtype=torch.int32))
        self.register_buffer("block_of", torch.full((num_classes,), -1, dtype=torch.int32))
        self.mean = Codes(nodes, columns)
        self.register_buffer("spread", torch.zeros(nodes))
        # Node 1 is the root, 2·i and 2·i + 1 are the children of node i, and block b is node blocks + b.
        self.register_buffer("sums", torch.zeros(2 * self.blocks, dtype=torch.float64))
        # The update that summarised each block last.
        self.register_buffer("refreshed", torch.zeros(self.blocks, dtype=torch.long))
        # How far the tree has grown, in slices, and what it needs in between: the centre or the present direction, and
        # the classes farthest from the centre so far, with their squared distances.
        self.grown = 0
        self.register_buffer("vector", torch.zeros(columns))
        self.register_buffer("farthest", torch.zeros(self.outliers - self.strays, dtype=torch.long))
        self.register_buffer("square", torch.zeros(self.outliers - self.strays))
        # Segments larger than a slice are halved slice by slice. Smaller ones are divided into blocks in one step.
        self.stepwise = 0
        while self.stepwise < self.levels and math.ceil(self.inside / (1 << self.stepwise)) > SLICE:
            self.stepwise += 1

    @property
    def slices(self) -> int:
        """How many calls of `grow` make a tree."""
        return self._scans() + sum(self._slices_of(level) << level for level in range(self.stepwise + 1))

    def _scans(self) -> int:
        return math.ceil(self.num_classes / SLICE)

    def _slices_of(self, level: int) -> int:
        """Return the slices of one segment of a level."""
        return math.ceil(math.ceil(self.inside / (1 << level)) / SLICE) if level < self.stepwise else 1

    def grow(self, weight: Tensor, bias: Tensor | None, codes: Codes) -> Tensor | None:
        """Take the next step towards a new tree; return the blocks that are now complete, if any.

        A step reads at most `SLICE` rows of the class weights. The tree is complete after `slices` steps.
        """
        at = self.grown
        self.grown += 1
        if at < self._scans():
            self._scan(weight, bias, at)
            return None
        at -= self._scans()
        for level in range(self.stepwise):
            if at < self._slices_of(level) << level:
                self._halve(weight, bias, level, *divmod(at, self._slices_of(level)))
                return None
            at -= self._slices_of(level) << level
        return self._finish(weight, bias, at, codes)

    def _scan(self, weight: Tensor, bias: Tensor | None, at: int) -> None:
        """Look for the outliers in a slice of the classes; after the last one, start the order."""
        if at == 0:
            every = torch.arange(0, self.num_classes, max(1, self.num_classes // SAMPLE), device=weight.device)
            self.vector.copy_(rows_of(weight, bias, every).mean(dim=0))
            self.square.fill_(-1.0)
        first = at * SLICE
        ids = torch.arange(first, min(first + SLICE, self.num_classes), device=weight.device)
        if len(self.farthest):
            square = (rows_of(weight, bias, ids) - self.vector).square().sum(dim=-1).nan_to_num(0.0)
            square, ids = torch.cat([self.square, square]), torch.cat([self.farthest, ids])
            best = square.topk(len(self.farthest)).indices
            self.square.copy_(square[best])
            self.farthest.copy_(ids[best])
        if at == self._scans() - 1:
            others = torch.ones(self.num_classes, dtype=torch.bool, device=weight.device)
            others[self.farthest] = False
            far, near = len(self.farthest), self.num_classes - len(self.farthest)
            even = torch.arange(self.strays, device=weight.device) * (near // max(1, self.strays))
            places = torch.nonzero_static(others, size=near).squeeze(-1)[even]
            others[places] = False
            self.order[:far] = self.farthest.sort().values.int()
            self.order[far : self.outliers] = places.int()
            self.order[self.outliers :] = torch.nonzero_static(others, size=self.inside).squeeze(-1).int()
            self.block_of.fill_(-1)

    def _halve(self, weight: Tensor, bias: Tensor | None, level: int, segment: int, part: int) -> None:
        """Sort a slice of a large segment, an evenly spaced sample of its classes, into its two halves."""
        width, parts = self.blocks >> level, self._slices_of(level)
        begin, middle, end = (
            self._border(block) for block in (segment * width, segment * width + width // 2, (segment + 1) * width)
        )
        halves = [torch.arange(start + part, stop, parts) for start, stop in ((begin, middle), (middle, end))]
        position = torch.cat(halves).to(weight.device)
        ids = self.order[position].long()
        rows = rows_of(weight, bias, ids)
        if part == 0:
            sample = rows[:: max(1, len(rows) // SAMPLE)]
            self.vector.copy_(direction(sample, torch.ones_like(sample[:, 0], dtype=torch.bool)))
        self.order[position] = ids[(rows @ self.vector).argsort(stable=True)].int()

    def _finish(self, weight: Tensor, bias: Tensor | None, segment: int, codes: Codes) -> Tensor:
        """Divide a small segment into its blocks, and summarise them."""
        width = self.blocks >> self.stepwise
        # Borders stay on the host, which needs the sizes of the blocks.
        borders = self.border(torch.arange(segment * width, (segment + 1) * width + 1))
        begin, end = int(borders[0]), int(borders[-1])
        blocks = torch.arange(segment * width, (segment + 1) * width)
        block_of, blocks = blocks.repeat_interleave(borders.diff()).int().to(weight.device), blocks.to(weight.device)
        ids = self.order[begin:end]
        ids = ids[bisect(rows_of(weight, bias, ids.long()), borders - begin)]
        self.order[begin:end] = ids
        self.block_of[ids.long()] = block_of
        self.summarise(weight, bias, blocks, codes)
        return blocks

    def summarise(self, weight: Tensor, bias: Tensor | None, blocks: Tensor, codes: Codes) -> None:
        """Update means, spreads and codes of ``blocks``, sorted and distinct, and of the nodes above them."""
        if ops.native_for(weight):
            tables = (
                self.mean.code,
                self.mean.scale,
                self.spread,
                codes.code,
                codes.scale,
                *native_tables(weight, bias),
            )
            sizes = (self.outliers, self.blocks, self.widths[0])
            torch.ops.manyclass.summarise_(*tables, self.order, blocks.contiguous(), *sizes)
            return
        for part in blocks.split(max(1, chunks.MAX_LOGITS // (self.block_size * self.columns))):
            ids, inside = self.members(part)
            rows = rows_of(weight, bias, ids)
            codes.write(ids.flatten(), rows.flatten(0, 1))
            rows = rows * inside.unsqueeze(-1)
            self._set_moments(self.firsts[-1] + part, rows.sum(1), rows.square().sum((1, 2)), inside.sum(-1))
        nodes = blocks
        for level in range(len(self.widths) - 2, -1, -1):
            nodes = _parents(nodes, BRANCHING)
            children = nodes.unsqueeze(-1) * BRANCHING + torch.arange(BRANCHING, device=nodes.device)
            size = self._sizes(children, level + 1)
            below = self.firsts[level + 1] + children
            mean = self.mean.read(below)
            square = (mean.square().sum(-1) + self.columns * self.spread[below]) * size
            total = (mean * size.unsqueeze(-1)).sum(1)
            self._set_moments(self.firsts[level] + nodes, total, square.sum(-1), size.sum(-1))

    def _set_moments(self, nodes: Tensor, total: Tensor, square: Tensor, size: Tensor) -> None:
        mean = total / size.unsqueeze(-1)
        self.mean.write(nodes, mean)
        self.spread[nodes] = (square / size - mean.square().sum(-1)).clamp(min=0) / self.columns

    def set_shares(self, blocks: Tensor, share: Tensor) -> None:
        """Give each class of ``blocks (k,)`` a share ``(k,)``, and bring the sums above up to date."""
        self.sums[self.blocks + blocks] = share.double() * self._sizes(blocks, -1)
        if self.sums.device.type == "cpu" and ops.native_available():
            torch.ops.manyclass.sum_up_(self.sums, blocks.contiguous())
            return
        nodes = self.blocks + blocks
        for _ in range(self.levels):
            nodes = _parents(nodes, 2)
            self.sums[nodes] = self.sums[2 * nodes] + self.sums[2 * nodes + 1]

    def members(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Return the classes of blocks, one more dimension of ``block_size``, and which of them exist."""
        start, stop = self.border(blocks).unsqueeze(-1), self.border(blocks + 1).unsqueeze(-1)
        position = start + torch.arange(self.block_size, device=blocks.device)
        return self.order[position.minimum(stop - 1)].long(), position < stop

    def border(self, block: Tensor) -> Tensor:
        """Return the first position of a block in ``order``."""
        return self.outliers + block * self.inside // self.blocks

    def _border(self, block: int) -> int:
        return self.outliers + block * self.inside // self.blocks

    def _sizes(self, nodes: Tensor, level: int) -> Tensor:
        """Return the classes below nodes of a level that is kept."""
        width = self.blocks // self.widths[level]
        return self.border((nodes + 1) * width) - self.border(nodes * width)


def _parents(nodes: Tensor, branching: int) -> Tensor:
    """Return parents of nodes, distinct on the CPU only: elsewhere the host would wait for the device."""
    parents = nodes // branching
    return parents.unique() if parents.device.type == "cpu" else parents
