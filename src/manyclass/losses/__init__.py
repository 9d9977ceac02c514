"""Other losses over many classes, to compare the sampled softmax with. Each file names its paper."""

from .nce import NoiseContrastive
from .negative import NegativeSampling

__all__ = [
    "NegativeSampling",
    "NoiseContrastive",
]
