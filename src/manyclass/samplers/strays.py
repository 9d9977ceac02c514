"""Classes that have left their block: they become outliers, which every example scores."""

import torch
from torch import Tensor

from .. import functional
from .codes import rows_of
from .recent import Recent
from .search import Index

# A class is a stray for a query if it has more mass than its whole block is taken to have: this many nats more.
MARGIN = 1.0


def admit(index: Index, recent: Recent, ids: Tensor) -> Tensor:
    """Make outliers of those ``ids (k,)`` that recent queries would miss; return the blocks that changed, −1 for none.

    ``ids`` may repeat, and −1 stands for none. A class that is a target again and again moves within a few steps, long
    before the next tree. The mean and the variance of its block hardly show one distant member, so a search misses it.
    Such strays replace the outliers with the smallest shares, which join their blocks instead. No shape depends on a
    value, so the host does not wait for a device.
    """
    partition = index.partition
    number = min(partition.strays, len(ids))
    if number == 0:
        return ids[:0]
    first = partition.outliers - partition.strays
    ids = torch.cat([partition.order[first : partition.outliers].long(), ids.sort().values])
    share, missed = _shares(index, recent, ids)
    block = partition.block_of.index_select(0, ids.clamp(min=0)).long()
    again = torch.cat([ids.new_ones(1, dtype=torch.bool), ids[1:] == ids[:-1]])
    missed = missed.masked_fill(again | (ids < 0) | (block < 0), 0.0)
    missed, which = missed.topk(number)
    least, slot = share[: partition.strays].topk(number, largest=False)
    moves = missed > least  # the largest against the smallest, so the first few move
    stray, block = ids[which], block[which]
    members, _ = partition.members(block.clamp(min=0))
    position = partition.border(block) + (members == stray.unsqueeze(-1)).int().argmax(dim=-1)
    place, other = first + slot, ids[slot]
    # Where nothing moves, each line writes what is there.
    partition.order[torch.where(moves, position, place)] = other.int()
    partition.order[place] = torch.where(moves, stray, other).int()
    partition.block_of[other] = torch.where(moves, block, -1).int()
    partition.block_of[torch.where(moves, stray, other)] = -1
    return torch.where(moves, block, -1)


def _shares(index: Index, recent: Recent, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean squares of the shares of classes over recent queries, all of them and those that miss a class."""
    partition, known = index.partition, ids.clamp(min=0)
    output = functional.output(recent.query @ rows_of(index.weight, index.bias, known).T, index.prediction)
    square = (2 * (output - recent.log_total.unsqueeze(-1)).clamp(max=0)).exp().nan_to_num(0.0)
    block = partition.block_of.index_select(0, known).long().clamp(min=0)
    mass = recent.masses(partition, block, index.prediction)
    return square.mean(dim=0), (square * (mass < output - MARGIN)).mean(dim=0)
