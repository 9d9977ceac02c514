"""The mathematics of full and sampled softmax: pure functions, no state.

``prediction`` selects p ∝ exp(o) (``"softmax"``) or p ∝ exp(|o|) (``"absolute"``, Section 3.3 of the paper) everywhere.
"""

from collections.abc import Iterable
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from . import checks

__all__ = ["full_softmax_loss", "log_partition", "log_prob", "sampled_softmax_loss", "topk"]

PREDICTIONS = ("softmax", "absolute")
REDUCTIONS = ("none", "mean", "sum")

# Logits that may exist at one time while all classes are scored: 64 MiB in float32.
MAX_LOGITS = 1 << 24
# Queries that are scored together; more would make the chunks of classes too thin for a fast matrix product.
MAX_QUERIES = 4096


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
    """Sampled softmax loss of the paper's eq. 2 and 3.

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
    target: Tensor,  # shape: (*batch)
    bias: Tensor | None = None,  # shape: (num_classes,)
    reduction: str = "mean",
    *,
    prediction: str = "softmax",
) -> Tensor:
    """Cross entropy of the softmax over all classes, ``log Σ_i exp(o_i) − o_y``.

    Equals ``F.linear_cross_entropy(query, weight, target)``, but never holds more than ``MAX_LOGITS`` logits, also
    when gradients are needed: chunks of classes are recomputed in the backward pass. O(num_classes · in_features).

    Shape:
        - Output: scalar, or ``(*batch)`` if ``reduction="none"``.
    """
    _check_arguments(query, weight, bias, prediction)
    target = checks.indices("target", target, len(weight), batch_of=query)
    positive = (query * weight[target].to(query.dtype)).sum(dim=-1)
    if bias is not None:
        positive = positive + bias[target].to(query.dtype)
    log_z = log_partition(query, weight, bias, prediction=prediction)
    return reduce(log_z - output(positive, prediction), reduction)


def log_partition(
    query: Tensor,  # shape: (*batch, in_features)
    weight: Tensor,  # shape: (num_classes, in_features)
    bias: Tensor | None = None,  # shape: (num_classes,)
    *,
    prediction: str = "softmax",
) -> Tensor:
    """Log of the partition function, ``log Σ_i exp(o_i)``, in chunks of bounded memory. Returns shape ``(*batch)``."""
    _check_arguments(query, weight, bias, prediction)

    def part(query: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return output(linear(query, weight, bias), prediction).logsumexp(dim=-1)

    result = []
    for rows in _query_chunks(query):
        chunks = _class_chunks(rows.shape[0], weight, bias)
        if len(chunks) == 1:
            result.append(part(rows, weight, bias))
        else:
            # Recomputing a chunk in the backward pass is what bounds the memory when gradients are needed.
            parts = [cast(Tensor, checkpoint(part, rows, w, b, use_reentrant=False)) for w, b in chunks]
            result.append(torch.stack(parts).logsumexp(dim=0))
    return torch.cat(result).reshape(query.shape[:-1])


def topk(
    query: Tensor,  # shape: (*batch, in_features)
    weight: Tensor,  # shape: (num_classes, in_features)
    k: int,
    bias: Tensor | None = None,  # shape: (num_classes,)
    *,
    prediction: str = "softmax",
) -> tuple[Tensor, Tensor]:
    """The ``k`` classes with the largest outputs, best first, in chunks of bounded memory.

    Returns the outputs (after ``|·|`` if absolute) and the class ids, both of shape ``(*batch, k)``.
    """
    _check_arguments(query, weight, bias, prediction)
    checks.positive_int("k", k)
    if k > weight.shape[0]:
        raise ValueError(f"k must be at most num_classes = {weight.shape[0]}, got {k}")
    values, ids = [], []
    for rows in _query_chunks(query):
        best = rows.new_empty(rows.shape[0], 0)
        best_ids = torch.empty(rows.shape[0], 0, dtype=torch.long, device=rows.device)
        first = 0
        for w, b in _class_chunks(rows.shape[0], weight, bias):
            logits = output(linear(rows, w, b), prediction)
            value, position = logits.topk(min(k, logits.shape[-1]), dim=-1)
            best, best_ids = torch.cat([best, value], dim=-1), torch.cat([best_ids, position + first], dim=-1)
            best, position = best.topk(min(k, best.shape[-1]), dim=-1)
            best_ids = best_ids.gather(-1, position)
            first += w.shape[0]
        values.append(best)
        ids.append(best_ids)
    shape = (*query.shape[:-1], k)
    return torch.cat(values).reshape(shape), torch.cat(ids).reshape(shape)


def log_prob(
    query: Tensor,  # shape: (*batch, in_features)
    weight: Tensor,  # shape: (num_classes, in_features)
    bias: Tensor | None = None,  # shape: (num_classes,)
    *,
    prediction: str = "softmax",
) -> Tensor:
    """Log probability of every class (eq. 1), shape ``(*batch, num_classes)``: the result is as large as it sounds."""
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
    """Logits in the precision of the query, whatever the parameters are stored in: ``(*batch, num_classes)``."""
    return F.linear(query, weight.to(query.dtype), None if bias is None else bias.to(query.dtype))


def _query_chunks(query: Tensor) -> Iterable[Tensor]:
    rows = query.reshape(-1, query.shape[-1])
    return [rows] if torch.compiler.is_exporting() else rows.split(MAX_QUERIES)


def _class_chunks(num_queries: int, weight: Tensor, bias: Tensor | None) -> list[tuple[Tensor, Tensor | None]]:
    """Split the classes so that ``num_queries`` × chunk stays within ``MAX_LOGITS``.

    An exported graph takes any number of queries, so it does not split.
    """
    if torch.compiler.is_exporting():
        return [(weight, bias)]
    size = max(1, MAX_LOGITS // max(1, num_queries))
    weights = weight.split(size)
    return list(zip(weights, [None] * len(weights) if bias is None else bias.split(size), strict=True))
