"""What samplers return, and the parts of the classes that they may be made for."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Draw(NamedTuple):
    """Negatives of a batch of examples: own negatives of each example, and a pool that all share.

    Either part may be empty. A class enters an example's sample by one part only. If the example's own part accounts
    for a class, ``hidden`` lists the slots of the pool that hold it.
    """

    #: Negatives of each example alone, shape ``(*batch, k)``, int64.
    ids: Tensor
    #: Log of the expected number of times that the id enters this example's sample, shape of ``ids``: ``ln(m·q)``
    #: for ``m`` draws with replacement from ``q``, 0 for a class that is certain. ``+inf`` marks an empty slot.
    log_count: Tensor
    #: Classes that all examples share, shape ``(m,)``, int64.
    pool: Tensor
    #: The same for these, shape ``(m,)``.
    pool_log_count: Tensor
    #: Slots of the pool that are empty for one example: pairs of an example, counted over the flattened batch, and a
    #: slot, shape ``(2, pairs)``, int64. On devices other than the CPU it is a mask, shape ``(examples, m)``, bool:
    #: the number of pairs would make the host wait for the device.
    hidden: Tensor

    @staticmethod
    def each(ids: Tensor, log_count: Tensor) -> "Draw":
        """Return the negatives of each example, and no pool."""
        empty = ids.new_empty(0)
        return Draw(ids, log_count, empty, log_count.new_empty(0), ids.new_empty(2, 0))

    @staticmethod
    def shared(pool: Tensor, log_count: Tensor, shape: torch.Size, exclude: Tensor | None) -> "Draw":
        """Return a pool for a batch of this ``shape``; slots that hold an example's excluded class are empty for it."""
        hidden = pool.new_empty(2, 0) if exclude is None else same_class(pool, exclude.flatten())
        return Draw(pool.new_empty(*shape, 0), log_count.new_empty(*shape, 0), pool, log_count, hidden)

    def hidden_mask(self) -> Tensor:
        """Return the slots of the pool that are empty for one example, shape ``(examples, m)``, bool."""
        if self.hidden.dtype == torch.bool:
            return self.hidden
        mask = self.hidden.new_zeros(math.prod(self.ids.shape[:-1]), len(self.pool), dtype=torch.bool)
        mask[tuple(self.hidden)] = True
        return mask

    def classes(self) -> Tensor:
        """Return all classes that were drawn, shape ``(number,)``, some of them several times."""
        return torch.cat([self.ids[self.log_count < math.inf], self.pool])


def same_class(pool: Tensor, classes: Tensor) -> Tensor:
    """Find slots where ``pool (m,)`` holds the class of an example ``(batch,)``, as in `Draw.hidden`."""
    if pool.device.type != "cpu":
        return pool == classes.unsqueeze(-1)
    ordered, slot = pool.sort()
    classes = classes.contiguous()
    first, last = (torch.searchsorted(ordered, classes, right=right) for right in (False, True))
    example, place = ranges(first, last)
    return torch.stack([example, slot[place]])


def ranges(first: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
    """Write ranges, each from ``first (batch,)`` to before ``last``, as pairs of an example and a number."""
    count = last - first
    example = torch.arange(len(count), device=count.device).repeat_interleave(count)
    within = torch.arange(len(example), device=count.device) - (count.cumsum(0) - count)[example]
    return example, first[example] + within


def as_hidden(mask: Tensor) -> Tensor:
    """Write a mask ``(examples, m)`` as `Draw.hidden` has it on this device."""
    return mask.nonzero().T if mask.device.type == "cpu" else mask


def either_hidden(first: Tensor, second: Tensor) -> Tensor:
    """Unite two sets of hidden slots, as in `Draw.hidden`."""
    return first | second if first.dtype == torch.bool else torch.cat([first, second], dim=1)


def without(draw: Draw, labels: Tensor) -> Draw:
    """Mask all slots that hold one of an example's ``labels (batch, k)``, padded with −1."""
    mine = (draw.ids.unsqueeze(-1) == labels.unsqueeze(-2)).any(dim=-1)
    hidden = draw.hidden
    for column in labels.unbind(dim=-1):
        hidden = either_hidden(hidden, same_class(draw.pool, column))
    return draw._replace(log_count=draw.log_count.masked_fill(mine, math.inf), hidden=hidden)


class Part(NamedTuple):
    """A range of classes: what one of several processes holds."""

    first: int
    last: int
    num_classes: int
    #: How many parts there are.
    shards: int


class Best(NamedTuple):
    """The classes with the largest outputs among those that a search visited."""

    outputs: Tensor  # shape: (batch, k)
    ids: Tensor  # shape: (batch, k)
    #: Log-partition: exact for the visited classes, estimated for the others.
    log_total: Tensor  # shape: (batch,)
    #: Log-mass of the lightest block that was visited.
    cutoff: Tensor  # shape: (batch,)


def redrawn(
    ids: Tensor,  # shape: (batch, num_samples)
    hit: Tensor,  # shape: (batch, num_samples)
    draw: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """Replace the ``ids`` that are a ``hit`` by ``draw(example, slot)``, which has the shape of ``example``.

    On the CPU only hits are drawn again. On other devices all slots are, since the host would wait to find the hits.
    """
    if hit.device.type == "cpu":
        example, slot = hit.nonzero(as_tuple=True)
        return ids.index_put((example, slot), draw(example, slot))
    example, slot = (torch.arange(size, device=ids.device) for size in ids.shape)
    return torch.where(hit, draw(example.unsqueeze(-1).expand_as(ids), slot.expand_as(ids)), ids)
