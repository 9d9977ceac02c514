"""Other losses over many classes, to compare the sampled softmax with. Each file names its paper."""

from torch import nn

from .. import checks
from .adaptive import AdaptiveSoftmax
from .base import SampledLoss
from .blackout import BlackOut
from .hierarchical import HierarchicalSoftmax
from .nce import NoiseContrastive
from .negative import NegativeSampling
from .sce import ScalableCrossEntropy
from .spherical import SphericalSoftmax, SphericalUpdate
from .taylor import TaylorSoftmax

__all__ = [
    "AdaptiveSoftmax",
    "BlackOut",
    "HierarchicalSoftmax",
    "NegativeSampling",
    "NoiseContrastive",
    "ScalableCrossEntropy",
    "SphericalSoftmax",
    "SphericalUpdate",
    "TaylorSoftmax",
    "draws",
    "named",
    "names",
]

_NAMED: dict[str, type[nn.Module]] = {
    "nce": NoiseContrastive,
    "negative": NegativeSampling,
    "blackout": BlackOut,
    "sce": ScalableCrossEntropy,
    "hierarchical": HierarchicalSoftmax,
    "adaptive": AdaptiveSoftmax,
    "spherical": SphericalSoftmax,
    "taylor": TaylorSoftmax,
}


def names() -> tuple[str, ...]:
    """Return the names of losses that `named` and ``manyclass train --loss`` take."""
    return tuple(_NAMED)


def named(name: str) -> type[nn.Module]:
    """Return the layer of the loss with this name."""
    return _NAMED[checks.one_of("loss", name, names())]


def draws(name: str) -> bool:
    """Return whether the loss with this name draws negatives from a sampler."""
    return issubclass(named(name), SampledLoss)
