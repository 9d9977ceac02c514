"""Class weights in a `state_dict`: one tensor over all ranks, whatever their number."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

NAMES = ("embedding.weight", "bias_embedding.weight")


def as_sharded(local: Tensor, head: Any) -> DTensor:
    """Rows of this rank's classes as a part of one tensor of all classes."""
    places = [Replicate()] * (head.mesh.ndim - 1) + [Shard(0)]
    shape = torch.Size([head.num_classes, *local.shape[1:]])
    stride = local.contiguous().stride()
    return DTensor.from_local(local, head.mesh, places, run_check=False, shape=shape, stride=stride)


def shard(head: Any, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    """A hook of `state_dict`: class weights as `DTensor`, and nothing of the sampler, which differs between ranks."""
    for name in NAMES:
        if prefix + name in state_dict:
            state_dict[prefix + name] = as_sharded(state_dict[prefix + name], head)
    for key in [key for key in state_dict if key.startswith(f"{prefix}sampler.")]:
        del state_dict[key]
    state_dict.pop(f"{prefix}_extra_state", None)


def localise(head: Any, state_dict: dict[str, Any], prefix: str) -> None:
    """Before loading: take this rank's rows of sharded or of whole class weights; the sampler is rebuilt."""
    for name in NAMES:
        value = state_dict.get(prefix + name)
        if isinstance(value, DTensor):
            state_dict[prefix + name] = value.to_local()
        elif value is not None and len(value) == head.num_classes:
            state_dict[prefix + name] = value[head.first : head.last]
    own = {f"{prefix}sampler.{name}": value for name, value in head.sampler.state_dict().items()}
    for key in [key for key in state_dict if key.startswith(f"{prefix}sampler.") and key not in own]:
        del state_dict[key]
    state_dict.update(own)
    state_dict[f"{prefix}_extra_state"] = torch.tensor([-1])  # all rows wait for a refresh
