"""Taylor softmax."""

from .quadratic import QuadraticSoftmax


class TaylorSoftmax(QuadraticSoftmax):
    """p_i ∝ 1 + o_i + o_i²/2: the exponential to second order. It is at least ½, and least at o = −1.

    De Brébisson and Vincent, An exploration of softmax alternatives belonging to the spherical loss family (ICLR 2016).
    They find it as good as the softmax for few classes, and worse for many.

    Args:
        in_features: size of the query, d.
        num_classes: n, at least 2.
        options: as in `FullSoftmax`, without ``prediction``, ``classes``, ``cosine`` and ``shard``.
    """

    def coefficients(self) -> tuple[float, float, float]:
        """Return those of ``1 + o + o²/2``."""
        return 1.0, 1.0, 0.5
