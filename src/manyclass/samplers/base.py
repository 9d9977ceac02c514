"""The contract of a sampler."""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import checks, chunks
from .description import Described
from .draw import Best, Draw


class Sampler(Described, nn.Module):
    """A distribution q over classes, which may depend on the query, and draws from it.

    A subclass implements `_draw` and `_log_prob` on flat batches of checked arguments, and `update` if it follows the
    class weights. Its statistics are buffers, so ``state_dict``, ``.to()`` and pickling work. It must report the
    probability of the distribution that it drew from. Statistics may be stale or rough, but this probability is exact.
    """

    #: Whether q follows the class weights, so that the layer has to call `update`.
    adaptive = False
    #: Whether `update` with ``rows`` costs less than with all.
    incremental = False
    #: Whether `update` sweeps over all classes in turn, and so detects untracked changes without a rebuild.
    sweeps = False
    #: Whether all statistics can be rebuilt from the class weights, so that checkpoints leave them out.
    derived = False
    #: Own negatives of each example, besides the pool.
    own = 0
    #: Uniform numbers that one draw consumes, and classes that it gives.
    uniforms_per_draw = 1
    classes_per_draw = 1
    #: Whether a class can be drawn several times.
    replacement = True
    #: Whether to check the values of arguments, and that masses are finite; see `Head`.
    validate = True

    num_classes: int
    #: Size of the query; None if any will do.
    in_features: int | None = None

    def draw(
        self,
        query: Tensor,  # shape: (*batch, in_features)
        num_samples: int,
        *,
        exclude: Tensor | None = None,  # shape: (*batch)
        context: Tensor | None = None,  # shape: (*batch)
        generator: torch.Generator | None = None,
    ) -> Draw:
        """Draw negatives, with replacement.

        Args:
            query: the model's last hidden layer.
            num_samples: m, the number of sampled negatives that every example is compared with. The scope of the
                sampler decides whether they are drawn per example, or once and shared by the batch. Some samplers add
                the negatives of an option, such as ``own`` of ``"blocks"``.
            exclude: one class per example that must not be drawn, the positive, or −1 for none. Own draws come from q
                restricted to the other classes and renormalised. A pool comes from q itself, and each example masks
                the slots that hold its positive.
            context: the class to condition on, for samplers that need it (``"bigram"``).
            generator: source of the random numbers. The same state gives the same draw.
        """
        checks.positive_int("num_samples", num_samples, maximum=checks.MAX_CLASSES)
        flat, exclude, context = self._flatten(query, exclude, context)
        pooled, dtype = self.scope == "batch", torch.promote_types(query.dtype, torch.float32)
        draws = math.ceil(num_samples / self.classes_per_draw)
        shape = (1 if pooled else len(flat), draws, self.uniforms_per_draw)
        uniform = torch.rand(shape, dtype=torch.float64, device=query.device, generator=generator)
        if pooled:
            ids, log_prob = self._draw(flat.new_zeros(1, flat.shape[1]), uniform, None, None)
            return Draw.shared(ids[0], (log_prob[0] + math.log(draws)).to(dtype), query.shape[:-1], exclude)
        ids, log_prob = self._draw(flat, uniform, exclude, context)
        shape = (*query.shape[:-1], ids.shape[-1])
        return Draw.each(ids.reshape(shape), (log_prob + math.log(draws)).to(dtype).reshape(shape))

    def log_prob(
        self,
        query: Tensor,  # shape: (*batch, in_features)
        ids: Tensor,  # shape: (*batch, k)
        *,
        exclude: Tensor | None = None,  # shape: (*batch)
        context: Tensor | None = None,  # shape: (*batch)
    ) -> Tensor:
        """Return the log probability of ``ids`` under the distribution of `draw`; −inf for the excluded class.

        Returns shape ``(*batch, k)``, float64.
        """
        flat, exclude, context = self._flatten(query, exclude, context)
        ids = checks.indices("ids", ids, self.num_classes, validate=self.validate)
        if ids.dim() == 0 or ids.shape[:-1] != query.shape[:-1]:
            raise ValueError(f"ids must have shape {(*query.shape[:-1], 'k')}, got {tuple(ids.shape)}")
        flat_ids = ids.reshape(flat.shape[0], ids.shape[-1])
        restricted = None if self.scope == "batch" else exclude
        log_prob = self._log_prob(flat, flat_ids, restricted, context)
        if exclude is not None:
            log_prob = log_prob.masked_fill(flat_ids == exclude.unsqueeze(-1), -math.inf)
        return log_prob.reshape(ids.shape)

    def log_total(self, query: Tensor) -> Tensor:  # shape: (batch, in_features)
        """Return the log of the unnormalised mass of all classes, ``(batch,)``, to weigh shards against each other."""
        raise ValueError(f"{type(self).__name__} cannot tell the mass of a shard: use split='even'")

    def update(
        self,
        weight: Tensor,  # shape: (num_classes, in_features)
        rows: Tensor | None = None,  # shape: (k,)
        *,
        bias: Tensor | None = None,  # shape: (num_classes,)
    ) -> None:
        """Refresh the statistics after all class weights changed, or only ``rows``. Fixed samplers ignore it."""

    def attach(self, weight: Tensor, bias: Tensor | None, rows: Tensor | None = None) -> None:
        """Read these class weights from now on, if the sampler does; ``rows (k,)`` changed since the last update."""

    def search(self, query: Tensor, k: int, probe: int) -> Best:
        """Find ``k`` of the classes with the largest outputs without scoring all, if the sampler can."""
        kind = type(self).__name__
        raise ValueError(f"probe needs a sampler with a search index, such as 'blocks'; {kind} has none")

    def numbers(self, num_samples: int) -> tuple[int, int]:
        """Return the negatives of each example alone, and those of the pool, that `draw` gives for ``num_samples``."""
        number = math.ceil(num_samples / self.classes_per_draw) * self.classes_per_draw
        return (self.own, number) if self.scope == "batch" else (number, 0)

    def staleness(self) -> float:
        """Return the mean age of the statistics in updates; 0 if every update brings all of them up to date."""
        return 0.0

    def begin(self, target: Tensor) -> None:  # shape: (batch,), or (batch, k) padded with −1
        """Receive the targets of a training step before it draws. Samplers that do not need them ignore it."""

    def observe(self, query: Tensor, target: Tensor) -> None:
        """Receive queries ``(batch, in_features)`` and targets, as `begin` has them, of a step that has drawn."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Sampler":
        """Move statistics to other devices, but keep their values and precision: `to_empty` would lose counts."""

        def moved(buffer: Tensor) -> Tensor:
            new = fn(buffer)
            return new if buffer.is_meta else buffer.to(new.device)

        return super()._apply(moved, recurse)

    def _draw(
        self,
        query: Tensor,  # shape: (batch, in_features)
        uniform: Tensor,  # shape: (batch, num_samples, uniforms_per_draw), float64
        exclude: Tensor | None,  # shape: (batch,)
        context: Tensor | None,  # shape: (batch,)
    ) -> tuple[Tensor, Tensor]:
        """Map uniform numbers to ids and their log probabilities, both ``(batch, num_samples)``. A pure function."""
        raise NotImplementedError

    def _log_prob(
        self,
        query: Tensor,  # shape: (batch, in_features)
        ids: Tensor,  # shape: (batch, k)
        exclude: Tensor | None,  # shape: (batch,)
        context: Tensor | None,  # shape: (batch,)
    ) -> Tensor:
        """Return the log probability of ``ids``, ``(batch, k)``, float64; that of the excluded class is ignored."""
        raise NotImplementedError

    def _flatten(
        self, query: Tensor, exclude: Tensor | None, context: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Check the arguments and give them one batch dimension."""
        checks.floating("query", query)
        for name, buffer in self.named_buffers():
            checks.same_device("query", query, f"the sampler's {name}", buffer)
        checks.queries("query", query, self.in_features, validate=self.validate)
        if exclude is not None:
            if self.num_classes < 2:
                raise ValueError("exclude leaves no class to draw: num_classes is 1, at least 2 are needed")
            ignore = -1 if self.scope == "batch" else None
            exclude = checks.indices(
                "exclude", exclude, self.num_classes, batch_of=query, ignore=ignore, validate=self.validate
            )
            exclude = exclude.reshape(-1).contiguous()
        if not self.needs_context:
            context = None
        elif context is None:
            raise ValueError(f"context is needed: {type(self).__name__} draws from q(class | context)")
        else:
            context = checks.indices("context", context, None, batch_of=query, validate=self.validate)
            context = context.reshape(-1).contiguous()
        return query.reshape(math.prod(query.shape[:-1]), query.shape[-1]), exclude, context

    def _chunks(
        self, numbers_per_query: int, query: Tensor, other: Tensor, exclude: Tensor | None, most: int | None = None
    ):
        """Split the batch so that ``numbers_per_query`` of all queries of a chunk stay within ``most`` numbers."""
        size = max(1, (most or chunks.MAX_LOGITS) // numbers_per_query)
        parts = query.split(size)
        positives = [None] * len(parts) if exclude is None else exclude.split(size)
        return zip(parts, other.split(size), positives, strict=True)

    def extra_repr(self) -> str:
        """Show the number of classes."""
        return f"num_classes={self.num_classes}"


class Incremental(Sampler):
    """A sampler that keeps sums or summaries of sets of classes, and refreshes them row by row.

    Args:
        num_classes: n.
        in_features: size of the query, d.
        bias: whether class weights have offsets, stored as a further column that is multiplied by 1.
    """

    adaptive = True
    incremental = True

    def __init__(self, num_classes: int, in_features: int, bias: bool) -> None:
        super().__init__()
        self.num_classes = checks.positive_int("num_classes", num_classes, maximum=checks.MAX_CLASSES)
        self.in_features: int = checks.positive_int("in_features", in_features)  # pyright: ignore
        self.columns = in_features + checks.boolean("bias", bias)

    def _check_weight(self, weight: Tensor, bias: Tensor | None, own: Tensor) -> None:
        """Check what `update` is given; ``own`` is a buffer of the sampler."""
        expected = (self.num_classes, self.in_features)
        if tuple(checks.floating("weight", weight).shape) != expected:
            raise ValueError(f"weight must have shape {expected}, got {tuple(weight.shape)}")
        takes_bias = self.columns > self.in_features
        if (bias is not None) != takes_bias:
            needed = "given" if takes_bias else "None"
            raise ValueError(f"bias must be {needed}: the sampler was made with bias={takes_bias}")
        checks.tables(weight, bias)
        checks.same_device("weight", weight, "the sampler", own)

    def _check_rows(self, rows: Tensor) -> Tensor:
        if isinstance(rows, Tensor) and rows.dim() != 1:
            raise ValueError(f"rows must have shape (k,), got {tuple(rows.shape)}")
        return checks.indices("rows", rows, self.num_classes, validate=self.validate)

    def _extended(self, query: Tensor, own: Tensor) -> Tensor:
        """Return the query in the precision of the sampler's buffer ``own``, with a one for the offsets."""
        query = query.to(own.dtype)
        return F.pad(query, (0, 1), value=1.0) if self.columns > self.in_features else query
