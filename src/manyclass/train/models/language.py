"""The paper's language model: a regularised LSTM."""

from torch import Tensor, nn

from .towers import look_up, table

State = tuple[Tensor, Tensor]


class LSTM(nn.Module):
    """Embedding → LSTM → hidden states, with dropout between the layers as in Zaremba et al. (2014).

    Args:
        num_classes: size of the vocabulary.
        features: size of the embeddings and of the hidden state.
        layers: stacked LSTMs.
        dropout: share of the values that are dropped before, between and after the layers.
        tower: instead of a table of input embeddings: maps words ``(k,)`` to embeddings ``(k, features)``.
    """

    def __init__(
        self, num_classes: int, features: int, layers: int = 2, dropout: float = 0.0, tower: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.embedding = table(num_classes, features) if tower is None else tower
        self.lstm = nn.LSTM(features, features, layers, batch_first=True, dropout=dropout if layers > 1 else 0.0)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        tokens: Tensor,  # shape: (batch, time)
        state: State | None = None,
    ) -> tuple[Tensor, State]:
        """Return the hidden states ``(batch, time, features)`` and the final state, detached."""
        hidden, (h, c) = self.lstm(self.dropout(look_up(self.embedding, tokens)), state)
        return self.dropout(hidden), (h.detach(), c.detach())
