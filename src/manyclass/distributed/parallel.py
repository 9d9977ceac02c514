"""Data parallel training of models whose output layer is sampled."""

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from ..rows import sparse_rows
from ..sampled import SampledSoftmax
from .collectives import mean_rows
from .head import ShardedSampledSoftmax


def data_parallel(model: nn.Module, **options: Any) -> DistributedDataParallel:
    """Wrap a model that contains sampled layers in `DistributedDataParallel`.

    Sharded class weights are not synchronised. Sampler statistics are not broadcast, since each rank derives them from
    the class weights. A communication hook gathers sparse gradients with any backend, so a model with sparse gradients
    takes no other hook. ``options`` are those of `DistributedDataParallel`.
    """
    ignored = []
    for prefix, layer in model.named_modules():
        if isinstance(layer, SampledSoftmax):
            names = [name for name, _ in layer.named_buffers() if not name.startswith("classes.")]
            if isinstance(layer, ShardedSampledSoftmax):
                names += [name for name, parameter in layer.named_parameters() if hasattr(parameter, "shard_group")]
            ignored += [f"{prefix}.{name}" if prefix else name for name in names]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
    parallel = DistributedDataParallel(model, **options)
    if any(
        isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.sparse and f"{prefix}.weight" not in ignored
        for prefix, layer in model.named_modules()
    ):
        parallel.register_comm_hook(parallel.process_group, _mean)
    return parallel


def _mean(group: dist.ProcessGroup, bucket: dist.GradBucket) -> Future[Tensor]:  # pyright: ignore
    """Return the mean over ranks of a bucket of gradients.

    Sparse gradients do not use torch's all-reduce. Released versions of NCCL have no sparse one. That of gloo can
    crash: its two threads write the name of their last operation to one string without a lock.
    """
    grad = bucket.buffer()
    if not grad.is_sparse:
        return allreduce_hook(group, bucket)
    own = grad.coalesce()
    rows, values = mean_rows(own.indices()[0], own.values(), group, "sparse gradients")
    done: Future[Tensor] = Future()
    done.set_result(sparse_rows(rows, values, grad.shape))
    return done
