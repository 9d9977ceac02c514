"""Layers that train on a sample of the classes with another loss than the sampled softmax."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from .. import fused, samplers
from ..diagnostics import MEASURED, Diagnostics
from ..sampled import SampledSoftmax

#: Arguments of `SampledSoftmax` that the layers of this package do not take, and why.
REFUSED = {
    "tolerance": "its loss is no estimate of the softmax loss",
    "shard": "it has all classes in one process",
    "classes": "it reads its class weights from a table",
    "cosine": "it reads its class weights from a table",
}


def refuse(layer: nn.Module, options: Iterable[str]) -> None:
    """Raise if there are options that a layer of this package does not take."""
    for name in sorted(REFUSED.keys() & set(options)):
        raise TypeError(f"{type(layer).__name__} does not take {name}: {REFUSED[name]}")


class SampledLoss(SampledSoftmax):
    """A `SampledSoftmax` whose training loss is another function of the positive and the negatives.

    A subclass implements `_losses`. In ``eval()`` `forward` returns the exact softmax loss over all classes.

    Args:
        in_features: size of the query, d.
        num_classes: n, at least 2.
        sampler: as in `SampledSoftmax`.
        num_samples: as in `SampledSoftmax`.
        options: as in `SampledSoftmax`, without those in `REFUSED`, and options of the sampler.
    """

    several_targets = False
    #: Whether negatives are never the target.
    excludes_target = True
    #: Whether `_losses` needs the target's log-count, so a sampler with one q for all classes.
    needs_target_count = False

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        sampler: str | type[samplers.Sampler] | samplers.Sampler,
        num_samples: int | None = None,
        **options: Any,
    ) -> None:
        refuse(self, options)
        super().__init__(in_features, num_classes, sampler, num_samples, **options)
        if self.needs_target_count and type(self.sampler)._draw is samplers.Sampler._draw:
            raise ValueError(
                f"sampler must have one distribution q, as {type(self).__name__} needs q(target), but "
                f"{type(self.sampler).__name__} has none: take 'unigram' or another with log_prob"
            )

    def _sampled_losses(
        self,
        query: Tensor,
        target: Tensor,
        context: Tensor | None,
        generator: torch.Generator | None,
        *,
        observe: bool = False,
        encode: bool = True,
    ) -> Tensor:
        target_log_count = None
        with torch.no_grad():
            exclude = target if self.excludes_target else None
            flat = query.detach()
            draw = self.sampler.draw(flat, self.num_samples, exclude=exclude, context=context, generator=generator)
            if self.needs_target_count:
                draws = sum(self.sampler.numbers(self.num_samples)) // self.sampler.classes_per_draw
                log_prob = self.sampler.log_prob(flat, target.unsqueeze(-1), context=context).squeeze(-1)
                target_log_count = (log_prob + math.log(draws)).to(query.dtype)
            if observe:
                self.sampler.observe(flat, target)
                self.monitor.sampled()
        outputs = fused.gathered_outputs(
            query,
            self.weight,
            self._offsets(),
            target,
            draw,
            prediction=self.prediction,
            sparse=self.sparse,
            exchange=self._exchange,
        )
        return self._losses(*outputs, target_log_count)

    def _losses(
        self,
        positive: Tensor,  # shape: (batch,)
        negative: Tensor,  # shape: (batch, samples)
        log_count: Tensor,  # shape: (batch, samples), `fused.EMPTY` for an empty slot
        target_log_count: Tensor | None,  # shape: (batch,), of draws from q itself, if `needs_target_count`
    ) -> Tensor:
        """Return the losses ``(batch,)`` from the outputs of the positives and the negatives."""
        raise NotImplementedError

    def diagnostics(self, examples: int = MEASURED) -> Diagnostics:
        """Raise: this loss is no estimate of the softmax loss, so it has no bias."""
        raise ValueError(f"{type(self).__name__} has no diagnostics: its loss is no estimate of the softmax loss")
