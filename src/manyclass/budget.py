"""How many negatives a layer draws: a fixed number, or as many as its bias asks for."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from . import checks, functional
from .diagnostics import MEASURED, Measured, steady_bias
from .samplers.base import Sampler

# Negatives of each example, or of the pool of a batch, unless told otherwise.
NUM_SAMPLES = {"example": 64, "batch": 4096}
# A layer with a tolerance begins with this many negatives, and has at least these.
FIRST_SAMPLES, FEWEST_SAMPLES = 256, 16
# It measures so rarely that measuring takes at most this part of the multiplications of training.
MEASURING = 0.02
# Weight of a new measurement in the running mean.
ADAPT_WEIGHT = 0.3


class Budget(nn.Module):
    """The number of negatives, and with it the sampler's ``own``.

    Args:
        sampler: whose ``own`` grows and shrinks along.
        num_samples: a fixed number; None for the default, or for the first number with a tolerance.
        tolerance: bias of the loss in nats that the layer may have.
        fewest: negatives that there must be.
    """

    adapted: Tensor
    bias_product: Tensor

    def __init__(self, sampler: Sampler, num_samples: int | None, tolerance: float | None, fewest: int = 1) -> None:
        super().__init__()
        if num_samples is not None and tolerance is not None:
            raise ValueError(f"give num_samples={num_samples} or tolerance={tolerance}, not both")
        if tolerance is not None and not 0 < checks.number("tolerance", tolerance) < math.inf:
            raise ValueError(f"tolerance must be positive, in nats, got {tolerance}")
        self.tolerance, self.fewest = tolerance, fewest
        if num_samples is None:
            num_samples = NUM_SAMPLES[sampler.scope]
        self.number = checks.positive_int("num_samples", num_samples)
        self._own_share = sampler.own / self.number
        if tolerance is not None:
            self.register_buffer("adapted", torch.tensor(0))
            self.register_buffer("bias_product", torch.full((), math.nan, dtype=torch.float64))
            self.set(sampler, FIRST_SAMPLES)

    def set(self, sampler: Sampler, number: int) -> None:
        """Draw so many from now on."""
        self.number = max(self.fewest, number)
        self.adapted.fill_(self.number)
        if sampler.own:
            sampler.own = max(1, round(self._own_share * self.number))

    def adapt(
        self, sampler: Sampler, measure: Callable[[int, int], Measured], step: int, batch: int, num_classes: int
    ) -> None:
        """Draw more or fewer from this step on, as the bias asks for that ``measure(examples, draws)`` finds."""
        if self.tolerance is None or not batch:
            return
        work = batch * (self.number + sampler.own) * 3
        # Multiplications per column, forward and backward. Powers of two: few multiples also while samples change.
        every = 1 << max(0, math.ceil(math.log2(3 * MEASURED * num_classes / work / MEASURING)))
        if step > 4 and step % every:
            return
        product = -steady_bias(measure(MEASURED, 2).difference) * self.number
        if not math.isfinite(product):
            return
        old = float(self.bias_product)
        # The bias falls about as 1/num_samples: their product is what is averaged.
        mean = product if math.isnan(old) else old + ADAPT_WEIGHT * (product - old)
        self.bias_product.fill_(mean)
        highest = max(FEWEST_SAMPLES, min(num_classes, functional.MAX_LOGITS // batch))
        wanted = max(self.number / 2, min(2 * self.number, mean / self.tolerance))
        self.set(sampler, max(min(FEWEST_SAMPLES, num_classes), min(highest, round(wanted))))

    def after_loading(self, sampler: Sampler) -> None:
        """Go on with the number of a checkpoint."""
        if self.tolerance is not None and int(self.adapted):
            self.set(sampler, int(self.adapted))

    def extra_repr(self) -> str:
        """Show the number and what it follows."""
        return f"num_samples={self.number}, tolerance={self.tolerance}"
