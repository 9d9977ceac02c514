"""The output layer that trains on all classes."""

from typing import Any

import torch
from torch import Tensor

from .head import Head
from .loading import keep_class_weights
from .shard import Tables


class FullSoftmax(Head):
    """The exact loss over all classes, in training, too: the reference for sampling. O(n·d) per example.

    Takes the arguments of `SampledSoftmax` that do not concern sampling. Gradients are dense. With ``classes`` every
    step encodes all classes.
    """

    def __init__(self, in_features: int, num_classes: int, **options: Any) -> None:
        super().__init__(in_features, num_classes, **options)
        self.register_load_state_dict_pre_hook(keep_class_weights)

    def _training_losses(
        self, query: Tensor, target: Tensor, context: Tensor | None, generator: torch.Generator | None
    ) -> Tensor:
        tables = self._tables() if self.cache is None else self._all()
        return self.shard.full_losses(query, target, tables, self.prediction, self._margin())

    def _automatic(self) -> bool:
        return True  # it costs what a training step costs

    def _all(self) -> Tables:
        """Return the embeddings of all classes, with gradients."""
        assert self.cache is not None
        rows = self._made(torch.arange(self.shard.size, device=self.weight.device))
        self.cache.fresh &= not self._learns()
        return rows, self.bias
