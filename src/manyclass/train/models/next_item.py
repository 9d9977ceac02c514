"""Models that predict the next item of a user: the paper's feed-forward network, and a causal transformer."""

import torch
from torch import Tensor, nn

from .towers import look_up, table


class FeedForward(nn.Module):
    """The paper's recommender: the previous items and the user's features → two hidden layers.

    Args:
        num_classes: number of items.
        features: size of the embeddings and of the output.
        history: how many previous items it sees; three in the paper.
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
        """Hidden layer ``(batch, 1, features)``."""
        parts = [_look_up(self.embedding, items).flatten(1)]
        if self.users is not None:
            parts.append(self.users(users).flatten(1))
        return self.layers(torch.cat(parts, dim=1)).unsqueeze(1)


class Transformer(nn.Module):
    """A causal transformer: every position predicts the item after it from all items up to it.

    Args:
        num_classes: number of items.
        features: size of the embeddings and of the output; a multiple of ``heads``.
        history: how many previous items it sees.
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
        self.users = table(user_values, features) if user_features else None
        self.heads = heads
        self.position = nn.Parameter(torch.zeros(history, features))
        layer = nn.TransformerEncoderLayer(
            features, heads, 4 * features, dropout, activation="gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, layers, nn.LayerNorm(features), enable_nested_tensor=False)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        items: Tensor,  # shape: (batch, history), with −1 where there is none: on the left
        users: Tensor,  # shape: (batch, user_features)
    ) -> Tensor:
        """Hidden states ``(batch, history, features)``."""
        if not len(items):  # torch's attention needs a row; its gradient is zero
            return self(items.new_zeros(1, items.shape[1]), users.new_zeros(1, users.shape[1]))[:0]
        length = items.shape[1]
        hidden = _look_up(self.embedding, items) + self.position[-length:]
        if self.users is not None:
            hidden = hidden + self.users(users).sum(dim=1, keepdim=True)
        later = torch.ones(length, length, dtype=torch.bool, device=items.device).triu(1)
        # Empty places are seen by nobody but themselves, so that no row of the attention is empty.
        empty = items < 0
        blocked = (later | empty.unsqueeze(1)) & ~torch.eye(length, dtype=torch.bool, device=items.device)
        return self.encoder(self.dropout(hidden), mask=blocked.repeat_interleave(self.heads, dim=0))


def _look_up(embedding: nn.Module, items: Tensor) -> Tensor:
    """Embeddings of items, zero where there is none."""
    return look_up(embedding, items.clamp(min=0)) * (items >= 0).unsqueeze(-1)
