"""The classes of one rank, and how results of all ranks are combined."""

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from .. import checks, functional
from ..diagnostics import Measured
from ..functional import Margin
from ..samplers import Draw, Sampler
from ..samplers.draw import without
from ..shard import Examples, Shard, Tables
from . import collectives, stratum
from .allocation import SPLITS, allocate, even

# Rows of the class weights per random seed, so that initial values do not depend on the number of ranks.
SEEDED = 4096


class RankShard(Shard):
    """The classes of this rank.

    Args:
        num_classes: n, of all ranks together. Rank r of R holds the classes from ``r·⌈n/R⌉`` on, at least two.
        mesh: the ranks; see `ShardedSampledSoftmax`.
        split: how negatives are divided between ranks; see there.
        device: of the class weights.
    """

    def __init__(
        self, num_classes: int, mesh: DeviceMesh | dist.ProcessGroup | None, split: str = "even", device: Any = None
    ) -> None:
        super().__init__(checks.positive_int("num_classes", num_classes, 2))
        self.split = checks.one_of("split", split, SPLITS)
        self.mesh = _as_mesh(mesh, device)
        self.group = self.mesh.get_group(self.mesh.ndim - 1)
        self.rank, self.ranks = dist.get_rank(self.group), dist.get_world_size(self.group)
        #: Ranks that hold the same classes and see other data; None if there is only this one.
        self.replicas = self.mesh.get_group(0) if self.mesh.ndim == 2 and self.mesh.size(0) > 1 else None
        self.device = torch.device(self.mesh.device_type)
        size = math.ceil(num_classes / self.ranks)  # as DTensor shards
        self.first, self.last = self.rank * size, min(num_classes, (self.rank + 1) * size)
        if num_classes - (self.ranks - 1) * size < 2:
            raise ValueError(
                f"num_classes must leave 2 classes or more to each of {self.ranks} ranks, got {num_classes}"
            )
        # Targets of the last batch, of all ranks; and how many each example has here, if they have several.
        self._examples, self._labels = 0, torch.Size()

    @torch.no_grad()
    def initialise(self, parameters: Iterable[nn.Parameter], bound: float) -> None:
        """Draw parameters, the same for any number of ranks; torch's generators stay in step on all ranks."""
        parameters = list(parameters)
        seed = torch.randint(1 << 60, ()).to(self.device)
        for group in (self.replicas, self.group):
            if group is not None:
                seed = collectives.gathered(seed, group, "a random seed")[0]
        for number, parameter in enumerate(parameters):
            parameter.shard_group = self.group  # pyright: ignore[reportAttributeAccessIssue]  # for `clip_grad_norm_`
            for start in range(self.first // SEEDED * SEEDED, self.last, SEEDED):
                generator = torch.Generator().manual_seed(int(seed) + 2 * (start // SEEDED) + number)
                rows = torch.empty(SEEDED, parameter.shape[1]).uniform_(-bound, bound, generator=generator)
                rows = rows[max(self.first - start, 0) : self.last - start]
                begin = max(start - self.first, 0)
                parameter[begin : begin + len(rows)] = rows.to(parameter)

    def _gather(self, query: Tensor, *others: Tensor) -> tuple[Tensor, list[int], list[Tensor]]:
        """Gather the queries of all ranks ``(examples, in_features)``, their number per rank, and their targets."""
        _check_parallel()
        (everyone, *found), rows = collectives.gathered_rows([query.detach(), *others], self.group, "examples")
        return collectives.with_gradient(query, everyone, rows, self.group), rows, found

    def gather(self, query: Tensor, target: Tensor, context: Tensor | None) -> Examples:
        """Gather the examples of all ranks."""
        self._labels = target.shape[1:]
        labels = target if target.dim() == 2 else target.unsqueeze(-1)
        if target.dim() == 2:  # ranks may have padded theirs to different widths
            width = torch.tensor(labels.shape[1], device=labels.device)
            most = int(collectives.gathered(width, self.group, "the number of targets").max())
            labels = F.pad(labels, (0, most - labels.shape[1]), value=-1)
        extra = [] if context is None else [context.unsqueeze(-1)]
        everyone, rows, (numbers,) = self._gather(query, torch.cat([labels, *extra], dim=-1))
        labels = numbers[:, : labels.shape[1]]
        self._examples = int((labels >= 0).sum()) if target.dim() == 2 else len(everyone)
        labels = torch.where((labels >= self.first) & (labels < self.last), labels - self.first, -1)
        target = labels if target.dim() == 2 else labels.squeeze(-1)
        if self.replicas is not None:
            total = target.new_tensor(self._examples)
            self._examples = int(collectives.summed(total, self.replicas, "the number of examples"))
        return Examples(everyone, target, None if context is None else numbers[:, -1], rows)

    def draw(self, sampler: Sampler, examples: Examples, number: int, generator: torch.Generator | None) -> Draw:
        """Draw this rank's part of ``number`` negatives, for the examples of all ranks."""
        query, target, context, rows = examples
        if target.dim() == 2:
            nobody = target.new_full((len(target),), -1)
            return without(self.draw(sampler, Examples(query, nobody, context, rows), number, generator), target)
        units, pooled = max(self.ranks, number), sampler.scope == "batch"
        if self.split == "even":
            share = even(units, self.ranks, self.rank)
            numbers = torch.full_like(target, share)
        else:
            mass = sampler.log_total(query)
            shares = collectives.gathered(mass, self.group, "masses of shards").softmax(dim=0)
            if pooled:
                shares = shares.square().sum(dim=-1, keepdim=True).sqrt()
            numbers = allocate(shares, units)[self.rank]
            share = int(numbers[0]) if pooled else 0
        if pooled:
            return sampler.draw(query, share, exclude=target, generator=generator)
        return stratum.draw_each(sampler, query, target, context, numbers, generator)

    def combine(self, loss: Tensor, positive: Tensor, rows: list[int]) -> Tensor:
        """Combine the strata to the losses of this rank's examples."""
        return self._combine((loss + positive, positive), rows)

    def _combine(self, terms: tuple[Tensor, Tensor], rows: list[int]) -> Tensor:
        found = collectives.exchanged(torch.stack(terms, dim=-1).flatten(1), rows, self.group)
        found = found.unflatten(-1, (-1, 2))
        losses = found[..., 0].logsumexp(dim=0) - found[..., 1].sum(dim=0)
        return losses[:, : self._labels[0]] if self._labels else losses.squeeze(-1)

    def mean_rows(self, rows: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Average over the ranks that hold the same classes."""
        if self.replicas is None:
            return rows, values
        return collectives.mean_rows(rows, values, self.replicas, "gradients of class weights")

    def sum_gradients(self, rows: Tensor) -> Tensor:
        """Multiply gradients by the number of shards: data parallelism averages those of an encoder over ranks."""
        if rows.requires_grad:
            rows.register_hook(lambda grad: grad * self.ranks)
        return rows

    def sees_all_gradients(self) -> bool:
        """Return True: all ranks that change these rows call `mean_rows`."""
        return True

    def sole_source(self) -> bool:
        """Return whether no other rank holds the same classes."""
        return self.replicas is None

    def reduce(self, losses: Tensor, reduction: str, number: Tensor | None = None) -> Tensor:
        """Reduce so that the mean over ranks is the mean over the examples of all ranks."""
        if reduction == "mean":
            return losses.sum() * (self.mesh.size() / max(1, self._examples))
        return super().reduce(losses, reduction, number)

    def exact_losses(
        self, query: Tensor, target: Tensor, tables: Tables, prediction: str, margin: Margin | None = None
    ) -> Tensor:
        """Combine the shards to the exact losses of this rank's examples."""
        everyone, target, _, rows = self.gather(query, target, None)
        return self._combine(stratum.exact(everyone, *tables, target, prediction, margin, self.replicas), rows)

    full_losses = exact_losses

    def log_prob(self, query: Tensor, tables: Tables, prediction: str) -> Tensor:
        """Gather the log probabilities of the classes of all ranks."""
        everyone, rows, _ = self._gather(query.reshape(-1, query.shape[-1]))
        outputs = stratum.outputs(everyone, *tables, prediction, self.replicas)
        width = math.ceil(self.num_classes / self.ranks)
        found = collectives.exchanged(F.pad(outputs, (0, width - outputs.shape[1])), rows, self.group)
        found = found.transpose(0, 1).flatten(1)[:, : self.num_classes]
        return found.log_softmax(dim=-1).reshape(*query.shape[:-1], self.num_classes)

    def topk(self, query: Tensor, tables: Tables, k: int, prediction: str) -> tuple[Tensor, Tensor]:
        """Merge the best classes of all ranks."""
        weight, bias = tables
        everyone, rows, _ = self._gather(query.reshape(-1, query.shape[-1]))
        local = min(k, self.last - self.first)
        values, ids, log_z = functional.best(everyone, weight, local, bias, prediction)
        values, ids = F.pad(values, (0, k - local), value=-math.inf), F.pad(ids + self.first, (0, k - local))
        found = torch.cat([log_z.unsqueeze(-1), values], dim=-1)
        found = collectives.to_owners(found, rows, self.group, "scores")
        ids = collectives.to_owners(ids, rows, self.group, "the best classes")
        values, place = found[..., 1:].transpose(0, 1).flatten(1).topk(k, dim=-1)
        ids = ids.transpose(0, 1).flatten(1).gather(-1, place)
        values = values - found[..., 0].logsumexp(dim=0).unsqueeze(-1)
        return values.reshape(*query.shape[:-1], k), ids.reshape(*query.shape[:-1], k)

    def total(self, number: int) -> int:
        """Sum a number over the ranks that the classes are sharded over."""
        return int(collectives.summed(torch.tensor(number, device=self.device), self.group, "a number"))

    def gather_measured(self, measured: Measured) -> Measured:
        """Gather the measurements of all ranks."""
        parts, _ = collectives.gathered_rows([part.T.contiguous() for part in measured], self.group, "measurements")
        return Measured(*(part.T for part in parts))


def _check_parallel() -> None:
    """Refuse data parallelism over shards: it would overwrite every shard with rank 0's."""
    active = getattr(DistributedDataParallel, "_active_ddp_module", None)
    if active is not None:
        ours = {name for name, parameter in active.module.named_parameters() if hasattr(parameter, "shard_group")}
        if not ours <= set(active.parameters_to_ignore):
            raise ValueError(
                "DistributedDataParallel must not hold the sharded class weights: wrap the trunk only, or the whole "
                "model with manyclass.distributed.data_parallel"
            )


def _as_mesh(mesh: DeviceMesh | dist.ProcessGroup | None, device: Any) -> DeviceMesh:
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError("torch.distributed is not initialised: start with torchrun, and call init_process_group first")
    kind = torch.device(device or torch.get_default_device()).type
    if mesh is None:
        return init_device_mesh(kind, (dist.get_world_size(),))
    if isinstance(mesh, dist.ProcessGroup):
        return DeviceMesh.from_group(mesh, kind)
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh must be a DeviceMesh or a ProcessGroup, got {type(mesh).__name__}")
    if mesh.ndim > 2:
        raise ValueError(f"mesh must have 1 dimension, or 2 (data × classes), got {mesh.ndim}")
    return mesh
