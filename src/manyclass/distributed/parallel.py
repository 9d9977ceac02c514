"""Data parallel training of models whose output layer is sampled."""

from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..head import SampledSoftmax
from .head import ShardedSampledSoftmax


def data_parallel(model: nn.Module, **options: Any) -> DistributedDataParallel:
    """`DistributedDataParallel` for a model with a `SampledSoftmax` or a `ShardedSampledSoftmax` in it.

    Sharded class weights stay each rank's own, and no rank sends its sampler's statistics to the others at every step:
    each finds them from the class weights. ``options`` are those of `DistributedDataParallel`.
    """
    ignored = []
    for prefix, layer in model.named_modules():
        if isinstance(layer, SampledSoftmax):
            names = [name for name, _ in layer.named_buffers()]
            if isinstance(layer, ShardedSampledSoftmax):
                names += [name for name, _ in layer.named_parameters()]
            ignored += [f"{prefix}.{name}" if prefix else name for name in names]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
    return DistributedDataParallel(model, **options)
