"""An output layer: class weights, the loss, and what is exact about it. The loss of training is a hook."""

import math
from typing import Any, cast

import torch
from torch import Tensor, nn

from . import checks, functional
from .shard import Shard, Tables


class Head(nn.Module):
    """A linear layer and its cross entropy over many classes.

    In ``eval()`` `forward` returns the exact loss over all classes. In training it returns what a subclass finds:
    `FullSoftmax` the same, `SampledSoftmax` an estimate.

    Args:
        in_features: size of the query, d.
        num_classes: n, at least 2.
        prediction: ``"softmax"`` for p ∝ exp(o); ``"absolute"`` for p ∝ exp(|o|).
        bias: whether logits have a learned offset per class.
        sparse: whether gradients of ``weight`` and ``bias`` are sparse tensors.
        reduction: ``"mean"`` over the targets that are not ignored, ``"sum"`` or ``"none"``.
        ignore_index: a target to leave out. If all are left out, or the batch is empty, the loss is 0.
        embedding: an ``nn.Embedding(num_classes, in_features)`` whose weight is used: tied input and output weights.
        device: of the parameters.
        dtype: of the parameters. Logits and losses are computed in float32 at least, also under autocast.
        shard: the classes that this process holds; default: all of them.
        validate: whether to check the values of arguments. On devices other than the CPU the host has to wait for that.
    """

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        prediction: str = "softmax",
        bias: bool = False,
        sparse: bool = False,
        reduction: str = "mean",
        ignore_index: int = -100,
        embedding: nn.Embedding | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
        shard: Shard | None = None,
        validate: bool = True,
    ) -> None:
        super().__init__()
        self.validate = checks.boolean("validate", validate)
        self.in_features = checks.positive_int("in_features", in_features)
        self.num_classes = checks.positive_int("num_classes", num_classes, 2)
        self.prediction = checks.one_of("prediction", prediction, functional.PREDICTIONS)
        self.reduction = checks.one_of("reduction", reduction, functional.REDUCTIONS)
        self.sparse = checks.boolean("sparse", sparse)
        self.ignore_index = checks.integer("ignore_index", ignore_index)
        checks.boolean("bias", bias)
        if dtype is not None and dtype not in checks.FLOATING:
            raise TypeError(f"dtype must be a floating point dtype of 16, 32 or 64 bits, got {dtype!r}")
        device = checks.device("device", device)
        if not isinstance(shard, Shard | None):
            raise TypeError(f"shard must be a manyclass.shard.Shard or None, got {shard!r}")
        self.shard = Shard(num_classes) if shard is None else shard
        self.tied = embedding is not None
        if embedding is None:
            embedding = self._table(in_features, device, dtype)
        elif not isinstance(embedding, nn.Embedding):
            raise TypeError(f"embedding must be an nn.Embedding or None, got {type(embedding).__name__}")
        elif tuple(embedding.weight.shape) != (num_classes, in_features):
            raise ValueError(
                f"embedding must have shape ({num_classes}, {in_features}), got {tuple(embedding.weight.shape)}"
            )
        elif embedding.sparse != sparse:
            raise ValueError(f"sparse={sparse} but embedding.sparse={embedding.sparse}; both must be the same")
        self.embedding = embedding
        weight = embedding.weight
        self.bias_embedding = self._table(1, weight.device, weight.dtype) if bias else None
        self.reset_parameters()

    def _table(self, columns: int, device: Any, dtype: torch.dtype | None) -> nn.Embedding:
        """Parameters belong to nn.Embedding modules: DistributedDataParallel expects sparse gradients only there."""
        rows = self.shard.last - self.shard.first
        made = nn.utils.skip_init(nn.Embedding, rows, columns, sparse=self.sparse, device=device, dtype=dtype)
        return cast(nn.Embedding, made)

    def reset_parameters(self) -> None:
        """Draw the parameters as `torch.nn.Linear` does; tied weights stay as they are."""
        own = [None if self.tied else self.embedding, self.bias_embedding]
        parameters = [table.weight for table in own if table is not None]
        self.shard.initialise(cast(list[nn.Parameter], parameters), 1 / math.sqrt(self.in_features))

    @property
    def weight(self) -> nn.Parameter:
        """Class embeddings, shape ``(num_classes, in_features)``; of a shard, those of its classes."""
        return self.embedding.weight  # pyright: ignore[reportReturnType]

    @property
    def bias(self) -> Tensor | None:
        """Offsets per class, shape ``(num_classes,)``: a view of the parameter ``bias_embedding.weight``."""
        return None if self.bias_embedding is None else self.bias_embedding.weight.squeeze(-1)

    def _tables(self) -> Tables:
        return self.weight, None if self.bias_embedding is None else self.bias_embedding.weight

    def forward(
        self,
        input: Tensor,  # shape: (*batch, in_features)
        target: Tensor,  # shape: (*batch)
        *,
        context: Tensor | None = None,  # shape: (*batch)
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Return the loss: that of training in training mode, exact over all classes in evaluation mode.

        Args:
            input: queries, the model's last hidden layer.
            target: the positive class of each.
            context: what the ``"bigram"`` sampler conditions on.
            generator: source of the random numbers of the draw; default: torch's global one.
        """
        return self._forward(input, target, context, generator)  # pyright: ignore[reportCallIssue]

    @torch.compiler.disable  # shapes depend on the draw: a compiled model has one graph break here
    def _forward(
        self, input: Tensor, target: Tensor, context: Tensor | None, generator: torch.Generator | None
    ) -> Tensor:
        query = self._check_input(input)
        labels = checks.indices(
            "target", target, self.num_classes, batch_of=query, ignore=self.ignore_index, validate=self.validate
        ).flatten()
        # One mask, read once: each time that a mask is an index, the host waits for the device.
        kept = (labels != self.ignore_index).nonzero().squeeze(-1)
        if context is not None:
            context = checks.indices("context", context, None, batch_of=query, validate=self.validate).flatten()[kept]
        query, labels = query.reshape(-1, self.in_features)[kept], labels[kept]
        with full_precision(query):
            if self.training:
                losses = self._training_losses(query, labels, context, generator)
            else:
                losses = self._exact_losses(query, labels)
        if self.reduction == "none":
            return losses.new_zeros(target.numel()).index_copy(0, kept, losses).reshape(target.shape)
        return self.shard.reduce(losses, self.reduction)

    def _training_losses(
        self, query: Tensor, target: Tensor, context: Tensor | None, generator: torch.Generator | None
    ) -> Tensor:
        """Loss of each example in training: query ``(batch, in_features)``, target ``(batch,)`` → ``(batch,)``."""
        raise NotImplementedError

    def _exact_losses(self, query: Tensor, target: Tensor) -> Tensor:
        return self.shard.exact_losses(query, target, self._tables(), self.prediction)

    def log_prob(self, input: Tensor) -> Tensor:
        """Log probability of every class, shape ``(*batch, num_classes)``. O(n·d) per example."""
        query = self._check_input(input)
        with full_precision(query):
            return self.shard.log_prob(query, self._tables(), self.prediction)

    @torch.no_grad()
    def topk(self, input: Tensor, k: int, *, probe: int | None = None) -> tuple[Tensor, Tensor]:
        """The ``k`` most probable classes, best first: log probabilities and ids, both ``(*batch, k)``.

        Scores all classes in chunks, so memory stays bounded. ``probe`` is for `SampledSoftmax` with ``"blocks"``.
        """
        if probe is not None:
            raise ValueError(f"probe must be None: {type(self).__name__} has no tree to search; got {probe}")
        checks.positive_int("k", k)
        if k > self.num_classes:
            raise ValueError(f"k must be at most num_classes = {self.num_classes}, got {k}")
        query = self._check_input(input)
        with full_precision(query):
            return self.shard.topk(query, self._tables(), k, self.prediction)

    @torch.no_grad()
    def predict(self, input: Tensor) -> Tensor:
        """The most probable class of each query, shape ``(*batch)``."""
        return self.topk(input, 1)[1].squeeze(-1)

    def _check_input(self, input: Tensor) -> Tensor:
        """Check the queries and bring them to the precision of the computation."""
        checks.floating("input", input)
        checks.same_device("input", input, "weight", self.weight)
        checks.queries("input", input, self.in_features, validate=self.validate)
        if input.dtype != self.weight.dtype and not torch.is_autocast_enabled(input.device.type):
            raise TypeError(f"input must have the dtype of weight, {self.weight.dtype}, got {input.dtype}")
        return input.to(torch.promote_types(self.weight.dtype, torch.float32))

    def extra_repr(self) -> str:
        """Show the sizes and what differs between layers."""
        return (
            f"in_features={self.in_features}, num_classes={self.num_classes}, prediction={self.prediction!r}, "
            f"bias={self.bias_embedding is not None}, sparse={self.sparse}, reduction={self.reduction!r}"
        )


class FullSoftmax(Head):
    """The exact loss over all classes in training, too: what sampling is measured against. Cost O(n·d) per example.

    Takes the arguments of `SampledSoftmax` that have nothing to do with sampling. Gradients are dense.
    """

    def __init__(self, in_features: int, num_classes: int, **options: Any) -> None:
        super().__init__(in_features, num_classes, **options)

    def _training_losses(
        self, query: Tensor, target: Tensor, context: Tensor | None, generator: torch.Generator | None
    ) -> Tensor:
        return self.shard.full_losses(query, target, self._tables(), self.prediction)


def full_precision(query: Tensor) -> torch.autocast:
    """Autocast would run the matrix products of the loss in half precision."""
    return torch.autocast(query.device.type, enabled=False)
