"""The shared pool: classes drawn systematically, block by block, by the shares that a partition holds."""

import torch
from torch import Tensor

from .. import ops
from .partition import Partition

# This part of the pool is uniform over the classes, and the other part follows the shares. Shares come from recent
# queries, and other queries may need other classes. A uniform half costs little if shares are right, and bounds the
# error if they are not.
UNIFORM = 0.5


def pool_share(partition: Partition, node: Tensor, first: Tensor, width: int) -> Tensor:
    """Return the pool's share of the ``width`` blocks from ``first``, all below ``node`` of the tree of sums."""
    even = (partition.border(first + width) - partition.border(first)).double() / partition.inside
    total = partition.sums[1]
    return torch.where(total > 0, UNIFORM * even + (1 - UNIFORM) * partition.sums[node] / total, even)


def pool_count(partition: Partition, blocks: Tensor, samples: int) -> Tensor:
    """Return the expected count in a pool of each class of ``blocks``, same shape; 1 if the pool holds all."""
    if samples >= partition.inside:
        return torch.ones_like(blocks, dtype=torch.float64)
    size = partition.border(blocks + 1) - partition.border(blocks)
    return pool_share(partition, partition.blocks + blocks, blocks, 1) * samples / size


def pool_draw(partition: Partition, uniform: Tensor, samples: int) -> tuple[Tensor, Tensor]:
    """Draw a pool of ``samples`` positions in the order of the classes; ``uniform`` holds one number in [0, 1).

    Evenly spaced points descend the tree of sums. So blocks are strata, and the classes of a block are equally
    probable. Outliers are in no block, and so in no pool. A pool as large as all blocks takes every class once.

    Returns positions, ascending, and the log of their expected counts, both ``(samples,)``. O(samples · log n).
    """
    if samples >= partition.inside:
        position = torch.arange(partition.num_classes, device=uniform.device)
        return position, torch.zeros_like(position, dtype=torch.float64)
    if ops.native_available() and uniform.device.type == "cpu":
        sizes = (partition.num_classes, partition.outliers, samples, UNIFORM)
        return torch.ops.manyclass.pool_draw(partition.sums, uniform, *sizes)
    return pool_draw_reference(partition, uniform, samples)


def pool_draw_reference(partition: Partition, uniform: Tensor, samples: int) -> tuple[Tensor, Tensor]:
    """Compute `pool_draw` in plain PyTorch, all points one level at a time."""
    point = (uniform + torch.arange(samples, device=uniform.device)) / samples
    node = torch.ones(samples, dtype=torch.long, device=uniform.device)
    first, width = torch.zeros_like(node), partition.blocks
    while width > 1:
        width //= 2
        left = pool_share(partition, 2 * node, first, width)
        right = point >= left
        point, first, node = torch.where(right, point - left, point), first + width * right, 2 * node + right
    size = partition.border(first + 1) - partition.border(first)
    share = pool_share(partition, node, first, 1)
    place = (point / share * size).long().clamp(min=0).minimum(size - 1)
    position, order = (partition.border(first) + place).sort()
    return position, (share * samples / size).log()[order]
