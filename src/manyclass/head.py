"""The output layer: sampled softmax in training, the exact softmax in evaluation."""

import math
import time
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from . import checks, functional, fused, samplers
from .diagnostics import Diagnostics, Estimate, estimate

_REFUSED = {
    "label_smoothing": "smoothed targets need the logits of all classes",
    "weight": "for class weights take reduction='none' and average: (w[target] * loss).sum() / w[target].sum()",
}


def full_precision(query: Tensor) -> torch.autocast:
    """Autocast would run the matrix products of the loss in half precision."""
    return torch.autocast(query.device.type, enabled=False)


# An adaptive sampler follows all rows every so many steps, in case that rows changed unseen, …
REFRESH_ALL = 1000
# … and this often if they are bound to: dense gradients, tied weights, other processes.
REFRESH_UNTRACKED = 5

# Negatives of each example, or of the pool of a batch, unless told otherwise.
NUM_SAMPLES = {"example": 64, "batch": 4096}
# Units (classes, or blocks of them) that a layer with a target for the bias begins with, and has at least: fewer would
# not tell their own spread.
FIRST_UNITS = 64
FEWEST_UNITS = 8
# The bias is looked at in the first steps and then every so many; each look has this weight in the running mean.
ADAPT_EVERY = 16
ADAPT_WEIGHT = 0.1
# Examples that the bias is estimated from.
DIAGNOSED = 256


class SampledSoftmax(nn.Module):
    """A linear layer and its cross entropy over many classes, trained on a sample of them.

    In training, `forward` returns the sampled softmax loss with corrected logits (eq. 2 of the paper): each example
    sees its positive class and ``num_samples`` negatives. In ``eval()`` it returns the exact loss over all classes.
    It stands where `torch.nn.LinearCrossEntropyLoss` would.

    Args:
        in_features: size of the query, d.
        num_classes: n, at least 2.
        sampler: a name (``"blocks"``, ``"uniform"``, ``"log_uniform"``, ``"unigram"``, ``"bigram"``, ``"softmax"``,
            ``"quadratic"``, ``"quartic"``) or a `samplers.Sampler`.
        num_samples: negatives per example, m, by default 64; or those of the pool, by default 4096, for samplers whose
            scope is the batch, such as ``"blocks"``.
        target_bias: instead of ``num_samples``: the bias of the loss in nats, such as 0.02, that the layer may have.
            It begins with 64 draws, estimates its bias (see `diagnostics`) as it trains, and adapts ``num_samples``.
        prediction: ``"softmax"`` for p ∝ exp(o); ``"absolute"`` for p ∝ exp(|o|), which suits the symmetric kernels
            ``"quadratic"`` and ``"quartic"``.
        bias: whether logits have a learned offset per class.
        sparse: whether gradients of ``weight`` and ``bias`` are sparse tensors (coalesced) that hold only the rows
            drawn. SGD, Adagrad and SparseAdam take them; Adam and AdamW need ``sparse=False``.
        reduction: ``"mean"`` over the targets that are not ignored, ``"sum"`` or ``"none"``.
        ignore_index: a target to leave out. If all are left out, or the batch is empty, the loss is 0.
        embedding: an ``nn.Embedding(num_classes, in_features)`` whose weight is used: tied input and output weights.
            Its ``sparse`` must equal ``sparse``.
        device: of the parameters.
        dtype: of the parameters. Logits and losses are computed in float32 at least, also under autocast.
        sampler_options: what the named sampler takes, such as ``counts=`` for ``"unigram"``, ``pairs=`` for
            ``"bigram"``, ``alpha=`` for ``"quadratic"``.

    Shape:
        - Input: ``(*batch, in_features)``
        - Target: ``(*batch)``, integer, in ``[0, num_classes)`` or ``ignore_index``
        - Output: scalar, or ``(*batch)`` if ``reduction="none"``

    Example:
        >>> head = SampledSoftmax(64, 100_000)
        >>> loss = head(torch.randn(32, 64), torch.randint(100_000, (32,)))
        >>> loss.backward()
    """

    step: Tensor
    adapted_samples: Tensor
    bias_product: Tensor

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        sampler: str | samplers.Sampler = "blocks",
        num_samples: int | None = None,
        *,
        target_bias: float | None = None,
        prediction: str = "softmax",
        bias: bool = False,
        sparse: bool = True,
        reduction: str = "mean",
        ignore_index: int = -100,
        embedding: nn.Embedding | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
        **sampler_options: Any,
    ) -> None:
        super().__init__()
        for name in sampler_options.keys() & _REFUSED.keys():
            raise TypeError(f"SampledSoftmax does not take {name}: {_REFUSED[name]}")
        self.in_features = checks.positive_int("in_features", in_features)
        self.num_classes = checks.positive_int("num_classes", num_classes, 2)
        if num_samples is not None and target_bias is not None:
            raise ValueError(f"give num_samples={num_samples} or target_bias={target_bias}, not both")
        if target_bias is not None and not 0 < target_bias < math.inf:
            raise ValueError(f"target_bias must be positive, in nats, got {target_bias}")
        self.target_bias = target_bias
        checks.one_of("prediction", prediction, functional.PREDICTIONS)
        checks.one_of("reduction", reduction, functional.REDUCTIONS)
        self.prediction = prediction
        self.sparse = sparse
        self.reduction = reduction
        self.ignore_index = ignore_index

        # The parameters belong to nn.Embedding modules: DistributedDataParallel expects sparse gradients only there.
        def parameters(columns: int) -> nn.Embedding:
            place = torch.get_default_device() if device is None else device
            new = nn.utils.skip_init(nn.Embedding, num_classes, columns, sparse=sparse, device=place, dtype=dtype)
            new = cast(nn.Embedding, new)
            bound = 1 / math.sqrt(in_features)  # as nn.Linear
            nn.init.uniform_(new.weight, -bound, bound)
            return new

        self.tied = embedding is not None
        if embedding is None:
            embedding = parameters(in_features)
        elif tuple(embedding.weight.shape) != (num_classes, in_features):
            raise ValueError(
                f"embedding must have shape ({num_classes}, {in_features}), got {tuple(embedding.weight.shape)}"
            )
        elif embedding.sparse != sparse:
            raise ValueError(f"sparse={sparse} but embedding.sparse={embedding.sparse}; both must be the same")
        self.embedding = embedding
        self.bias_embedding = parameters(1) if bias else None

        if isinstance(sampler, str):
            sampler = samplers.create(
                sampler, num_classes, in_features, prediction=prediction, bias=bias, **sampler_options
            )
        elif not isinstance(sampler, samplers.Sampler):
            raise TypeError(f"sampler must be a name or a manyclass.samplers.Sampler, got {sampler!r}")
        elif sampler_options:
            raise TypeError(f"unknown arguments {', '.join(sampler_options)}: options belong to samplers given by name")
        elif not sampler.adaptive and sampler.num_classes != num_classes:
            raise ValueError(f"sampler is for {sampler.num_classes} classes, but num_classes is {num_classes}")
        self.sampler = sampler.to(self.weight.device)
        # Training steps so far, and rows whose statistics wait for a refresh; None: all of them.
        self.register_buffer("step", torch.zeros((), dtype=torch.long))
        self._touched: list[Tensor] | None = None
        if num_samples is None:
            num_samples = NUM_SAMPLES[self.sampler.scope]
        self.num_samples = checks.positive_int("num_samples", num_samples)
        if target_bias is not None:
            self.num_samples = min(num_classes, FIRST_UNITS * self.sampler.unit)
            self.register_buffer("adapted_samples", torch.tensor(self.num_samples))
            self.register_buffer("bias_product", torch.zeros((), dtype=torch.float64))
        # For `diagnostics`: the last draw, when the last step began, and the time that it sampled.
        self._last: tuple[Tensor, Tensor, samplers.Draw] | None = None
        self._began = self._share = math.nan
        self._sampling = 0.0

    @property
    def weight(self) -> nn.Parameter:
        """Class embeddings, shape ``(num_classes, in_features)``."""
        return self.embedding.weight  # pyright: ignore[reportReturnType]

    @property
    def bias(self) -> Tensor | None:
        """Offsets per class, shape ``(num_classes,)``: a view of the parameter ``bias_embedding.weight``."""
        return None if self.bias_embedding is None else self.bias_embedding.weight.squeeze(-1)

    def forward(
        self,
        input: Tensor,  # shape: (*batch, in_features)
        target: Tensor,  # shape: (*batch)
        *,
        context: Tensor | None = None,  # shape: (*batch)
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Return the loss: sampled in training mode, exact over all classes in evaluation mode.

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
        labels = checks.indices("target", target, self.num_classes, batch_of=query, ignore=self.ignore_index)
        kept = labels != self.ignore_index
        if context is not None:
            context = checks.indices("context", context, None, batch_of=query)[kept]
        query, labels = query[kept], labels[kept]
        with full_precision(query):
            if self.training:
                losses = self._sampled_losses(query, labels, context, generator)
            else:
                losses = self._exact_losses(query, labels)
        if self.reduction == "none":
            return losses.new_zeros(target.shape).masked_scatter(kept, losses)
        return self._reduce(losses)

    def _reduce(self, losses: Tensor) -> Tensor:
        return functional.reduce(losses, self.reduction)

    def _exact_losses(self, query: Tensor, target: Tensor) -> Tensor:
        """Loss over all classes of each example: query ``(batch, in_features)``, target ``(batch,)`` → ``(batch,)``."""
        return functional.full_softmax_loss(query, self.weight, target, self.bias, "none", prediction=self.prediction)

    def log_prob(self, input: Tensor) -> Tensor:
        """Log probability of every class, shape ``(*batch, num_classes)``. O(n·d) per example."""
        query = self._check_input(input)
        with full_precision(query):
            return functional.log_prob(query, self.weight, self.bias, prediction=self.prediction)

    @torch.no_grad()
    def topk(self, input: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The ``k`` most probable classes, best first: log probabilities and ids, both ``(*batch, k)``.

        Scores all classes in chunks, so memory stays bounded.
        """
        query = self._check_input(input)
        with full_precision(query):
            values, ids = functional.topk(query, self.weight, k, self.bias, prediction=self.prediction)
            log_z = functional.log_partition(query, self.weight, self.bias, prediction=self.prediction)
            return values - log_z.unsqueeze(-1), ids

    @torch.no_grad()
    def predict(self, input: Tensor) -> Tensor:
        """The most probable class of each query, shape ``(*batch)``."""
        query = self._check_input(input)
        with full_precision(query):
            return functional.topk(query, self.weight, 1, self.bias, prediction=self.prediction)[1].squeeze(-1)

    def _sampled_losses(
        self, query: Tensor, target: Tensor, context: Tensor | None, generator: torch.Generator | None
    ) -> Tensor:
        """Sampled softmax loss of each example: query ``(batch, in_features)``, target ``(batch,)`` → ``(batch,)``."""
        with torch.no_grad():
            self._time_step()
            self._refresh_sampler()
            # The loss itself leaves the positives out of a pool: it never is as large as batch × pool.
            exclude = None if self.sampler.scope == "batch" else target
            draw = self.sampler.draw(query, self.num_samples, exclude=exclude, context=context, generator=generator)
            self._sampling = time.perf_counter() - self._began
            self._last = (query.detach(), target, draw)
            if self.target_bias is not None and len(query):
                self._adapt(self.target_bias)
            pooled = self.sampler.scope == "batch" and len(query) > 0
            negatives, log_count = (part[0] if pooled else part for part in draw)
            if self._touched is not None:
                self._touched += [target, negatives.flatten()]
        bias = None if self.bias_embedding is None else self.bias_embedding.weight
        losses = fused.pooled_losses if pooled else fused.sampled_losses
        options = {"prediction": self.prediction, "sparse": self.sparse}
        return losses(query, self.weight, bias, target, negatives, log_count, **options)

    def _refresh_sampler(self) -> None:
        """Let an adaptive sampler follow the weights: the rows that the last steps touched, or all of them."""
        step = int(self.step)
        self.step += 1
        if not self.sampler.adaptive:
            return
        if not self.sampler.incremental or self._touched is None or step % REFRESH_ALL == 0:
            self.sampler.update(self.weight, bias=self.bias)
        elif self._tracked():
            self.sampler.update(self.weight, self.get_extra_state(), bias=self.bias)
        elif step % REFRESH_UNTRACKED == 0:
            self.sampler.update(self.weight, bias=self.bias)
        self._touched = []

    @torch.no_grad()
    def diagnostics(self) -> Diagnostics:
        """What the last training step paid for sampling, estimated from its own draw; see `Diagnostics`.

        The estimate takes at most 256 examples of the batch and the present class weights. Its cost is that of their
        logits; nothing is computed before it is asked for.
        """
        if self._last is None or not len(self._last[0]):
            raise ValueError("diagnostics need a training step with at least one target before them")
        found = self._estimate()
        untracked = self.sampler.adaptive and self.sampler.incremental and not self._tracked()
        return Diagnostics(
            num_samples=self._last[2].ids.shape[-1],
            effective_samples=float(found.effective_samples.mean()),
            chi_square=float(found.chi_square.mean()),
            bias=float(found.bias.mean()),
            stale_steps=(int(self.step) - 1) % REFRESH_UNTRACKED if untracked else 0,
            sampling_share=self._share,
        )

    def _estimate(self) -> Estimate:
        """Quality of the last draw, for examples at even distances in the batch."""
        return estimate(*self._last_outputs(), self.sampler.unit, self.sampler.distinct)

    def _last_outputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """Outputs of the positives and negatives of these examples, and the log-counts of the latter."""
        assert self._last is not None
        query, target, draw = self._last
        every = math.ceil(len(query) / DIAGNOSED)
        query, target, ids, log_count = (part[::every] for part in (query, target, *draw))
        log_count = log_count.masked_fill(ids == target.unsqueeze(-1), math.inf)
        weight, bias = self.weight, self.bias
        positive = (query * weight[target].to(query.dtype)).sum(dim=-1)
        if self.sampler.scope == "batch":
            negative = query @ weight[ids[0]].to(query.dtype).T
        else:
            parts = zip(query, ids, strict=True)
            negative = torch.stack([weight[own].to(query.dtype) @ example for example, own in parts])
        if bias is not None:
            positive, negative = positive + bias[target], negative + bias[ids]
        positive, negative = (functional.output(part, self.prediction) for part in (positive, negative))
        return positive, negative, log_count

    def _adapt(self, target_bias: float) -> None:
        """Draw more or fewer from the next step on, as the bias of this one asks for."""
        step = int(self.step)
        if step < ADAPT_EVERY or step % ADAPT_EVERY == 0:
            assert self._last is not None
            lowest = min(self.num_classes, FEWEST_UNITS * self.sampler.unit)
            highest = max(lowest, min(self.num_classes, functional.MAX_LOGITS // len(self._last[0])))
            # The bias falls about as 1/num_samples: their product is what is averaged. The mean of the estimates is
            # right, single ones are not: a sample that misses much does not know it.
            product = -float(self._estimate().bias.mean()) * self.num_samples
            self.bias_product.lerp_(self.bias_product.new_tensor(product), max(ADAPT_WEIGHT, 1 / step))
            wanted = float(self.bias_product) / target_bias
            wanted = round(max(self.num_samples / 2, min(2 * self.num_samples, wanted)))
            self.num_samples = max(lowest, min(highest, wanted))
            self.adapted_samples.fill_(self.num_samples)

    def _time_step(self) -> None:
        """Note that a step begins, and the share of the last one that went into sampling."""
        now = time.perf_counter()
        share = self._sampling / (now - self._began)
        self._share = 0.9 * self._share + 0.1 * share if math.isfinite(self._share) else share
        self._began = now

    def _tracked(self) -> bool:
        """Whether only rows that this layer touched can have changed."""
        alone = not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1)
        return self.sparse and not self.tied and alone

    def get_extra_state(self) -> Tensor:
        """Rows whose statistics wait for a refresh, so that a checkpoint goes on exactly; (−1,) for all of them."""
        if self._touched is None:
            return torch.tensor([-1])
        return torch.cat([self.step.new_empty(0), *self._touched])

    def set_extra_state(self, state: Tensor) -> None:
        """Take over the rows of `get_extra_state`."""
        self._touched = None if state.tolist() == [-1] else [state.to(self.weight.device)]

    def _load_from_state_dict(self, *args: Any) -> None:  # pyright: ignore
        self._touched = None  # unless the checkpoint knows better: the weights are new
        super()._load_from_state_dict(*args)
        if self.target_bias is not None:
            self.num_samples = int(self.adapted_samples)

    def _check_input(self, input: Tensor) -> Tensor:
        """Check the queries and bring them to the precision of the computation."""
        checks.floating("input", input)
        checks.same_device("input", input, "weight", self.weight)
        checks.queries("input", input, self.in_features)
        if input.dtype != self.weight.dtype and not torch.is_autocast_enabled(input.device.type):
            raise TypeError(f"input must have the dtype of weight, {self.weight.dtype}, got {input.dtype}")
        return input.to(torch.promote_types(self.weight.dtype, torch.float32))

    def extra_repr(self) -> str:
        """Show the sizes and what differs between layers."""
        return (
            f"in_features={self.in_features}, num_classes={self.num_classes}, num_samples={self.num_samples}, "
            f"target_bias={self.target_bias}, prediction={self.prediction!r}, bias={self.bias_embedding is not None}, "
            f"sparse={self.sparse}, reduction={self.reduction!r}"
        )
