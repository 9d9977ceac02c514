"""The paper's divide-and-conquer tree (Section 3.2): draws from a kernel distribution without scoring all classes."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import checks, chunks, kernels, ops
from .base import Incremental
from .descent import FLOOR, check_finite, descend, distinct, invert, last_from_rest, normalise

# Nodes of the first level. One matrix product evaluates them for all examples. Per node it is much faster than single
# dot products, so levels above would cost more than they save.
MAX_TOP = 2048
# The native kernels work on blocks of this many features.
FEATURE_BLOCK = 64
MAX_FEATURES = 1 << 16
ENDINGS = ("class", "leaf")


class KernelTree(Incremental):
    """q_i ∝ K(h, w_i) = ⟨φ(h), φ(w_i)⟩ by descending a tree whose nodes hold z(C) = Σ_{j ∈ C} φ(w_j).

    A set C of classes is drawn with probability ⟨φ(h), z(C)⟩ / ⟨φ(h), z(parent)⟩, and a class within a leaf by its
    kernel value, in O(d) per class. Draws and updates cost O(D·log n). The reported q is the probability of the path.

    Args:
        kernel: has ``feature_map`` and ``feature_dim``, as `kernels.Quadratic`. If it has ``value(logits)``, leaves are
            scored with it; if not, with the feature map.
        num_classes: n.
        in_features: size of the query, d.
        leaf_size: classes in a leaf. The default, about 2·D/d, makes the sums as large as the class weights.
        branching: children of a node below the first level.
        ending: ``"class"`` draws one class per path; ``"leaf"`` returns all classes of the leaf (the paper's multiple
            partial samples), with its expected count: ``num_samples`` is rounded up to whole leaves.
        bias: whether class weights have offsets, stored as a further column.

    Memory: a copy of the class weights and the sums, together about twice the class weights.
    """

    derived = True

    kernel: Any
    weight: Tensor
    sums: Tensor

    def __init__(
        self,
        kernel: kernels.FeatureKernel,
        num_classes: int,
        in_features: int,
        leaf_size: int | None = None,
        branching: int = 2,
        ending: str = "class",
        *,
        bias: bool = False,
    ) -> None:
        super().__init__(num_classes, in_features, bias)
        if not callable(getattr(kernel, "feature_map", None)) or not callable(getattr(kernel, "feature_dim", None)):
            raise TypeError(f"kernel must have methods feature_map and feature_dim, got {kernel!r}")
        self.kernel = kernel
        # More children than there are classes make no other tree.
        self.branching = min(checks.positive_int("branching", branching, 2), max(2, num_classes))
        self.ending = checks.one_of("ending", ending, ENDINGS)
        features = kernel.feature_dim(self.columns)
        if features > MAX_FEATURES:
            raise ValueError(
                f"{kernel!r} has {features:,} features for {self.columns} columns; a tree takes at most "
                f"{MAX_FEATURES:,}. Use samplers.Kernel, which scores all classes, or a kernel of lower degree"
            )
        padded = math.ceil(features / FEATURE_BLOCK) * FEATURE_BLOCK
        if leaf_size is None:
            leaf_size = 4 * math.ceil(padded / self.columns / 2)
        self.leaf_size = min(checks.positive_int("leaf_size", leaf_size), num_classes)
        self.classes_per_draw = self.leaf_size if ending == "leaf" else 1
        self.sizes = [math.ceil(num_classes / self.leaf_size)]
        while self.sizes[0] > MAX_TOP:
            self.sizes.insert(0, math.ceil(self.sizes[0] / self.branching))
        self.register_buffer("weight", torch.zeros(num_classes, self.columns), persistent=False)
        self.register_buffer("sums", torch.zeros(sum(self.sizes), padded), persistent=False)
        self._refresh()

    def update(self, weight: Tensor, rows: Tensor | None = None, *, bias: Tensor | None = None) -> None:
        """Refresh the sums of changed ``rows``, or of all rows; each node above a changed row is summed once.

        Sums are recomputed, never incremented, so they equal those of a rebuild after any number of updates.
        """
        self._check_weight(weight, bias, self.weight)
        picked = slice(None) if rows is None else distinct(self._check_rows(rows).sort().values)
        self.weight[picked, : self.in_features] = weight.detach()[picked].to(self.weight.dtype)
        if bias is not None:
            self.weight[picked, -1] = bias.detach()[picked].to(self.weight.dtype)
        self._refresh(None if isinstance(picked, slice) else distinct(picked // self.leaf_size))

    def _refresh(self, leaves: Tensor | None = None) -> None:
        """Sum the given leaves, sorted, and the nodes above them; by default all of them."""
        nodes = torch.arange(self.sizes[-1], device=self.weight.device) if leaves is None else leaves
        if self._native() and self.kernel.degree == 2:
            shape = (self.sizes, self.leaf_size, self.branching)
            torch.ops.manyclass.tree_refresh_(self.sums, self.weight, *shape, nodes, self.kernel.alpha)
            return
        for part in nodes.split(max(1, chunks.MAX_LOGITS // (self.leaf_size * self.sums.shape[1]))):
            classes, inside = self._classes(part)
            self._level(-1)[part] = torch.where(inside[..., None], self._features(self.weight[classes]), 0).sum(dim=1)
        for level in range(len(self.sizes) - 2, -1, -1):
            nodes = distinct(nodes // self.branching)
            below = self._level(level + 1)
            for node in nodes.split(max(1, chunks.MAX_LOGITS // (self.branching * self.sums.shape[1]))):
                child = node.unsqueeze(-1) * self.branching + torch.arange(self.branching, device=node.device)
                sums = below[child.clamp(max=len(below) - 1)]
                self._level(level)[node] = torch.where((child < len(below))[..., None], sums, 0).sum(dim=1)

    def _draw(self, query, uniform, exclude, context):
        query = self._extended(query, self.weight)
        draw = self._draw_native if self._native() else self._draw_reference
        leaf_or_class, log_prob = draw(query, uniform[..., 0], exclude)
        if self.ending == "class":
            return leaf_or_class, log_prob
        classes, inside = self._classes(leaf_or_class)
        if exclude is not None:
            inside = inside & (classes != exclude[:, None, None])
        return classes.flatten(1), torch.where(inside, log_prob.unsqueeze(-1), math.inf).flatten(1)

    def _draw_native(self, query: Tensor, uniform: Tensor, exclude: Tensor | None) -> tuple[Tensor, Tensor]:
        features = self._features(query)
        if exclude is None:
            exclude, value = torch.empty(0, dtype=torch.long), query.new_empty(0)
        else:
            value = kernels.evaluate(self.kernel, query, self.weight[exclude])
        ids, log_prob = torch.ops.manyclass.tree_draw(
            features,
            query.contiguous(),
            self._masses(features, 0),
            self.sums,
            self.weight,
            self.sizes,
            self.leaf_size,
            self.branching,
            uniform.contiguous(),
            exclude,
            value,
            self.kernel.degree,
            self.kernel.alpha,
            FLOOR,
            self.ending == "leaf",
        )
        check_finite(log_prob, self.validate)
        return ids, log_prob

    def _draw_reference(self, query: Tensor, uniform: Tensor, exclude: Tensor | None) -> tuple[Tensor, Tensor]:
        """Make the same draw from the masses of all nodes: one uniform number, rescaled at each step."""
        results = []
        for part, numbers, positive in self._chunks(self._work(uniform.shape[-1]), query, uniform, exclude):
            leaf_prob = self._leaf_prob(part, positive)
            leaf, rest = invert(leaf_prob, numbers)
            prob = leaf_prob.gather(-1, leaf)
            if self.ending == "leaf":
                results.append((leaf, prob.log()))
                continue
            class_prob = self._class_prob(part, leaf, positive)
            slot, _ = invert(class_prob, rest.unsqueeze(-1))
            prob = prob * class_prob.gather(-1, slot).squeeze(-1)
            results.append((leaf * self.leaf_size + slot.squeeze(-1), prob.log()))
        ids, log_prob = zip(*results, strict=True)
        return torch.cat(ids), torch.cat(log_prob)

    def _log_prob(self, query, ids, exclude, context):
        results = []
        query = self._extended(query, self.weight)
        for part, chunk, positive in self._chunks(self._work(ids.shape[-1]), query, ids, exclude):
            leaf = chunk // self.leaf_size
            prob = self._leaf_prob(part, positive).gather(-1, leaf)
            if self.ending == "class":
                slot = (chunk % self.leaf_size).unsqueeze(-1)
                prob = prob * self._class_prob(part, leaf, positive).gather(-1, slot).squeeze(-1)
            results.append(prob.log())
        return torch.cat(results)

    def log_total(self, query: Tensor) -> Tensor:
        """Return the log of ⟨φ(h), z(all)⟩."""
        features = self._features(self._extended(query, self.weight))
        return self._masses(features, 0).sum(dim=-1).clamp(min=1e-30).log().to(query.dtype)

    def _leaf_prob(self, query: Tensor, exclude: Tensor | None) -> Tensor:
        """Return P(leaf) of all leaves, the product of the probabilities along the path, shape ``(batch, leaves)``."""
        features = self._features(query)
        prob = torch.ones(len(query), 1, dtype=torch.float64, device=query.device)
        above = None
        for level, size in enumerate(self.sizes):
            span = self.leaf_size * self.branching ** (len(self.sizes) - 1 - level)
            mass = self._masses(features, level).double()
            if above is not None:
                mass = last_from_rest(mass, above, self.branching)
            above = mass
            count = (self.num_classes - torch.arange(size, device=query.device) * span).clamp(max=span).double()
            count = count.expand_as(mass)
            if exclude is not None:
                node = (exclude // span).unsqueeze(-1)
                value = kernels.evaluate(self.kernel, query, self.weight[exclude])
                mass = mass.scatter_add(-1, node, -value.double().unsqueeze(-1))
                count = count.scatter_add(-1, node, torch.full_like(node, -1.0, dtype=torch.float64))
            prob = descend(prob, mass, count, size if level == 0 else self.branching)
        return prob

    def _masses(self, features: Tensor, level: int) -> Tensor:
        """Return ⟨φ(h), z(C)⟩ for all nodes of a level, shape ``(batch, nodes)``."""
        masses = features @ self._level(level).T
        check_finite(masses, self.validate)
        return masses

    def _class_prob(self, query: Tensor, leaf: Tensor, exclude: Tensor | None) -> Tensor:
        """Return P(class | leaf) of all classes of the leaves ``(batch, k)``, shape ``(batch, k, leaf_size)``."""
        classes, inside = self._classes(leaf)
        if exclude is not None:
            inside = inside & (classes != exclude[:, None, None])
        value = kernels.evaluate(self.kernel, query[:, None, None], self.weight[classes])
        return normalise(value.double(), inside.double())

    def _classes(self, leaf: Tensor) -> tuple[Tensor, Tensor]:
        """Return the classes of leaves, one more dimension of ``leaf_size``, and which of them exist."""
        classes = leaf.unsqueeze(-1) * self.leaf_size + torch.arange(self.leaf_size, device=leaf.device)
        return classes.clamp(max=self.num_classes - 1), classes < self.num_classes

    def _features(self, vectors: Tensor) -> Tensor:
        features = self.kernel.feature_map(vectors)
        return F.pad(features, (0, self.sums.shape[1] - features.shape[-1]))

    def _level(self, level: int) -> Tensor:
        """Return a view of the sums of one level, shape ``(nodes, features)``."""
        return self.sums.split(self.sizes)[level]

    def _native(self) -> bool:
        """Return whether the native kernels serve: polynomial kernels in float32 on the CPU."""
        return kernels.is_polynomial(self.kernel) and ops.native_for(self.weight)

    def _work(self, draws: int) -> int:
        """Count the numbers that the reference holds per query: masses of all nodes, or weights of drawn leaves."""
        return max(len(self.sums), draws * self.leaf_size * self.columns)

    def extra_repr(self) -> str:
        """Show the shape of the tree and what it costs."""
        ratio = self.sums.numel() / (self.num_classes * self.in_features)
        return (
            f"{self.kernel!r}, num_classes={self.num_classes}, in_features={self.in_features}, "
            f"leaf_size={self.leaf_size}, branching={self.branching}, ending={self.ending!r}, levels={self.sizes}, "
            f"sums={self.sums.numel() * self.sums.element_size():,} bytes ({ratio:.2f} × the class weights)"
        )
