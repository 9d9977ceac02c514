"""Taylor softmax."""

from typing import Any

from torch import Tensor

from .quadratic import QuadraticSoftmax


class TaylorSoftmax(QuadraticSoftmax):
    """p_i ∝ 1 + o_i + o_i²/2: the exponential to second order. It is at least ½, and least at o = −1.

    De Brébisson and Vincent, An exploration of softmax alternatives belonging to the spherical loss family (ICLR 2016).
    They find it as good as the softmax for few classes, and worse for many.

    Args:
        in_features: size of the query, d.
        num_classes: n, at least 2.
        options: as in `FullSoftmax`, without ``prediction``.
    """

    def __init__(self, in_features: int, num_classes: int, **options: Any) -> None:
        super().__init__(in_features, num_classes, prediction="softmax", **options)

    def value(self, logits: Tensor) -> Tensor:
        """``1 + o + o²/2``."""
        return 1 + logits + logits.square() / 2
