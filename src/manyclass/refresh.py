"""How a sampler follows the class weights: which rows wait for a refresh, and when they get it."""

import torch
from torch import Tensor

from .samplers.base import Sampler

# A sampler that keeps sums of rows follows all of them every so many steps, in case that rows changed unseen, …
REFRESH_ALL = 1000
# … and this often if they are bound to: dense gradients, tied weights, other processes.
REFRESH_UNTRACKED = 5
# Rows, or a few more, that tell whether weights changed.
WITNESSES = 8
#: Stands for all rows in a checkpoint.
ALL_ROWS = torch.tensor([-1])


class Follower:
    """Rows of the class weights that got a gradient since the sampler last saw them."""

    def __init__(self) -> None:
        # None: all of them. Gradients may arrive several times before the weights change.
        self.touched: list[Tensor] | None = None
        # What the weights' counter of changes was when the sampler saw them.
        self.version = -1
        # A few rows that got a gradient, as they were: fused optimisers change weights without counting it.
        self.witness: tuple[Tensor, Tensor] | None = None
        # Changes of the weights since the last refresh.
        self.behind = 0

    def touch(self, rows: Tensor, weight: Tensor) -> None:
        """Note that ``rows`` of ``weight`` got a gradient; they may come several times."""
        if self.touched is None or (self.touched and self.touched[-1] is rows):  # of the weights, then of the offsets
            return
        self.touched.append(rows)
        if self.witness is None and len(rows):
            some = rows[:: max(1, len(rows) // WITNESSES)]
            self.witness = some, weight.detach()[some]
        if sum(map(len, self.touched)) > 1 << 20:
            self.touched = [torch.cat(self.touched).unique()]

    def follow(self, sampler: Sampler, weight: Tensor, bias: Tensor | None, step: int, tracked: bool) -> bool:
        """Let the sampler see the weights if they changed; say whether they did.

        ``tracked`` says whether only rows with a gradient of this layer can change.
        Weights that nobody trains count as changed, so that a sampler may learn from queries.
        """
        known = weight._version == self.version and self.touched is not None and weight.requires_grad
        if known and (self.witness is None or torch.equal(weight.detach()[self.witness[0]], self.witness[1])):
            return False
        self.witness = None
        if sampler.adaptive:
            self._update(sampler, weight, bias, step, tracked)
        else:
            self.touched = []
        self.version = weight._version
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

    def refresh(self, sampler: Sampler, weight: Tensor, bias: Tensor | None) -> None:
        """Let the sampler see all weights anew."""
        sampler.update(weight, bias=bias)
        self.touched, self.version, self.behind, self.witness = [], weight._version, 0, None

    def state(self, device: torch.device) -> Tensor:
        """Rows that wait, for a checkpoint; (−1,) for all of them."""
        if self.touched is None:
            return ALL_ROWS.clone()
        return torch.cat([torch.empty(0, dtype=torch.long, device=device), *self.touched])

    def load_state(self, state: Tensor, device: torch.device) -> None:
        """Take over the rows of `state`."""
        self.touched = None if state.tolist() == [-1] else [state.to(device)]
        self.version, self.witness = -1, None
