"""Systematic sampling without replacement, with probabilities proportional to given masses."""

import torch
from torch import Tensor


def inclusion(
    mass: Tensor,  # shape: (rows, cells), positive where count is
    count: Tensor,  # shape: (rows, cells)
    wanted: int,
) -> Tensor:
    """π = min(1, c·mass) of each item, such that ``wanted`` items are expected; all items of a cell have its mass.

    Shape ``(rows, cells)``, float64.
    """
    mass, number = mass.double(), count.double()
    certain = torch.zeros_like(mass, dtype=torch.bool)
    while True:
        rest = torch.where(certain, 0.0, mass * number)
        left = wanted - torch.where(certain, number, 0.0).sum(dim=-1, keepdim=True)
        scaled = mass * (left / rest.sum(dim=-1, keepdim=True).clamp(min=1e-300))
        found = (scaled > 1) & (number > 0) & ~certain
        if not bool(found.any()):
            return torch.where(certain, 1.0, scaled)
        certain |= found


def draw(
    mass: Tensor,  # shape: (rows, cells), positive where count is
    count: Tensor,  # shape: (rows, cells), int64
    wanted: int,
    uniform: Tensor,  # shape: (rows,), float64
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw ``wanted`` different items per row by their `inclusion` probabilities, with one uniform number per row.

    Returns the cell of each item, its place in the cell, and its probability, all ``(rows, wanted)``.
    """
    probability = inclusion(mass, count, wanted)
    length, items = probability * count, count.cumsum(dim=-1)
    cumulative = length.cumsum(dim=-1)
    step = torch.arange(wanted, device=uniform.device)
    point = uniform.unsqueeze(-1) + step
    cell = torch.searchsorted(cumulative, point, right=True).clamp(max=mass.shape[-1] - 1)
    inside = point - (cumulative - length).gather(-1, cell)
    place = (inside / probability.gather(-1, cell)).long()
    item = (items - count).gather(-1, cell) + place.clamp(min=0).minimum(count.gather(-1, cell) - 1)
    # Points are a unit apart and items at most a unit long: only rounding can put two points into one item, or the
    # last one beyond the end. Then the next item takes it.
    item = (item - step).cummax(dim=-1).values + step
    item = item.minimum(items[:, -1:] - wanted + step)
    cell = torch.searchsorted(items, item, right=True)
    return cell, item - (items - count).gather(-1, cell), probability.gather(-1, cell)
