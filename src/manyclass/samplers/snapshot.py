"""The base of samplers whose tables cannot follow single rows: they draw from a snapshot of the class weights."""

from typing import Any

import torch
from torch import Tensor

from .. import checks
from ..counters import Counters
from .base import Incremental


class Snapshot(Counters, Incremental):
    """A sampler that rebuilds its tables from all class weights every ``every`` updates.

    In between it draws from the old tables, and reports their distribution. A checkpoint holds the snapshot of the
    class weights, from which `_rebuild` makes the tables.

    Args:
        num_classes: n.
        in_features: size of the query, d.
        every: updates between rebuilds.
        bias: whether class weights have offsets, stored as a further column.
    """

    counters = ("age",)

    weight: Tensor

    def __init__(self, num_classes: int, in_features: int, every: int, bias: bool) -> None:
        super().__init__(num_classes, in_features, bias)
        self.every = checks.positive_int("every", every)
        #: Updates since the snapshot; −1 before the first.
        self.age = -1
        self.register_buffer("weight", torch.zeros(num_classes, self.columns))
        self.register_load_state_dict_post_hook(_after_loading)

    def update(self, weight: Tensor, rows: Tensor | None = None, *, bias: Tensor | None = None) -> None:
        """Take a snapshot of all class weights and rebuild the tables; with ``rows``, only every ``every`` updates."""
        self._check_weight(weight, bias, self.weight)
        if rows is not None:
            self._check_rows(rows)
            self.age += self.age >= 0
        if rows is None or self.age < 0 or self.age >= self.every:
            self.weight[:, : self.in_features] = weight.detach()
            if bias is not None:
                self.weight[:, -1] = bias.detach()
            if self.validate and not checks.all_finite(self.weight):
                raise ValueError("weight must be finite, and so must bias")
            self._rebuild()
            self.age = 0

    def _rebuild(self) -> None:
        """Make the tables from ``weight``."""
        raise NotImplementedError

    def staleness(self) -> float:
        """Return the updates since the snapshot."""
        return float(max(0, self.age))

    def _flatten(self, query: Tensor, exclude: Tensor | None, context: Tensor | None) -> Any:
        if self.age < 0:
            raise ValueError(f"{type(self).__name__} has seen no class weights yet: call update(weight) first")
        return super()._flatten(query, exclude, context)


def _after_loading(sampler: Snapshot, keys: Any) -> None:
    if sampler.age >= 0:
        sampler._rebuild()
