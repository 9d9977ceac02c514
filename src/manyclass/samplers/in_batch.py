"""In-batch negatives: the targets of a batch are negatives for each other, with optional uniform classes."""

import math
from typing import Any

import torch
from torch import Tensor

from .. import checks
from ..counters import Counters
from .base import Sampler
from .draw import Draw, Part
from .static import Unigram

# Weight of a new interval in the running mean of a class, once it has been seen often enough.
RATE = 0.05


class StreamingFrequency(Counters):
    """Estimate how often classes occur in a stream of batches, also while that changes (Yi et al., 2019).

    Each class has two running means over the batches that it occurs in: the number of examples since the last such
    batch, and the number of its occurrences. Their ratio is the frequency. The paper keeps them in a hash table, this
    class in arrays.

    Args:
        num_classes: n.
    """

    last: Tensor
    interval: Tensor
    number: Tensor
    times: Tensor

    counters = ("examples",)

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        #: Examples so far.
        self.examples = 0
        # What `examples` was when a class occurred last, the two means, and the batches that the class occurred in.
        self.register_buffer("last", torch.zeros(num_classes, dtype=torch.long))
        self.register_buffer("interval", torch.ones(num_classes))
        self.register_buffer("number", torch.zeros(num_classes))
        self.register_buffer("times", torch.zeros(num_classes, dtype=torch.int32))

    def update(self, classes: Tensor) -> None:  # shape: (batch,)
        """Count the classes of a batch."""
        self.examples += len(classes)
        ids, number = classes.unique(return_counts=True)
        self.times[ids] += 1
        rate = (1 / self.times[ids].float()).clamp(min=RATE)  # the plain mean, until it has seen enough
        self.interval[ids] += rate * (self.examples - self.last[ids] - self.interval[ids])
        self.number[ids] += rate * (number - self.number[ids])
        self.last[ids] = self.examples

    def probability(self, classes: Tensor) -> Tensor:
        """Return the frequencies of ``classes``, float64; 0 for those that never occurred. The shape is kept."""
        return self.number[classes].double() / self.interval[classes].double()


class InBatch(Sampler):
    """The targets of the batch are the pool, and ``uniform`` random classes join it.

    Let b be the number of targets in the batch, drawn independently from q. All but an example's own target can be its
    negatives, so class i enters its sample ``(b − 1)·q_i`` times on average, plus ``uniform/n``. This is the reported
    count: the logQ correction of Yi et al. (2019), and with ``uniform`` the mixed negative sampling of Yang et al.
    (2020). It is exact if targets are independent and q is their distribution, and slightly too large for an example
    with several targets. A class that is never a target is never a negative unless ``uniform`` is positive.

    Args:
        num_classes: n.
        counts: occurrences of each class in the training data, shape ``(num_classes,)``; q is their share. Of classes
            with the count 0 that occur, the smallest other count is used. Default: q is estimated from the batches.
        uniform: number of random classes in the pool beside the targets.

    ``num_samples`` is the largest number of targets in the pool. A larger batch contributes a random subset.
    """

    q = "frequency of the class as a target"
    cost = "O(1)"
    use = "baseline of two-tower models"
    scope = "batch"

    frequency: Tensor

    def __init__(self, num_classes: int, counts: Tensor | None = None, uniform: int = 0) -> None:
        super().__init__()
        self.num_classes = checks.positive_int("num_classes", num_classes)
        self.uniform = checks.positive_int("uniform", uniform, 0, checks.MAX_CLASSES)
        self.stream = StreamingFrequency(num_classes) if counts is None else None
        if counts is not None:
            weight = Unigram(counts, num_classes=num_classes).table.weight.double()
            weight = weight.clamp(min=float(weight[weight > 0].min()))
            self.register_buffer("frequency", weight / float(counts.double().sum()))
        self._targets: Tensor | None = None

    @classmethod
    def restrict(cls, options: dict[str, Any], part: Part) -> tuple[type[Sampler], dict[str, Any]]:
        """Raise: the targets of a batch are spread over all shards."""
        raise ValueError(f"{cls.__name__} cannot be sharded: its pool is the targets of the whole batch")

    def begin(self, target: Tensor) -> None:
        """Take the targets of a batch as the pool of its draws, and count them."""
        target = checks.indices("target", target, self.num_classes, ignore=-1, validate=self.validate)
        self._targets = target[target >= 0] if target.dim() > 1 else target
        if self.stream is not None:
            self.stream.update(self._targets)

    def draw(
        self,
        query: Tensor,
        num_samples: int,
        *,
        exclude: Tensor | None = None,
        context: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> Draw:
        """Return the pool of the batch that `begin` was given; the rest is as in `Sampler.draw`."""
        checks.positive_int("num_samples", num_samples, maximum=checks.MAX_CLASSES)
        _, exclude, _ = self._flatten(query, exclude, context)
        if self._targets is None:
            raise ValueError("InBatch has seen no batch yet: call begin(target) first")
        targets = self._targets.to(query.device)
        number, part = len(targets), min(len(targets), num_samples)
        if part < number:
            keys = torch.rand(number, dtype=torch.float64, device=query.device, generator=generator)
            targets = targets[keys.argsort()[:part]]
        uniform = torch.rand(self.uniform, dtype=torch.float64, device=query.device, generator=generator)
        others = (uniform * self.num_classes).long().clamp(max=self.num_classes - 1)
        pool = torch.cat([targets, others])
        count = part * (1 - 1 / max(number, 1)) * self._probability(pool) + self.uniform / self.num_classes
        log_count = count.log().masked_fill(count <= 0, math.inf)
        dtype = torch.promote_types(query.dtype, torch.float32)
        return Draw.shared(pool, log_count.to(dtype), query.shape[:-1], exclude)

    def _probability(self, classes: Tensor) -> Tensor:
        return self.frequency[classes] if self.stream is None else self.stream.probability(classes)

    def log_prob(self, *args: Any, **kwargs: Any) -> Tensor:
        """Raise: the classes that are drawn depend on the batch."""
        raise ValueError("InBatch has no single distribution; see the log_count of a Draw")

    def numbers(self, num_samples: int) -> tuple[int, int]:
        """Return no own negatives, and the targets of the last batch plus the uniform classes as the pool."""
        targets = num_samples if self._targets is None else min(num_samples, len(self._targets))
        return 0, targets + self.uniform

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the batch."""
        return {**super().__getstate__(), "_targets": None}  # pyright: ignore

    def extra_repr(self) -> str:
        """Show the sizes and where frequencies come from."""
        source = "counts" if self.stream is None else "the stream of targets"
        return f"num_classes={self.num_classes}, uniform={self.uniform}, frequencies from {source}"
