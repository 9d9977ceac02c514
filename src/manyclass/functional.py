"""The mathematics of full and sampled softmax: pure functions, no state.

``prediction`` selects p ∝ exp(o) (``"softmax"``) or p ∝ exp(|o|) (``"absolute"``, Section 3.3 of the paper) everywhere.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from . import checks, chunks

__all__ = ["cosine_softmax_loss", "full_softmax_loss", "log_partition", "log_prob", "sampled_softmax_loss", "topk"]

PREDICTIONS = ("softmax", "absolute")
REDUCTIONS = ("none", "mean", "sum")

#: Maps the output of a target to a smaller one.
Margin = Callable[[Tensor], Tensor]

# Replaces −inf where the gradient of an empty sum must be finite.
LOWEST = -1e30


def output(logits: Tensor, prediction: str = "softmax") -> Tensor:
    """Map raw logits ``o`` to what enters the exponential: ``o`` or ``|o|``. Shape is kept."""
    return logits.abs() if prediction == "absolute" else logits


def reduce(losses: Tensor, reduction: str = "mean") -> Tensor:
    """Reduce per-example ``losses`` as in PyTorch, but the mean of no examples is 0, not NaN."""
    checks.one_of("reduction", reduction, REDUCTIONS)
    if reduction == "none":
        return losses
    return losses.mean() if reduction == "mean" and losses.numel() else losses.sum()


def sampled_softmax_loss(
    positive_logits: Tensor,  # shape: (*batch)
    negative_logits: Tensor,  # shape: (*batch, num_samples)
    log_count: Tensor,  # shape: (*batch, num_samples), or anything that broadcasts to it
    reduction: str = "mean",
    *,
    prediction: str = "softmax",
) -> Tensor:
    """Compute the sampled softmax loss, eq. 2 and 3 of the paper.

    ``loss = −o_y + log(exp(o_y) + Σ_k exp(o_k − log_count_k))``, where ``log_count`` is the log of the expected
    number of times that the negative enters the sample, ``ln(m·q)`` for ``m`` draws with replacement from ``q``.
    A slot with ``log_count = +inf`` is empty. O(num_samples) per example.

    Shape:
        - Output: scalar, or ``(*batch)`` if ``reduction="none"``.
    """
    checks.one_of("prediction", prediction, PREDICTIONS)
    arguments = {"positive_logits": positive_logits, "negative_logits": negative_logits, "log_count": log_count}
    for name, value in arguments.items():
        checks.same_device(name, checks.floating(name, value), "positive_logits", positive_logits)
    if negative_logits.shape[:-1] != positive_logits.shape or negative_logits.dim() == 0:
        raise ValueError(
            f"negative_logits must have shape (*batch, num_samples) with batch = {tuple(positive_logits.shape)}, "
            f"the shape of positive_logits; got {tuple(negative_logits.shape)}"
        )
    sizes = zip(reversed(log_count.shape), reversed(negative_logits.shape), strict=False)
    if log_count.dim() > negative_logits.dim() or any(own not in (1, size) for own, size in sizes):
        raise ValueError(
            f"log_count must broadcast to {tuple(negative_logits.shape)}, the shape of negative_logits; "
            f"got {tuple(log_count.shape)}"
        )
    positive = output(positive_logits, prediction)
    corrected = output(negative_logits, prediction) - log_count
    log_partition = torch.cat([positive.unsqueeze(-1), corrected], dim=-1).logsumexp(dim=-1)
    return reduce(log_partition - positive, reduction)


def full_softmax_loss(
    query: Tensor,  # shape: (*batch, in_features)
    weight: Tensor,  # shape: (num_classes, in_features)
    target: Tensor,  # shape: (*batch), or (*batch, k) padded with −1
    bias: Tensor | None = None,  # shape: (num_classes,)
    reduction: str = "mean",
    *,
    prediction: str = "softmax",
    margin: Margin | None = None,
) -> Tensor:
    """Cross entropy of the softmax over all classes, ``log Σ_i exp(o_i) − o_y``.

    Equals ``F.linear_cross_entropy(query, weight, target)``, but never holds more than ``MAX_LOGITS`` logits, also
    when gradients are needed: chunks of classes are recomputed in the backward pass. O(num_classes · in_features).

    Several targets of one example have one loss each, ``log(exp(o_y) + Σ_i exp(o_i)) − o_y``, where the sum leaves out
    all of its targets. A ``margin`` maps ``o_y`` to what takes its place in both terms.

    Shape:
        - Output: scalar, or the shape of ``target`` if ``reduction="none"``, with 0 for padding.
    """
    _check_arguments(query, weight, bias, prediction)
    several = isinstance(target, Tensor) and target.dim() == query.dim()
    target = checks.indices(
        "target", target, len(weight), batch_of=query, several=several, ignore=-1 if several else None
    )
    labels = target if several else target.unsqueeze(-1)
    positive = positive_outputs(query, weight, bias, labels, prediction)
    if margin is None and not several:
        return reduce(log_partition(query, weight, bias, prediction=prediction) - positive.squeeze(-1), reduction)
    positive = positive if margin is None else margin(positive)
    rest = log_partition(query, weight, bias, prediction=prediction, exclude=labels).unsqueeze(-1)
    losses = F.softplus(rest - positive, threshold=50.0).where(labels >= 0, 0.0)
    return losses.reshape(target.shape) if reduction == "none" else reduce(losses[labels >= 0], reduction)


def cosine_softmax_loss(
    query: Tensor,  # shape: (*batch, in_features)
    weight: Tensor,  # shape: (num_classes, in_features)
    target: Tensor,  # shape: (*batch), or (*batch, k) padded with −1
    scale: float | Tensor,
    reduction: str = "mean",
    *,
    margin: Margin | None = None,
) -> Tensor:
    """Compute `full_softmax_loss` of logits ``scale · cos(query, class)``; ``margin`` maps target cosines.

    What a layer with ``cosine=Cosine(scale, margin=…)`` estimates in training.
    """
    _check_arguments(query, weight, None, "softmax")
    shifted = None if margin is None else lambda logits: margin(logits / scale) * scale
    query, weight = F.normalize(query, dim=-1) * scale, F.normalize(weight, dim=-1)
    return full_softmax_loss(query, weight, target, None, reduction, margin=shifted)


def positive_outputs(query: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, prediction: str) -> Tensor:
    """Return outputs of the classes ``labels (*batch, k)`` for queries ``(*batch, in_features)``; −1 is any class."""
    positive = (query.unsqueeze(-2) * weight[labels].to(query.dtype)).sum(dim=-1)
    return output(positive if bias is None else positive + bias[labels].to(query.dtype), prediction)


def log_partition(
    query: Tensor,  # shape: (*batch, in_features)
    weight: Tensor,  # shape: (num_classes, in_features)
    bias: Tensor | None = None,  # shape: (num_classes,)
    *,
    prediction: str = "softmax",
    exclude: Tensor | None = None,  # shape: (*batch, k), −1 for none
) -> Tensor:
    """Compute the log-partition ``log Σ_i exp(o_i)``, shape ``(*batch)``, in chunks of bounded memory.

    The sum leaves out the classes in ``exclude``.
    """
    _check_arguments(query, weight, bias, prediction)

    def part(query: Tensor, weight: Tensor, bias: Tensor | None, hidden: Tensor | None) -> Tensor:
        outputs = output(linear(query, weight, bias), prediction)
        if hidden is not None:  # a further column collects classes of other chunks
            place = hidden.where((hidden >= 0) & (hidden < len(weight)), len(weight))
            outputs = F.pad(outputs, (0, 1)).scatter(-1, place, LOWEST)[:, :-1]
        return outputs.logsumexp(dim=-1)

    result, queries = [], chunks.of_queries(query)
    excluded = [None] * len(queries) if exclude is None else chunks.of_queries(exclude)
    for rows, hidden in zip(queries, excluded, strict=True):
        pieces = chunks.of_classes(rows.shape[0], weight, bias)
        # Recomputing a chunk in the backward pass is what bounds the memory when gradients are needed.
        run = part if len(pieces) == 1 else partial(checkpoint, part, use_reentrant=False)
        parts = [run(rows, w, b, None if hidden is None else hidden - first) for first, w, b in pieces]
        result.append(torch.stack(cast(list[Tensor], parts)).logsumexp(dim=0))
    return torch.cat(result).reshape(query.shape[:-1])


def topk(
    query: Tensor,  # shape: (*batch, in_features)
    weight: Tensor,  # shape: (num_classes, in_features)
    k: int,
    bias: Tensor | None = None,  # shape: (num_classes,)
    *,
    prediction: str = "softmax",
) -> tuple[Tensor, Tensor]:
    """Return the ``k`` classes with the largest outputs, best first, in chunks of bounded memory.

    Returns the outputs (after ``|·|`` if absolute) and the class ids, both of shape ``(*batch, k)``.
    """
    return best(query, weight, k, bias, prediction, normalise=False)[:2]


def best(
    query: Tensor, weight: Tensor, k: int, bias: Tensor | None, prediction: str, *, normalise: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `topk` and `log_partition` return, from one pass over the classes; −inf without ``normalise``."""
    _check_arguments(query, weight, bias, prediction)
    checks.positive_int("k", k)
    if k > weight.shape[0]:
        raise ValueError(f"k must be at most num_classes = {weight.shape[0]}, got {k}")
    parts = []
    for rows in chunks.of_queries(query):
        top, total = rows.new_empty(rows.shape[0], 0), rows.new_full(rows.shape[:1], -math.inf)
        ids = torch.empty_like(top, dtype=torch.long)
        for first, w, b in chunks.of_classes(rows.shape[0], weight, bias):
            logits = output(linear(rows, w, b), prediction)
            value, position = logits.topk(min(k, logits.shape[-1]), dim=-1)
            ids = torch.cat([ids, position + first], dim=-1)
            top, position = torch.cat([top, value], dim=-1).topk(min(k, ids.shape[-1]), dim=-1)
            ids = ids.gather(-1, position)
            total = torch.logaddexp(total, logits.logsumexp(dim=-1)) if normalise else total
        parts.append((top, ids, total))
    batch = query.shape[:-1]
    top, ids, total = (torch.cat(part) for part in zip(*parts, strict=True))
    return top.reshape(*batch, k), ids.reshape(*batch, k), total.reshape(batch)


def log_prob(
    query: Tensor,  # shape: (*batch, in_features)
    weight: Tensor,  # shape: (num_classes, in_features)
    bias: Tensor | None = None,  # shape: (num_classes,)
    *,
    prediction: str = "softmax",
) -> Tensor:
    """Return the log probability of every class (eq. 1), shape ``(*batch, num_classes)``."""
    _check_arguments(query, weight, bias, prediction)
    return output(linear(query, weight, bias), prediction).log_softmax(dim=-1)


def _check_arguments(query: Tensor, weight: Tensor, bias: Tensor | None, prediction: str) -> None:
    """Check types, shapes and devices, but no values, which would cost a pass over them."""
    checks.one_of("prediction", prediction, PREDICTIONS)
    checks.tables(weight, bias)
    if checks.floating("query", query).dim() == 0 or query.shape[-1] != weight.shape[1]:
        raise ValueError(f"query must have shape (*batch, {weight.shape[1]}), got {tuple(query.shape)}")
    checks.same_device("query", query, "weight", weight)


def linear(query: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return logits ``(*batch, num_classes)`` in the precision of the query, not of the parameters."""
    return F.linear(query, weight.to(query.dtype), None if bias is None else bias.to(query.dtype))
