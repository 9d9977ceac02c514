"""The base of output layers: class weights and exact results. The training loss is a hook."""

from typing import Any

import torch
from torch import Tensor, nn

from . import checks, functional
from .cosine import Cosine
from .embeddings import ClassEmbeddings
from .shard import Shard, Tables
from .untraced import untraced


class Head(ClassEmbeddings):
    """A linear layer and its cross entropy over many classes.

    In ``eval()`` `forward` returns the exact loss over all classes. In training it returns the loss of the subclass:
    `FullSoftmax` the exact one, `SampledSoftmax` an estimate.

    Args:
        in_features: size of the query, d.
        num_classes: n, at least 2.
        prediction: ``"softmax"`` for p ∝ exp(o); ``"absolute"`` for p ∝ exp(|o|).
        bias: whether logits have a learned offset per class.
        sparse: whether gradients of ``weight`` and ``bias`` are sparse tensors.
        reduction: ``"mean"`` over the targets that are not ignored, ``"sum"`` or ``"none"``.
        ignore_index: a target to leave out. If all are left out, or the batch is empty, the loss is 0.
        embedding: an ``nn.Embedding(num_classes, in_features)`` whose weight is used: tied input and output weights.
        classes: instead of a table: a module that maps class ids ``(k,)`` to embeddings ``(k, in_features)``.
        chunk_size: how many classes ``classes`` encodes at a time.
        cosine: make logits cosines times a scale: a `Cosine`.
        device: of the parameters.
        dtype: of the parameters; with ``classes``, of the cache. Logits and losses are computed in float32 at least,
            also under autocast.
        shard: the classes that this process holds; default: all of them.
        validate: whether to check the values of arguments. On devices other than the CPU the host waits for the check.
    """

    #: Whether an example may have several targets, ``(*batch, k)``.
    several_targets = True

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
        classes: nn.Module | None = None,
        chunk_size: int = 1024,
        cosine: Cosine | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
        shard: Shard | None = None,
        validate: bool = True,
    ) -> None:
        super().__init__(
            in_features,
            num_classes,
            prediction=prediction,
            bias=bias,
            sparse=sparse,
            embedding=embedding,
            classes=classes,
            chunk_size=chunk_size,
            cosine=cosine,
            device=device,
            dtype=dtype,
            shard=shard,
        )
        self.validate = checks.boolean("validate", validate)
        self.reduction = checks.one_of("reduction", reduction, functional.REDUCTIONS)
        self.ignore_index = checks.integer("ignore_index", ignore_index)

    def forward(
        self,
        input: Tensor,  # shape: (*batch, in_features)
        target: Tensor,  # shape: (*batch) or (*batch, k)
        *,
        context: Tensor | None = None,  # shape: (*batch)
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Return the training loss in training mode, and the exact loss over all classes in evaluation mode.

        Args:
            input: queries, the model's last hidden layer.
            target: the positive class of each query, or several, padded with ``ignore_index``.
            context: the class that the ``"bigram"`` sampler conditions on.
            generator: source of the random numbers of the draw; default: torch's global one.
        """
        return self._forward(input, target, context, generator)

    @untraced  # shapes depend on the draw
    def _forward(
        self, input: Tensor, target: Tensor, context: Tensor | None, generator: torch.Generator | None
    ) -> Tensor:
        query = self._check_input(input)
        labels = checks.indices(
            "target",
            target,
            self.num_classes,
            batch_of=query,
            several=self.several_targets,
            ignore=self.ignore_index,
            validate=self.validate,
        )
        several = labels.dim() == query.dim()
        labels = labels.reshape(labels.shape[:-1].numel(), labels.shape[-1]) if several else labels.flatten()
        here = labels != self.ignore_index
        # The mask is read once, since the host waits for the device whenever a mask is an index.
        kept = (here.any(dim=-1) if several else here).nonzero().squeeze(-1)
        if context is not None:
            context = checks.indices("context", context, None, batch_of=query, validate=self.validate).flatten()[kept]
        query, labels = query.reshape(-1, self.in_features)[kept], labels.where(here, -1)[kept]
        with full_precision(query):
            if self.training:
                losses = self._training_losses(query, labels, context, generator)
            else:
                losses = self._exact_losses(query, labels, self._fresh_tables())
        losses = losses.where(labels >= 0, 0.0) if several else losses
        if self.reduction == "none":
            return losses.new_zeros(here.shape).index_copy(0, kept, losses).reshape(target.shape)
        return self.shard.reduce(losses, self.reduction, (labels >= 0).sum() if several else None)

    def _training_losses(
        self, query: Tensor, target: Tensor, context: Tensor | None, generator: torch.Generator | None
    ) -> Tensor:
        """Compute the training loss of each target: query ``(batch, in_features)``, target and loss ``(batch,)``.

        Several targets of an example: target ``(batch, k)``, padded with −1 → ``(batch, k)``.
        """
        raise NotImplementedError

    def _exact_losses(
        self, query: Tensor, target: Tensor, tables: Tables, margin: functional.Margin | None = None
    ) -> Tensor:
        return self.shard.exact_losses(query, target, tables, self.prediction, margin)

    def log_prob(self, input: Tensor) -> Tensor:
        """Return the log probability of every class, shape ``(*batch, num_classes)``. O(n·d) per example."""
        query = self._check_input(input)
        with full_precision(query):
            return self.shard.log_prob(query, self._fresh_tables(), self.prediction)

    @torch.no_grad()
    def topk(self, input: Tensor, k: int, *, probe: int | None = None) -> tuple[Tensor, Tensor]:
        """Return the ``k`` most probable classes, best first: log probabilities and ids, both ``(*batch, k)``.

        Scores all classes in chunks, so memory stays bounded. ``probe`` is for `SampledSoftmax` with ``"blocks"``.
        """
        if probe is not None:
            raise ValueError(f"probe must be None: {type(self).__name__} has no tree to search; got {probe}")
        checks.positive_int("k", k)
        if k > self.num_classes:
            raise ValueError(f"k must be at most num_classes = {self.num_classes}, got {k}")
        query = self._check_input(input)
        with full_precision(query):
            return self.shard.topk(query, self._fresh_tables(), k, self.prediction)

    @torch.no_grad()
    def predict(self, input: Tensor) -> Tensor:
        """Return the most probable class of each query, shape ``(*batch)``."""
        return self.topk(input, 1)[1].squeeze(-1)

    def _check_input(self, input: Tensor) -> Tensor:
        """Check the queries and bring them to the precision of the computation."""
        checks.floating("input", input)
        checks.same_device("input", input, "weight", self.weight)
        checks.queries("input", input, self.in_features, validate=self.validate)
        if self.cache is not None:  # the precision of a cache need not be that of the encoder
            query = input.to(torch.promote_types(input.dtype, torch.float32))
            return query if self.cosine is None else self.cosine(query)
        if input.dtype != self.weight.dtype and not torch.is_autocast_enabled(input.device.type):
            raise TypeError(f"input must have the dtype of weight, {self.weight.dtype}, got {input.dtype}")
        return input.to(torch.promote_types(self.weight.dtype, torch.float32))

    def extra_repr(self) -> str:
        """Show the sizes and what differs between layers."""
        return (
            f"in_features={self.in_features}, num_classes={self.num_classes}, prediction={self.prediction!r}, "
            f"bias={self.bias_embedding is not None}, sparse={self.sparse}, reduction={self.reduction!r}"
        )


def full_precision(query: Tensor) -> torch.autocast:
    """Disable autocast, which would run the loss in half precision."""
    return torch.autocast(query.device.type, enabled=False)
