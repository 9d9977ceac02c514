"""Classes sharded over the processes of `torch.distributed`."""

from .collectives import LostContactError
from .head import ShardedSampledSoftmax
from .parallel import data_parallel

__all__ = ["LostContactError", "ShardedSampledSoftmax", "data_parallel"]
