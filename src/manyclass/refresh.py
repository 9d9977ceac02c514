"""Refresh of a sampler after the class weights changed: which rows wait for it, and when it happens."""

import torch
from torch import Tensor

from .pages import use_huge_pages
from .samplers.base import Sampler

# Steps between refreshes of all rows, for a sampler that cannot find untracked changes itself, …
REFRESH_ALL = 1000
# … and where untracked changes are certain: dense gradients, tied weights, other processes.
REFRESH_UNTRACKED = 5
# About how many rows are compared to detect a change of the weights.
WITNESSES = 8
#: Marks all rows in a checkpoint.
ALL_ROWS = torch.tensor([-1])


class Follower:
    """Rows of the class weights that got a gradient since the sampler last read them."""

    def __init__(self) -> None:
        # None: all rows. Gradients may arrive several times before the weights change.
        self.touched: list[Tensor] | None = None
        # The weights' version counter when the sampler read them.
        self.version = -1
        # A few rows that got a gradient, as they were: fused optimisers change weights without counting it.
        self.witness: tuple[Tensor, Tensor] | None = None
        # Changes of the weights since the last refresh.
        self.behind = 0
        # The version counter when a search last read the rows that wait.
        self.searched = -1

    def touch(self, rows: Tensor, weight: Tensor) -> None:
        """Record that ``rows`` of ``weight`` got a gradient; rows may repeat."""
        if self.touched is None or (self.touched and self.touched[-1] is rows):  # of the weights, then of the offsets
            return
        self.touched.append(rows)
        if self.witness is None and len(rows):
            some = rows[:: max(1, len(rows) // WITNESSES)]
            self.witness = some, weight.detach()[some]
        if sum(map(len, self.touched)) > 1 << 20:
            self.touched = [torch.cat(self.touched).unique()]

    def told(self, rows: Tensor | None, weight: Tensor) -> None:
        """Record that ``rows`` of ``weight`` changed; None for all of them."""
        if rows is None:
            self.touched = None
        else:
            self.touch(rows, weight)

    def follow(self, sampler: Sampler, weight: Tensor, bias: Tensor | None, step: int, tracked: bool) -> bool:
        """Update the sampler if the weights changed, and return whether they did.

        ``tracked``: whether only rows with a gradient of this layer can change.
        Weights without gradients count as changed, so that a sampler can adapt to queries.
        """
        known = version(weight) == self.version and self.touched is not None and weight.requires_grad
        if known and (self.witness is None or _unchanged(weight.detach(), *self.witness)):
            sampler.attach(weight, bias)  # copies and pickles of a layer have a sampler without class weights
            return False
        self.witness = None
        if sampler.adaptive:
            self._update(sampler, weight, bias, step, tracked)
        else:
            self._meet(sampler, weight)
            self.touched = []
        self.version = version(weight)
        return True

    def _update(self, sampler: Sampler, weight: Tensor, bias: Tensor | None, step: int, tracked: bool) -> None:
        all_due = step % REFRESH_ALL == 0 and not sampler.sweeps
        self.behind += 1
        if not sampler.incremental or self.touched is None or all_due:
            self.refresh(sampler, weight, bias)
        elif sampler.sweeps or tracked:
            sampler.update(weight, self.state(weight.device), bias=bias)
            self.touched, self.behind = [], 0
        elif step % REFRESH_UNTRACKED == 0:
            self.refresh(sampler, weight, bias)
        else:
            self.touched = []

    def _meet(self, sampler: Sampler, weight: Tensor) -> None:
        """Prepare for reading rows at random, once."""
        if self.version < 0:
            use_huge_pages(weight.detach(), *sampler.buffers())

    def refresh(self, sampler: Sampler, weight: Tensor, bias: Tensor | None) -> None:
        """Update the sampler from all rows."""
        self._meet(sampler, weight)
        sampler.update(weight, bias=bias)
        self.touched, self.version, self.behind, self.witness = [], version(weight), 0, None

    def unseen(self, weight: Tensor) -> Tensor | None:
        """Return the rows that changed since the sampler's last update; None if a search has read them already."""
        if self.searched == version(weight):
            return None
        self.searched = version(weight)
        return self.state(weight.device)

    def state(self, device: torch.device) -> Tensor:
        """Return the rows that wait, for a checkpoint; (−1,) for all of them."""
        if self.touched is None:
            return ALL_ROWS.clone()
        # The layer may have moved since.
        return torch.cat([torch.empty(0, dtype=torch.long, device=device), *(rows.to(device) for rows in self.touched)])

    def load_state(self, state: Tensor, device: torch.device) -> None:
        """Restore the rows of `state`."""
        self.touched = None if state.tolist() == [-1] else [state.to(device)]
        self.version, self.witness = -1, None


def version(tensor: Tensor) -> int:
    """Return how often a tensor changed; 0 for a tensor of inference mode, where torch does not count."""
    return 0 if tensor.is_inference() else tensor._version


def _unchanged(weight: Tensor, rows: Tensor, values: Tensor) -> bool:
    """Return whether ``rows`` of ``weight`` have these values; not if the layer moved to another device."""
    return values.device == weight.device and torch.equal(weight[rows], values)
