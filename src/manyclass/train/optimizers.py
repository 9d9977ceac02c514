"""The optimisers of a model, and their state by the names of its parameters."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .settings import Settings


def make(model: nn.Module, settings: Settings) -> list[Optimizer]:
    """One for all parameters; or two, where sparse gradients need one of their own."""
    parameters = list(model.parameters())
    if settings.optimizer == "adagrad":
        return [torch.optim.Adagrad(parameters, lr=settings.lr)]
    if settings.optimizer == "sgd":
        return [torch.optim.SGD(parameters, lr=settings.lr)]
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag)]
    sparse = {id(table.weight) for table in tables if table.sparse}
    return [
        kind([parameter for parameter in parameters if (id(parameter) in sparse) is wanted], lr=settings.lr)
        for kind, wanted in ((torch.optim.Adam, False), (torch.optim.SparseAdam, True))
        if any((id(parameter) in sparse) is wanted for parameter in parameters)
    ]


def state_by_name(model: nn.Module, optimizer: Optimizer) -> dict[str, dict[str, Any]]:
    """What an optimiser remembers of each parameter."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    return {names[parameter]: dict(state) for parameter, state in optimizer.state.items()}


def load_state_by_name(model: nn.Module, optimizer: Optimizer, state: dict[str, dict[str, Any]]) -> None:
    """Take over what `state_by_name` gave."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    order = [names[parameter] for group in optimizer.param_groups for parameter in group["params"]]
    numbered = {number: state[name] for number, name in enumerate(order) if name in state}
    optimizer.load_state_dict({"state": numbered, "param_groups": optimizer.state_dict()["param_groups"]})
