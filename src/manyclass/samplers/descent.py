"""Steps down a tree of classes: from masses to probabilities, and from uniform numbers to nodes. Pure functions."""

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import checks

# No part of a node gets less than this share of what its number of classes would give it. It keeps every class
# possible when sums are rounded or stale, or when a feature map makes them negative.
FLOOR = 1e-6


def descend(
    prob: Tensor,  # shape: (batch, parents)
    mass: Tensor,  # shape: (batch, nodes)
    count: Tensor,  # shape: (batch, nodes)
    branching: int,
) -> Tensor:
    """Give each node its share of its parent's probability, by mass; shape ``(batch, nodes)``.

    ``count`` is the number of classes of a node. The last parent may have fewer than ``branching`` children.
    """
    parents, nodes = prob.shape[1], mass.shape[1]
    padding = (0, parents * branching - nodes)
    groups = (len(mass), parents, branching)
    share = normalise(F.pad(mass, padding).view(groups), F.pad(count, padding).view(groups))
    return (prob.unsqueeze(-1) * share).flatten(1)[:, :nodes]


def last_from_rest(
    mass: Tensor,  # shape: (batch, nodes)
    above: Tensor,  # shape: (batch, parents)
    branching: int,
) -> Tensor:
    """Give the last of several children what its siblings leave of the parent, unless that is mostly rounding.

    It spares the native draw one evaluation per node. The shape of ``mass`` is kept.
    """
    size, parents = mass.shape[1], above.shape[1]
    last = (torch.arange(1, parents + 1, device=mass.device) * branching).clamp(max=size) - 1
    groups = F.pad(mass, (0, parents * branching - size)).view(-1, parents, branching)
    rest = above - (groups.sum(dim=-1) - mass[:, last])
    several = last > torch.arange(parents, device=mass.device) * branching
    return mass.index_copy(1, last, torch.where(several & (rest > 0.1 * above), rest, mass[:, last]))


def normalise(mass: Tensor, count: Tensor) -> Tensor:
    """Normalise the masses of a set's parts ``(…, parts)`` to probabilities; parts without classes get 0."""
    mass = torch.where(count > 0, mass.clamp(min=0), 0.0)
    total = mass.sum(dim=-1, keepdim=True)
    share = count / count.sum(dim=-1, keepdim=True).clamp(min=1)
    mass = torch.where(total > 0, mass.maximum(FLOOR * total * share), count)
    return mass / mass.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(mass.dtype).tiny)


def invert(prob: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Invert the distribution function of ``prob (…, parts)`` at ``uniform (…, k)``.

    Returns the parts and how far into them the numbers fall, stretched to [0, 1), both ``(…, k)``.
    """
    cumulative = prob.cumsum(dim=-1)
    mass = uniform * cumulative[..., -1:]
    part = torch.searchsorted(cumulative, mass, right=True)
    width = prob.gather(-1, part)
    rest = (mass - (cumulative.gather(-1, part) - width)) / width
    return part, rest.clamp(0, 1 - 2**-53)


def check_finite(masses: Tensor, validate: bool) -> None:
    """Raise unless all masses are finite; without ``validate`` do not read them."""
    if validate and not checks.all_finite(masses):
        raise ValueError("the masses of the kernel tree are not finite; class weights must be finite, and smaller")


def distinct(ids: Tensor) -> Tensor:
    """Leave out repetitions of sorted ids ``(k,)``; not on other devices, where the host would have to wait."""
    return ids.unique_consecutive() if ids.device.type == "cpu" else ids
