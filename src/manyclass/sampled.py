"""The output layer that trains on a sample of the classes."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from . import checks, importance, samplers
from .budget import Budget
from .cosine import Cosine
from .counters import Counters
from .diagnostics import DRAWS, MEASURED, Diagnostics, Measured, Monitor, each, measure
from .head import full_precision
from .loading import Resumable
from .shard import Shard


class SampledSoftmax(Counters, Resumable):
    """A linear layer and its cross entropy over many classes, trained on a sample of them.

    In training, `forward` returns the sampled softmax loss with corrected logits (eq. 2 of the paper): each example is
    compared with its positive class and some negatives. In ``eval()`` it returns the exact loss over all classes.
    It takes the place of `torch.nn.LinearCrossEntropyLoss`.

    Args:
        in_features: size of the query, d.
        num_classes: n, at least 2.
        sampler: a name, a subclass of `samplers.Sampler`, or an object of one. `samplers.table` lists the names.
        num_samples: m, the number of sampled negatives that every example is compared with. The default is 64 if the
            sampler draws per example. It is 4096 if the scope is ``"batch"``: one draw that the batch shares.
            Some samplers add the negatives of an option, such as ``own`` of ``"blocks"``.
        tolerance: instead of ``num_samples``: the largest bias of the loss in nats, such as 0.02. The layer measures
            its bias (see `diagnostics`) as it trains, and adapts ``num_samples`` and the sampler's ``own``.
        prediction: ``"softmax"`` for p ∝ exp(o). ``"absolute"`` for p ∝ exp(|o|), which suits the symmetric kernels
            ``"quadratic"`` and ``"quartic"``.
        bias: whether logits have a learned offset per class.
        sparse: whether gradients of ``weight`` and ``bias`` are coalesced sparse tensors of the drawn rows. The
            optimisers in `manyclass.optim` take them, and so do torch's SGD, Adagrad and SparseAdam.
        reduction: ``"mean"`` over the targets that are not ignored, ``"sum"`` or ``"none"``.
        ignore_index: a target to leave out. If all are left out, or the batch is empty, the loss is 0.
        embedding: an ``nn.Embedding(num_classes, in_features)`` whose weight is used: tied input and output weights.
            Its ``sparse`` must equal ``sparse``.
        classes: instead of a table: a module that maps class ids ``(k,)`` to embeddings ``(k, in_features)``, such as
            an item tower. A step encodes each of its targets and negatives once. The sampler, ``eval()``, `log_prob`
            and `topk` read a cache of the last known embeddings, which `refresh` brings up to date.
        chunk_size: how many classes ``classes`` encodes at a time. The backward pass encodes each chunk again, to save
            memory.
        cosine: a `Cosine`: logits are cosines times a scale, with a margin in training if it has one.
        device: of the parameters.
        dtype: of the parameters; with ``classes``, of the cache. Logits and losses are computed in float32 at least,
            also under autocast.
        shard: the classes that this process holds; default: all of them.
        validate: whether to check the values of arguments. On devices other than the CPU the host waits for the check.
        sampler_options: options of a sampler given by name or class; `samplers.options` lists them.

    Shape:
        - Input: ``(*batch, in_features)``
        - Target: ``(*batch)``, integer, in ``[0, num_classes)`` or ``ignore_index``. Or ``(*batch, k)``: one loss per
          target. None of an example's targets is a negative for it.
        - Output: scalar, or the shape of the target if ``reduction="none"``

    Example:
        >>> head = SampledSoftmax(64, 100_000)
        >>> head(torch.randn(32, 64), torch.randint(100_000, (32,))).backward()
    """

    counters = ("step",)

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        sampler: str | type[samplers.Sampler] | samplers.Sampler = "blocks",
        num_samples: int | None = None,
        *,
        tolerance: float | None = None,
        prediction: str = "softmax",
        bias: bool = False,
        sparse: bool = True,
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
        **sampler_options: Any,
    ) -> None:
        checks.refused_options(sampler_options)
        super().__init__(
            in_features,
            num_classes,
            prediction=prediction,
            bias=bias,
            sparse=sparse,
            reduction=reduction,
            ignore_index=ignore_index,
            embedding=embedding,
            classes=classes,
            chunk_size=chunk_size,
            cosine=cosine,
            device=device,
            dtype=dtype,
            shard=shard,
            validate=validate,
        )
        options = {"prediction": prediction, "bias": bias, **sampler_options}
        with torch.device("cpu"):  # on the meta device counts and other data of the sampler would be lost
            sampler = samplers.resolve(sampler, num_classes, in_features, self.shard.part(), **options)
        self.sampler = sampler if self.weight.is_meta else sampler.to(self.weight.device)
        self.sampler.validate = validate
        self.budget = Budget(sampler, num_samples, tolerance, self.shard.ranks)
        self.step = 0  #: Training steps so far.
        self.monitor = Monitor()
        self._install_hooks()

    @property
    def num_samples(self) -> int:
        """Negatives of each example, or of the pool."""
        return self.budget.number

    @num_samples.setter
    def num_samples(self, number: int) -> None:
        self.budget.number = checks.positive_int("num_samples", number)

    @property
    def tolerance(self) -> float | None:
        """The bias in nats that the layer may have; None for a fixed number of negatives."""
        return self.budget.tolerance

    def _training_losses(
        self, query: Tensor, target: Tensor, context: Tensor | None, generator: torch.Generator | None
    ) -> Tensor:
        again = torch._C._current_graph_task_id() != -1  # torch.utils.checkpoint runs a step again in its backward pass
        if not again:
            with torch.no_grad():
                self._begin_step(query, target, context)
        return self._sampled_losses(query, target, context, generator, observe=not again)

    def _begin_step(self, query: Tensor, target: Tensor, context: Tensor | None) -> None:
        """Bring the sampler and the number of negatives up to date, and keep the batch for `diagnostics`."""
        self.monitor.begin(query.detach(), target, context)
        self.sampler.begin(target)
        if self.cache is not None:
            self.follower.told(self.cache.advance(self._known, self._sources()), self.weight)
        changed = self.follower.follow(self.sampler, self.weight, self.bias, self.step, self._tracked())
        self.step += 1
        if self.tolerance is not None and self.shard.total(int(changed)):  # all ranks measure, or none
            batch = self.shard.total(len(query))
            self.budget.adapt(self.sampler, self._measure, self.step, batch, self.num_classes)

    def _sampled_losses(
        self,
        query: Tensor,
        target: Tensor,
        context: Tensor | None,
        generator: torch.Generator | None,
        *,
        observe: bool = False,
        encode: bool = True,
    ) -> Tensor:
        """Draw negatives and compute the losses of the targets; ``encode=False`` reads embeddings from the cache."""
        examples = self.shard.gather(query, target, context)
        with torch.no_grad():
            seen = examples._replace(query=examples.query.detach())
            draw = self.shard.draw(self.sampler, seen, self.num_samples, generator)
            if observe:
                self.sampler.observe(seen.query, seen.target)
                self.monitor.sampled()
        noted = encode and self.sparse and self.shard.sole_source()
        note = importance.noting([self.embedding, self.bias_embedding]) if noted else None
        loss, positive = self._scored(examples.query, examples.target, draw, self._exchange, encode, note)
        return self.shard.combine(loss, positive, examples.rows)

    def _exchange(self, rows: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        rows, values = self.shard.mean_rows(rows, values)
        self.follower.touch(rows, self.weight)
        return rows, values

    def _tracked(self) -> bool:
        """Return whether only rows that get a gradient here can change."""
        cached = self.cache is not None and self.bias_embedding is None
        return cached or (self.sparse and not self.tied and self.shard.sees_all_gradients())

    def refresh(self) -> None:
        """Bring all statistics of an adaptive sampler up to date with the class weights, O(n·d·log n).

        With ``classes`` it first encodes all classes. Training refreshes gradually. Call this after changing weights
        outside of training, before ``topk(…, probe=…)`` serves, and with ``classes`` before eval, export or compile.
        """
        super().refresh()
        self.follower.refresh(self.sampler, self.weight, self.bias)

    @torch.no_grad()
    def topk(self, input: Tensor, k: int, *, probe: int | None = None) -> tuple[Tensor, Tensor]:
        """Return the ``k`` most probable classes, best first: log probabilities and ids, both ``(*batch, k)``.

        Scores all classes in chunks, so memory stays bounded. With ``probe`` and the sampler ``"blocks"`` it scores
        only the classes of the ``probe`` blocks that its tree leads to: O(probe · d · log n) per query. Some of the
        best classes may then be missing, and the log probabilities rest on an estimate of the partition function.
        """
        if probe is None:
            return super().topk(input, k)
        if self.shard.ranks > 1:
            raise ValueError("probe must be None: a sharded layer scores all classes")
        query = self._check_input(input)
        if self.follower.touched is None:
            self.refresh()
        self._fresh_tables()
        self.sampler.attach(self.weight, self.bias, self.follower.unseen(self.weight))
        with full_precision(query):
            found = self.sampler.search(query, k, probe)
        return (found.outputs - found.log_total.unsqueeze(-1)).to(query.dtype), found.ids

    def diagnostics(self, examples: int = MEASURED) -> Diagnostics:
        """Measure bias, error and cost of sampling in the last training step; see `Diagnostics`.

        Computes the exact loss of some examples of the last batch, evenly spaced, with the present class weights, and
        compares it with new draws. Costs O(examples · n · d). Changes no state. All ranks of a sharded layer have to
        call it together, and get the same result.
        """
        checks.positive_int("examples", examples)
        if not self.shard.total(self.monitor.size()):
            raise ValueError("diagnostics need a training step with at least one target before them")
        own, pool = self.sampler.numbers(self.num_samples)
        return self._measure(examples, DRAWS).diagnostics(
            own=self.shard.total(own) if pool else own,
            pool=pool if self.sampler.replacement else min(pool, self.num_classes),
            stale_steps=self.follower.behind + self.sampler.staleness() + self._age(),
            sampling_share=self.monitor.share,
        )

    @torch.inference_mode(False)  # gradients are compared, too
    def _measure(self, examples: int, draws: int) -> Measured:
        """Compare sampled and exact losses on some examples of the last batch, with cached embeddings, if any."""
        query, target, context = self.monitor.some(math.ceil(examples / self.shard.ranks))
        generator = torch.Generator(query.device).manual_seed(self.step)  # not that of training
        self.sampler.attach(self.weight, self.bias)
        with full_precision(query):
            found = measure(
                query,
                lambda query: each(self._exact_losses(query, target, self._tables(), self._margin()), target),
                lambda query: each(self._sampled_losses(query, target, context, generator, encode=False), target),
                draws,
            )
        return self.shard.gather_measured(found)
