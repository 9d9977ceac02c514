"""Save a layer so that it resumes exactly, and load the state of a linear layer or of a layer with another sampler."""

from typing import Any

import torch
from torch import Tensor

from .budget import Budget
from .head import Head
from .refresh import ALL_ROWS, Follower
from .samplers import Sampler

# Names of the parameters here and in `torch.nn.Linear`.
_LINEAR = {"embedding.weight": "weight", "bias_embedding.weight": "bias"}
# Prefixes of the names in the state of `Resumable` that concern sampling.
_SAMPLING = ("sampler.", "budget.", "step", "_extra_state")


class Resumable(Head):
    """An output layer with a sampler, whose state includes the rows that wait for a refresh."""

    sampler: Sampler
    budget: Budget
    follower: Follower

    def reset_parameters(self) -> None:
        """Draw the parameters as `torch.nn.Linear` does; the next step rebuilds the sampler."""
        super().reset_parameters()
        self.follower = Follower()

    def _install_hooks(self) -> None:
        self.register_state_dict_pre_hook(_before_saving)
        self.register_load_state_dict_pre_hook(_before_loading)
        self.register_load_state_dict_post_hook(_after_loading)

    def get_extra_state(self) -> Tensor:
        """Return the rows that wait for a refresh, so that a checkpoint resumes exactly; (−1,) for all rows.

        Statistics that are stale and not in the checkpoint are rebuilt in the next step, both here and where the
        checkpoint is loaded, so both continue with the same statistics.
        """
        if self.sampler.derived and self.follower.behind:
            self.follower.touched = None
        return self.follower.state(self.weight.device)

    def set_extra_state(self, state: Tensor) -> None:
        """Restore the rows of `get_extra_state`."""
        self.follower.load_state(ALL_ROWS if self.sampler.derived else state, self.weight.device)


def keep_class_weights(layer: Any, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
    """Let a layer without a sampler load the state of a linear layer, or of a layer with a sampler."""
    _from_linear(state_dict, prefix)
    for key in [key for key in state_dict if key.startswith(tuple(prefix + name for name in _SAMPLING))]:
        del state_dict[key]


def _from_linear(state_dict: dict[str, Any], prefix: str) -> None:
    """Rename parameters of a linear layer."""
    for ours, theirs in _LINEAR.items():
        if prefix + theirs in state_dict and prefix + ours not in state_dict:
            value = state_dict.pop(prefix + theirs)
            state_dict[prefix + ours] = value.unsqueeze(-1) if theirs == "bias" else value


def _before_saving(layer: Any, prefix: str, keep_vars: bool) -> None:
    """Write the embeddings of the last step to the cache."""
    if layer.cache is not None:
        layer.follower.touch(layer.cache.flush(layer._known), layer.weight)


def _before_loading(layer: Any, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
    """Rename parameters of a linear layer, and keep the layer's statistics where those of the checkpoint do not fit.

    Statistics that were not saved with the class weights are stale, so the next step rebuilds them.
    """
    _from_linear(state_dict, prefix)
    state_dict.setdefault(f"{prefix}step", torch.tensor(layer.step))
    for name in ("sampler", "budget", "cache"):
        part = getattr(layer, name)
        own = {} if part is None else part.state_dict(prefix=f"{prefix}{name}.")
        found = {key for key in state_dict if key.startswith(f"{prefix}{name}.")}
        fits = found == own.keys()
        if name == "sampler" and fits:
            fits = all(state_dict[key].shape == value.shape for key, value in own.items())
        if not fits:
            for key in found:
                del state_dict[key]
            state_dict.update(own)
            if name == "cache" and part is not None:
                state_dict[f"{prefix}cache.started"] = torch.tensor(False)
            if name != "budget":
                state_dict[f"{prefix}_extra_state"] = ALL_ROWS
    state_dict.setdefault(f"{prefix}_extra_state", ALL_ROWS)


def _after_loading(layer: Any, incompatible: Any) -> None:
    """Restore ``num_samples``, and assume that cache and encoder of the checkpoint belong together."""
    layer.budget.after_loading(layer.sampler)
    if layer.cache is not None:
        layer.cache.notice(layer._sources())
