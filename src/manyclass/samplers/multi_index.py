"""The inverted multi-index: classes in the cells of a product quantiser."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import checks, chunks
from .snapshot import Snapshot

# Steps of k-means per rebuild, and the largest number of rows that it reads.
ITERATIONS = 10
LEARNED = 1 << 16


class MultiIndex(Snapshot):
    """q_i ∝ exp(⟨h, ŵ_i⟩), where ŵ_i is the class vector after product quantisation with two codebooks.

    Each half of the vectors is quantised separately by ``codewords`` means, so a class is in one of codewords² cells.
    A cell has the mass |cell|·exp(⟨h₁, c₁⟩ + ⟨h₂, c₂⟩). A draw chooses a cell by its mass, then a class of the cell
    uniformly: the product is q_i exactly. Codebooks are learned by k-means in every rebuild.

    Chen, Lian, Jin, et al., Fast variational autoencoder with inverted multi-index for collaborative filtering
    (WWW 2022). The index is that of Babenko and Lempitsky (CVPR 2012).

    Args:
        num_classes: n.
        in_features: size of the query, d.
        codewords: K of each half.
        every: updates between rebuilds, which cost O(n·K·d).
        bias: whether class weights have offsets, stored as a further column.

    A draw costs O(K·d + K²) per example and O(log K) per class.
    """

    q = "exp(o) of quantised class vectors"
    cost = "O(codewords·d + codewords²) per example"
    use = "clustered embeddings"
    uniforms_per_draw = 2

    codebooks: Tensor
    cell: Tensor
    ordered: Tensor
    place: Tensor
    size: Tensor

    def __init__(
        self, num_classes: int, in_features: int, codewords: int = 32, every: int = 100, *, bias: bool = False
    ) -> None:
        super().__init__(num_classes, in_features, every, bias)
        self.codewords = checks.positive_int("codewords", codewords, maximum=1 << 11)
        half, cells = math.ceil(self.columns / 2), self.codewords**2
        self.register_buffer("codebooks", torch.zeros(2, codewords, half), persistent=False)
        # The cell of each class, the classes sorted by cell, the position of each class there, and the cell sizes.
        for name, length in {"cell": num_classes, "ordered": num_classes, "place": num_classes, "size": cells}.items():
            self.register_buffer(name, torch.zeros(length, dtype=torch.long), persistent=False)

    def _rebuild(self) -> None:
        parts = self._halves(self.weight)
        self.codebooks = torch.stack([means(part, self.codewords) for part in parts])
        first, second = (nearest(part, book) for part, book in zip(parts, self.codebooks, strict=True))
        self.cell = first * self.codewords + second
        self.ordered = self.cell.argsort(stable=True)
        self.place = torch.empty_like(self.ordered)
        self.place[self.ordered] = torch.arange(self.num_classes, device=self.cell.device)
        self.size = torch.zeros_like(self.size).index_add(0, self.cell, torch.ones_like(self.cell))

    def _halves(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        """Split vectors ``(batch, columns)`` into two halves of equal width; the second may end with a zero."""
        half = self.codebooks.shape[-1]
        padded = F.pad(vectors, (0, 2 * half - self.columns))
        return padded[:, :half], padded[:, half:]

    def _log_masses(self, query: Tensor, exclude: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the log-masses of a class in each cell and of the whole cells, both ``(batch, cells)``, float64."""
        first, second = (
            half @ book.T
            for half, book in zip(self._halves(self._extended(query, self.weight)), self.codebooks, strict=True)
        )
        each = (first.double().unsqueeze(-1) + second.double().unsqueeze(-2)).flatten(1)
        size = self.size.expand_as(each)
        if exclude is not None:
            cell = self.cell[exclude].unsqueeze(-1)
            size = size.scatter_add(-1, cell, torch.full_like(cell, -1))
        return each, each + size.double().log()

    def _draw(self, query, uniform, exclude, context):
        drawn = []
        for part, numbers, positive in self._chunks(len(self.size), query, uniform, exclude):
            each, whole = self._log_masses(part, positive)
            ends = (whole - whole.amax(dim=-1, keepdim=True)).exp().cumsum(dim=-1)
            cell = torch.searchsorted(ends, numbers[..., 0] * ends[:, -1:], right=True)
            size, begin = self.size[cell], (self.size.cumsum(0) - self.size)[cell]
            if positive is None:
                place = begin + (numbers[..., 1] * size).long().minimum(size - 1)
            else:
                same = self.cell[positive].unsqueeze(-1) == cell
                size = size - same.long()
                place = begin + (numbers[..., 1] * size).long().minimum(size - 1)
                place = place + (same & (place >= self.place[positive].unsqueeze(-1)))
            drawn.append((self.ordered[place], each.gather(-1, cell) - whole.logsumexp(dim=-1, keepdim=True)))
        ids, log_prob = zip(*drawn, strict=True)
        return torch.cat(ids), torch.cat(log_prob)

    def _log_prob(self, query, ids, exclude, context):
        found = []
        for part, chunk, positive in self._chunks(len(self.size), query, ids, exclude):
            each, whole = self._log_masses(part, positive)
            found.append(each.gather(-1, self.cell[chunk]) - whole.logsumexp(dim=-1, keepdim=True))
        return torch.cat(found)

    def extra_repr(self) -> str:
        """Show the sizes."""
        return f"num_classes={self.num_classes}, in_features={self.in_features}, codewords={self.codewords}"


def means(rows: Tensor, number: int) -> Tensor:
    """Find ``number`` means of ``rows (n, columns)`` by k-means, from rows at even distances: a pure function."""
    rows = rows[:: math.ceil(len(rows) / LEARNED)]
    start = torch.arange(number, device=rows.device) * len(rows) // number
    centres = rows[start]
    for _ in range(ITERATIONS):
        index = nearest(rows, centres)
        sums = torch.zeros_like(centres).index_add(0, index, rows)
        count = centres.new_zeros(number).index_add(0, index, torch.ones_like(rows[:, 0])).unsqueeze(-1)
        centres = torch.where(count > 0, sums / count.clamp(min=1), centres)
    return centres


def nearest(rows: Tensor, centres: Tensor) -> Tensor:
    """Return the index of the centre nearest to each row, shape ``(n,)``."""
    norm = centres.square().sum(dim=-1)
    parts = rows.split(max(1, chunks.MAX_LOGITS // len(centres)))
    return torch.cat([(norm - 2 * part @ centres.T).argmin(dim=-1) for part in parts])
