"""The base of the optimisers: which parameters are updated by rows, and how.

Dense gradients are left to torch, with its state and options. A sparse gradient changes only the rows in it, after
these rows have caught up with the steps that they missed. See docs/optimisers.md.
"""

import math
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from .. import checks, importance
from ..pages import use_huge_pages
from ..untraced import untraced
from . import lazy
from .rows import RowUpdate, update_rows_

Group = dict[str, Any]
State = dict[str, Any]

# Why some options do not work with sparse gradients.
EVERY_ROW = "it would give every row a gradient"


class Rows(Optimizer):
    """Update parameters with sparse gradients by rows, and leave the others to torch."""

    #: Options that only dense gradients allow, and why.
    _dense_only: ClassVar[dict[str, str]] = {
        "capturable": "rows are counted on the host",
        "differentiable": "the update is not part of the graph",
        "fused": "rows are updated by another kernel",
    }
    #: Names of the moments in torch's state.
    _first: str | None = None
    _second: str | None = None

    def _set_options(self, **options: bool) -> None:
        """Add options of rows to all parameter groups, since torch's constructor refuses them."""
        for name, value in options.items():
            self.defaults[name] = checks.boolean(name, value)
            for group in self.param_groups:
                checks.boolean(name, group.setdefault(name, value))

    def _init_group(self, group: Group, *lists: Any) -> Any:
        """Step the parameters that have sparse gradients; collect the others for torch, whose `step` calls this."""
        dense = []
        for parameter in group["params"]:
            if parameter.grad is not None and (parameter.grad.is_sparse or self._has_rows(parameter)):
                self._step_rows(group, parameter)
            else:
                dense.append(parameter)
        return super()._init_group({**group, "params": dense}, *lists)  # pyright: ignore[reportAttributeAccessIssue]

    def _has_rows(self, parameter: Tensor) -> bool:
        """Return whether rows are incomplete or share a second moment, which torch's dense path cannot continue."""
        state = self.state.get(parameter, {})
        second = state.get(self._second)
        return lazy.ROW_STEP in state or (second is not None and second.shape != parameter.shape)

    @untraced  # the number of rows depends on the gradient
    def _step_rows(self, group: Group, parameter: Tensor) -> None:
        for name, reason in self._dense_only.items():
            if group.get(name):
                raise ValueError(f"{name}={group[name]} does not work with sparse gradients: {reason}")
        rows, grad = _rows_of(parameter)
        state = self.state[parameter]
        step = int(state.get("step", 0)) + 1
        update = self._row_update(group, step)
        if not update.weight_decay < 1:
            raise ValueError(f"lr * weight_decay must be below 1, got {update.weight_decay}")
        state["step"] = torch.tensor(float(step))
        self._make_moments(group, parameter, state)
        if step == 1:
            use_huge_pages(*self._tables(parameter)[1:])
        if lazy.ROW_STEP not in state and (update.decay1 or update.decay2 != 1 or update.weight_decay):
            lazy.start(state, len(parameter), parameter.device)
        complete = lazy.ROW_STEP not in state
        if complete:
            missed = lazy.nothing_missed(len(rows), update, parameter)
        else:
            lazy.open_step(state, update)
            missed = lazy.catch_up(state, rows, update, parameter)
        if group.get("exact_squares") and parameter.grad is not None:
            missed[:, 4] = 1 / importance.read(parameter.grad, rows)
        update_rows_(*self._tables(parameter), rows, -grad if group["maximize"] else grad, missed, update)
        if not complete:
            lazy.close_step(state, update)

    def _tables(self, parameter: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return weights, first and second moments as matrices."""
        state = self.state[parameter]
        first, second = (
            None if state.get(name) is None else _matrix(state[name]) for name in (self._first, self._second)
        )
        return _matrix(parameter), first, second

    def _make_moments(self, group: Group, parameter: Tensor, state: State) -> None:
        """Make the moments that the state lacks."""
        raise NotImplementedError

    def _row_update(self, group: Group, step: int) -> RowUpdate:
        """Return what step number ``step``, counted from 1, does to a row."""
        raise NotImplementedError

    @torch.no_grad()
    def flush(self) -> None:
        """Complete the rows that still wait for momentum and weight decay, O(n·d).

        Call it before you evaluate or export the weights. Training can continue after it. A checkpoint does not need
        it, since the state includes the pending updates.
        """
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state.get(parameter, {})
                if lazy.ROW_STEP in state:
                    lazy.flush(*self._tables(parameter), state, self._row_update(group, int(state["step"])))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a `state_dict`. torch casts it to the parameter's dtype, except steps and sums."""
        super().load_state_dict(state_dict)
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for number, parameter in zip(numbers, parameters, strict=True):
            saved = state_dict["state"].get(number, {})
            for key in {lazy.ROW_STEP, lazy.HISTORY} & saved.keys():
                self.state[parameter][key] = saved[key].to(parameter.device, copy=True)


def _matrix(table: Tensor) -> Tensor:
    return table.view(len(table), math.prod(table.shape[1:]))


def _rows_of(parameter: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows of a gradient, ascending, and their values ``(count, columns)``; all rows of a dense one."""
    if not parameter.is_contiguous():
        raise ValueError(f"a parameter with sparse gradients must be contiguous, got strides {parameter.stride()}")
    grad, columns = parameter.grad, math.prod(parameter.shape[1:])
    assert grad is not None
    if not grad.is_sparse:
        return torch.arange(len(parameter), device=parameter.device), grad.reshape(len(parameter), columns)
    if grad.sparse_dim() != 1:
        raise ValueError(f"sparse gradients must hold whole rows, sparse_dim=1, got sparse_dim={grad.sparse_dim()}")
    grad = grad.coalesce()
    rows = grad.indices()[0]
    return rows, grad.values().reshape(len(rows), columns)


def second_moments(parameter: Tensor, rowwise: bool, value: float = 0.0) -> Tensor:
    """Make second moments, one for each weight or one per row."""
    shape = (len(parameter), 1) if rowwise else parameter.shape
    return torch.full(shape, value, dtype=parameter.dtype, device=parameter.device)
