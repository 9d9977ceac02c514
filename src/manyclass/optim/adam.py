"""AdamW and Adam of torch, with rows where gradients are sparse."""

from typing import Any

import torch
from torch import Tensor

from .base import EVERY_ROW, Group, Rows, State, second_moments
from .rows import RowUpdate


class AdamRows(Rows):
    """The common base of `AdamW` and `Adam`."""

    _dense_only = Rows._dense_only | {"amsgrad": "maxima of second moments are not kept"}
    _first, _second = "exp_avg", "exp_avg_sq"

    def _make_moments(self, group: Group, parameter: Tensor, state: State) -> None:
        if "exp_avg" not in state:
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = second_moments(parameter, group["rowwise"])

    def _row_update(self, group: Group, step: int) -> RowUpdate:
        lr, (beta1, beta2) = float(group["lr"]), group["betas"]
        if not beta1**2 < beta2:
            raise ValueError(f"sparse gradients need betas[0]² < betas[1], got betas={(beta1, beta2)}")
        return RowUpdate(
            rate=lr / (1 - beta1**step),
            decay1=beta1,
            gain1=1 - beta1,
            decay2=beta2,
            gain2=1 - beta2,
            root=(1 - beta2**step) ** -0.5,
            eps=group["eps"],
            weight_decay=lr * group["weight_decay"],
        )


class AdamW(AdamRows, torch.optim.AdamW):  # pyright: ignore[reportIncompatibleMethodOverride]
    """`torch.optim.AdamW` for dense and sparse gradients.

    Rows that are not in a sparse gradient wait. They catch up at their next gradient, or at `flush`: the weights are
    then those of torch's AdamW with the same gradients in dense form.

    Args:
        params: what to optimise, as for torch; the arguments down to ``amsgrad`` are torch's, too.
        lr: learning rate.
        betas: decay of the first and the second moments; for sparse gradients ``betas[0]² < betas[1]``.
        eps: added to the root of the second moment.
        weight_decay: times ``lr``, the share of each weight that a step takes.
        amsgrad: for dense gradients only.
        rowwise: keep one second moment per row of parameters with sparse gradients: the mean over the row.
        exact_squares: subtract the variance of sampling from squared gradients of a `SampledSoftmax`, so that steps are
            as long as with the full softmax. Without it, rare classes take shorter steps.
        options: ``foreach`` and ``maximize``; for dense gradients only ``fused``, ``capturable``, ``differentiable``.

    Example:
        >>> head = manyclass.SampledSoftmax(64, 100_000)
        >>> optimizer = AdamW(head.parameters(), lr=1e-3)
        >>> head(torch.randn(32, 64), torch.randint(100_000, (32,))).backward()
        >>> optimizer.step()
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        rowwise: bool = False,
        exact_squares: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, **options)
        self._set_options(rowwise=rowwise, exact_squares=exact_squares)


class Adam(AdamRows, torch.optim.Adam):  # pyright: ignore[reportIncompatibleMethodOverride]
    """`torch.optim.Adam` for dense and sparse gradients.

    Args:
        params: as for `AdamW`.
        lr: learning rate.
        betas: decay of the first and the second moments.
        eps: added to the root of the second moment.
        weight_decay: for dense gradients only.
        amsgrad: for dense gradients only.
        rowwise: keep one second moment per row of parameters with sparse gradients.
        exact_squares: as for `AdamW`.
        options: further options of torch.
    """

    _dense_only = AdamRows._dense_only | {"weight_decay": f"{EVERY_ROW}; AdamW decays the weights themselves"}

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        rowwise: bool = False,
        exact_squares: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, **options)
        self._set_options(rowwise=rowwise, exact_squares=exact_squares)
