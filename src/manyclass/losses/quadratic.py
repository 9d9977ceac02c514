"""Softmaxes with a polynomial of degree two in place of the exponential."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import checks, chunks, functional
from ..head import Head, full_precision
from ..shard import Tables
from .base import refuse


class QuadraticSoftmax(Head):
    """p_i = f(o_i) / Σ_j f(o_j) for a positive polynomial f(o) = a + b·o + c·o². Exact in training, too.

    Σ_j f(o_j) = n·a + b·⟨h, Σ_j w_j⟩ + c·hᵀ(Σ_j w_j·w_jᵀ)h, so the loss scores only the targets: O(n·d²) for a batch,
    and O(d²) per example. ``log_prob`` and ``topk`` score all classes. A subclass implements `coefficients`.

    Args:
        in_features: size of the query, d.
        num_classes: n, at least 2.
        options: as in `FullSoftmax`, without ``prediction``, ``classes``, ``cosine`` and ``shard``.
    """

    several_targets = False

    def __init__(self, in_features: int, num_classes: int, **options: Any) -> None:
        refuse(self, options)
        super().__init__(in_features, num_classes, prediction="softmax", **options)

    def coefficients(self) -> tuple[float, float, float]:
        """Return a, b and c, such that f > 0 everywhere."""
        raise NotImplementedError

    def value(self, logits: Tensor) -> Tensor:
        """Return f(o); the shape is kept."""
        a, b, c = self.coefficients()
        return a + b * logits + c * logits.square()

    def _training_losses(
        self, query: Tensor, target: Tensor, context: Tensor | None, generator: torch.Generator | None
    ) -> Tensor:
        return self._quadratic_losses(query, target)

    def _exact_losses(
        self, query: Tensor, target: Tensor, tables: Tables, margin: functional.Margin | None = None
    ) -> Tensor:
        return self._quadratic_losses(query, target)

    def _quadratic_losses(self, query: Tensor, target: Tensor) -> Tensor:
        weight = self.weight.to(query.dtype)
        if self.bias is not None:
            query, weight = F.pad(query, (0, 1), value=1.0), torch.cat([weight, self.bias.to(query).unsqueeze(-1)], 1)
        a, b, c = self.coefficients()
        squares = ((query @ (weight.T @ weight)) * query).sum(dim=-1)
        total = self.num_classes * a + b * (query @ weight.sum(dim=0)) + c * squares
        return total.log() - self.value((query * F.embedding(target, weight)).sum(dim=-1)).log()

    def log_prob(self, input: Tensor) -> Tensor:
        """Return the log probability of every class, shape ``(*batch, num_classes)``. O(n·d) per example."""
        query = self._check_input(input)
        with full_precision(query):
            parts = [self._log_prob(part) for part in self._parts(query.reshape(-1, self.in_features))]
        return torch.cat(parts).reshape(*query.shape[:-1], self.num_classes)

    def _log_prob(self, query: Tensor) -> Tensor:
        mass = self.value(functional.linear(query, self.weight, self.bias))
        return mass.log() - mass.sum(dim=-1, keepdim=True).log()

    def _parts(self, query: Tensor) -> tuple[Tensor, ...]:
        return query.split(max(1, chunks.MAX_LOGITS // self.num_classes))

    @torch.no_grad()
    def topk(self, input: Tensor, k: int, *, probe: int | None = None) -> tuple[Tensor, Tensor]:
        """Return the ``k`` most probable classes, best first: log probabilities and ids, both ``(*batch, k)``."""
        if probe is not None:
            raise ValueError(f"probe must be None: {type(self).__name__} has no index to search; got {probe}")
        if checks.positive_int("k", k) > self.num_classes:
            raise ValueError(f"k must be at most num_classes = {self.num_classes}, got {k}")
        query = self._check_input(input)
        with full_precision(query):
            flat = query.reshape(-1, self.in_features)
            values, ids = zip(*(self._log_prob(part).topk(k, dim=-1) for part in self._parts(flat)), strict=True)
        return torch.cat(values).reshape(*query.shape[:-1], k), torch.cat(ids).reshape(*query.shape[:-1], k)
