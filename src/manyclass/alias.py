"""Alias tables: O(1) draws from fixed discrete distributions, many of them side by side."""

import torch
from torch import Tensor, nn

from . import ops


class AliasTable(nn.Module):
    """Discrete distributions over consecutive cells: row ``r`` owns cells ``offsets[r] … offsets[r + 1] − 1``.

    Args:
        weight: unnormalised masses, shape ``(cells,)``. Integers give tables that are exact; floating point masses
            are for a single row.
        offsets: shape ``(rows + 1,)``; the default is one row of all cells. A row may be empty, but a row with cells
            needs a positive total.
        persistent: whether ``state_dict`` holds the table.

    Built in O(cells) without a Python loop; 32 bytes per cell.
    """

    threshold: Tensor
    alias: Tensor
    weight: Tensor
    cumulative: Tensor
    offsets: Tensor

    def __init__(self, weight: Tensor, offsets: Tensor | None = None, *, persistent: bool = True) -> None:
        super().__init__()
        if offsets is None:
            offsets = torch.tensor([0, weight.numel()], device=weight.device)
        cumulative = weight.cumsum(0)
        ends = torch.cat([cumulative.new_zeros(1), cumulative])
        total = ends[offsets[1:]] - ends[offsets[:-1]]
        length, size = offsets.diff(), len(weight)
        total, length = (each.repeat_interleave(length, output_size=size) for each in (total, length))
        threshold, alias = _build(weight, total, length)
        buffers = {"threshold": threshold, "alias": alias, "weight": weight.double(), "cumulative": cumulative.double()}
        for name, buffer in {**buffers, "offsets": offsets}.items():
            self.register_buffer(name, buffer, persistent=persistent)

    def total(self, row: Tensor) -> Tensor:
        """Return the total mass of each row, shape of ``row``; 0 for an empty one."""
        return self._mass_before(self.offsets[row + 1]) - self._mass_before(self.offsets[row])

    def draw(self, row: Tensor, uniform: Tensor) -> Tensor:
        """Draw cells of shape ``(batch, draws)`` for non-empty ``row (batch,)`` with ``uniform (batch, draws)``."""
        start = self.offsets[row]
        return ops.alias_draw(self.threshold, self.alias, start, self.offsets[row + 1] - start, uniform)

    def draw_without(self, row: Tensor, skip: Tensor, uniform: Tensor) -> Tensor:
        """Draw one cell per entry from ``row`` without its cell ``skip``, by inverting the distribution function.

        ``row``, ``skip``, ``uniform`` and the result have one shape. ``skip = −1`` skips no cell. The other cells must
        have mass. O(log cells) per draw, for the few draws that hit an excluded class.
        """
        first, last = self._mass_before(self.offsets[row]), self._mass_before(self.offsets[row + 1])
        left = torch.where(skip < 0, last, self._mass_before(skip.clamp(min=0)))
        right = torch.where(skip < 0, last, self._mass_before(skip + 1))
        mass = first + uniform * ((left - first) + (last - right))
        # Rounding must neither land on the skipped cell nor step into the next row.
        below = (mass < left) | (right >= last)
        above = (mass + (right - left)).maximum(right).minimum(last.nextafter(first))
        mass = torch.where(below, mass.minimum(left.nextafter(first)), above)
        return torch.searchsorted(self.cumulative, mass, right=True)

    def _mass_before(self, cell: Tensor) -> Tensor:
        return torch.where(cell > 0, self.cumulative[(cell - 1).clamp(min=0)], 0.0)


def _build(weight: Tensor, total: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
    """Sweep light and heavy cells against each other, with prefix sums in place of the usual two stacks.

    In units where a cell holds ``total``, light cells lack ``total − weight·length``, and heavy cells have a surplus.
    The light cells take the surplus in order. A heavy cell that gave more than its surplus takes from the next one.
    Within a row lack and surplus are equal, so in exact (integer) arithmetic no cell refers to another row.
    No size depends on a value, so the host need not wait for a device.
    """
    scaled = weight * length
    light = scaled < total
    index = torch.arange(len(scaled), device=scaled.device)
    # All lights and then all heavies, each in order; and the other way round.
    rank = light.cumsum(0)
    lights, heavies = rank[-1:], len(index) - rank[-1:]
    lights_first = torch.empty_like(index).scatter_(0, torch.where(light, rank - 1, lights + index - rank), index)
    heavies_first = lights_first[(index + lights) % len(index)]
    gap = total - scaled
    lack = gap.where(light, 0)[lights_first].cumsum(0)
    surplus = (-gap).where(~light, 0)[heavies_first].cumsum(0)

    before = torch.cat([lack.new_zeros(1), lack[:-1]])
    giver = torch.searchsorted(surplus, before, right=True).minimum(heavies - 1)
    alias = torch.empty_like(index).scatter_(0, lights_first, heavies_first[giver])

    taker = torch.searchsorted(lack, surplus).minimum(lights - 1).clamp(min=0)
    overdrawn = torch.where(before[taker] < surplus, lack[taker] - surplus, 0).clamp(min=0)
    overdrawn = overdrawn.double() / total[heavies_first].double()
    kept = torch.empty_like(overdrawn).scatter_(0, heavies_first, (1 - overdrawn).clamp(min=0))
    following = heavies_first[(index + 1).minimum(heavies - 1)]
    following = torch.where(overdrawn > 0, following, heavies_first)
    heavy_alias = torch.empty_like(index).scatter_(0, heavies_first, following)
    return torch.where(light, scaled.double() / total.double(), kept), torch.where(light, alias, heavy_alias)
