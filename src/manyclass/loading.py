"""Load a `state_dict` of the same layer, of a linear layer, or of a layer with another sampler."""

from typing import Any

import torch

from .refresh import ALL_ROWS

# Names of the parameters here and in `torch.nn.Linear`.
_LINEAR = {"embedding.weight": "weight", "bias_embedding.weight": "bias"}


def before_loading(layer: Any, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
    """Rename parameters of a linear layer, and keep the layer's statistics where those of the checkpoint do not fit.

    Statistics that do not come with the class weights are stale: the next step rebuilds all of them.
    """
    for ours, theirs in _LINEAR.items():
        if prefix + theirs in state_dict and prefix + ours not in state_dict:
            value = state_dict.pop(prefix + theirs)
            state_dict[prefix + ours] = value.unsqueeze(-1) if theirs == "bias" else value
    state_dict.setdefault(f"{prefix}step", torch.tensor(layer.step))
    for name in ("sampler", "budget"):
        own = getattr(layer, name).state_dict(prefix=f"{prefix}{name}.")
        found = {key for key in state_dict if key.startswith(f"{prefix}{name}.")}
        if found != own.keys() or any(state_dict[key].shape != value.shape for key, value in own.items()):
            for key in found:
                del state_dict[key]
            state_dict.update(own)
            if name == "sampler":
                state_dict[f"{prefix}_extra_state"] = ALL_ROWS
    state_dict.setdefault(f"{prefix}_extra_state", ALL_ROWS)


def after_loading(layer: Any, incompatible: Any) -> None:
    """Restore ``num_samples`` from the checkpoint."""
    layer.budget.after_loading(layer.sampler)
