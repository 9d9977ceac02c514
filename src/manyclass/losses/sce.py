"""Scalable cross entropy: hard negatives of the batch, from buckets of queries and classes."""

import math
from typing import Any

import torch
from torch import Tensor

from .. import checks, functional
from ..diagnostics import DRAWS, MEASURED, Diagnostics, Monitor, measure
from ..head import Head, full_precision
from ..rows import select_rows
from .base import refuse


class ScalableCrossEntropy(Head):
    """Compare each query with the classes of its buckets only: those that some random direction ranks highest.

    Each bucket is a random combination of the batch's queries. It takes the ``bucket_queries`` queries and the
    ``bucket_classes`` classes with the largest products with it, without gradients. The loss of a query is the largest
    over its buckets of ``−o_y + ln(exp(o_y) + Σ_{i in bucket, i ≠ y} exp(o_i))``; a query in no bucket has the loss 0.
    The mean is over all queries; the authors' code takes it over those in a bucket, which scales gradients only.
    It is a lower bound of the exact loss, since it lacks the mass of all other classes. So the bias is the log of the
    share of the mass that the bucket holds. It is small only if the predictions of a batch are peaked and alike;
    `diagnostics` measures it. Cost O(n·d) per bucket to rank the classes, O(d) for each pair in a bucket.

    Mezentsev, Gusak, Oseledets and Frolov, Scalable cross-entropy loss for sequential recommendations with large item
    catalogs (RecSys 2024).

    Args:
        in_features: size of the query, d.
        num_classes: n, at least 2.
        buckets: number of buckets; default: about 2·√batch, as in the paper.
        bucket_queries: queries of a bucket; default: as many.
        bucket_classes: classes of a bucket.
        sparse: whether gradients of ``weight`` and ``bias`` are sparse tensors.
        options: as in `FullSoftmax`, without ``classes``, ``cosine`` and ``shard``.
    """

    several_targets = False

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        buckets: int | None = None,
        bucket_queries: int | None = None,
        bucket_classes: int = 256,
        sparse: bool = True,
        **options: Any,
    ) -> None:
        refuse(self, options)
        super().__init__(in_features, num_classes, sparse=sparse, **options)
        self.buckets = None if buckets is None else checks.positive_int("buckets", buckets)
        if bucket_queries is not None:
            checks.positive_int("bucket_queries", bucket_queries)
        self.bucket_queries = bucket_queries
        self.bucket_classes = min(checks.positive_int("bucket_classes", bucket_classes), num_classes)
        self.monitor = Monitor()

    def _training_losses(
        self, query: Tensor, target: Tensor, context: Tensor | None, generator: torch.Generator | None
    ) -> Tensor:
        if not len(query):
            return query.sum(dim=-1)
        self.monitor.begin(query.detach(), target, None)
        return self._bucket_losses(query, target, generator)

    def _bucket_losses(self, query: Tensor, target: Tensor, generator: torch.Generator | None) -> Tensor:
        """Return the largest loss of each query over its buckets, ``(batch,)``; the buckets are drawn now."""
        weight, bias = self.weight, self._offsets()
        usual = math.ceil(2 * math.sqrt(len(query)))
        with torch.no_grad():
            mix = torch.randn(self.buckets or usual, len(query), generator=generator, device=query.device)
            centre = mix.to(query.dtype) @ query
            members = (centre @ query.T).topk(min(self.bucket_queries or usual, len(query)), dim=-1).indices
            classes = functional.topk(centre, weight, self.bucket_classes, bias)[1]
        rows, place = torch.cat([target, classes.flatten()]).unique(return_inverse=True)
        positives, places = place[: len(target)], place[len(target) :].view(classes.shape)
        drawn = select_rows(weight, rows, self.sparse).to(query.dtype)
        positive = (query * drawn[positives]).sum(dim=-1)
        logits = torch.einsum("bqd,bcd->bqc", query[members], drawn[places])
        if bias is not None:
            shift = select_rows(bias, rows, self.sparse).to(query.dtype)
            positive, logits = positive + shift[positives], logits + shift[places].unsqueeze(1)
        positive, logits = (functional.output(part, self.prediction) for part in (positive, logits))
        own = positive[members].unsqueeze(-1)
        logits = logits.masked_fill(classes.unsqueeze(1) == target[members].unsqueeze(-1), -math.inf)
        losses = torch.cat([own, logits], dim=-1).logsumexp(dim=-1) - own.squeeze(-1)
        # A query in no bucket keeps the 0 of its place, without a gradient.
        return torch.zeros_like(positive).scatter_reduce(0, members.flatten(), losses.flatten(), "amax")

    @torch.inference_mode(False)  # gradients are compared, too
    def diagnostics(self, examples: int = MEASURED) -> Diagnostics:
        """Measure how far the losses of the last batch are from the exact ones; see `Diagnostics`.

        Draws new buckets of the whole batch, with the present class weights, and compares some of its examples, evenly
        spaced. Costs O(examples · n · d), and some training steps. Changes nothing.
        """
        checks.positive_int("examples", examples)
        if not self.monitor.size():
            raise ValueError("diagnostics need a training step with at least one target before them")
        query, target, _ = self.monitor.some(self.monitor.size())
        rows = torch.arange(0, len(query), math.ceil(len(query) / examples), device=query.device)
        generator = torch.Generator(query.device).manual_seed(0)  # not that of training
        with full_precision(query):
            measured = measure(
                query[rows],
                lambda some: self._exact_losses(some, target[rows], self._tables()),
                lambda some: self._bucket_losses(query.index_copy(0, rows, some), target, generator)[rows],
                DRAWS,
            )
        return measured.diagnostics(self.bucket_classes, 0, stale_steps=0.0, sampling_share=math.nan)
