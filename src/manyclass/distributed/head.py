"""Output layers with their classes sharded over the ranks of a process group."""

from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .. import samplers
from ..full import FullSoftmax
from ..sampled import SampledSoftmax
from . import state
from .shard import RankShard

#: Numbers of a cache that differ between ranks.
SWEEP = ("cursor", "round_began", "flushed")


class ShardedSampledSoftmax(SampledSoftmax):
    """`SampledSoftmax` with the classes sharded over processes.

    Every rank calls it with its local examples, which may be none. The queries of all ranks are gathered. Each rank
    draws negatives from the classes of its shard, which is a stratum. Then the log-sum-exps of the strata are combined.
    All ranks have to join every call and every backward pass.

    The loss is that of this rank's examples. Gradients of the queries are those of this rank's loss. Gradients of the
    class weights are the mean over ranks, as `DistributedDataParallel` computes it for all other parameters. An
    encoder (``classes``) exists on every rank and encodes this rank's classes. Its gradients have to be averaged over
    ranks, so it must be in what `data_parallel` wraps. With
    ``reduction="mean"`` the mean over ranks of the losses is the mean over the examples of all ranks, also if some
    ranks have more examples than others.

    Args:
        in_features: size of the query, d.
        num_classes: n, of all ranks together. Rank r of R holds the classes from ``r·⌈n/R⌉`` on, at least two.
        sampler: a name or a class as in `SampledSoftmax`, or an object for this rank's classes. Another class defines
            the options for a range of classes in `samplers.Sampler.restrict`.
        num_samples: number of sampled negatives that every example is compared with, as in `SampledSoftmax`. Each rank
            draws a part of them, at least one.
        mesh: the ranks: a process group, a 1-D `DeviceMesh`, or a 2-D one of data × classes. The second dimension
            shards the classes, and the first replicates them. Default: all processes.
        split: ``"even"`` draws the same number of negatives from each shard. ``"mass"`` draws by the shards' masses, if
            the sampler can tell them, and exchanges one further number per example and rank.
        options: the other arguments of `SampledSoftmax`, but no tied weights (``embedding``). ``counts`` and ``pairs``
            are those of all classes; ``own`` and ``probe`` are divided between the ranks.

    `state_dict` has the class weights as `DTensor` for `torch.distributed.checkpoint`, which loads them on any number
    of ranks. The sampler is not in it, since it is rebuilt from them.
    """

    shard: RankShard

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        sampler: str | type[samplers.Sampler] | samplers.Sampler = "blocks",
        num_samples: int | None = None,
        *,
        mesh: DeviceMesh | dist.ProcessGroup | None = None,
        split: str = "even",
        **options: Any,
    ) -> None:
        shard = _shard(num_classes, mesh, split, options)
        super().__init__(in_features, num_classes, sampler, num_samples, shard=shard, **options)
        if self.num_samples < shard.ranks:
            raise ValueError(f"num_samples must be 1 or more for each of {shard.ranks} ranks, got {self.num_samples}")
        state.install(self)

    def shard_state(self) -> dict[str, Any]:
        """Return what `state_dict` leaves out, this rank's sampler, to resume exactly on the same number of ranks."""
        sweep = None if self.cache is None else [getattr(self.cache, name) for name in SWEEP]
        state = {"sampler": self.sampler.state_dict(), "touched": self.get_extra_state(), "sweep": sweep}
        return {"layout": self._layout(), **state}

    def load_shard_state(self, found: dict[str, Any]) -> None:
        """Restore `shard_state`, after `load_state_dict`. A state of another number of ranks is ignored."""
        if found["layout"] == self._layout():
            self.sampler.load_state_dict(found["sampler"])
            self.set_extra_state(found["touched"])
            if self.cache is not None:
                for name, number in zip(SWEEP, found["sweep"], strict=True):
                    setattr(self.cache, name, number)

    def _layout(self) -> list[int]:
        return [self.shard.first, self.shard.last, self.num_classes]

    def extra_repr(self) -> str:
        """Show this rank's part, too."""
        return f"{super().extra_repr()}, {_part(self.shard)}"


class ShardedFullSoftmax(FullSoftmax):
    """The exact loss over all classes, in training, too. O(n·d) per example, divided between the ranks.

    Takes the arguments of `ShardedSampledSoftmax` that do not concern sampling. Gradients are dense.
    """

    shard: RankShard

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        mesh: DeviceMesh | dist.ProcessGroup | None = None,
        **options: Any,
    ) -> None:
        super().__init__(in_features, num_classes, shard=_shard(num_classes, mesh, "even", options), **options)
        state.install(self)

    def extra_repr(self) -> str:
        """Show this rank's part, too."""
        return f"{super().extra_repr()}, {_part(self.shard)}"


def _shard(
    num_classes: int, mesh: DeviceMesh | dist.ProcessGroup | None, split: str, options: dict[str, Any]
) -> RankShard:
    if options.get("embedding") is not None:
        raise ValueError("embedding must be None: tied weights cannot be sharded, since inputs need all rows")
    cosine = options.get("cosine")
    if cosine is not None and getattr(cosine, "margin", None) is not None and cosine.log_scale.requires_grad:
        raise ValueError("a margin with a learned scale cannot be sharded: give Cosine a fixed scale, or no margin")
    return RankShard(num_classes, mesh, split, options.get("device"))


def _part(shard: RankShard) -> str:
    return f"classes={shard.first}…{shard.last - 1} on rank {shard.rank} of {shard.ranks}"
