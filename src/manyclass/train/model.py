"""A trunk and the output layer on it."""

import inspect
from typing import Any, cast

import torch
from torch import Tensor, nn

from .. import losses, samplers
from ..full import FullSoftmax
from ..sampled import SampledSoftmax
from .settings import FULL, SOFTMAX, Settings
from .tasks import Batch, Task
from .tasks.base import IGNORE


class Model(nn.Module):
    """A trunk and the output layer on it.

    Args:
        task: what the model is for.
        settings: of the run.
    """

    def __init__(self, task: Task[Any], settings: Settings) -> None:
        super().__init__()
        self.recurrent = task.recurrent
        self._parallel: list[nn.Module] = []  # in a list, so that its parameters do not count twice
        self.trunk = task.trunk()
        embedding = None
        full = settings.sampler == FULL
        if getattr(settings, "tied", False):
            embedding = cast(nn.Embedding, self.trunk.embedding)
            embedding.sparse = settings.draws
        options: dict[str, Any] = {"prediction": settings.prediction, "embedding": embedding, "ignore_index": IGNORE}
        features = settings.features  # pyright: ignore[reportAttributeAccessIssue]
        sharded = task.part[1] > 1
        if sharded and embedding is not None:
            raise ValueError("--tied needs all class weights in every process, so it cannot be trained by several")
        if settings.loss != SOFTMAX:
            self.head: Any = _baseline(settings, task, features, embedding)
            return
        sampled_layer, full_layer = _layers(sharded)
        if full:
            self.head = full_layer(features, task.num_classes, **options)
            return
        options |= settings.sampler_options() | _sampler_data(settings.sampler, task)
        self.head = sampled_layer(
            features,
            task.num_classes,
            settings.sampler,
            settings.num_samples,
            tolerance=settings.tolerance,
            **options,
        )

    def hidden(self, batch: Batch, state: Any = None) -> tuple[Tensor, Any]:
        """Hidden states ``(batch, time, features)``, and the state to go on from."""
        trunk = self._parallel[0] if self._parallel and self.training else self.trunk
        return trunk(*batch.inputs, state) if self.recurrent else (trunk(*batch.inputs), None)

    def forward(self, batch: Batch, state: Any = None) -> tuple[Tensor, Any]:
        """Mean loss over all targets, and the state to go on from."""
        hidden, state = self.hidden(batch, state)
        *places, labels = batch.target.shape
        query = hidden.unsqueeze(2).expand(*places, labels, -1)
        context = None if batch.context is None else batch.context.unsqueeze(2).expand_as(batch.target)
        return self.head(query, batch.target, context=context), state

    def parallelise(self) -> None:
        """Let the processes that train together share the gradients of the trunk."""
        from ..distributed import data_parallel

        self._parallel = [data_parallel(self.trunk)]

    def weights(self) -> dict[str, Tensor]:
        """All parameters, each once."""
        return {name: parameter.detach() for name, parameter in self.named_parameters()}

    def buffers_and_extras(self) -> dict[str, Any]:
        """What else the state has: the sampler's statistics."""
        names = {name for name, _ in self.named_parameters(remove_duplicate=False)}
        return {name: value for name, value in self.state_dict().items() if name not in names}

    def restore(self, weights: dict[str, Tensor], rest: dict[str, Any]) -> None:
        """Take over what `weights` and `buffers_and_extras` gave; what ``rest`` lacks stays as it is."""
        shared = {}  # a tied weight has one name in a checkpoint and two in the model
        for name, parameter in self.named_parameters(remove_duplicate=False):
            first = next(other for other, same in self.named_parameters() if same is parameter)
            shared[name] = weights[first]
        self.load_state_dict({**self.buffers_and_extras(), **shared, **rest})


def _baseline(settings: Settings, task: Task[Any], features: int, embedding: nn.Embedding | None) -> nn.Module:
    """The layer of a loss of related work."""
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
        counts = torch.bincount(task.pairs()[0], minlength=task.num_classes) + 1
        return kind(features, task.num_classes, counts=counts, ignore_index=IGNORE)
    dense = {} if embedding is None else {"sparse": False}
    return kind(features, task.num_classes, embedding=embedding, ignore_index=IGNORE, **dense)


def _sampler_data(sampler: str, task: Task[Any]) -> dict[str, Tensor]:
    """What a sampler needs of the training data: the options that it requires."""
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
    """The sampled and the full output layer."""
    if not sharded:
        return SampledSoftmax, FullSoftmax
    from ..distributed.head import ShardedFullSoftmax, ShardedSampledSoftmax

    return ShardedSampledSoftmax, ShardedFullSoftmax
