"""A mixture of n-grams and of the model's recent predictions, which follows the model while it trains."""

import math
from typing import Any

import torch
from torch import Tensor

from .. import checks, functional
from ..counters import Counters
from .bigram import Bigram
from .draw import Draw

# Shares of the unigram, the bigram and the recent classes before anything is learned.
MIXTURE = (0.2, 0.6, 0.2)
# Smallest share of a part, so that a part can grow again and every class stays possible.
SMALLEST_SHARE = 0.02
# How far a step moves the shares towards what its examples ask for.
RATE = 0.02
# Number of examples per step that update the mixture.
OBSERVED = 64
# Steps of this size visit [0, 1) evenly: the golden ratio.
GOLDEN = (math.sqrt(5) - 1) / 2


class AdaptiveNgram(Counters, Bigram):
    """q(i | c) = λ₁·unigram(i) + λ₂·bigram(i | c) + λ₃·recent(i): n-grams whose shares λ follow the model.

    ``recent`` is the distribution of ``memory`` classes that represent the model's recent predictions. Each step keeps
    some of its negatives, chosen by their corrected weights exp(o)/q (sampling importance resampling). The same weights
    estimate how much of the model's mass each part of the mixture explains. λ follows by steps of expectation
    maximisation for the cross entropy of q relative to p. The reported q is exact at any time. O(log memory) per draw.
    A context that was never seen has no bigram, so the unigram takes its share.

    After Bengio and Senécal, Adaptive importance sampling to accelerate training of a neural probabilistic language
    model (IEEE Transactions on Neural Networks, 2008). They adapt counts of n-grams; here the recent classes adapt.

    Args:
        pairs: as in `Bigram`.
        num_classes: default: the largest class in ``pairs`` plus one.
        memory: number of classes in ``recent``.
        prediction: whether the model's mass is exp(o) or exp(|o|).
    """

    q = "unigram, bigram and the model's recent classes, in adapted shares"
    cost = "O(log memory)"
    use = "sequences; follows the model"
    adaptive = True
    incremental = True
    counters = ("observed",)

    mixture: Tensor
    slots: Tensor
    ordered: Tensor

    def __init__(
        self, pairs: Tensor, num_classes: int | None = None, memory: int = 8192, *, prediction: str = "softmax"
    ) -> None:
        super().__init__(pairs, num_classes)
        self.prediction = checks.one_of("prediction", prediction, functional.PREDICTIONS)
        self.memory = checks.positive_int("memory", memory, maximum=1 << 24)
        #: Steps that it learned from.
        self.observed = 0
        self.register_buffer("mixture", torch.tensor(MIXTURE, dtype=torch.float64))
        counts = self.unigram.table.cumulative
        quantile = (torch.arange(memory, dtype=torch.float64, device=counts.device) + 0.5) / memory * counts[-1]
        self.register_buffer("slots", torch.searchsorted(counts, quantile, right=True))
        self.register_buffer("ordered", self.slots.clone())
        self._tables: tuple[Tensor, Tensor | None] | None = None
        self._last: tuple[Draw, Tensor | None] | None = None

    def update(self, weight: Tensor, rows: Tensor | None = None, *, bias: Tensor | None = None) -> None:
        """Read these class weights from now on; `observe` needs them."""
        self.attach(*checks.tables(weight, bias))

    def attach(self, weight: Tensor, bias: Tensor | None, rows: Tensor | None = None) -> None:
        """Read these class weights from now on."""
        self._tables = weight.detach(), None if bias is None else bias.detach()

    def draw(self, query: Tensor, num_samples: int, **options: Any) -> Draw:
        """Draw as `Sampler.draw` does, and remember the draw for `observe`."""
        draw, context = super().draw(query, num_samples, **options), options.get("context")
        self._last = draw, None if context is None else context.flatten()
        return draw

    @torch.no_grad()
    def observe(self, query: Tensor, target: Tensor) -> None:
        """Learn from the draw of these queries ``(batch, in_features)``, if it was the last draw."""
        if self._last is None or self._tables is None or self._last[0].ids.shape[:-1] != query.shape[:-1]:
            return
        (draw, context), self._last = self._last, None
        if not len(query) or context is None:
            return
        some = slice(None, None, math.ceil(len(query) / OBSERVED))
        ids, (weight, bias) = draw.ids[some], self._tables
        outputs = torch.einsum("bkd,bd->bk", weight[ids].to(query.dtype), query[some])
        if bias is not None:
            outputs = outputs + bias[ids].to(query.dtype)
        outputs = functional.output(outputs, self.prediction)
        importance = (outputs - draw.log_count[some]).double().softmax(dim=-1)
        parts = torch.stack(self._parts(context[some].unsqueeze(-1), ids))
        asked = (importance * parts / parts.sum(dim=0)).sum(dim=-1).mean(dim=-1)
        mixture = (self.mixture + RATE * (asked - self.mixture)).clamp(min=SMALLEST_SHARE)
        self.mixture.copy_(mixture / mixture.sum())
        self._remember(ids.flatten(), importance.flatten())

    def _remember(self, ids: Tensor, importance: Tensor) -> None:
        """Replace the oldest recent classes by a systematic draw by importance, one class per example."""
        ends = importance.cumsum(dim=0)
        number = min(OBSERVED, self.memory)
        point = torch.arange(number, device=ids.device) + self.observed * GOLDEN % 1
        chosen = torch.searchsorted(ends, point / number * ends[-1], right=True).clamp(max=len(ids) - 1)
        place = (self.observed * number + torch.arange(number, device=ids.device)) % self.memory
        self.slots[place] = ids[chosen]
        self.ordered.copy_(self.slots.sort().values)
        self.observed += 1

    def _draw(self, query, uniform, exclude, context):
        assert context is not None
        first, last, share = self._recent_rest(exclude, len(query))
        others = self._ngram_rest(exclude, context)
        share = share / (share + others)
        # The first uniform number picks the part of the mixture and, stretched to [0, 1), draws from it.
        number = uniform[..., 0]
        position = (number / share * (self.memory - (last - first))).long()
        position = position.minimum(self.memory - 1 - (last - first)).clamp(min=0)
        recent = self.ordered[(position + (last - first) * (position >= first)).clamp(max=self.memory - 1)]
        rest = ((number - share) / (1 - share)).clamp(0, 1 - 2**-53)
        ids, _ = super()._draw(query, torch.stack([rest, uniform[..., 1]], dim=-1), exclude, context)
        ids = torch.where(number < share, recent, ids)
        return ids, self._log_prob(query, ids, exclude, context)

    def _log_prob(self, query, ids, exclude, context):
        assert context is not None
        unigram, bigram, recent = self._parts(context.unsqueeze(-1), ids)
        rest = self._recent_rest(exclude, len(ids))[2] + self._ngram_rest(exclude, context)
        return (unigram + bigram + recent).log() - rest.log()

    def _ngram_rest(self, exclude: Tensor | None, context: Tensor) -> Tensor:
        """Return the mass of the n-grams for all classes but ``exclude``, shape ``(batch, 1)``."""
        share = (1 - self.mixture[2]).expand(len(context), 1)
        if exclude is None:
            return share
        bigram, unigram = self._rests(context, exclude)
        return share * (bigram + unigram).unsqueeze(-1)

    def _parts(self, context: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return what the unigram, the bigram and the recent classes add to q, each of the shape of ``ids``."""
        _, share, rest = self._row(context)
        n_grams = 1 - self.mixture[2]
        first, last = (torch.searchsorted(self.ordered, ids.contiguous(), right=right) for right in (False, True))
        return (
            n_grams * rest * self._unigram_frequency(ids),
            n_grams * share * self._frequency(context, ids),
            self.mixture[2] * (last - first) / self.memory,
        )

    def _recent_rest(self, exclude: Tensor | None, size: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the range of recent classes that equal ``exclude``, and the mass of the others; all ``(batch, 1)``."""
        classes = self.ordered.new_full((size,), -1) if exclude is None else exclude
        first, last = (torch.searchsorted(self.ordered, classes, right=right).unsqueeze(-1) for right in (False, True))
        return first, last, self.mixture[2] * (self.memory - (last - first)) / self.memory

    def _row(self, context: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return rows and shares as `Bigram` does, with the learned shares."""
        row = context.clamp(max=len(self.table.offsets) - 2)
        seen = (self.table.total(row) > 0).double()
        unigram = self.mixture[0] / (self.mixture[0] + self.mixture[1])
        return row, seen * (1 - unigram), seen * unigram + (1 - seen)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the class weights, which belong to the layer, and the last draw."""
        return {**super().__getstate__(), "_tables": None, "_last": None}  # pyright: ignore

    def extra_repr(self) -> str:
        """Show the sizes and the shares."""
        shares = ", ".join(f"{share:.3f}" for share in self.mixture.tolist())
        return f"num_classes={self.num_classes}, pairs={len(self.keys)}, memory={self.memory}, mixture=({shares})"
