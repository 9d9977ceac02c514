"""Fixed distributions: uniform, log-uniform (Zipf) and class frequencies."""

import math
from typing import Any

import torch
from torch import Tensor

from .. import checks
from ..alias import AliasTable
from .base import Sampler
from .description import SCOPES
from .draw import Part, redrawn

# The classes besides an excluded one must have more than this share of the total: less is lost in rounding.
ROUNDING = 1e-10


class Uniform(Sampler):
    """q_i = 1/n. O(1) per draw, no memory.

    Args:
        num_classes: n.
        scope: ``"example"`` for own negatives of each example, ``"batch"`` for one pool that the batch shares.
    """

    q = "1/n"
    cost = "O(1)"
    use = "baseline; very biased"

    def __init__(self, num_classes: int, scope: str = "example") -> None:
        super().__init__()
        self.num_classes = checks.positive_int("num_classes", num_classes)
        self.scope = checks.one_of("scope", scope, SCOPES)

    def _draw(self, query, uniform, exclude, context):
        size = self.num_classes - (exclude is not None)
        ids = (uniform[..., 0] * size).long().clamp(max=size - 1)
        if exclude is not None:
            ids = ids + (ids >= exclude.unsqueeze(-1))
        return ids, self._log_prob(query, ids, exclude, context)

    def log_total(self, query: Tensor) -> Tensor:
        """Return ln n: every class has mass 1."""
        return query.new_full((len(query),), math.log(self.num_classes))

    def _log_prob(self, query, ids, exclude, context):
        log_prob = -math.log(self.num_classes - (exclude is not None))
        return torch.full(ids.shape, log_prob, dtype=torch.float64, device=ids.device)


class LogUniform(Sampler):
    """q_i = ln((i + 2)/(i + 1)) / ln(n + 1): Zipf's law, for class ids sorted by falling frequency.

    The distribution of TensorFlow's log-uniform candidate sampler, which draws a pool. O(1) per draw, no memory.

    Args:
        num_classes: n.
        scope: as in `Uniform`.
    """

    q = "Zipf's law on the class id"
    cost = "O(1)"
    use = "ids sorted by falling frequency, counts unknown"

    def __init__(self, num_classes: int, scope: str = "example") -> None:
        super().__init__()
        self.num_classes = checks.positive_int("num_classes", num_classes)
        self.scope = checks.one_of("scope", scope, SCOPES)

    @classmethod
    def restrict(cls, options: dict[str, Any], part: Part) -> tuple[type[Sampler], dict[str, Any]]:
        """Use the ids of all classes, so that the ranges differ."""
        if cls is not LogUniform:  # another class may have another distribution
            return super().restrict(options, part)
        counts = (1 / torch.arange(part.first + 1, part.last + 1).double()).log1p()
        return Unigram, {**options, "counts": counts}

    def _draw(self, query, uniform, exclude, context):
        # ln(i + 1) is the unnormalised mass before class i: an excluded class is an interval to jump over.
        total = math.log(self.num_classes + 1)
        if exclude is None:
            ids = self._class_at(uniform[..., 0] * total)
        else:
            positive = exclude.unsqueeze(-1)
            left, right = positive.double().log1p(), (positive + 1).double().log1p()
            mass = uniform[..., 0] * (left + (total - right))
            below = (mass < left) | (positive == self.num_classes - 1)
            ids = self._class_at(torch.where(below, mass, mass + (right - left)))
            ids = torch.where(below, ids.minimum(positive - 1), ids.maximum(positive + 1))
        return ids, self._log_prob(query, ids, exclude, context)

    def _class_at(self, mass: Tensor) -> Tensor:
        return mass.expm1().long().clamp(0, self.num_classes - 1)

    def _log_prob(self, query, ids, exclude, context):
        rest = math.log(self.num_classes + 1) - (0 if exclude is None else self._mass(exclude).unsqueeze(-1))
        return (self._mass(ids) / rest).log()

    def _mass(self, ids: Tensor) -> Tensor:
        return (1 / (ids.double() + 1)).log1p()


class Unigram(Sampler):
    """q_i ∝ counts_i^power: class frequencies. Alias table, O(1) per draw.

    A class whose count is 0 is never drawn, so it is never a negative, and its ``log_prob`` is −inf. Add 1 to all
    counts to change that.

    Args:
        counts: occurrences of each class, shape ``(num_classes,)``, integer or floating point, not negative.
        power: 1 is the frequency itself; 0.75 is what word2vec uses; 0 is uniform over classes that occur.
        scope: as in `Uniform`.
        num_classes: what the length of ``counts`` must be; default: any.
    """

    q = "counts^power"
    cost = "O(1)"
    use = "class frequencies"
    uniforms_per_draw = 2

    def __init__(
        self, counts: Tensor, power: float = 1.0, scope: str = "example", *, num_classes: int | None = None
    ) -> None:
        super().__init__()
        self.scope = checks.one_of("scope", scope, SCOPES)
        size = None if num_classes is None else checks.positive_int("num_classes", num_classes)
        numbers = checks.counts("counts", counts, size)
        power = checks.number("power", power)
        if not bool(numbers.any()):
            raise ValueError("counts must not all be zero")
        self.power = power
        self.num_classes = len(counts)
        total = float(numbers.sum())
        if power == 1 and not counts.is_floating_point() and total < 2**53 and total * len(counts) < 2**62:
            weight = counts.long()
        else:
            weight = torch.where(numbers > 0, numbers**power, 0.0)
            smallest, largest = float(weight[numbers > 0].min()), float(weight.sum()) * len(weight)
            if not (smallest >= torch.finfo(weight.dtype).tiny and largest < math.inf):
                raise ValueError(
                    f"counts ** {power} must stay within the range of float64, got masses from {smallest} to a total "
                    f"of {float(weight.sum())}: scale the counts, or take a power closer to 0"
                )
        self.table = AliasTable(weight)

    @classmethod
    def restrict(cls, options: dict[str, Any], part: Part) -> tuple[type[Sampler], dict[str, Any]]:
        """Take the counts of these classes from those of all."""
        if "counts" not in options:  # a subclass that has its counts from elsewhere
            return super().restrict(options, part)
        counts, (first, last, num_classes, _) = options["counts"], part
        if not isinstance(counts, Tensor) or counts.shape != (num_classes,):
            found = tuple(counts.shape) if isinstance(counts, Tensor) else type(counts).__name__
            raise ValueError(f"counts must have shape ({num_classes},), got {found}")
        if not bool(counts[first:last].any()):
            raise ValueError(f"counts are all zero for the classes {first} … {last - 1} of one rank: add 1 to all")
        return cls, {**options, "counts": counts[first:last]}

    def _draw(self, query, uniform, exclude, context):
        row = torch.zeros(len(query), dtype=torch.long, device=query.device)
        ids = self.table.draw(row, uniform[..., 0])
        if exclude is not None:
            self._rest(exclude)

            # A hit on the excluded class is drawn again from the other classes: q_i + q_y · q_i/(1 − q_y).
            def again(example: Tensor, slot: Tensor) -> Tensor:
                return self.table.draw_without(row[example], exclude[example], uniform[example, slot, 1])

            ids = redrawn(ids, ids == exclude.unsqueeze(-1), again)
        return ids, self._log_prob(query, ids, exclude, context)

    def log_total(self, query: Tensor) -> Tensor:
        """Return the log of the sum of all masses."""
        return self.table.cumulative[-1].log().to(query.dtype).expand(len(query))

    def _log_prob(self, query, ids, exclude, context):
        rest = self.table.cumulative[-1] if exclude is None else self._rest(exclude).unsqueeze(-1)
        return (self.table.weight[ids] / rest).log()

    def _rest(self, exclude: Tensor) -> Tensor:
        """Return the mass of all classes but ``exclude``, same shape."""
        total = self.table.cumulative[-1]
        rest = total - self.table.weight[exclude]
        alone = rest <= ROUNDING * total
        if self.validate and bool(alone.any()):
            raise ValueError(
                f"exclude = {int(exclude[alone][0])} leaves no class to draw: no other class has a count above "
                f"{ROUNDING} of the total"
            )
        return rest

    def extra_repr(self) -> str:
        """Show the number of classes and the power."""
        return f"num_classes={self.num_classes}, power={self.power}"
