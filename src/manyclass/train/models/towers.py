"""Class embeddings from attributes: a network on categories, numbers and bags of hashed features."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

#: Largest first value of an embedding of a hashed feature: a class has the mean of many.
SPREAD = 0.5


class Attributes(NamedTuple):
    """The attributes of each class. Columns are numbered together, and so are buckets."""

    #: Values of categories, shape ``(num_classes, columns)``, in ``[0, num_values)``.
    categories: Tensor
    num_values: int
    #: Shape ``(num_classes, columns)``.
    numbers: Tensor
    #: For each text: hashed features, shape ``(total,)``, and where those of a class begin, ``(num_classes + 1,)``.
    bags: Sequence[tuple[Tensor, Tensor]]
    buckets: int


class Bag(nn.Module):
    """The mean of the embeddings of each class's hashed features.

    Args:
        values: features of all classes, one class after the other, shape ``(total,)``, in ``[0, buckets)``.
        offsets: where those of a class begin, shape ``(num_classes + 1,)``.
        buckets: number of features.
        features: size of an embedding.
    """

    values: Tensor
    offsets: Tensor

    def __init__(self, values: Tensor, offsets: Tensor, buckets: int, features: int) -> None:
        super().__init__()
        self.register_buffer("values", values, persistent=False)
        self.register_buffer("offsets", offsets, persistent=False)
        self.embedding = table(buckets, features, SPREAD)

    def forward(
        self,
        ids: Tensor,  # shape: (k,)
    ) -> Tensor:
        """Return means ``(k, features)``; zero for a class without features."""
        starts = self.offsets[ids]
        sizes = self.offsets[ids + 1] - starts
        offsets = sizes.cumsum(0) - sizes
        places = torch.repeat_interleave(starts - offsets, sizes)
        found = self.values[places + torch.arange(len(places), device=ids.device)].long()
        # Each distinct feature is read once, so that its sparse gradient has one row.
        there = torch.zeros(self.embedding.num_embeddings, dtype=torch.bool, device=ids.device)
        there[found] = True
        rows = self.embedding(there.nonzero().squeeze(-1))
        return F.embedding_bag((there.cumsum(0) - 1)[found], rows, offsets, mode="mean")


class Tower(nn.Module):
    """Class ids → embeddings: an embedding of each attribute, their sum, and two layers on them.

    Args:
        attributes: of all classes.
        features: size of an embedding.
    """

    categories: Tensor
    numbers: Tensor

    def __init__(self, attributes: Attributes, features: int) -> None:
        super().__init__()
        categories, num_values, numbers, bags, buckets = attributes
        self.register_buffer("categories", categories, persistent=False)
        self.register_buffer("numbers", numbers, persistent=False)
        self.bags = nn.ModuleList(Bag(*bag, buckets, features) for bag in bags)
        self.values = table(num_values, features) if categories.shape[1] else None
        self.scales = nn.Linear(numbers.shape[1], features) if numbers.shape[1] else None
        inputs = len(bags) + categories.shape[1] + (self.scales is not None)
        self.layers = nn.Sequential(
            nn.Linear(inputs * features, 2 * features), nn.ReLU(), nn.Linear(2 * features, features)
        )

    def forward(
        self,
        ids: Tensor,  # shape: (k,)
    ) -> Tensor:
        """Return embeddings ``(k, features)``."""
        parts = [bag(ids) for bag in self.bags]
        if self.values is not None:
            parts += self.values(self.categories[ids].long()).unbind(dim=1)
        if self.scales is not None:
            parts.append(self.scales(self.numbers[ids]))
        return torch.stack(parts).sum(dim=0) + self.layers(torch.cat(parts, dim=1))


def table(rows: int, features: int, spread: float = 0.1) -> nn.Embedding:
    """Return the embeddings that are learned one by one."""
    embedding = nn.Embedding(rows, features, sparse=True)
    nn.init.uniform_(embedding.weight, -spread, spread)
    return embedding


def look_up(embedding: nn.Module, ids: Tensor) -> Tensor:
    """Return the embeddings of ``ids (*batch)``, shape ``(*batch, features)``; a tower encodes each class once."""
    if isinstance(embedding, nn.Embedding):
        return embedding(ids)
    rows, place = ids.unique(return_inverse=True)
    return F.embedding(place, embedding(rows))
