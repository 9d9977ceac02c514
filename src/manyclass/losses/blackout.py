"""BlackOut: a discriminative loss on importance-weighted samples."""

import torch
from torch import Tensor

from .base import SampledLoss


class BlackOut(SampledLoss):
    """Raise the target's share of a weighted sample, and lower that of every negative by itself.

    ``p̃ = softmax(o − ln m·q)`` over the target and m negatives from q, which are never the target;
    ``loss = −ln p̃_y − Σ_k ln(1 − p̃_k)``. Unlike the sampled softmax it also divides the target's weight by its count,
    and its second term pushes negatives down further. It estimates no softmax loss. Its outputs at the optimum differ
    from ln p by an amount that depends on q and m; `manyclass bench optimum` measures it. The q of a negative is that
    of the classes without the target, where the paper takes q itself. Cost O(m·d) per example.

    Ji, Vishwanathan, Satish, Anderson and Dubey, BlackOut: Speeding up recurrent neural network language models with
    very large vocabularies (ICLR 2016).

    Args:
        in_features: size of the query, d.
        num_classes: n, at least 2.
        sampler: distribution of the negatives: any sampler with one q, so not ``"blocks"``. The paper takes
            ``"unigram"`` with a ``power`` between 0 and 1.
        num_samples: m, as in `SampledSoftmax`.
        options: as in `SampledSoftmax`, without ``tolerance`` and ``shard``, and options of the sampler.
    """

    needs_target_count = True

    def _losses(self, positive: Tensor, negative: Tensor, log_count: Tensor, target_log_count: Tensor | None) -> Tensor:
        assert target_log_count is not None
        first, others = (positive - target_log_count).unsqueeze(-1), negative - log_count
        log_total = torch.cat([first, others], dim=-1).logsumexp(dim=-1, keepdim=True)
        # 1 − p̃ of a negative is bounded away from 0, so that a negative that takes all has a finite loss.
        share = (others - log_total).exp().clamp(max=1 - 1e-6)
        return (log_total - first).squeeze(-1) - (-share).log1p().sum(dim=-1)
