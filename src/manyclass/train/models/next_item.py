"""Models that predict the next item of a user: the paper's feed-forward network, and a causal transformer."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .towers import look_up, table


class FeedForward(nn.Module):
    """The paper's recommender: the previous items and the user's features → two hidden layers.

    Args:
        num_classes: number of items.
        features: size of the embeddings and of the output.
        history: number of previous items that it reads; three in the paper.
        user_values: number of distinct values of all user features together.
        user_features: number of user features.
        dropout: share of the values that are dropped before the last layer.
        tower: instead of a table of item embeddings: maps items ``(k,)`` to embeddings ``(k, features)``.
    """

    def __init__(
        self,
        num_classes: int,
        features: int,
        history: int = 3,
        user_values: int = 1,
        user_features: int = 0,
        dropout: float = 0.0,
        tower: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.embedding = table(num_classes, features) if tower is None else tower
        self.users = table(user_values, features) if user_features else None
        columns = (history + user_features) * features
        self.layers = nn.Sequential(
            nn.Linear(columns, 2 * features), nn.ReLU(), nn.Dropout(dropout), nn.Linear(2 * features, features)
        )

    def forward(
        self,
        items: Tensor,  # shape: (batch, history), with −1 where there is none
        users: Tensor,  # shape: (batch, user_features)
    ) -> Tensor:
        """Return the hidden layer ``(batch, 1, features)``."""
        parts = [_look_up(self.embedding, items).flatten(1)]
        if self.users is not None:
            parts.append(self.users(users).flatten(1))
        return self.layers(torch.cat(parts, dim=1)).unsqueeze(1)


class Transformer(nn.Module):
    """A causal transformer: every position predicts the item after it from all items up to it.

    Args:
        num_classes: number of items.
        features: size of the embeddings and of the output; a multiple of ``heads``.
        history: number of previous items that it reads.
        user_values: number of distinct values of all user features together.
        user_features: number of user features; their embeddings are added at every position.
        layers: attention layers.
        heads: attention heads in each.
        dropout: share of the values that are dropped.
        tower: instead of a table of item embeddings, as in `FeedForward`.
    """

    def __init__(
        self,
        num_classes: int,
        features: int,
        history: int = 50,
        user_values: int = 1,
        user_features: int = 0,
        layers: int = 2,
        heads: int = 2,
        dropout: float = 0.0,
        tower: nn.Module | None = None,
    ) -> None:
        super().__init__()
        if features % heads:
            raise ValueError(f"features must be a multiple of the {heads} attention heads, got {features}")
        self.embedding = table(num_classes, features) if tower is None else tower
        # As in SASRec: embeddings in a table are small, since they may be output weights, too.
        self.scale = features**0.5 if tower is None else 1.0
        self.users = table(user_values, features) if user_features else None
        self.position = nn.Parameter(torch.zeros(history, features))
        self.blocks = nn.ModuleList(_Block(features, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(features)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        items: Tensor,  # shape: (batch, history), with −1 where there is none: on the left
        users: Tensor,  # shape: (batch, user_features)
    ) -> Tensor:
        """Return the hidden states ``(batch, history, features)``, zero where there is no item."""
        row, place = (items >= 0).nonzero(as_tuple=True)  # most positions are empty, so compute on the others only
        hidden = self.scale * look_up(self.embedding, items[row, place]) + self.position[place - items.shape[1]]
        if self.users is not None:
            hidden = hidden + self.users(users).sum(dim=1)[row]
        hidden = self.dropout(hidden)
        # Moved to the left, so that the causal mask hides the empty places, too.
        moved = place - (items < 0).sum(dim=1)[row]
        longest = max(1, int((items >= 0).any(dim=0).sum()))
        for block in self.blocks:
            hidden = block(hidden, row, moved, (len(items), longest))
        return _padded(self.norm(hidden), row, place, items.shape)


class _Block(nn.Module):
    """Causal self-attention and a hidden layer, each normalised before and added to its input."""

    def __init__(self, features: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.layers_norm = nn.LayerNorm(features), nn.LayerNorm(features)
        self.projection, self.output = nn.Linear(features, 3 * features), nn.Linear(features, features)
        self.layers = nn.Sequential(nn.Linear(features, 4 * features), nn.GELU(), nn.Linear(4 * features, features))
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        hidden: Tensor,  # shape: (places, features)
        row: Tensor,  # shape: (places,)
        place: Tensor,  # shape: (places,), in the row, from 0 without gaps
        shape: Sequence[int],  # rows, and at least the most places of one
    ) -> Tensor:
        """Return the next hidden states ``(places, features)``."""
        projected = _padded(self.projection(self.attention_norm(hidden)), row, place, shape)
        query, key, value = projected.unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.dropout(self.output(attended.transpose(1, 2).flatten(2)[row, place]))
        return hidden + self.dropout(self.layers(self.layers_norm(hidden)))


def _padded(hidden: Tensor, row: Tensor, place: Tensor, shape: Sequence[int]) -> Tensor:
    """Put hidden states ``(places, features)`` to their rows and places; zero elsewhere."""
    return hidden.new_zeros(*shape, hidden.shape[-1]).index_put((row, place), hidden)


def _look_up(embedding: nn.Module, items: Tensor) -> Tensor:
    """Return the embeddings of items, zero where there is none."""
    return look_up(embedding, items.clamp(min=0)) * (items >= 0).unsqueeze(-1)
