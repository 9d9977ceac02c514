"""The output layer: sampled softmax in training, the exact softmax in evaluation."""

import math
import time
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from . import checks, functional, fused, samplers
from .diagnostics import Diagnostics, Measured, measure, standard_error, steady_bias

_REFUSED = {
    "label_smoothing": "smoothed targets need the logits of all classes",
    "weight": "for class weights take reduction='none' and average: (w[target] * loss).sum() / w[target].sum()",
}


def full_precision(query: Tensor) -> torch.autocast:
    """Autocast would run the matrix products of the loss in half precision."""
    return torch.autocast(query.device.type, enabled=False)


# A sampler that keeps sums of rows follows all of them every so many steps, in case that rows changed unseen, …
REFRESH_ALL = 1000
# … and this often if they are bound to: dense gradients, tied weights, other processes.
REFRESH_UNTRACKED = 5

# Negatives of each example, or of the pool of a batch, unless told otherwise.
NUM_SAMPLES = {"example": 64, "batch": 4096}
# Examples that the bias is measured on, and how often each is drawn for.
MEASURED, DRAWS = 16, 8
# A layer with a tolerance begins with this many negatives, and has at least these.
FIRST_SAMPLES, FEWEST_SAMPLES = 256, 16
# It measures so rarely that measuring takes at most this part of the multiplications of training.
MEASURING = 0.02
# Weight of a new measurement in the running mean.
ADAPT_WEIGHT = 0.3


class SampledSoftmax(nn.Module):
    """A linear layer and its cross entropy over many classes, trained on a sample of them.

    In training, `forward` returns the sampled softmax loss with corrected logits (eq. 2 of the paper): each example
    sees its positive class and some negatives. In ``eval()`` it returns the exact loss over all classes.
    It stands where `torch.nn.LinearCrossEntropyLoss` would.

    Args:
        in_features: size of the query, d.
        num_classes: n, at least 2.
        sampler: a name (``"blocks"``, ``"uniform"``, ``"log_uniform"``, ``"unigram"``, ``"bigram"``, ``"softmax"``,
            ``"quadratic"``, ``"quartic"``) or a `samplers.Sampler`.
        num_samples: negatives per example, m, by default 64; or those of the pool that the batch shares, by default
            4096, for samplers whose scope is the batch, such as ``"blocks"``.
        tolerance: instead of ``num_samples``: the bias of the loss in nats, such as 0.02, that the layer may have. It
            measures its bias (see `diagnostics`) as it trains, and adapts ``num_samples`` and the sampler's ``own``.
        prediction: ``"softmax"`` for p ∝ exp(o); ``"absolute"`` for p ∝ exp(|o|), which suits the symmetric kernels
            ``"quadratic"`` and ``"quartic"``.
        bias: whether logits have a learned offset per class.
        sparse: whether gradients of ``weight`` and ``bias`` are sparse tensors (coalesced) that hold only the rows
            drawn. The optimisers in `manyclass.optim` take them, and torch's SGD, Adagrad and SparseAdam do.
        reduction: ``"mean"`` over the targets that are not ignored, ``"sum"`` or ``"none"``.
        ignore_index: a target to leave out. If all are left out, or the batch is empty, the loss is 0.
        embedding: an ``nn.Embedding(num_classes, in_features)`` whose weight is used: tied input and output weights.
            Its ``sparse`` must equal ``sparse``.
        device: of the parameters.
        dtype: of the parameters. Logits and losses are computed in float32 at least, also under autocast.
        sampler_options: what the named sampler takes, such as ``counts=`` for ``"unigram"``, ``pairs=`` for
            ``"bigram"``, ``alpha=`` for ``"quadratic"``, ``own=`` for ``"blocks"``: negatives of each example alone.

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
        tolerance: float | None = None,
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
        if num_samples is not None and tolerance is not None:
            raise ValueError(f"give num_samples={num_samples} or tolerance={tolerance}, not both")
        if tolerance is not None and not 0 < tolerance < math.inf:
            raise ValueError(f"tolerance must be positive, in nats, got {tolerance}")
        self.tolerance = tolerance
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
        # The sampler's own negatives grow and shrink with `num_samples`, in this proportion.
        self._own_share = getattr(self.sampler, "own", 0) / self.num_samples
        if tolerance is not None:
            self.register_buffer("adapted_samples", torch.tensor(0))
            self.register_buffer("bias_product", torch.full((), math.nan, dtype=torch.float64))
            self._set_samples(FIRST_SAMPLES)
        # For `diagnostics`: the last batch, when the last step began, and the time that it sampled.
        self._last: tuple[Tensor, Tensor, Tensor | None] | None = None
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
    def topk(self, input: Tensor, k: int, *, probe: int | None = None) -> tuple[Tensor, Tensor]:
        """The ``k`` most probable classes, best first: log probabilities and ids, both ``(*batch, k)``.

        Scores all classes in chunks, so memory stays bounded. With ``probe`` and the sampler ``"blocks"`` it scores
        only the classes of the ``probe`` blocks that its tree leads to: O(probe · d · log n) per query. Some of the
        best classes may then be missing, and the log probabilities rest on an estimate of the partition function.
        """
        query = self._check_input(input)
        if probe is not None:
            return self._probe(query, k, probe)
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

    def _probe(self, query: Tensor, k: int, probe: int) -> tuple[Tensor, Tensor]:
        if not isinstance(self.sampler, samplers.Blocks):
            kind = type(self.sampler).__name__
            raise ValueError(f"probe needs sampler='blocks', which keeps a tree of the classes; this one is {kind}")
        self._attach_sampler()
        with full_precision(query):
            found = self.sampler.search(query, k, probe)
        outputs, log_total = found.outputs.to(query.dtype), found.log_total.to(query.dtype)
        return outputs - log_total.unsqueeze(-1), found.ids

    def _sampled_losses(
        self, query: Tensor, target: Tensor, context: Tensor | None, generator: torch.Generator | None
    ) -> Tensor:
        """Sampled softmax loss of each example: query ``(batch, in_features)``, target ``(batch,)`` → ``(batch,)``."""
        with torch.no_grad():
            self._begin_step(query, target, context)
        losses, drawn_for, draw = self._sampled(query, target, context, generator)
        started = time.perf_counter()
        with torch.no_grad():
            self.sampler.observe(drawn_for.detach())
            self._touch_drawn(target, draw)
        self._sampling += time.perf_counter() - started
        return losses

    def _begin_step(self, query: Tensor, target: Tensor, context: Tensor | None) -> None:
        """Bring the sampler and the number of negatives up to date, and remember the batch."""
        self._time_step()
        self._refresh_sampler()
        self._last = (query.detach(), target, context)
        if self.tolerance is not None and self._size_of_batch():
            self._adapt(self.tolerance)

    def _sampled(
        self, query: Tensor, target: Tensor, context: Tensor | None, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor, samplers.Draw]:
        """Losses ``(batch,)`` with negatives that are drawn now; the queries they were drawn for; and the draw."""
        with torch.no_grad():
            draw = self.sampler.draw(query, self.num_samples, exclude=target, context=context, generator=generator)
        self._sampling = time.perf_counter() - self._began
        options = {"prediction": self.prediction, "sparse": self.sparse}
        return fused.sampled_loss(query, *self._tables(), target, draw, **options)[0], query, draw

    def _tables(self) -> tuple[Tensor, Tensor | None]:
        return self.weight, None if self.bias_embedding is None else self.bias_embedding.weight

    def _touch_drawn(self, target: Tensor, draw: samplers.Draw) -> None:
        if self._touched is not None:
            self._touched += [target, draw.classes()]

    def _refresh_sampler(self) -> None:
        """Let an adaptive sampler follow the weights: the rows that the last steps touched, or all of them."""
        step = int(self.step)
        self.step += 1
        sampler = self.sampler
        if not sampler.adaptive:
            return
        sweeps = isinstance(sampler, samplers.Blocks)  # finds by itself what changed unseen
        if not sampler.incremental or self._touched is None or (step % REFRESH_ALL == 0 and not sweeps):
            sampler.update(self.weight, bias=self.bias)
        elif self._tracked() or sweeps:
            sampler.update(self.weight, self.get_extra_state(), bias=self.bias)
        elif step % REFRESH_UNTRACKED == 0:
            sampler.update(self.weight, bias=self.bias)
        self._touched = []

    def refresh(self) -> None:
        """Bring all statistics of an adaptive sampler up to date with the class weights, O(n·d·log n).

        Training does this in passing. Call it after you have changed weights yourself, or once before serving with
        ``topk(…, probe=…)``.
        """
        self.sampler.update(self.weight, bias=self.bias)
        self._touched = []

    def _attach_sampler(self) -> None:
        """Let the tree of blocks see the weights, which may have been loaded or made since the last step."""
        if self._touched is None:
            self.refresh()
        self.sampler.attach(self.weight, self.bias)  # pyright: ignore[reportCallIssue]

    def diagnostics(self, examples: int = MEASURED) -> Diagnostics:
        """Measure what the last training step paid for sampling; see `Diagnostics`.

        Computes the exact loss of some examples of the last batch, at even distances, over all classes, and draws for
        them afresh a few times, with the present class weights. Costs O(examples · n · d). Changes nothing.
        """
        checks.positive_int("examples", examples)
        if not self._size_of_batch():
            raise ValueError("diagnostics need a training step with at least one target before them")
        found = self._measure(examples, DRAWS)
        sampler = self.sampler
        untracked = isinstance(sampler, samplers.KernelTree) and not self._tracked()
        return Diagnostics(
            own=getattr(sampler, "own", self.num_samples if sampler.scope == "example" else 0),
            pool=min(self.num_samples, self.num_classes) if sampler.scope == "batch" else 0,
            bias=float(found.difference.mean()),
            bias_error=standard_error(found.difference),
            error=float(found.difference.square().mean().sqrt()),
            gradient_error=float(found.gradient.square().mean().sqrt()),
            stale_steps=(int(self.step) - 1) % REFRESH_UNTRACKED if untracked else sampler.staleness(),
            sampling_share=self._share,
        )

    def _size_of_batch(self) -> int:
        return 0 if self._last is None else len(self._last[0])

    def _measure(self, examples: int, draws: int) -> Measured:
        """Sampled against exact losses of some examples of the last batch."""
        assert self._last is not None
        every = max(1, math.ceil(len(self._last[0]) / examples))
        query, target, context = (None if part is None else part[::every].contiguous() for part in self._last)
        assert query is not None
        assert target is not None
        generator = torch.Generator(query.device).manual_seed(int(self.step))  # not that of training
        sampling = self._sampling
        if isinstance(self.sampler, samplers.Blocks):
            self.sampler.attach(self.weight, self.bias)
        with full_precision(query):
            found = measure(
                query,
                lambda query: self._exact_losses(query, target),
                lambda query: self._sampled(query, target, context, generator)[0],
                draws,
            )
        self._sampling = sampling
        return found

    def _adapt(self, tolerance: float) -> None:
        """Draw more or fewer from this step on, as the measured bias asks for."""
        step, batch = int(self.step), self._size_of_batch()
        work = batch * (self.num_samples + getattr(self.sampler, "own", 0)) * 3
        # Multiplications per column, forward and backward. Powers of two: few multiples also while samples change.
        every = 1 << max(0, math.ceil(math.log2(3 * MEASURED * self.num_classes / work / MEASURING)))
        if step > 4 and step % every:
            return
        product = -steady_bias(self._measure(MEASURED, 2).difference) * self.num_samples
        if not math.isfinite(product):
            return
        old = float(self.bias_product)
        # The bias falls about as 1/num_samples: their product is what is averaged.
        mean = product if math.isnan(old) else old + ADAPT_WEIGHT * (product - old)
        self.bias_product.fill_(mean)
        highest = max(FEWEST_SAMPLES, min(self.num_classes, functional.MAX_LOGITS // batch))
        wanted = max(self.num_samples / 2, min(2 * self.num_samples, mean / tolerance))
        self._set_samples(max(min(FEWEST_SAMPLES, self.num_classes), min(highest, round(wanted))))

    def _set_samples(self, number: int) -> None:
        self.num_samples = number
        self.adapted_samples.fill_(number)
        if isinstance(self.sampler, samplers.Blocks):
            self.sampler.own = max(1, round(self._own_share * number))

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
        if self.tolerance is not None:
            self._set_samples(int(self.adapted_samples))

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
            f"tolerance={self.tolerance}, prediction={self.prediction!r}, bias={self.bias_embedding is not None}, "
            f"sparse={self.sparse}, reduction={self.reduction!r}"
        )
