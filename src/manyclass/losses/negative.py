"""The negative sampling of word2vec."""

import torch.nn.functional as F
from torch import Tensor

from .. import fused
from .base import SampledLoss


class NegativeSampling(SampledLoss):
    """Tell the target from negatives by logistic regression, whatever the negatives' distribution.

    ``loss = −ln σ(o_y) − Σ_k ln σ(−o_k)``, where k runs over the negatives, which are never the target. Any sampler
    will do, as its counts are not used. The optimum is not p: with m draws from q for each example
    exp(o_i) = p_i / (m · Σ_{y≠i} p_y·q_i/(1 − q_y)), about p_i/(m·q_i). So the softmax of the outputs is wrong by
    about the factor q, and the exact loss in ``eval()`` is large. Rankings suit tasks where frequent classes should not
    win by frequency alone. Cost O(m·d) per example.

    Mikolov, Sutskever, Chen, Corrado and Dean, Distributed representations of words and phrases and their
    compositionality (NIPS 2013).

    Args:
        in_features: size of the query, d.
        num_classes: n, at least 2.
        sampler: distribution of the negatives; word2vec takes ``"unigram"`` with ``power=0.75``.
        num_samples: m, as in `SampledSoftmax`.
        options: as in `SampledSoftmax`, without ``tolerance`` and ``shard``, and options of the sampler.
    """

    def _losses(self, positive: Tensor, negative: Tensor, log_count: Tensor, target_log_count: Tensor | None) -> Tensor:
        drawn = log_count < fused.EMPTY
        return F.softplus(-positive) + F.softplus(negative.where(drawn, -fused.EMPTY)).sum(dim=-1)
