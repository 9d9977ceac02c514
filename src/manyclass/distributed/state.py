"""Class weights, and embeddings of a cache, in a `state_dict`: one tensor over all ranks, whatever their number."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from ..head import Head

NAMES = ("embedding.weight", "bias_embedding.weight", "cache.rows", "cache.encoded_at")


def install(head: Head) -> None:
    """Let a sharded layer save and load its class weights as parts of one tensor."""
    head.register_state_dict_post_hook(_shard)
    head.register_load_state_dict_pre_hook(_localise)


def as_sharded(local: Tensor, head: Any) -> DTensor:
    """Return the rows of this rank's classes as a part of one tensor of all classes."""
    mesh = head.shard.mesh
    places = [Replicate()] * (mesh.ndim - 1) + [Shard(0)]
    shape = torch.Size([head.num_classes, *local.shape[1:]])
    stride = local.contiguous().stride()
    return DTensor.from_local(local, mesh, places, run_check=False, shape=shape, stride=stride)


def _shard(head: Any, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    """Make class weights `DTensor`s, and leave out the sampler, which differs between ranks."""
    for name in NAMES:
        if prefix + name in state_dict:
            state_dict[prefix + name] = as_sharded(state_dict[prefix + name], head)
    for key in [key for key in state_dict if key.startswith(f"{prefix}sampler.")]:
        del state_dict[key]
    state_dict.pop(f"{prefix}_extra_state", None)


def _localise(head: Any, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
    """Take this rank's rows of sharded or of whole class weights."""
    for name in NAMES:
        value = state_dict.get(prefix + name)
        if isinstance(value, DTensor):
            state_dict[prefix + name] = value.to_local()
        elif value is not None and len(value) == head.num_classes:
            state_dict[prefix + name] = value[head.shard.first : head.shard.last]
