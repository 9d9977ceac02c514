"""Train a softmax over thousands to millions of classes by adaptive, kernel based sampling."""

from . import functional, kernels, losses, optim, samplers
from .clip import clip_grad_norm_
from .cosine import ArcFace, CosFace, Cosine
from .diagnostics import Diagnostics
from .full import FullSoftmax
from .ops import native_available
from .sampled import SampledSoftmax

__version__ = "0.1.0"

__all__ = [
    "ArcFace",
    "CosFace",
    "Cosine",
    "Diagnostics",
    "FullSoftmax",
    "SampledSoftmax",
    "clip_grad_norm_",
    "functional",
    "kernels",
    "losses",
    "native_available",
    "optim",
    "samplers",
]
