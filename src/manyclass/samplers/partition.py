"""Blocks of classes that lie close together."""

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import ops


def bisect(weight: Tensor, levels: int, outliers_first: bool) -> Tensor:
    """Order classes so that ``2^levels`` equal runs of them are blocks of neighbours, shape ``(num_classes,)``.

    Each run is halved at the median along its principal direction, ``levels`` times. O(n·d·levels).

    Args:
        weight: shape ``(num_classes, columns)``.
        levels: of bisections.
        outliers_first: halve the first run by the distance from the mean of all classes instead. Then the first blocks
            hold the classes that lie farthest out, and all blocks hold classes that lie about equally far.
    """
    if ops.native_for(weight):
        return torch.ops.manyclass.bisect(weight.contiguous(), levels, outliers_first)
    num_classes = len(weight)
    order = torch.arange(num_classes, device=weight.device)
    distance = (weight.double() - weight.double().mean(dim=0)).square().sum(dim=1)
    for level in range(levels):
        borders = [j * num_classes // (1 << level) for j in range((1 << level) + 1)]
        for start, stop in itertools.pairwise(borders):
            if start == 0 and outliers_first:
                order[:stop] = order[:stop][distance[order[:stop]].argsort(descending=True, stable=True)]
                continue
            members = weight[order[start:stop]].double()
            centred = members - members.mean(dim=0)
            direction = centred[centred.square().sum(dim=1).argmax()]
            for _ in range(4):
                direction = F.normalize(centred.T @ (centred @ direction), dim=0)
            order[start:stop] = order[start:stop][(centred @ direction).argsort(stable=True)]
    return order
