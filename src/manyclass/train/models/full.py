"""The baseline that sampling is measured against."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from ... import functional
from ...head import SampledSoftmax


class FullSoftmax(SampledSoftmax):
    """What people write today: in training, too, the logits of all classes and their cross entropy. Cost O(n·d)."""

    def __init__(self, in_features: int, num_classes: int, **options: Any) -> None:
        super().__init__(in_features, num_classes, "uniform", sparse=False, **options)

    def forward(
        self,
        input: Tensor,
        target: Tensor,
        *,
        context: Tensor | None = None,
        generator: Any = None,
    ) -> Tensor:
        """Mean loss of ``input (*batch, in_features)`` and ``target (*batch)`` over all classes."""
        if not self.training:
            return super().forward(input, target)
        kept = target != self.ignore_index
        logits = functional.output(F.linear(input[kept], self.weight, self.bias), self.prediction)
        return F.cross_entropy(logits, target[kept])
