"""Two passes: a static sample of candidates for the batch, from which each example draws by logit."""

import math
from typing import Any

import torch
from torch import Tensor

from .. import checks, functional
from . import systematic
from .base import Incremental, Sampler
from .description import options as declared
from .draw import Draw, Part
from .static import Uniform, Unigram


class TwoPass(Incremental):
    """Draw candidates for the batch from a fixed distribution, score them, and let each example draw from them.

    The first pass has M candidates with the expected counts M·q. The second pass draws ``num_samples`` of them for each
    example, without replacement, with probabilities π = min(1, c·exp(o)/(M·q)): the best by logit are certain.
    ``log_count = ln(M·q) + ln π``: the count of the second pass is conditional on the candidates. So
    Σ exp(o − log_count) is an unbiased estimate of the partition function over both passes. The unconditional count
    would need the logits of all classes.

    ``best=True`` is the rule of the paper: the ``num_samples`` best candidates by logit, with ``log_count = ln(M·q)``.
    It is biased: other candidates are never drawn, and no weight makes up for them.

    Bai, Goldman and Zhang, TAPAS: Two-pass approximate adaptive sampling for softmax (2017).

    Args:
        num_classes: n.
        in_features: size of the query, d.
        candidates: M, drawn with replacement.
        counts: class frequencies of the first pass, shape ``(num_classes,)``; default: uniform.
        best: whether to take the best candidates instead of drawing from them.
        prediction: whether negatives follow exp(o) or exp(|o|).
        bias: whether class weights have offsets, stored as a further column.

    A draw costs O(M·d) per example.
    """

    q = "a static sample for the batch, then ∝ exp(o) within it"
    cost = "O(candidates·d) per example"
    use = "not many more classes than candidates"

    def __init__(
        self,
        num_classes: int,
        in_features: int,
        candidates: int = 4096,
        counts: Tensor | None = None,
        best: bool = False,
        *,
        prediction: str = "softmax",
        bias: bool = False,
    ) -> None:
        super().__init__(num_classes, in_features, bias)
        self.candidates = checks.positive_int("candidates", candidates, maximum=checks.MAX_CLASSES)
        self.best = checks.boolean("best", best)
        self.prediction = checks.one_of("prediction", prediction, functional.PREDICTIONS)
        uniform = counts is None
        self.first = (
            Uniform(num_classes, "batch") if uniform else Unigram(counts, scope="batch", num_classes=num_classes)
        )
        self._tables: tuple[Tensor, Tensor | None] | None = None

    @classmethod
    def restrict(cls, options: dict[str, Any], part: Part) -> tuple[type[Sampler], dict[str, Any]]:
        """Divide the candidates between the parts, and select the counts of these classes."""
        total = checks.positive_int("candidates", {**declared(cls), **options}["candidates"])
        options = {**options, "candidates": math.ceil(total / part.shards)}
        if options.get("counts") is not None:
            options["counts"] = Unigram.restrict({"counts": options["counts"]}, part)[1]["counts"]
        return cls, options

    def update(self, weight: Tensor, rows: Tensor | None = None, *, bias: Tensor | None = None) -> None:
        """Read these class weights from now on."""
        self._check_weight(weight, bias, weight)
        self.attach(weight, bias)

    def attach(self, weight: Tensor, bias: Tensor | None, rows: Tensor | None = None) -> None:
        """Read these class weights from now on."""
        self._tables = weight.detach(), None if bias is None else bias.detach()

    def draw(
        self,
        query: Tensor,
        num_samples: int,
        *,
        exclude: Tensor | None = None,
        context: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> Draw:
        """Draw candidates, then ``num_samples`` negatives of each example; the rest is as in `Sampler.draw`."""
        checks.positive_int("num_samples", num_samples, maximum=checks.MAX_CLASSES)
        flat, exclude, _ = self._flatten(query, exclude, context)
        self.first.validate = self.validate
        candidates = self.first.draw(flat.detach(), self.candidates, generator=generator)
        uniform = torch.rand(len(flat), dtype=torch.float64, device=query.device, generator=generator)
        ids, log_count = self._second(flat, candidates, exclude, uniform, num_samples)
        shape = (*query.shape[:-1], num_samples)
        return Draw.each(ids.reshape(shape), log_count.to(candidates.pool_log_count.dtype).reshape(shape))

    def _second(
        self, query: Tensor, candidates: Draw, exclude: Tensor | None, uniform: Tensor, number: int
    ) -> tuple[Tensor, Tensor]:
        """Map candidates and uniform numbers ``(batch,)`` to ids and log-counts ``(batch, number)``."""
        if self._tables is None:
            raise ValueError("TwoPass has seen no class weights yet: call update(weight) first")
        (weight, bias), pool = self._tables, candidates.pool
        rows, offsets = weight[pool].to(query.dtype), None if bias is None else bias[pool].to(query.dtype)
        outputs = functional.output(functional.linear(query, rows, offsets), self.prediction)
        if exclude is not None:
            outputs = outputs.masked_fill(pool == exclude.unsqueeze(-1), -math.inf)
        log_count = candidates.pool_log_count.double().expand_as(outputs)
        if self.best:
            value, place = outputs.topk(min(number, len(pool)), dim=-1)
            taken = value > -math.inf
        else:
            chance = systematic.chances(outputs - log_count, number)
            place, taken = systematic.draw(chance, uniform, number)
            log_count = log_count + chance.log()
        log_count = log_count.gather(-1, place).where(taken, math.inf)
        short = (0, number - place.shape[-1])
        return torch.nn.functional.pad(pool[place], short), torch.nn.functional.pad(log_count, short, value=math.inf)

    def log_prob(self, *args: Any, **kwargs: Any) -> Tensor:
        """Raise: counts are conditional on the candidates of a draw."""
        raise ValueError("TwoPass has no single distribution; see the log_count of a Draw")

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the class weights, which belong to the layer."""
        return {**super().__getstate__(), "_tables": None}  # pyright: ignore

    def extra_repr(self) -> str:
        """Show the sizes."""
        return f"num_classes={self.num_classes}, candidates={self.candidates}, best={self.best}"
