"""Blocks that wait for a refresh, in line."""

import torch
from torch import Tensor, nn

# Blocks that an update summarises, and the part of them that a sweep takes in turn; the others were touched.
REFRESH = 512
SWEEP = 8


class Line(nn.Module):
    """Touched blocks wait, each once, and a sweep goes round all of them, since rows may change unseen.

    Args:
        blocks: how many there are.
    """

    waiting: Tensor
    waits: Tensor
    start: Tensor
    length: Tensor
    swept: Tensor

    def __init__(self, blocks: int) -> None:
        super().__init__()
        # A ring.
        self.register_buffer("waiting", torch.zeros(blocks, dtype=torch.long))
        self.register_buffer("waits", torch.zeros(blocks, dtype=torch.bool))
        for name in ("start", "length", "swept"):
            self.register_buffer(name, torch.zeros((), dtype=torch.long))

    def clear(self) -> None:
        """Send all home: the blocks are new."""
        for buffer in (self.waits, self.length, self.swept):
            buffer.zero_()

    def join(self, blocks: Tensor) -> None:
        """Let ``blocks``, −1 for none, wait at the end of the line."""
        if len(self.waiting) <= REFRESH:  # all are refreshed anyway
            return
        blocks = blocks[(blocks >= 0) & ~self.waits[blocks]].unique()
        place = torch.arange(len(blocks), device=blocks.device) + self.start + self.length
        self.waiting[place % len(self.waiting)] = blocks
        self.waits[blocks] = True
        self.length += len(blocks)

    def due(self) -> Tensor:
        """Take the blocks to refresh now: from the front of the line, and some in turn."""
        device, blocks = self.waiting.device, len(self.waiting)
        if blocks <= REFRESH:
            return torch.arange(blocks, device=device)
        first = min(int(self.length), REFRESH - REFRESH // SWEEP)
        due = self.waiting[(self.start + torch.arange(first, device=device)) % blocks]
        self.waits[due] = False
        self.start.add_(first).remainder_(blocks)
        self.length -= first
        swept = (self.swept + torch.arange(REFRESH - first, device=device)) % blocks
        self.swept.add_(REFRESH - first).remainder_(blocks)
        return torch.cat([due, swept]).unique()  # each once: threads share them out
