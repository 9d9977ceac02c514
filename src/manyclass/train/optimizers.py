"""The optimiser of a model, and its state by the names of the parameters."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .. import optim
from .settings import Settings

KINDS = {"adagrad": optim.Adagrad, "sgd": torch.optim.SGD, "adam": optim.Adam, "adamw": optim.AdamW}


def make(model: nn.Module, settings: Settings) -> Optimizer:
    """Make one optimiser for all parameters, with dense or sparse gradients."""
    return KINDS[settings.optimizer](model.parameters(), lr=settings.lr)


def complete(optimizer: Optimizer) -> None:
    """Complete the pending updates of all rows; see `optim.AdamW.flush`."""
    if isinstance(optimizer, optim.AdamW | optim.Adam):
        optimizer.flush()


def state_by_name(model: nn.Module, optimizer: Optimizer) -> dict[str, dict[str, Any]]:
    """Return the optimiser's state by parameter name."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    return {names[parameter]: dict(state) for parameter, state in optimizer.state.items()}


def load_state_by_name(model: nn.Module, optimizer: Optimizer, state: dict[str, dict[str, Any]]) -> None:
    """Load what `state_by_name` returned."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    order = [names[parameter] for group in optimizer.param_groups for parameter in group["params"]]
    numbered = {number: state[name] for number, name in enumerate(order) if name in state}
    optimizer.load_state_dict({"state": numbered, "param_groups": optimizer.state_dict()["param_groups"]})
