"""Draws without replacement from a list of candidates, by systematic sampling. Pure functions."""

import torch
from torch import Tensor


def chances(
    log_mass: Tensor,  # shape: (batch, candidates); −inf for one that must not be drawn
    number: int,
) -> Tensor:
    """Return probabilities min(1, c·mass) whose sum is ``number``, or 1 for all if there are fewer."""
    mass = (log_mass - log_mass.amax(dim=-1, keepdim=True).clamp(min=-1e30)).double().exp()
    largest, place = mass.sort(dim=-1, descending=True)
    # The largest are certain as long as c·mass ≥ 1 for the c that is left for them and all smaller ones.
    remaining = largest.flip(-1).cumsum(dim=-1).flip(-1)
    left = number - torch.arange(mass.shape[-1], device=mass.device)
    certain = ((left * largest >= remaining) & (left > 0)).cumprod(dim=-1).bool()
    following = certain.sum(dim=-1, keepdim=True).clamp(max=mass.shape[-1] - 1)
    c = left[following].clamp(min=0) / remaining.gather(-1, following).clamp(min=torch.finfo(mass.dtype).tiny)
    chance = torch.where(certain, (largest > 0).double(), (c * largest).clamp(0, 1))
    return torch.zeros_like(mass).scatter(-1, place, chance)


def draw(
    chance: Tensor,  # shape: (batch, candidates)
    uniform: Tensor,  # shape: (batch,), float64
    number: int,
) -> tuple[Tensor, Tensor]:
    """Draw candidates with these probabilities, whose sum is at most ``number``.

    Returns places and whether a slot is taken, both ``(batch, number)``.
    """
    ends = chance.cumsum(dim=-1)
    point = uniform.unsqueeze(-1) + torch.arange(number, device=chance.device)
    place = torch.searchsorted(ends, point, right=True)
    taken = place < ends.shape[-1]
    return place.clamp(max=ends.shape[-1] - 1), taken
