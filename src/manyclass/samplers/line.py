"""The queue of blocks that are due for a refresh."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Blocks that an update refreshes, and how many of them the sweep chooses. The others are touched blocks, if there are
# any.
REFRESH = 512
SWEEP = 8
# Blocks among which an update looks for touched ones.
WINDOW = 8192


class Line(nn.Module):
    """Queue of touched blocks, and a sweep over all blocks, since rows may change without being reported.

    No shape depends on a value, so the host does not wait for a device.

    Args:
        blocks: how many there are, a power of two.
    """

    touched: Tensor
    at: Tensor
    swept: Tensor

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.register_buffer("touched", torch.zeros(blocks, dtype=torch.bool))
        # Where to look for touched blocks next, and where the sweep is.
        self.register_buffer("at", torch.zeros((), dtype=torch.long))
        self.register_buffer("swept", torch.zeros((), dtype=torch.long))

    def clear(self) -> None:
        """Clear the queue, since all blocks were refreshed."""
        self.touched.zero_()

    def join(self, blocks: Tensor) -> None:
        """Mark ``blocks`` as touched. −1, the block of outliers, marks the last block, which is harmless."""
        self.touched[blocks] = True

    def due(self) -> Tensor:
        """Take the blocks to refresh now, sorted and distinct."""
        blocks, device = len(self.touched), self.touched.device
        if blocks <= REFRESH:
            return torch.arange(blocks, device=device)
        most, window = REFRESH - REFRESH // SWEEP, min(blocks, WINDOW)
        candidates = (self.at + torch.arange(window, device=device)) & (blocks - 1)
        # Touched blocks that the sweep is about to reach are left to it, so that no block is due twice.
        touched = self.touched[candidates] & ((candidates - self.swept) & (blocks - 1) >= REFRESH)
        first = _first(touched, most)
        number = touched.sum().clamp(max=most)
        self.at.add_(torch.where(number == most, first[-1] + 1, window)).remainder_(blocks)
        turn = torch.arange(REFRESH, device=device)
        swept = (self.swept + turn - number) & (blocks - 1)
        self.swept.add_(REFRESH - number).remainder_(blocks)
        due = torch.where(turn < number, candidates[first[turn.clamp(max=most - 1)]], swept)
        self.touched[due] = False
        return due.sort().values


def _first(mask: Tensor, number: int) -> Tensor:
    """Return the places of the first ``number`` that are set in ``mask``, any places if there are fewer."""
    if mask.device.type == "cpu":
        found = mask.nonzero().squeeze(1)[:number]
        return F.pad(found, (0, number - len(found)))
    place = torch.arange(len(mask), device=mask.device)
    return (place + len(mask) * ~mask).topk(number, largest=False).indices
