"""The output layer with its classes dealt out to the ranks of a process group."""

import inspect
import math
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from .. import checks, functional, samplers
from ..diagnostics import Diagnostics, Measured
from ..fused import sampled_loss
from ..head import MEASURED, SampledSoftmax, full_precision
from . import collectives, state, stratum
from .allocation import SPLITS, allocate, even

# Rows of the class weights that one random seed initialises, so that they do not depend on the number of ranks.
SEEDED = 4096


class ShardedSampledSoftmax(SampledSoftmax):
    """`SampledSoftmax` with the classes sharded over processes: each holds, samples and learns its part of them.

    Every rank calls it with its own examples, as many as it has, or none. The queries of all ranks are gathered, each
    rank draws negatives from its own classes (its stratum), and the log-sum-exps of the strata are put together. All
    ranks have to take part in every call and in every backward pass.

    The loss is that of this rank's examples. Gradients of the queries are those of this rank's loss; gradients of the
    class weights are the mean over ranks, which is what `DistributedDataParallel` makes of all other gradients. With
    ``reduction="mean"`` the mean over ranks of the losses is the mean over the examples of all ranks, also if some
    ranks have more examples than others.

    Args:
        in_features: size of the query, d.
        num_classes: n, of all ranks together. Rank r of R holds the classes from ``r·⌈n/R⌉`` on, at least two.
        sampler: a name as in `SampledSoftmax`, or a `samplers.Sampler` for this rank's classes.
        num_samples: negatives of all ranks together, at least one for each rank.
        mesh: the ranks: a process group, a 1-D `DeviceMesh`, or a 2-D one of data × classes, whose second dimension
            shares the classes out while the first repeats them; default: all processes.
        split: ``"even"`` draws as many negatives from each shard; ``"mass"`` draws by the shards' masses, as far as the
            sampler knows them: one further number per example and rank is exchanged.
        options: the other arguments of `SampledSoftmax`, but no tied weights (``embedding``). ``counts`` and ``pairs``
            are those of all classes; ``own`` and ``probe`` are shared out to the ranks.

    `state_dict` has the class weights as `DTensor` for `torch.distributed.checkpoint`, which loads them on any number
    of ranks, and nothing of the sampler, which is rebuilt from them.
    """

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        sampler: str | samplers.Sampler = "blocks",
        num_samples: int | None = None,
        *,
        mesh: DeviceMesh | dist.ProcessGroup | None = None,
        split: str = "even",
        **options: Any,
    ) -> None:
        if options.get("embedding") is not None:
            raise ValueError("embedding must be None: tied weights cannot be sharded, since inputs need all rows")
        checks.positive_int("num_classes", num_classes, 2)
        checks.one_of("split", split, SPLITS)
        mesh = _as_mesh(mesh, options.get("device"))
        group = mesh.get_group(mesh.ndim - 1)
        rank, world = dist.get_rank(group), dist.get_world_size(group)
        size = math.ceil(num_classes / world)  # as DTensor shards
        first, last = rank * size, min(num_classes, (rank + 1) * size)
        if num_classes - (world - 1) * size < 2:
            raise ValueError(f"num_classes must leave 2 classes or more to each of {world} ranks, got {num_classes}")
        if isinstance(sampler, str):
            sampler, options = _of_shard(sampler, options, first, last, num_classes, world)
        with torch.random.fork_rng(devices=[]):  # how much is drawn here depends on the number of ranks
            super().__init__(in_features, last - first, sampler, num_samples, **options)
        if self.num_samples < world:
            raise ValueError(f"num_samples must be 1 or more for each of {world} ranks, got {self.num_samples}")
        self.split, self.num_classes, self.first, self.last = split, num_classes, first, last
        self.mesh, self.group, self.rank, self.world = mesh, group, rank, world
        data = mesh.get_group(0) if mesh.ndim == 2 and mesh.size(0) > 1 else None
        self._replicas = stratum.Replicas(data, self._touch)
        self._examples = 0
        self._initialise()
        for parameter in self.parameters():
            parameter.shard_group = group  # pyright: ignore[reportAttributeAccessIssue]  # for `clip_grad_norm_`
        self.register_state_dict_post_hook(state.shard)

    @torch.no_grad()
    def _initialise(self) -> None:
        """Draw the class weights, the same for any number of ranks; torch's generators stay in step on all ranks."""
        seed = torch.randint(1 << 60, ()).to(self.weight.device)
        for group in (self._replicas.group, self.group):
            if group is not None:
                seed = collectives.gathered(seed, group, "a random seed")[0]
        bound = 1 / math.sqrt(self.in_features)
        for number, parameter in enumerate(self.parameters()):
            for start in range(self.first // SEEDED * SEEDED, self.last, SEEDED):
                generator = torch.Generator().manual_seed(int(seed) + 2 * (start // SEEDED) + number)
                rows = torch.empty(SEEDED, parameter.shape[1]).uniform_(-bound, bound, generator=generator)
                rows = rows[max(self.first - start, 0) : self.last - start]
                begin = max(start - self.first, 0)
                parameter[begin : begin + len(rows)] = rows.to(parameter)

    def log_prob(self, input: Tensor) -> Tensor:
        """Log probability of every class of all ranks, shape ``(*batch, num_classes)``."""
        query = self._check_input(input)
        with full_precision(query):
            everyone, rows, _ = self._gather(query.reshape(-1, self.in_features))
            outputs = stratum.outputs(everyone, *self._tables(), self.prediction, self._replicas)
            width = math.ceil(self.num_classes / self.world)
            padded = torch.nn.functional.pad(outputs, (0, width - outputs.shape[1]))
            found = collectives.exchanged(padded, rows, self.group)
            found = found.transpose(0, 1).flatten(1)[:, : self.num_classes]
            return found.log_softmax(dim=-1).reshape(*query.shape[:-1], self.num_classes)

    @torch.no_grad()
    def topk(self, input: Tensor, k: int, *, probe: int | None = None) -> tuple[Tensor, Tensor]:
        """The ``k`` most probable classes of all ranks; see `SampledSoftmax.topk`. Takes no ``probe``."""
        if probe is not None:
            raise ValueError("probe must be None: a sharded layer scores all classes, each rank its own")
        checks.positive_int("k", k)
        if k > self.num_classes:
            raise ValueError(f"k must be at most num_classes = {self.num_classes}, got {k}")
        query = self._check_input(input)
        with full_precision(query):
            everyone, rows, _ = self._gather(query.reshape(-1, self.in_features))
            local = min(k, self.last - self.first)
            values, ids = functional.topk(everyone, self.weight, local, self.bias, prediction=self.prediction)
            log_z = functional.log_partition(everyone, self.weight, self.bias, prediction=self.prediction)
            values = torch.nn.functional.pad(values, (0, k - local), value=-math.inf)
            ids = torch.nn.functional.pad(ids + self.first, (0, k - local))
            found = torch.cat([log_z.unsqueeze(-1), values], dim=-1)
            found = collectives.to_owners(found, rows, self.group, "scores")
            ids = collectives.to_owners(ids, rows, self.group, "the best classes")
            values, place = found[..., 1:].transpose(0, 1).flatten(1).topk(k, dim=-1)
            ids = ids.transpose(0, 1).flatten(1).gather(-1, place)
            values = values - found[..., 0].logsumexp(dim=0).unsqueeze(-1)
            return values.reshape(*query.shape[:-1], k), ids.reshape(*query.shape[:-1], k)

    @torch.no_grad()
    def predict(self, input: Tensor) -> Tensor:
        """The most probable class of each query, shape ``(*batch)``."""
        return self.topk(input, 1)[1].squeeze(-1)

    def _sampled(
        self, query: Tensor, target: Tensor, context: Tensor | None, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor, samplers.Draw]:
        everyone, rows, target, context = self._gather_examples(query, target, context)
        with torch.no_grad():
            draw = self._draw(everyone.detach(), target, context, generator)
        self._sampling = time.perf_counter() - self._began
        options = {"prediction": self.prediction, "sparse": self.sparse, "exchange": self._replicas.mean}
        loss, positive = sampled_loss(everyone, *self._tables(), target, draw, **options)
        return self._combine((loss + positive, positive), rows), everyone, draw

    def _touch_drawn(self, target: Tensor, draw: samplers.Draw) -> None:
        """Rows are touched when their gradients are known: those of other replicas, too."""

    def _exact_losses(self, query: Tensor, target: Tensor) -> Tensor:
        everyone, rows, target, _ = self._gather_examples(query, target, None)
        options = {"prediction": self.prediction, "replicas": self._replicas}
        return self._combine(stratum.exact(everyone, *self._tables(), target, **options), rows)

    def _combine(self, terms: tuple[Tensor, Tensor], rows: list[int]) -> Tensor:
        """Losses of this rank's examples, from what all ranks found for them."""
        found = collectives.exchanged(torch.stack(terms, dim=-1), rows, self.group)
        return found[..., 0].logsumexp(dim=0) - found[..., 1].sum(dim=0)

    def _reduce(self, losses: Tensor) -> Tensor:
        if self.reduction == "mean":
            return losses.sum() * (self.mesh.size() / max(1, self._examples))
        return super()._reduce(losses)

    def _gather(self, query: Tensor, *others: Tensor) -> tuple[Tensor, list[int], list[Tensor]]:
        """The queries of all ranks, ``(all examples, in_features)``, how many each has, and what comes with them."""
        self._check_parallel()
        (everyone, *found), rows = collectives.gathered_rows([query.detach(), *others], self.group, "examples")
        return collectives.with_gradient(query, everyone, rows, self.group), rows, found

    def _gather_examples(
        self, query: Tensor, target: Tensor, context: Tensor | None
    ) -> tuple[Tensor, list[int], Tensor, Tensor | None]:
        """The queries, how many each rank has, targets counted from this rank's first class or −1, and contexts."""
        numbers = target.unsqueeze(-1) if context is None else torch.stack([target, context], dim=-1)
        everyone, rows, (numbers,) = self._gather(query, numbers)
        target = numbers[:, 0] - self.first
        target = torch.where((target >= 0) & (target < self.last - self.first), target, -1)
        self._examples = len(everyone)
        if self._replicas.group is not None:
            total = target.new_tensor(self._examples)
            self._examples = int(collectives.summed(total, self._replicas.group, "the number of examples"))
        return everyone, rows, target, None if context is None else numbers[:, 1]

    def _draw(
        self, query: Tensor, target: Tensor, context: Tensor | None, generator: torch.Generator | None
    ) -> samplers.Draw:
        """Negatives from the own classes for all examples."""
        units = max(self.world, self.num_samples)
        pooled = self.sampler.scope == "batch"
        if self.split == "even":
            number = even(units, self.world, self.rank)
            numbers = torch.full_like(target, number)
        else:
            mass = self.sampler.log_total(query)
            share = collectives.gathered(mass, self.group, "masses of shards").softmax(dim=0)
            if pooled:
                share = share.square().sum(dim=-1, keepdim=True).sqrt()
            numbers = allocate(share, units)[self.rank]
            number = int(numbers[0]) if pooled else 0
        if pooled:
            return self.sampler.draw(query, number, exclude=target, generator=generator)
        return self._draw_each(query, target, context, numbers, generator)

    def _draw_each(
        self,
        query: Tensor,
        target: Tensor,
        context: Tensor | None,
        numbers: Tensor,  # shape: (batch,), draws of each example
        generator: torch.Generator | None,
    ) -> samplers.Draw:
        """Examples that draw alike draw together: as many, and with or without a positive to exclude."""
        kinds = 2 * numbers + (target >= 0)
        found = []
        for kind in kinds.unique().tolist():
            chosen = (kinds == kind).nonzero().squeeze(-1)
            exclude = target[chosen] if kind % 2 else None
            own = None if context is None else context[chosen]
            draw = self.sampler.draw(query[chosen], kind // 2, exclude=exclude, context=own, generator=generator)
            found.append((chosen, draw))
        width = max((draw.ids.shape[1] for _, draw in found), default=0)
        ids = target.new_zeros(len(query), width)
        log_count = query.new_full((len(query), width), math.inf)
        for chosen, draw in found:
            ids[chosen, : draw.ids.shape[1]] = draw.ids
            log_count[chosen, : draw.ids.shape[1]] = draw.log_count.to(log_count.dtype)
        return samplers.Draw.each(ids, log_count)

    def diagnostics(self, examples: int = MEASURED) -> Diagnostics:
        """As `SampledSoftmax.diagnostics`, for examples and negatives of all ranks: all have to call it."""
        found = super().diagnostics(examples)
        own = collectives.summed(torch.tensor(found.own, device=self.weight.device), self.group, "own negatives")
        return found._replace(own=int(own) if found.pool else found.own)

    def _size_of_batch(self) -> int:
        """Examples of all ranks that share the classes out, in the last step."""
        own = 0 if self._last is None else len(self._last[0])
        return int(collectives.summed(torch.tensor(own, device=self.weight.device), self.group, "batch sizes"))

    def _measure(self, examples: int, draws: int) -> Measured:
        """Each rank measures some of its examples, and all get what all have found."""
        found = super()._measure(math.ceil(examples / self.world), draws)
        parts, _ = collectives.gathered_rows([part.T.contiguous() for part in found], self.group, "measurements")
        return Measured(*(part.T for part in parts))

    def _set_samples(self, number: int) -> None:
        super()._set_samples(max(getattr(self, "world", 1), number))

    def _touch(self, rows: Tensor) -> None:
        if self._touched is not None:
            self._touched.append(rows)

    def _tracked(self) -> bool:
        return self.sparse  # nobody else changes these rows, or it is told

    def _check_parallel(self) -> None:
        """Data parallelism would make all shards the same: what it broadcasts at its start is rank 0's."""
        active = getattr(DistributedDataParallel, "_active_ddp_module", None)
        if active is not None:
            ours = [name for name, parameter in active.module.named_parameters() if parameter is self.weight]
            if not set(ours) <= set(active.parameters_to_ignore):
                raise ValueError(
                    "DistributedDataParallel must not own the sharded class weights: wrap the trunk only, or the whole "
                    "model with manyclass.distributed.data_parallel"
                )

    def shard_state(self) -> dict[str, Any]:
        """What `state_dict` leaves out, to go on exactly with as many ranks: the state of this rank's sampler."""
        layout = [self.first, self.last, self.num_classes]
        return {"layout": layout, "sampler": self.sampler.state_dict(), "touched": self.get_extra_state()}

    def load_shard_state(self, found: dict[str, Any]) -> None:
        """Take over what `shard_state` gave, after `load_state_dict`; not if it is of another number of ranks."""
        if found["layout"] == [self.first, self.last, self.num_classes]:
            self.sampler.load_state_dict(found["sampler"])
            self.set_extra_state(found["touched"])

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:  # pyright: ignore
        state.localise(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        """Show this rank's part, too."""
        return f"{super().extra_repr()}, classes={self.first}…{self.last - 1} on rank {self.rank} of {self.world}"


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


def _of_shard(
    name: str, options: dict[str, Any], first: int, last: int, num_classes: int, world: int
) -> tuple[str, dict[str, Any]]:
    """A sampler's name and options for the classes of one rank."""
    options = dict(options)
    if name == "blocks":
        for option in ("own", "probe"):
            total = options.get(option, inspect.signature(samplers.Blocks).parameters[option].default)
            options[option] = math.ceil(checks.positive_int(option, total) / world)
    if name == "log_uniform":  # by the ids of all classes, so the shards differ
        name, options["counts"] = "unigram", (1 / torch.arange(first + 1, last + 1).double()).log1p()
    elif name == "unigram" and isinstance(options.get("counts"), Tensor):
        counts = options["counts"]
        if counts.shape != (num_classes,):
            raise ValueError(f"counts must have shape ({num_classes},), got {tuple(counts.shape)}")
        options["counts"] = counts[first:last]
        if not bool(options["counts"].any()):
            raise ValueError(f"counts are all zero for the classes {first} … {last - 1} of one rank: add 1 to all")
    elif name == "bigram" and isinstance(options.get("pairs"), Tensor):
        pairs = checks.indices("pairs", options["pairs"], None)
        if pairs.dim() == 2 and pairs.shape[1] == 2:
            pairs = pairs[(pairs[:, 1] >= first) & (pairs[:, 1] < last)]
            options["pairs"] = pairs - pairs.new_tensor([0, first])
    return name, options
