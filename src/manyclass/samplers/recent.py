"""Recent queries, and the share of the pool that each block gets from them."""

import math

import torch
from torch import Tensor, nn

from .. import ops
from .draw import Best
from .partition import Partition
from .search import log_mass

# Number of stored queries, and how many of them each step replaces.
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
        # Results of each query's search: the mass of the lightest visited block, and the mass of all classes.
        self.register_buffer("cutoff", torch.zeros(RECENT))
        self.register_buffer("log_total", torch.full((RECENT,), math.inf))

    def fill(self, query: Tensor, best: Best) -> None:
        """Replace all by one query ``(1, columns)`` and the results of its search."""
        self.query[:], self.cutoff[:], self.log_total[:] = query, best.cutoff, best.log_total

    def replace(self, step: int, query: Tensor, best: Best) -> None:
        """Replace the oldest by at most `NEW` queries ``(k, columns)`` and the results of their search."""
        place = (step * NEW + torch.arange(len(query), device=query.device)) % RECENT
        self.query[place], self.cutoff[place], self.log_total[place] = query, best.cutoff, best.log_total

    def shares(self, partition: Partition, blocks: Tensor, prediction: str) -> Tensor:
        """Return the root mean square over the queries of the mass per class of ``blocks (k,)``, shape ``(k,)``.

        The mass of a block is capped at that of the lightest block that the query visits: visited classes are mostly
        drawn as own negatives, and a block that the search missed gets the same cap.
        """
        node, size = partition.firsts[-1] + blocks, partition.inside / partition.blocks
        if ops.native_for(self.query):
            queries = (self.query, self.cutoff, self.log_total)
            tables = (partition.mean.code, partition.mean.scale, partition.spread)
            return torch.ops.manyclass.node_shares(*queries, *tables, node, size, prediction == "absolute") / size
        mass = self.masses(partition, blocks, prediction)
        share = (mass.minimum(self.cutoff.unsqueeze(-1)) - self.log_total.unsqueeze(-1)).clamp(max=0).exp()
        return share.square().mean(dim=0).sqrt().nan_to_num(0.0) / size

    def masses(self, partition: Partition, blocks: Tensor, prediction: str) -> Tensor:
        """Return the log-masses that ``blocks (k,)`` are taken to have for each query, shape ``(RECENT, k)``."""
        node = partition.firsts[-1] + blocks
        variance = self.query.square().sum(dim=-1, keepdim=True) * partition.spread[node]
        mean = self.query @ partition.mean.read(node).T
        return log_mass(mean, variance, partition.inside / partition.blocks, prediction)
