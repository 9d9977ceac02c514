"""``num_samples`` of a layer: a fixed number, or one that keeps the measured bias within a tolerance."""

import math
from collections.abc import Callable

from . import checks, chunks
from .counters import Counters
from .diagnostics import MEASURED, Measured, steady_bias
from .samplers.base import Sampler

# The default of num_samples by the sampler's scope.
NUM_SAMPLES = {"example": 64, "batch": 4096}
# A layer with a tolerance begins with this many negatives, and has at least these.
FIRST_SAMPLES, FEWEST_SAMPLES = 256, 16
# Measuring takes at most this part of the multiplications of training.
MEASURING = 0.02
# Weight of a new measurement in the running mean.
ADAPT_WEIGHT = 0.3


class Budget(Counters):
    """``num_samples``, fixed or adapted to a tolerance, and with it the sampler's ``own``.

    Args:
        sampler: its ``own`` stays in proportion to ``num_samples``.
        num_samples: see `SampledSoftmax`; None for the default, or for the first number with a tolerance.
        tolerance: largest bias of the loss, in nats.
        fewest: smallest value of ``num_samples``.
    """

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
            self.counters = ("adapted", "bias_product")  # pyright: ignore[reportAttributeAccessIssue]
            self.adapted, self.bias_product = 0, math.nan
            self.set(sampler, FIRST_SAMPLES)

    def set(self, sampler: Sampler, number: int) -> None:
        """Set ``num_samples``, and ``own`` in proportion."""
        self.number = max(self.fewest, number)
        self.adapted = self.number
        if sampler.own:
            sampler.own = max(1, round(self._own_share * self.number))

    def adapt(
        self, sampler: Sampler, measure: Callable[[int, int], Measured], step: int, batch: int, num_classes: int
    ) -> None:
        """Adapt ``num_samples`` to the bias that ``measure(examples, draws)`` returns."""
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
        old = self.bias_product
        # The bias falls about as 1/num_samples: their product is what is averaged.
        self.bias_product = mean = product if math.isnan(old) else old + ADAPT_WEIGHT * (product - old)
        highest = max(FEWEST_SAMPLES, min(num_classes, chunks.MAX_LOGITS // batch))
        wanted = max(self.number / 2, min(2 * self.number, mean / self.tolerance))
        self.set(sampler, max(min(FEWEST_SAMPLES, num_classes), min(highest, round(wanted))))

    def after_loading(self, sampler: Sampler) -> None:
        """Restore ``num_samples`` from a checkpoint."""
        if self.tolerance is not None and self.adapted:
            self.set(sampler, self.adapted)

    def extra_repr(self) -> str:
        """Show the number and what it follows."""
        return f"num_samples={self.number}, tolerance={self.tolerance}"
