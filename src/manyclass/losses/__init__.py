"""Other losses over many classes, to compare the sampled softmax with. Each file names its paper."""

from .blackout import BlackOut
from .hierarchical import HierarchicalSoftmax
from .nce import NoiseContrastive
from .negative import NegativeSampling
from .sce import ScalableCrossEntropy
from .spherical import SphericalSoftmax, SphericalUpdate
from .taylor import TaylorSoftmax

__all__ = [
    "BlackOut",
    "HierarchicalSoftmax",
    "NegativeSampling",
    "NoiseContrastive",
    "ScalableCrossEntropy",
    "SphericalSoftmax",
    "SphericalUpdate",
    "TaylorSoftmax",
]
