"""Kernels K(h, w) = f(⟨h, w⟩) to sample from, and their feature maps φ with K(h, w) = ⟨φ(h), φ(w)⟩.

A kernel is any object with ``value(logits)``. With ``feature_map`` and ``feature_dim`` it also has the finite φ that
summarises a set of classes in one vector (Section 3.1 of the paper).
"""

import functools
import math
from typing import Any, Protocol

import torch
from torch import Tensor

from . import checks

__all__ = ["FeatureKernel", "Kernel", "Polynomial", "Quadratic", "Quartic"]

# Higher powers of the logits leave the range of float64.
MAX_DEGREE = 64
# Largest feature map. Beyond this size, scoring all classes is cheaper.
MAX_FEATURES = 1 << 20


class Kernel(Protocol):
    """The kernel interface of `samplers.Kernel`: a non-negative function of the logit."""

    def value(self, logits: Tensor) -> Tensor:
        """Map logits ``⟨h, w⟩`` to ``K(h, w) ≥ 0``; the shape is kept."""
        ...


class FeatureKernel(Protocol):
    """The kernel interface of `samplers.KernelTree`: a feature map, and optionally ``value(logits)``."""

    def feature_dim(self, in_features: int) -> int:
        """Return D, the number of features of a vector of ``in_features`` numbers."""
        ...

    def feature_map(self, vectors: Tensor) -> Tensor:
        """Map vectors ``(*batch, in_features)`` to features φ ``(*batch, feature_dim)``."""
        ...


class Polynomial:
    """``K(h, w) = alpha · ⟨h, w⟩^degree + 1`` for an even ``degree``, so that it is positive everywhere."""

    def __init__(self, degree: int, alpha: float = 1.0) -> None:
        self.degree = checks.positive_int("degree", degree, 2, MAX_DEGREE)
        if degree % 2:
            raise ValueError(f"degree must be even, got {degree}: an odd power is negative for negative logits")
        self.alpha = checks.number("alpha", alpha)
        if alpha <= 0:
            raise ValueError(f"alpha must be positive, got {alpha}")

    def __repr__(self) -> str:
        return f"{type(self).__name__}(degree={self.degree}, alpha={self.alpha})"

    def value(self, logits: Tensor) -> Tensor:
        """Return ``alpha · logits^degree + 1``; the shape is kept."""
        square = logits.square()
        power = square if self.degree == 2 else square ** (self.degree // 2)
        return power.mul_(self.alpha).add_(1)  # in place: half the memory traffic

    def feature_dim(self, in_features: int) -> int:
        """Return D: the number of distinct monomials of ``degree`` in ``in_features`` variables, plus one."""
        return math.comb(in_features + self.degree - 1, self.degree) + 1

    def feature_map(self, vectors: Tensor) -> Tensor:
        """Map vectors ``(*batch, in_features)`` to features φ ``(*batch, feature_dim)``.

        Each monomial appears once, scaled by the square root of the number of orders of its factors. So for
        ``degree=2`` there are about half of the paper's d² + 1 features. O(degree · D) per vector.
        """
        if checks.floating("vectors", vectors).dim() == 0:
            raise ValueError("vectors must have shape (*batch, in_features), got ()")
        in_features = vectors.shape[-1]
        if self.feature_dim(in_features) > MAX_FEATURES:
            raise ValueError(
                f"{self} has {self.feature_dim(in_features):,} features for in_features={in_features}; at most "
                f"{MAX_FEATURES:,} are allowed. Score the classes directly with samplers.Kernel instead"
            )
        factors, orders = _monomials(in_features, self.degree)
        features = (self.alpha * orders).sqrt().to(vectors).expand(*vectors.shape[:-1], -1)
        for factor in factors.to(vectors.device):
            features = features * vectors[..., factor]
        return torch.cat([features, features.new_ones(*features.shape[:-1], 1)], dim=-1)


@functools.lru_cache(maxsize=8)
def _monomials(in_features: int, degree: int) -> tuple[Tensor, Tensor]:
    """Return the factors of each monomial ``(degree, monomials)`` and the number of orders of its factors."""
    factors = torch.combinations(torch.arange(in_features), degree, with_replacement=True)
    # The factors are sorted: the k-th of a run of equal ones divides the degree! orders by k.
    run = torch.ones(len(factors), dtype=torch.float64)
    repeats = run.clone()
    for k in range(1, degree):
        run = torch.where(factors[:, k] == factors[:, k - 1], run + 1, 1.0)
        repeats = repeats * run
    return factors.T.contiguous(), math.factorial(degree) / repeats


class Quadratic(Polynomial):
    """``alpha · ⟨h, w⟩² + 1``, the paper's Section 3.3, with D = d(d+1)/2 + 1 features."""

    def __init__(self, alpha: float = 100.0) -> None:
        super().__init__(2, alpha)


class Quartic(Polynomial):
    """``⟨h, w⟩⁴ + 1``, the paper's Section 4; its D grows with d⁴."""

    def __init__(self) -> None:
        super().__init__(4)


def evaluate(kernel: Any, query: Tensor, weight: Tensor) -> Tensor:
    """Evaluate K(h, w) of a `Kernel` or a `FeatureKernel`; the vectors broadcast."""
    if hasattr(kernel, "value"):
        return kernel.value((query * weight).sum(dim=-1))
    return (kernel.feature_map(query) * kernel.feature_map(weight)).sum(dim=-1)


def is_polynomial(kernel: Any) -> bool:
    """Return whether ``kernel`` is a `Polynomial` without overrides, whose formulas the native code implements."""
    own = type(kernel)
    formulas = (Polynomial.value, Polynomial.feature_map)
    return isinstance(kernel, Polynomial) and (own.value, own.feature_map) == formulas
