"""Adagrad and SGD of torch, with rows where gradients are sparse."""

from typing import Any

import torch
from torch import Tensor

from .base import EVERY_ROW, Group, Rows, State, second_moments
from .rows import RowUpdate


class Adagrad(Rows, torch.optim.Adagrad):  # pyright: ignore[reportIncompatibleMethodOverride]
    """`torch.optim.Adagrad` with a native kernel for sparse gradients. Rows without gradients do not change.

    Args:
        params: what to optimise, as for torch; the arguments down to ``eps`` are torch's, too.
        lr: learning rate.
        lr_decay: decay of the learning rate.
        weight_decay: for dense gradients only.
        initial_accumulator_value: first value of the sums of squares.
        eps: added to the root of the sum.
        rowwise: keep one sum per row of parameters with sparse gradients: of the means of squares over the row.
        exact_squares: subtract the variance of sampling from squared gradients of a `SampledSoftmax`, as `AdamW` does.
            No step is longer than ``lr``.
        options: ``foreach`` and ``maximize``; ``fused`` and ``differentiable`` for dense gradients only.
    """

    _dense_only = Rows._dense_only | {"weight_decay": EVERY_ROW}
    _second = "sum"

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        *,
        rowwise: bool = False,
        exact_squares: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(params, lr, lr_decay, weight_decay, initial_accumulator_value, eps, **options)
        self._set_options(rowwise=rowwise, exact_squares=exact_squares)

    def _make_moments(self, group: Group, parameter: Tensor, state: State) -> None:
        if "sum" not in state or (state["step"] == 1 and group["rowwise"]):  # torch's constructor makes full sums
            value = group["initial_accumulator_value"]
            state["sum"] = second_moments(parameter, group["rowwise"], value)

    def _row_update(self, group: Group, step: int) -> RowUpdate:
        return RowUpdate(rate=float(group["lr"]) / (1 + (step - 1) * group["lr_decay"]), eps=group["eps"])


class SGD(Rows, torch.optim.SGD):  # pyright: ignore[reportIncompatibleMethodOverride]
    """`torch.optim.SGD` for dense and sparse gradients; the arguments are torch's.

    For sparse gradients it has ``momentum`` or ``weight_decay``, not both. Rows that are not in the gradient wait, and
    catch up at their next gradient, or at `flush`.
    """

    _dense_only = Rows._dense_only | {
        "dampening": "the first gradient of a row would be dampened",
        "nesterov": "rows support plain momentum only",
    }
    _first = "momentum_buffer"

    def _make_moments(self, group: Group, parameter: Tensor, state: State) -> None:
        if group["momentum"] and state.get("momentum_buffer") is None:
            state["momentum_buffer"] = torch.zeros_like(parameter)

    def _row_update(self, group: Group, step: int) -> RowUpdate:
        lr, momentum, weight_decay = float(group["lr"]), group["momentum"], float(group["weight_decay"])
        if momentum and weight_decay:
            raise ValueError(
                f"weight_decay={weight_decay} does not work with sparse gradients and momentum={momentum}: "
                f"{EVERY_ROW}; one of the two must be 0"
            )
        if not momentum < 1:
            raise ValueError(f"momentum must be below 1 for sparse gradients, got {momentum}")
        return RowUpdate(rate=lr, decay1=momentum, weight_decay=lr * weight_decay)
