"""The classes that a process holds, and how to combine the results of all processes. Here one process holds all."""

from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from . import functional
from .diagnostics import Measured
from .functional import Margin
from .samplers import Draw, Part, Sampler
from .samplers.draw import without

#: Class weights, shape ``(classes of the shard, in_features)``, and offsets, shape ``(classes of the shard,)``.
Tables = tuple[Tensor, Tensor | None]


class Examples(NamedTuple):
    """Examples that are scored with the classes of a shard: those of all processes of the group."""

    #: Shape ``(examples, in_features)``.
    query: Tensor
    #: Shape ``(examples,)``, counted from the first class of the shard; −1 if the class is in another one. Or
    #: ``(examples, k)``, padded with −1.
    target: Tensor
    context: Tensor | None
    #: How many of them each process has, in this order.
    rows: list[int]


class Shard:
    """All classes, in one process. `manyclass.distributed` has the shard of a rank.

    Args:
        num_classes: n, of all shards together.
    """

    def __init__(self, num_classes: int) -> None:
        self.num_classes = num_classes
        #: The classes of this shard are ``first … last − 1``.
        self.first, self.last = 0, num_classes
        #: Number of processes that the classes are sharded over.
        self.ranks = 1

    @property
    def size(self) -> int:
        """Number of classes of this shard."""
        return self.last - self.first

    def part(self) -> Part:
        """Return the range of classes of this shard."""
        return Part(self.first, self.last, self.num_classes, self.ranks)

    def initialise(self, parameters: Iterable[nn.Parameter], bound: float) -> None:
        """Draw parameters uniformly from ``−bound`` to ``bound``."""
        for parameter in parameters:
            nn.init.uniform_(parameter, -bound, bound)

    def gather(self, query: Tensor, target: Tensor, context: Tensor | None) -> Examples:
        """Gather the examples that are scored with the classes of this shard."""
        return Examples(query, target, context, [len(query)])

    def draw(self, sampler: Sampler, examples: Examples, number: int, generator: torch.Generator | None) -> Draw:
        """Draw negatives from this shard: its part of ``number``."""
        query, target, context, _ = examples
        if target.dim() == 1:
            return sampler.draw(query, number, exclude=target, context=context, generator=generator)
        return without(sampler.draw(query, number, context=context, generator=generator), target)

    def combine(self, loss: Tensor, positive: Tensor, rows: list[int]) -> Tensor:
        """Combine what `fused.sampled_loss` returned in each shard to the losses of this process's examples."""
        return loss

    def mean_rows(self, rows: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Average gradients of rows, sorted and distinct, over the processes that hold the same classes."""
        return rows, values

    def sum_gradients(self, rows: Tensor) -> Tensor:
        """Return an encoder's embeddings, so that its gradient becomes the sum over shards."""
        return rows

    def sees_all_gradients(self) -> bool:
        """Return whether `mean_rows` sees every row that gets a gradient anywhere."""
        return not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1)

    def sole_source(self) -> bool:
        """Return whether this process alone makes the gradients of its classes, so that none is averaged."""
        return self.sees_all_gradients()

    def reduce(self, losses: Tensor, reduction: str, number: Tensor | None = None) -> Tensor:
        """Reduce the losses of this process's targets; ``number`` counts them if some losses are padding, 0."""
        if number is None or reduction != "mean":
            return functional.reduce(losses, reduction)
        return losses.sum() / number.clamp(min=1)

    def exact_losses(
        self, query: Tensor, target: Tensor, tables: Tables, prediction: str, margin: Margin | None = None
    ) -> Tensor:
        """Compute the loss over all classes of each target: query ``(batch, in_features)`` → shape of ``target``."""
        (weight, bias), options = tables, {"prediction": prediction, "margin": margin}
        return functional.full_softmax_loss(query, weight, target, bias, "none", **options)

    def full_losses(
        self, query: Tensor, target: Tensor, tables: Tables, prediction: str, margin: Margin | None = None
    ) -> Tensor:
        """Compute `exact_losses` with all logits in memory at once, which is faster if they fit."""
        if margin is not None or target.dim() == 2:
            return self.exact_losses(query, target, tables, prediction, margin)
        logits = functional.output(functional.linear(query, *tables), prediction)
        return F.cross_entropy(logits, target, reduction="none")

    def log_prob(self, query: Tensor, tables: Tables, prediction: str) -> Tensor:
        """Compute the log probability of every class, shape ``(*batch, num_classes)``."""
        return functional.log_prob(query, *tables, prediction=prediction)

    def topk(self, query: Tensor, tables: Tables, k: int, prediction: str) -> tuple[Tensor, Tensor]:
        """Find the ``k`` most probable classes: log probabilities and ids, both ``(*batch, k)``."""
        weight, bias = tables
        values, ids, log_z = functional.best(query, weight, k, bias, prediction)
        return values - log_z.unsqueeze(-1), ids

    def total(self, number: int) -> int:
        """Sum a number over the processes that the classes are sharded over."""
        return number

    def gather_measured(self, measured: Measured) -> Measured:
        """Gather the measurements of all these processes."""
        return measured
