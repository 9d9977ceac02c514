"""Divide vectors into blocks of equal size whose members are close together."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import chunks, ops

POWER_ITERATIONS = 3
MEANS_ITERATIONS = 4


def bisect(
    rows: Tensor,  # shape: (n, columns)
    borders: Tensor,  # shape: (2^levels + 1,), int64, from 0 to n; on the CPU
) -> Tensor:
    """Order rows so that positions ``borders[j] … borders[j + 1] − 1`` hold the members of block j, shape ``(n,)``.

    All rows are halved across the direction that separates them best, then each half, ``levels`` times.
    O(n·columns·levels).
    """
    if ops.native_for(rows):
        return torch.ops.manyclass.bisect(rows.contiguous(), borders)
    return bisect_reference(rows, borders)


def bisect_reference(rows: Tensor, borders: Tensor) -> Tensor:
    """Compute `bisect` in plain PyTorch, one level at a time."""
    order, blocks = torch.arange(len(rows), device=rows.device), len(borders) - 1
    width = blocks
    while width > 1 and len(rows):
        begin, size = borders[:-1:width], borders[::width].diff()
        longest = int(size.max())
        halved = torch.empty_like(order)
        part = max(1, chunks.MAX_LOGITS // (longest * rows.shape[1]))
        for chosen in size.nonzero().squeeze(-1).split(part):
            place = torch.arange(longest, device=rows.device)
            first, number = (each[chosen].to(rows.device).unsqueeze(-1) for each in (begin, size))
            inside, last = place < number, place.minimum(number - 1)
            position = first + last
            members = order[position]
            value = (rows[members] @ direction(rows[members], inside).unsqueeze(-1)).squeeze(-1)
            value = value.nan_to_num(0.0).masked_fill(~inside, math.inf)
            # Places outside repeat the last one inside: a mask would make the host wait for the device.
            halved[position] = members.gather(1, value.argsort(dim=1, stable=True).gather(1, last))
        order, width = halved, width // 2
    return order


def direction(
    members: Tensor,  # shape: (*segments, size, columns)
    inside: Tensor,  # shape: (*segments, size): which members exist
) -> Tensor:
    """Return the unit vectors that separate the halves of sets of vectors best, shape ``(*segments, columns)``.

    The principal direction by power iteration, then some steps of 2-means with halves of equal size.
    """
    exists = inside.unsqueeze(-1).to(members.dtype)
    centred = (members - (members * exists).sum(-2, keepdim=True) / exists.sum(-2, keepdim=True)) * exists
    farthest = centred.square().sum(-1).argmax(-1)
    found = centred.take_along_dim(farthest[..., None, None], -2).squeeze(-2)
    half = inside.sum(-1, keepdim=True) // 2
    for iteration in range(POWER_ITERATIONS + MEANS_ITERATIONS):
        factor = (centred @ F.normalize(found, dim=-1).unsqueeze(-1)).squeeze(-1)
        if iteration >= POWER_ITERATIONS:
            rank = factor.masked_fill(~inside, math.inf).argsort(dim=-1).argsort(dim=-1)
            factor = torch.where(rank < half, -1.0, 1.0).to(factor)
        found = (factor.unsqueeze(-2) @ centred).squeeze(-2)
    return F.normalize(found, dim=-1)
