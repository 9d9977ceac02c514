"""Noise contrastive estimation."""

import math
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from .. import checks, samplers
from .base import SampledLoss


class NoiseContrastive(SampledLoss):
    """Tell the target from noise: logistic regression with the known counts of the noise.

    ``loss = −ln σ(s_y − ln m·q_y) − Σ_k ln σ(ln m·q_k − s_k)``, where k runs over m draws from q and s = o − ln n.
    The optimum is exp(s) = p for any q > 0, so outputs normalise themselves: Z = n. The constant ln n does not change
    the softmax. With it, a new layer with outputs near 0 is normalised. Noise may include the target, since it comes
    from q itself, not from q restricted to other classes. Cost O(m·d) per example.

    Gutmann and Hyvärinen, Noise-contrastive estimation (AISTATS 2010); Mnih and Teh, A fast and simple algorithm for
    training neural probabilistic language models (ICML 2012).

    Args:
        in_features: size of the query, d.
        num_classes: n, at least 2.
        sampler: distribution of the noise: any sampler with one q, so not ``"blocks"``.
        num_samples: m, as in `SampledSoftmax`.
        self_normalisation: weight of a further term, (ln Ẑ)² with Ẑ = Σ_k exp(s_k)/(m·q_k) from the same noise.
        options: as in `SampledSoftmax`, without ``tolerance`` and ``shard``, and options of the sampler.
    """

    excludes_target = False
    needs_target_count = True

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        sampler: str | type[samplers.Sampler] | samplers.Sampler,
        num_samples: int | None = None,
        *,
        self_normalisation: float = 0.0,
        **options: Any,
    ) -> None:
        self_normalisation = checks.number("self_normalisation", self_normalisation)
        if self_normalisation < 0:
            raise ValueError(f"self_normalisation must not be negative, got {self_normalisation}")
        super().__init__(in_features, num_classes, sampler, num_samples, **options)
        self.self_normalisation = self_normalisation

    def _losses(self, positive: Tensor, negative: Tensor, log_count: Tensor, target_log_count: Tensor | None) -> Tensor:
        assert target_log_count is not None
        scale = math.log(self.num_classes)
        noise = negative - scale - log_count
        losses = F.softplus(target_log_count - (positive - scale)) + F.softplus(noise).sum(dim=-1)
        if self.self_normalisation:
            losses = losses + self.self_normalisation * noise.logsumexp(dim=-1).square()
        return losses
