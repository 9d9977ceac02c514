"""A trunk and the output layer on it."""

import inspect
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import losses, samplers
from ..full import FullSoftmax
from ..sampled import SampledSoftmax
from ..shard import Shard
from .records import first_line, quoted
from .settings import FULL, SOFTMAX, Settings
from .tasks import Batch, Task
from .tasks.base import IGNORE

#: Classes that a tower encodes at a time.
ENCODED = 1 << 13


class Prediction(NamedTuple):
    """A class by name, and its probability or, for `Model.similar`, its cosine."""

    name: str
    score: float


class Model(nn.Module):
    """A trunk and the output layer on it.

    Args:
        task: what the model is for.
        settings: of the run.
        class_vectors: for the tree of a hierarchical softmax, ``(num_classes, columns)``, if ``settings.tree`` is set.
            Without them a checkpoint has to bring the tree.
    """

    def __init__(self, task: Task[Any], settings: Settings, class_vectors: Tensor | None = None) -> None:
        super().__init__()
        self.task, self.recurrent = task, task.recurrent
        self._parallel: list[nn.Module] = []  # in a list, so that its parameters are not listed twice
        self.trunk = task.trunk()
        tied = getattr(settings, "tied", False)
        embedding, tower = None, self.trunk.embedding if tied else task.tower()
        if isinstance(tower, nn.Embedding):
            embedding, tower = tower, None
            embedding.sparse = settings.draws
        full = settings.sampler == FULL
        options: dict[str, Any] = {
            "prediction": settings.prediction,
            "bias": settings.offsets,
            "embedding": embedding,
            "ignore_index": IGNORE,
        }
        if tower is not None:
            _check_tower(task)
            options |= {"classes": tower, "chunk_size": ENCODED}
        features = settings.features  # pyright: ignore[reportAttributeAccessIssue]
        sharded = task.part[1] > 1
        if sharded and embedding is not None:
            raise ValueError("--tied needs all class weights in every process, so it cannot be trained by several")
        if settings.loss != SOFTMAX:
            self.head: Any = _baseline(settings, task, features, embedding, class_vectors)
            return
        sampled_layer, full_layer = _layers(sharded)
        if full:
            self.head = full_layer(features, task.num_classes, **options)
        else:
            options |= settings.sampler_options() | _sampler_data(settings.sampler, task)
            number = settings.num_samples
            self.head = sampled_layer(
                features, task.num_classes, settings.sampler, number, tolerance=settings.tolerance, **options
            )
        if settings.offsets:
            self.head.reset_bias(torch.bincount(task.pairs()[0], minlength=task.num_classes))

    @torch.no_grad()
    def predict(self, lines: Iterable[str], k: int = 5, exclude_seen: bool = False) -> list[list[Prediction]]:
        """Predict the ``k`` most probable classes for each line: a text, a history of items, or a document.

        Args:
            lines: as `Task.encode` reads them.
            k: predictions for each, or fewer if there are fewer classes.
            exclude_seen: for recommenders, leave the items of the history out.
        """
        if exclude_seen:
            self.task.recommends()
        found = []
        for line in lines:
            batch = self.task.encode(line).to(self.device)
            seen = batch.seen if exclude_seen else None
            values, ids = best(self.head, self.hidden(batch)[0][:, -1], k, seen)
            pairs = zip(ids[0].tolist(), values[0].tolist(), strict=True)
            found.append([Prediction(self._name(index), math.exp(value)) for index, value in pairs if index >= 0])
        return found

    def recommend(self, history: Sequence[str], k: int = 10, exclude_seen: bool = True) -> list[Prediction]:
        """Recommend ``k`` items to a user with a history, oldest first. Unknown items are left out of the history."""
        return self.predict([" ".join(history)], k, exclude_seen)[0]

    @torch.no_grad()
    def similar(self, name: str, k: int = 10) -> list[Prediction]:
        """Return the ``k`` classes whose weights have the largest cosine with those of a class, without itself."""
        if name not in self.task.ids:
            raise ValueError(f"unknown class {quoted(name)}")
        if len(getattr(self.head, "weight", ())) != self.task.num_classes:
            raise ValueError(f"--loss {self.task.settings.loss} has no vector for each class")
        weight = torch.nn.functional.normalize(self.head.weight, dim=-1)
        cosine = weight @ weight[self.task.ids[name]]
        cosine[self.task.ids[name]] = -math.inf
        values, ids = cosine.topk(min(k, len(cosine) - 1))
        return [Prediction(self._name(i), value) for i, value in zip(ids.tolist(), values.tolist(), strict=True)]

    def refresh(self) -> None:
        """Encode all classes again if their cached embeddings are stale, for exact results."""
        if not getattr(self.head, "fresh", True):
            self.head.refresh()

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.parameters()).device

    @property
    def shard(self) -> Shard:
        """The classes that this process holds: all of them for layers that cannot be sharded."""
        return getattr(self.head, "shard", None) or Shard(self.task.num_classes)

    def _name(self, index: int) -> str:
        return self.task.vocabulary.names[index]

    def hidden(self, batch: Batch, state: Any = None) -> tuple[Tensor, Any]:
        """Return the hidden states ``(batch, time, features)`` and the final state of the trunk."""
        trunk = self._parallel[0] if self._parallel and self.training else self.trunk
        return trunk(*batch.inputs, state) if self.recurrent else (trunk(*batch.inputs), None)

    def forward(self, batch: Batch, state: Any = None, generator: torch.Generator | None = None) -> tuple[Tensor, Any]:
        """Return the mean loss over all targets and the final state of the trunk; ``generator`` is for negatives."""
        hidden, state = self.hidden(batch, state)
        *places, labels = batch.target.shape
        query = hidden.unsqueeze(2).expand(*places, labels, -1)
        context = None if batch.context is None else batch.context.unsqueeze(2).expand_as(batch.target)
        return self.head(query, batch.target, context=context, generator=generator), state

    def parallelise(self) -> None:
        """Wrap the trunk in data parallelism, if several processes train together."""
        from ..distributed import data_parallel

        self._parallel = [data_parallel(self.trunk)]

    def weights(self) -> dict[str, Tensor]:
        """Return all parameters, each once."""
        return {name: parameter.detach() for name, parameter in self.named_parameters()}

    def buffers_and_extras(self) -> dict[str, Any]:
        """Return the state besides parameters: the sampler's statistics."""
        names = {name for name, _ in self.named_parameters(remove_duplicate=False)}
        return {name: value for name, value in self.state_dict().items() if name not in names}

    def restore(self, weights: dict[str, Tensor], rest: dict[str, Any]) -> None:
        """Load what `weights` and `buffers_and_extras` returned; entries that ``rest`` lacks stay unchanged."""
        shared = {}  # a tied weight has one name in a checkpoint and two in the model
        for name, parameter in self.named_parameters(remove_duplicate=False):
            first = next(other for other, same in self.named_parameters() if same is parameter)
            shared[name] = weights[first]
        self.load_state_dict({**self.buffers_and_extras(), **shared, **rest})


def device_named(name: str) -> torch.device:
    """Return a device that can be used, or raise."""
    try:
        torch.empty(1, device=name)
    except (RuntimeError, AssertionError) as error:  # unknown, or this machine or this torch has none
        raise ValueError(f"--device {quoted(name)} cannot be used: {first_line(error)}") from error
    return torch.device(name)


def _check_tower(task: Task[Any]) -> None:
    """Raise if the output layer cannot have classes that a network makes."""
    if task.part[1] > 1:
        raise ValueError("classes that a network makes are trained by one process; leave torchrun out")
    if task.settings.loss != SOFTMAX:
        raise ValueError(f"--loss {task.settings.loss} needs a table of class weights, not a network that makes them")


def _baseline(
    settings: Settings, task: Task[Any], features: int, embedding: nn.Embedding | None, class_vectors: Tensor | None
) -> nn.Module:
    """Return the layer of a loss of related work."""
    if task.part[1] > 1:
        raise ValueError(f"--loss {settings.loss} needs all classes in one process, so several cannot train it")
    kind: Any = losses.named(settings.loss)
    if losses.draws(settings.loss):
        options = settings.sampler_options() | _sampler_data(settings.sampler, task)
        number = settings.num_samples
        return kind(
            features, task.num_classes, settings.sampler, number, embedding=embedding, ignore_index=IGNORE, **options
        )
    if "counts" in inspect.signature(kind).parameters:
        if embedding is not None:
            raise ValueError(f"--loss {settings.loss} takes no --tied: it has no row for each class")
        if settings.tree is not None:
            # A tree of halves has the same number of decisions for any vectors, so a checkpoint can replace this tree.
            vectors = torch.arange(task.num_classes).unsqueeze(-1) if class_vectors is None else class_vectors
            return kind(features, task.num_classes, embeddings=vectors, ignore_index=IGNORE)
        counts = torch.bincount(task.pairs()[0], minlength=task.num_classes) + 1
        return kind(features, task.num_classes, counts=counts, ignore_index=IGNORE)
    dense = {} if embedding is None else {"sparse": False}
    return kind(features, task.num_classes, embedding=embedding, ignore_index=IGNORE, **dense)


def best(
    head: Any,
    query: Tensor,  # shape: (queries, in_features)
    k: int,
    seen: Tensor | None = None,  # shape: (queries, any), padded with what is no class
    probe: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return log probabilities and ids ``(queries, k)`` of the best classes without those ``seen``; id −1: no more.

    There are fewer than ``k`` columns if there are fewer classes.
    """
    if seen is None:
        return head.topk(query, min(k, head.num_classes), probe=probe)
    values, ids = head.topk(query, min(k + seen.shape[1], head.num_classes), probe=probe)
    order, ids = without(ids, seen)
    return values.gather(1, order[:, :k]), ids[:, :k]


def without(ids: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """Move ids that are ``seen``, shape ``(rows, any)``, behind the others as −1; return the new order, and the ids."""
    hidden = [torch.isin(row, out) for row, out in zip(ids, seen, strict=True)]
    mask = torch.stack(hidden) if hidden else torch.zeros_like(ids, dtype=torch.bool)
    order = mask.to(torch.int8).argsort(dim=-1, stable=True)
    return order, ids.masked_fill(mask, -1).gather(1, order)


def _sampler_data(sampler: str, task: Task[Any]) -> dict[str, Tensor]:
    """Return what a sampler needs of the training data: the options that it requires."""
    required = [name for name, default in samplers.options(sampler).items() if default is inspect.Parameter.empty]
    if not required:
        return {}
    target, context = task.pairs()
    if samplers.named(sampler).needs_context and int(context.max()) == IGNORE:
        raise ValueError(f"--sampler {sampler} needs a class before each, which documents do not have")
    data = {
        "counts": lambda: torch.bincount(target, minlength=task.num_classes) + 1,
        "pairs": lambda: torch.stack([context, target], dim=1),
    }
    return {name: data[name]() for name in required}


def _layers(sharded: bool) -> tuple[type[SampledSoftmax], type[FullSoftmax]]:
    """Return the sampled and the full output layer."""
    if not sharded:
        return SampledSoftmax, FullSoftmax
    from ..distributed.head import ShardedFullSoftmax, ShardedSampledSoftmax

    return ShardedSampledSoftmax, ShardedFullSoftmax
