"""The baseline that sampling is measured against, with its classes sharded."""

from typing import Any

import torch
from torch import Tensor

from ...distributed.head import ShardedSampledSoftmax


class ShardedFullSoftmax(ShardedSampledSoftmax):
    """The exact loss over all classes in training, too. Cost O(n·d) for each example, shared by the ranks."""

    def __init__(self, in_features: int, num_classes: int, **options: Any) -> None:
        super().__init__(in_features, num_classes, "uniform", sparse=False, **options)

    def _sampled_losses(
        self, query: Tensor, target: Tensor, context: Tensor | None, generator: torch.Generator | None
    ) -> Tensor:
        return self._exact_losses(query, target)
