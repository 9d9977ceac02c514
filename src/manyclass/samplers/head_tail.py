"""A head by maximum inner product search, and a uniform tail."""

import math
from typing import Any

import torch
from torch import Tensor

from .. import checks
from .base import Incremental, Sampler
from .blocks import Blocks
from .description import options as declared
from .draw import Best, Draw, Part


class HeadTail(Incremental):
    """The best classes of each example for certain, and uniform draws from all others.

    Z = Σ_head exp(o) + Σ_tail exp(o). An index finds the head. ``num_samples`` uniform draws estimate the tail, each
    with the weight (n − head)/num_samples. If the index misses a class of the true head, the tail covers it. So counts
    are exact for any index. Here the index is the tree of `Blocks`.

    Mussmann, Levy and Ermon, Fast amortized inference and learning in log-linear models with randomly perturbed nearest
    neighbor search (UAI 2017), after Mussmann and Ermon, Learning and inference via maximum inner product search (ICML
    2016). This is their estimate for learning. For inference they add Gumbel noise to the head, and lazily to the tail.
    The largest sum is then an exact draw from the softmax. That needs the exact head: a class that the index misses
    would be drawn too rarely, by an unknown factor. Such draws have q = p, whose counts need the partition function.

    Args:
        num_classes: n.
        in_features: size of the query, d.
        head: classes that the index finds.
        probe: blocks that the search visits.
        prediction: whether the head is by o or by |o|.
        bias: whether class weights have offsets, stored as a further column.
    """

    q = "the best classes for certain, all others uniformly"
    cost = "O(probe·d·log n) per example"
    use = "peaked predictions; [blocks](docs/blocks.md) learn the tail, too"
    sweeps = True

    def __init__(
        self,
        num_classes: int,
        in_features: int,
        head: int = 32,
        probe: int = 64,
        *,
        prediction: str = "softmax",
        bias: bool = False,
    ) -> None:
        super().__init__(num_classes, in_features, bias)
        self.head = checks.positive_int("head", head, maximum=checks.MAX_CLASSES)
        self.probe = checks.positive_int("probe", probe)
        self.index = Blocks(num_classes, in_features, probe=probe, prediction=prediction, bias=bias)

    @classmethod
    def restrict(cls, options: dict[str, Any], part: Part) -> tuple[type[Sampler], dict[str, Any]]:
        """Divide ``head`` and ``probe`` between the parts."""
        totals = {name: value for name, value in {**declared(cls), **options}.items() if name in ("head", "probe")}
        shared = {name: math.ceil(checks.positive_int(name, total) / part.shards) for name, total in totals.items()}
        return cls, {**options, **shared}

    def update(self, weight: Tensor, rows: Tensor | None = None, *, bias: Tensor | None = None) -> None:
        """Let the index follow the class weights."""
        self.index.update(weight, rows, bias=bias)

    def attach(self, weight: Tensor, bias: Tensor | None, rows: Tensor | None = None) -> None:
        """Let the index read these class weights from now on."""
        self.index.attach(weight, bias, rows)

    def search(self, query: Tensor, k: int, probe: int) -> Best:
        """Search the index."""
        return self.index.search(query, k, probe)

    def numbers(self, num_samples: int) -> tuple[int, int]:
        """Return the sizes of head and tail as own negatives, and no pool."""
        return min(self.head, self.index.visited(self.probe)) + num_samples, 0

    def staleness(self) -> float:
        """Return the staleness of the index."""
        return self.index.staleness()

    def draw(
        self,
        query: Tensor,
        num_samples: int,
        *,
        exclude: Tensor | None = None,
        context: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> Draw:
        """Find the head of each example and draw ``num_samples`` from the rest; otherwise as in `Sampler.draw`."""
        checks.positive_int("num_samples", num_samples, maximum=checks.MAX_CLASSES)
        flat, exclude, _ = self._flatten(query, exclude, context)
        shape, dtype = (len(flat), num_samples), torch.promote_types(query.dtype, torch.float32)
        uniform = torch.rand(shape, dtype=torch.float64, device=query.device, generator=generator)
        self.index.validate = self.validate
        head = self.index.search(flat, min(self.head, self.index.visited(self.probe)), self.probe).ids
        tail, rest = uniform_rest(head, exclude, uniform, self.num_classes)
        log_count = torch.zeros_like(head, dtype=dtype)
        if exclude is not None:
            log_count = log_count.masked_fill(head == exclude.unsqueeze(-1), math.inf)
        # If no class is left for the tail, its slots are empty: ln(m/0).
        of_tail = (num_samples / rest.double()).log().to(dtype).expand(tail.shape)
        ids, log_count = torch.cat([head, tail], dim=-1), torch.cat([log_count, of_tail], dim=-1)
        slots = (*query.shape[:-1], ids.shape[-1])
        return Draw.each(ids.reshape(slots), log_count.reshape(slots))

    def log_prob(self, *args: Any, **kwargs: Any) -> Tensor:
        """Raise: the head is certain, so a draw has no single distribution."""
        raise ValueError("HeadTail has no single distribution; see the log_count of a Draw")

    def extra_repr(self) -> str:
        """Show the sizes."""
        return f"num_classes={self.num_classes}, in_features={self.in_features}, head={self.head}, probe={self.probe}"


def uniform_rest(head: Tensor, exclude: Tensor | None, uniform: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
    """Draw uniformly from the classes that are neither in ``head (batch, k)`` nor ``exclude (batch,)``.

    Returns ids of the shape of ``uniform (batch, m)``, and the number of classes to draw from, ``(batch, 1)``.
    """
    known = head
    if exclude is not None:
        inside = (head == exclude.unsqueeze(-1)).any(dim=-1)
        known = torch.cat([head, torch.where(inside, 2 * num_classes, exclude).unsqueeze(-1)], dim=-1)
    known = known.sort(dim=-1).values
    rest = num_classes - (known < num_classes).sum(dim=-1, keepdim=True)
    # Excluded classes are gaps: the j-th gap, in order, precedes all ids whose rank among the others is ≥ gap − j.
    rank = (uniform * rest).long().minimum(rest - 1).clamp(min=0)
    gaps = known - torch.arange(known.shape[-1], device=known.device)
    ids = rank + torch.searchsorted(gaps.contiguous(), rank, right=True)
    return ids.clamp(max=num_classes - 1), rest
