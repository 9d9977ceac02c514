"""Work over all classes in pieces of bounded memory."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

# Numbers that a piece may have, such as logits: 64 MiB in float32.
MAX_LOGITS = 1 << 24
# Queries that are scored together. More would leave chunks with too few classes for a fast matrix product.
MAX_QUERIES = 4096


def of_queries(query: Tensor) -> Sequence[Tensor]:
    """Flatten queries ``(*batch, in_features)`` to rows, and split them."""
    rows = query.reshape(math.prod(query.shape[:-1]), query.shape[-1])  # −1 would be ambiguous without columns
    return [rows] if torch.compiler.is_exporting() else rows.split(MAX_QUERIES)


def of_classes(num_queries: int, weight: Tensor, bias: Tensor | None) -> list[tuple[int, Tensor, Tensor | None]]:
    """Split the classes so that ``num_queries`` × chunk stays within ``MAX_LOGITS``; each with its first class.

    An exported graph takes any number of queries, so it does not split.
    """
    if torch.compiler.is_exporting():
        return [(0, weight, bias)]
    size = max(1, MAX_LOGITS // max(1, num_queries))
    offsets = [None] * math.ceil(len(weight) / size) if bias is None else bias.split(size)
    return list(zip(range(0, len(weight), size), weight.split(size), offsets, strict=True))
