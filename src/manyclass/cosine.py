"""Cosine logits with a scale, and margins for the target's cosine."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import checks
from .functional import Margin

# 1 − cos² is at least this: the slope of its root at cos = ±1 is infinite.
_SMALLEST = 1e-6


class CosFace:
    """The additive cosine margin, ``cos θ − margin`` (Wang et al., 2018).

    Args:
        margin: from 0 to 1; 0.35 is usual for faces.
    """

    def __init__(self, margin: float = 0.35) -> None:
        self.margin = _between("margin", margin, 1.0)

    def __call__(self, cosine: Tensor) -> Tensor:
        """Map cosines of targets; the shape is kept."""
        return cosine - self.margin

    def __repr__(self) -> str:
        return f"CosFace({self.margin})"


class ArcFace:
    """The additive angular margin, ``cos(θ + margin)`` (Deng et al., 2019).

    Where ``θ + margin`` exceeds π, the cosine would rise again. There it is ``cos θ − margin · sin(margin)``, as in the
    authors' code.

    Args:
        margin: in radians, from 0 to π/2; 0.5 is usual for faces.
    """

    def __init__(self, margin: float = 0.5) -> None:
        self.margin = _between("margin", margin, math.pi / 2)

    def __call__(self, cosine: Tensor) -> Tensor:
        """Map cosines of targets; the shape is kept."""
        sine = (1 - cosine.square()).clamp(min=_SMALLEST).sqrt()
        turned = cosine * math.cos(self.margin) - sine * math.sin(self.margin)
        beyond = cosine - self.margin * math.sin(self.margin)
        return torch.where(cosine > -math.cos(self.margin), turned, beyond)

    def __repr__(self) -> str:
        return f"ArcFace({self.margin})"


class Cosine(nn.Module):
    """Make the logits of a layer ``scale · cos(query, class)``.

    Give it to one layer: ``SampledSoftmax(d, n, cosine=Cosine(30))``. The layer normalises class embeddings, keeps a
    cache of the normalised ones, and draws negatives by them.

    Args:
        scale: the largest logit; positive.
        learn_scale: whether the scale is learned, beginning with ``scale``. The parameter ``log_scale`` holds its log.
        margin: `CosFace`, `ArcFace`, or any function that maps cosines to cosines. It is applied to the target's cosine
            in training, not in ``eval()``.
    """

    def __init__(self, scale: float = 30.0, *, learn_scale: bool = False, margin: Margin | None = None) -> None:
        super().__init__()
        if checks.number("scale", scale) <= 0:
            raise ValueError(f"scale must be positive, got {scale}")
        if margin is not None and not callable(margin):
            raise TypeError(f"margin must map cosines to cosines, as manyclass.ArcFace(0.5) does, got {margin!r}")
        self.margin = margin
        log_scale = torch.tensor(math.log(scale))
        if checks.boolean("learn_scale", learn_scale):
            self.log_scale = nn.Parameter(log_scale)
        else:
            self.register_buffer("log_scale", log_scale)

    @property
    def scale(self) -> Tensor:
        """The largest logit, a tensor without dimensions."""
        return self.log_scale.exp()

    def forward(self, query: Tensor) -> Tensor:
        """Normalise queries ``(*batch, in_features)`` and multiply them by the scale."""
        return F.normalize(query, dim=-1) * self.scale.to(query.dtype)

    def shifted(self, logits: Tensor) -> Tensor:
        """Apply the margin to logits of targets; the shape is kept."""
        assert self.margin is not None
        scale = self.scale.to(logits.dtype)
        return self.margin(logits / scale) * scale

    def extra_repr(self) -> str:
        """Show the scale and the margin."""
        return f"scale={float(self.scale):.4g}, learn_scale={self.log_scale.requires_grad}, margin={self.margin!r}"


def _between(name: str, value: float, most: float) -> float:
    if not 0 <= checks.number(name, value) <= most:
        raise ValueError(f"{name} must be from 0 to {most:.4g}, got {value}")
    return float(value)
