"""AdamW, Adam, Adagrad and SGD of torch, with rows where gradients are sparse.

Dense gradients take torch's own path, with its state and options. A sparse gradient changes only the rows in it, and
what they have missed comes first; docs/optimisers.md says what that means.
"""

import math
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from . import lazy
from .rows import RowUpdate, update_rows_

Group = dict[str, Any]
State = dict[str, Any]


class Rows(Optimizer):
    """What the optimisers share: which parameters are updated by rows, and how."""

    #: Options that only dense gradients allow, and why.
    _dense_only: ClassVar[dict[str, str]] = {
        "capturable": "rows are counted on the host",
        "differentiable": "the update is not part of the graph",
        "fused": "rows have a kernel of their own",
    }
    #: Names of the moments in torch's state.
    _first: str | None = None
    _second: str | None = None

    def _set_default(self, name: str, value: Any) -> None:
        """Give all parameter groups an option that torch's constructor does not know."""
        self.defaults[name] = value
        for group in self.param_groups:
            group.setdefault(name, value)

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
        """Whether torch's dense path could not go on from the state: rows are incomplete, or share a number."""
        state = self.state.get(parameter, {})
        second = state.get(self._second)
        return lazy.ROW_STEP in state or (second is not None and second.shape != parameter.shape)

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
        if lazy.ROW_STEP not in state and (update.decay1 or update.decay2 != 1 or update.weight_decay):
            lazy.start(state, len(parameter), parameter.device)
        complete = lazy.ROW_STEP not in state
        if complete:
            missed = lazy.nothing_missed(len(rows), update, parameter)
        else:
            lazy.open_step(state, update)
            missed = lazy.catch_up(state, rows, update, parameter)
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

        Call it before you evaluate or export the weights. Training may go on after it. A checkpoint does not need it:
        the state knows what each row waits for.
        """
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state.get(parameter, {})
                if lazy.ROW_STEP in state:
                    lazy.flush(*self._tables(parameter), state, self._row_update(group, int(state["step"])))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` gave; torch casts all of it to the parameter's dtype, but steps and sums stay."""
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
    """Rows of a gradient, ascending, and their values ``(count, columns)``; all rows of a dense one."""
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


def _second_moments(parameter: Tensor, rowwise: bool, value: float = 0.0) -> Tensor:
    shape = (len(parameter), 1) if rowwise else parameter.shape
    return torch.full(shape, value, dtype=parameter.dtype, device=parameter.device)


_EVERY_ROW = "it would give every row a gradient"


class AdamRows(Rows):
    """What `AdamW` and `Adam` share."""

    _dense_only = Rows._dense_only | {"amsgrad": "maxima of second moments are not kept"}
    _first, _second = "exp_avg", "exp_avg_sq"

    def _make_moments(self, group: Group, parameter: Tensor, state: State) -> None:
        if "exp_avg" not in state:
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = _second_moments(parameter, group["rowwise"])

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
        **options: Any,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, **options)
        self._set_default("rowwise", rowwise)


class Adam(AdamRows, torch.optim.Adam):  # pyright: ignore[reportIncompatibleMethodOverride]
    """`torch.optim.Adam` for dense and sparse gradients.

    Args:
        params: as for `AdamW`, which the other arguments are, too.
        lr: learning rate.
        betas: decay of the first and the second moments.
        eps: added to the root of the second moment.
        weight_decay: for dense gradients only.
        amsgrad: for dense gradients only.
        rowwise: keep one second moment per row of parameters with sparse gradients.
        options: further options of torch.
    """

    _dense_only = AdamRows._dense_only | {"weight_decay": f"{_EVERY_ROW}; AdamW decays the weights themselves"}

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
        **options: Any,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, **options)
        self._set_default("rowwise", rowwise)


class Adagrad(Rows, torch.optim.Adagrad):  # pyright: ignore[reportIncompatibleMethodOverride]
    """`torch.optim.Adagrad` with a native kernel for sparse gradients. Its rows have nothing to catch up with.

    Args:
        params: what to optimise, as for torch; the arguments down to ``eps`` are torch's, too.
        lr: learning rate.
        lr_decay: decay of the learning rate.
        weight_decay: for dense gradients only.
        initial_accumulator_value: first value of the sums of squares.
        eps: added to the root of the sum.
        rowwise: keep one sum per row of parameters with sparse gradients: of the means of squares over the row.
        options: ``foreach`` and ``maximize``; ``fused`` and ``differentiable`` for dense gradients only.
    """

    _dense_only = Rows._dense_only | {"weight_decay": _EVERY_ROW}
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
        **options: Any,
    ) -> None:
        super().__init__(params, lr, lr_decay, weight_decay, initial_accumulator_value, eps, **options)
        self._set_default("rowwise", rowwise)

    def _make_moments(self, group: Group, parameter: Tensor, state: State) -> None:
        if "sum" not in state or (state["step"] == 1 and group["rowwise"]):  # torch's constructor makes full sums
            value = group["initial_accumulator_value"]
            state["sum"] = _second_moments(parameter, group["rowwise"], value)

    def _row_update(self, group: Group, step: int) -> RowUpdate:
        return RowUpdate(rate=float(group["lr"]) / (1 + (step - 1) * group["lr_decay"]), eps=group["eps"])


class SGD(Rows, torch.optim.SGD):  # pyright: ignore[reportIncompatibleMethodOverride]
    """`torch.optim.SGD` for dense and sparse gradients; the arguments are torch's.

    For sparse gradients it has ``momentum`` or ``weight_decay``, not both. Rows that are not in the gradient wait, and
    catch up at their next gradient, or at `flush`.
    """

    _dense_only = Rows._dense_only | {
        "dampening": "the first gradient of a row would be dampened",
        "nesterov": "rows know plain momentum only",
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
                f"{_EVERY_ROW}; one of the two must be 0"
            )
        if not momentum < 1:
            raise ValueError(f"momentum must be below 1 for sparse gradients, got {momentum}")
        return RowUpdate(rate=lr, decay1=momentum, weight_decay=lr * weight_decay)
