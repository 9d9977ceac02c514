"""Recent queries, and the share of the pool that they ask for each block."""

import math

import torch
from torch import Tensor, nn

from .draw import Best
from .partition import Partition
from .search import log_mass

# Queries that are remembered, and how many each step adds.
RECENT = 64
NEW = 8


class Recent(nn.Module):
    """A sample of the queries of recent training steps.

    Args:
        columns: of a query, with one for the offsets.
    """

    query: Tensor
    cutoff: Tensor
    log_total: Tensor

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.register_buffer("query", torch.zeros(RECENT, columns))
        # What a search of each found: the least mass of a visited block, and the mass of all classes.
        self.register_buffer("cutoff", torch.zeros(RECENT))
        self.register_buffer("log_total", torch.full((RECENT,), math.inf))

    def replace(self, step: int, query: Tensor, best: Best) -> None:
        """Replace the oldest by at most `NEW` queries ``(k, columns)`` and what a search of them found."""
        place = (step * NEW + torch.arange(len(query), device=query.device)) % RECENT
        self.query[place], self.cutoff[place], self.log_total[place] = query, best.cutoff, best.log_total

    def shares(self, partition: Partition, blocks: Tensor, prediction: str) -> Tensor:
        """Return the root mean square over the queries of the mass per class of ``blocks (k,)``, shape ``(k,)``.

        A block that a query would visit counts with at most the mass of the least that it did visit: most visited
        classes are drawn as own negatives, and a block that the walk missed is worth as much.
        """
        node, size = partition.firsts[-1] + blocks, partition.inside / partition.blocks
        norm = self.query.square().sum(dim=-1, keepdim=True)
        mean = self.query @ partition.mean.read(node).T
        mass = log_mass(mean, norm * partition.spread[node], size, prediction)
        share = (mass.minimum(self.cutoff.unsqueeze(-1)) - self.log_total.unsqueeze(-1)).exp() / size
        return share.square().mean(dim=0).sqrt().nan_to_num(0.0)
