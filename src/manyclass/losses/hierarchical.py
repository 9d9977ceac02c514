"""Hierarchical softmax: a class is a path of binary decisions."""

import itertools
import math
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import checks, chunks, functional
from ..head import Head, full_precision
from ..rows import select_rows
from ..samplers.bisection import bisect
from ..shard import Tables


class Paths(NamedTuple):
    """The decisions from the root of a binary tree to each class, root first, class by class."""

    #: Inner nodes, shape ``(decisions,)``, in ``[0, num_classes − 1)``.
    node: Tensor
    #: Whether the class is on the right of the node: 1, or −1 on the left, shape ``(decisions,)``.
    side: Tensor
    #: The decisions of class i are ``offsets[i] … offsets[i + 1] − 1``, shape ``(num_classes + 1,)``.
    offsets: Tensor


class HierarchicalSoftmax(Head):
    """p_i = Π σ(±⟨v, h⟩) over the inner nodes on the way to class i in a binary tree. O(d·depth) per example.

    Probabilities are normalised by construction, so the loss is exact in training, too. There are n − 1 vectors v,
    ``weight``, one for each inner node. ``log_prob`` and ``topk`` score all nodes.

    Morin and Bengio, Hierarchical probabilistic neural network language model (AISTATS 2005); with a Huffman tree:
    Mikolov et al. (2013).

    Args:
        in_features: size of the query, d.
        num_classes: n, at least 2.
        counts: class frequencies, shape ``(num_classes,)``, for a Huffman tree: frequent classes have short paths.
        embeddings: or class vectors, shape ``(num_classes, columns)``, for a balanced tree of halves that lie together.
        sparse: whether the gradient of ``weight`` is a sparse tensor of the nodes that were met.
        options: ``reduction``, ``ignore_index``, ``device``, ``dtype`` and ``validate``, as in `FullSoftmax`.
    """

    several_targets = False
    node: Tensor
    side: Tensor
    offsets: Tensor

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        counts: Tensor | None = None,
        embeddings: Tensor | None = None,
        sparse: bool = True,
        **options: Any,
    ) -> None:
        allowed = ("reduction", "ignore_index", "device", "dtype", "validate")
        for name in options.keys() - set(allowed):
            raise TypeError(f"HierarchicalSoftmax does not take {name}: its options are {', '.join(allowed)}")
        if (counts is None) == (embeddings is None):
            raise ValueError("give either counts, for a Huffman tree, or embeddings, for a tree of halves")
        super().__init__(in_features, num_classes, sparse=sparse, **options)
        if counts is None:
            checks.dense("embeddings", embeddings)
            vectors = cast(Tensor, embeddings)
            if vectors.dim() != 2 or len(vectors) != num_classes:
                raise ValueError(f"embeddings must have shape ({num_classes}, columns), got {tuple(vectors.shape)}")
            if not checks.all_finite(vectors):
                raise ValueError("embeddings must be finite")
            paths = halves(vectors)
        else:
            paths = huffman(checks.counts("counts", counts, num_classes))
        for field, value in paths._asdict().items():
            self.register_buffer(field, value.to(self.weight.device))

    def _table(self, columns: int, device: Any, dtype: torch.dtype | None) -> nn.Embedding:
        """Make the table of parameters, one row per inner node."""
        rows = torch.empty(self.num_classes - 1, columns, device=device, dtype=dtype)
        return nn.Embedding.from_pretrained(rows, freeze=False, sparse=self.sparse)

    def _training_losses(
        self, query: Tensor, target: Tensor, context: Tensor | None, generator: torch.Generator | None
    ) -> Tensor:
        return self._path_losses(query, target)

    def _exact_losses(
        self, query: Tensor, target: Tensor, tables: Tables, margin: functional.Margin | None = None
    ) -> Tensor:
        return self._path_losses(query, target)

    def _path_losses(self, query: Tensor, target: Tensor) -> Tensor:
        first, length = self.offsets[target], self.offsets[target + 1] - self.offsets[target]
        step = torch.arange(int(length.max()) if len(target) else 0, device=target.device)
        there = step < length.unsqueeze(-1)
        decision = torch.where(there, first.unsqueeze(-1) + step, 0)
        rows, place = self.node[decision].unique(return_inverse=True)
        vectors = F.embedding(place, select_rows(self.weight, rows, self.sparse).to(query.dtype))
        logits = torch.einsum("bd,bkd->bk", query, vectors) * self.side[decision]
        return torch.where(there, F.softplus(-logits), 0.0).sum(dim=-1)

    def log_prob(self, input: Tensor) -> Tensor:
        """Return the log probability of every class, shape ``(*batch, num_classes)``. O(n·d) per example."""
        query, links = self._check_input(input), self._links()
        with full_precision(query):
            parts = [self._log_prob(part, links) for part in self._parts(query)]
        return torch.cat(parts).reshape(*query.shape[:-1], self.num_classes)

    def _log_prob(self, query: Tensor, links: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Add up decisions from the root to the leaves, one level of the tree at a time."""
        logits = self.weight.to(query.dtype) @ query.T
        sides = torch.stack([F.logsigmoid(-logits), F.logsigmoid(logits)], dim=1).flatten(0, 1)
        reached = torch.zeros_like(logits)
        for child, step in links:
            reached[child] = reached[step // 2] + sides[step]
        last = self._steps()[self.offsets[1:] - 1]
        return (reached[last // 2] + sides[last]).T

    def _steps(self) -> Tensor:
        """Return all decisions ``(decisions,)`` as numbers: 2·node to the left, 2·node + 1 to the right."""
        return 2 * self.node + (self.side > 0)

    def _links(self) -> list[tuple[Tensor, Tensor]]:
        """Return, per level below the root, its inner nodes and the step from the level above to each."""
        first = self.offsets[:-1].repeat_interleave(self.offsets.diff())
        level = torch.arange(len(self.node), device=self.node.device) - first
        depth, step = self.node.new_zeros(2, self.num_classes - 1)
        below = level > 0
        depth[self.node], step[self.node[below]] = level, self._steps().roll(1)[below]
        levels = depth.argsort(stable=True).split(depth.bincount().tolist())
        return [(nodes, step[nodes]) for nodes in levels[1:]]

    def _parts(self, query: Tensor) -> tuple[Tensor, ...]:
        """Split the queries, so that their decisions fit into a bounded memory."""
        return query.reshape(-1, self.in_features).split(max(1, chunks.MAX_LOGITS // self.num_classes))

    @torch.no_grad()
    def topk(self, input: Tensor, k: int, *, probe: int | None = None) -> tuple[Tensor, Tensor]:
        """Return the exact ``k`` most probable classes, best first: log probabilities and ids, both ``(*batch, k)``."""
        if probe is not None:
            raise ValueError(f"probe must be None: HierarchicalSoftmax has no index to search; got {probe}")
        if checks.positive_int("k", k) > self.num_classes:
            raise ValueError(f"k must be at most num_classes = {self.num_classes}, got {k}")
        query, links = self._check_input(input), self._links()
        with full_precision(query):
            found = (self._log_prob(part, links).topk(k, dim=-1) for part in self._parts(query))
            values, ids = zip(*found, strict=True)
        return torch.cat(values).reshape(*query.shape[:-1], k), torch.cat(ids).reshape(*query.shape[:-1], k)

    def extra_repr(self) -> str:
        """Show the sizes and the mean depth of a class."""
        depth = len(self.node) / self.num_classes
        return f"in_features={self.in_features}, num_classes={self.num_classes}, mean depth={depth:.1f}"


def huffman(counts: Tensor) -> Paths:
    """Build the tree with the shortest mean path, by repeatedly merging the two rarest sets. O(n·log n)."""
    leaves = len(counts)
    order = counts.argsort(stable=True).tolist()
    mass, parent, side = counts.double().tolist(), [0] * (2 * leaves - 1), [0] * (2 * leaves - 1)
    leaf = merged = 0  # the rarest leaf, and the rarest of the merged sets, which come in ascending order
    for new in range(leaves, 2 * leaves - 1):
        total = 0.0
        for which in (-1, 1):
            if merged == new - leaves or (leaf < leaves and mass[order[leaf]] <= mass[leaves + merged]):
                child, leaf = order[leaf], leaf + 1
            else:
                child, merged = leaves + merged, merged + 1
            parent[child], side[child] = new, which
            total += mass[child]
        mass.append(total)
    root = 2 * leaves - 2
    parent[root] = root
    up, turn, at, steps = torch.tensor(parent), torch.tensor(side), torch.arange(leaves), []
    while bool((at != root).any()):
        steps.append((up[at] - leaves, turn[at], at != root))
        at = up[at]
    return _ragged(steps[::-1])


def halves(embeddings: Tensor) -> Paths:
    """Build a balanced tree whose nodes halve class vectors across the direction that separates them best."""
    n = len(embeddings)
    borders = [0, n]
    for _ in range(math.ceil(math.log2(n))):
        middles = [(a + b) // 2 for a, b in itertools.pairwise(borders)]
        borders = [*(border for pair in zip(borders[:-1], middles, strict=True) for border in pair), n]
    rows = embeddings.detach().to(torch.float32).cpu()
    place = torch.empty(n, dtype=torch.long)
    place[bisect(rows, torch.tensor(borders))] = torch.arange(n)
    low, high, steps = torch.zeros_like(place), torch.full_like(place, n), []
    while bool((active := high - low > 1).any()):
        middle = (low + high) // 2
        right = place >= middle
        # Every position but 0 is the middle of one segment only: it numbers the inner nodes.
        steps.append(((middle - 1).clamp(min=0), torch.where(right, 1, -1), active))
        low, high = torch.where(right & active, middle, low), torch.where(~right & active, middle, high)
    return _ragged(steps)


def _ragged(steps: list[tuple[Tensor, Tensor, Tensor]]) -> Paths:
    """Return node, side and existence of the k-th decision of all classes."""
    node, side, there = (torch.stack(part, dim=1) for part in zip(*steps, strict=True))
    offsets = torch.cat([torch.zeros(1, dtype=torch.long), there.sum(dim=1).cumsum(0)])
    return Paths(node[there], side[there].to(torch.int8), offsets)
