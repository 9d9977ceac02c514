"""Frequencies of the class given its predecessor."""

from typing import Any

import torch
from torch import Tensor

from .. import checks
from ..alias import AliasTable
from .base import Sampler
from .draw import Part, redrawn
from .static import Unigram

# The smallest share of the unigram: products of smaller ones with frequencies leave the range of float64.
SMALLEST = 1e-290


class Bigram(Sampler):
    """q(i | c) = (1 − λ)·count(c, i)/count(c) + λ·unigram(i), and the unigram alone for a context never seen.

    The unigram counts every class once more than it was seen, so no class has probability zero. Alias tables, O(1)
    per draw; memory grows with the distinct pairs.

    Args:
        pairs: the (context, class) pairs of the training data, shape ``(N, 2)``, integer. In a text the context of a
            word is the word before: ``torch.stack([tokens[:-1], tokens[1:]], 1)``.
        num_classes: default: the largest class in ``pairs`` plus one.
        interpolation: λ, the share of the unigram, in (0, 1].
    """

    q = "counts given the previous class, mixed with the unigram"
    cost = "O(1)"
    use = "sequences"
    needs_context = True
    uniforms_per_draw = 2

    keys: Tensor

    def __init__(self, pairs: Tensor, num_classes: int | None = None, interpolation: float = 0.1) -> None:
        super().__init__()
        pairs = checks.indices("pairs", pairs, None)
        if pairs.dim() != 2 or pairs.shape[1] != 2 or len(pairs) == 0:
            raise ValueError(f"pairs must have shape (N, 2) with N ≥ 1, got {tuple(pairs.shape)}")
        if len(pairs) >= 2**31:  # counts · cells of an alias table must stay below 2**62
            raise ValueError(f"pairs must be fewer than 2**31, got {len(pairs)}")
        last_context, largest = (int(column.max()) for column in pairs.T)
        if last_context >= checks.MAX_CLASSES:
            raise ValueError(f"pairs must hold contexts below {checks.MAX_CLASSES}, got {last_context}")
        num_classes = largest + 1 if num_classes is None else num_classes
        self.num_classes = checks.positive_int("num_classes", num_classes, maximum=checks.MAX_CLASSES)
        if largest >= self.num_classes:
            raise ValueError(f"pairs must hold classes in [0, {self.num_classes}), got {largest}")
        self.interpolation = checks.number("interpolation", interpolation)
        if not (SMALLEST <= interpolation <= 1):
            raise ValueError(f"interpolation must be in (0, 1], got {interpolation}; the smallest is {SMALLEST}")
        self.unigram = Unigram(torch.bincount(pairs[:, 1], minlength=self.num_classes) + 1)

        # One sorted key per distinct pair; the keys of one context are consecutive.
        keys, counts = torch.unique(pairs[:, 0] * self.num_classes + pairs[:, 1], return_counts=True)
        per_context = torch.bincount(keys // self.num_classes)
        # The last row, empty, is for contexts never seen.
        offsets = torch.cat([per_context.new_zeros(1), per_context.cumsum(0), keys.new_tensor([len(keys)])])
        self.register_buffer("keys", keys)
        self.table = AliasTable(counts, offsets)

    @classmethod
    def restrict(cls, options: dict[str, Any], part: Part) -> tuple[type[Sampler], dict[str, Any]]:
        """Take the pairs of these classes from those of all."""
        if "pairs" not in options:  # a subclass that has its pairs from elsewhere
            return super().restrict(options, part)
        pairs = checks.indices("pairs", options["pairs"], None)
        if pairs.dim() == 2 and pairs.shape[1] == 2:
            pairs = pairs[(pairs[:, 1] >= part.first) & (pairs[:, 1] < part.last)]
            pairs = pairs - pairs.new_tensor([0, part.first])
        return cls, {**options, "pairs": pairs}

    def _row(self, context: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the table row of each context, its share of the mixture (0 if never seen), and the unigram's."""
        row = context.clamp(max=len(self.table.offsets) - 2)
        seen = (self.table.total(row) > 0).double()
        return row, seen * (1 - self.interpolation), seen * self.interpolation + (1 - seen)

    def _cell(self, context: Tensor, ids: Tensor) -> Tensor:
        """Return the table cell of each pair, −1 if it was never seen."""
        # A context beyond the last row would overflow; clamped, it asks for the empty row.
        key = context.clamp(max=len(self.table.offsets) - 2) * self.num_classes + ids
        cell = torch.searchsorted(self.keys, key).clamp(max=len(self.keys) - 1)
        return torch.where(self.keys[cell] == key, cell, -1)

    def _draw(self, query, uniform, exclude, context):
        assert context is not None
        row, share, rest = self._row(context)
        first, share, rest = uniform[..., 0], share.unsqueeze(-1), rest.unsqueeze(-1)
        # The first uniform number picks the part of the mixture and, stretched to [0, 1), draws from it.
        ids = self.unigram.table.draw(torch.zeros_like(row), _unit((first - share) / rest))
        # An empty row, whose share is 0, has no cell to draw from, so another row replaces it.
        row = torch.where(self.table.total(row) > 0, row, self.keys[0] // self.num_classes)
        number = _unit(first / share.clamp(min=SMALLEST))

        def from_table(example: Tensor, slot: Tensor) -> Tensor:
            cells = self.table.draw(row[example].flatten(), number[example, slot].reshape(-1, 1))
            return self.keys[cells.view(example.shape)] % self.num_classes

        ids = redrawn(ids, first < share, from_table)
        if exclude is not None:

            def again(example: Tensor, slot: Tensor) -> Tensor:
                return self._draw_without(context[example], exclude[example], uniform[example, slot, 1])

            ids = redrawn(ids, ids == exclude.unsqueeze(-1), again)
        return ids, self._log_prob(query, ids, exclude, context)

    def _draw_without(self, context: Tensor, exclude: Tensor, uniform: Tensor) -> Tensor:
        """Draw from the mixture without the class ``exclude``; all have one shape."""
        row, skip = self._row(context)[0], self._cell(context, exclude)
        table_rest, unigram_rest = self._rests(context, exclude)
        mass = uniform * (table_rest + unigram_rest)
        ids = self.unigram.table.draw_without(torch.zeros_like(row), exclude, _unit((mass - table_rest) / unigram_rest))
        cells = self.table.draw_without(row, skip, _unit(mass / table_rest.clamp(min=SMALLEST)))
        cells = cells.clamp(max=len(self.keys) - 1)  # for an empty remainder, which is never drawn from
        return torch.where(mass < table_rest, self.keys[cells] % self.num_classes, ids)

    def _log_prob(self, query, ids, exclude, context):
        assert context is not None
        log_prob = self._prob(context.unsqueeze(-1), ids).log()
        if exclude is not None:
            table_rest, unigram_rest = self._rests(context, exclude)
            log_prob = log_prob - (table_rest + unigram_rest).log().unsqueeze(-1)
        return log_prob

    def _rests(self, context: Tensor, exclude: Tensor) -> tuple[Tensor, Tensor]:
        """Return the masses in the table and in the unigram of all classes but ``exclude``, without cancellation."""
        row, share, rest = self._row(context)
        cell, total = self._cell(context, exclude), self.table.total(row)
        others = total - torch.where(cell >= 0, self.table.weight[cell.clamp(min=0)], 0.0)
        unigram = self.unigram.table
        unigram_others = (unigram.cumulative[-1] - unigram.weight[exclude]) / unigram.cumulative[-1]
        return torch.where(total > 0, share * others / total, 0.0), rest * unigram_others

    def _prob(self, context: Tensor, ids: Tensor) -> Tensor:
        _, share, rest = self._row(context)
        return share * self._frequency(context, ids) + rest * self._unigram_frequency(ids)

    def _frequency(self, context: Tensor, ids: Tensor) -> Tensor:
        """Return count(c, i)/count(c), 0 for a context never seen."""
        cell, total = self._cell(context, ids), self.table.total(self._row(context)[0])
        return torch.where(cell >= 0, self.table.weight[cell.clamp(min=0)] / total, 0.0)

    def _unigram_frequency(self, ids: Tensor) -> Tensor:
        return self.unigram.table.weight[ids] / self.unigram.table.cumulative[-1]

    def extra_repr(self) -> str:
        """Show the sizes and the mixture."""
        return f"num_classes={self.num_classes}, pairs={len(self.keys)}, interpolation={self.interpolation}"


def _unit(number: Tensor) -> Tensor:
    """Clamp numbers to [0, 1), which rounding may have left."""
    return number.clamp(0, 1 - 2**-53)
