"""A recurrent language model."""

from torch import Tensor, nn

State = tuple[Tensor, Tensor]


class LanguageModel(nn.Module):
    """Embedding → LSTM → output layer: predicts each token from those before it.

    Args:
        num_classes: size of the vocabulary.
        features: size of the embeddings and of the hidden state, the ``in_features`` of ``head``.
        head: a layer that maps ``(hidden, target)`` to a loss, such as `manyclass.SampledSoftmax`.
    """

    def __init__(self, num_classes: int, features: int, head: nn.Module) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_classes, features, sparse=True)
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)
        self.lstm = nn.LSTM(features, features, batch_first=True)
        self.head = head

    def hidden(self, tokens: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """Tokens ``(batch, time)`` → hidden states ``(batch, time, features)`` and the state to go on from."""
        return self.lstm(self.embedding(tokens), state)

    def forward(self, tokens: Tensor, target: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """Loss of predicting ``target (batch, time)`` from ``tokens (batch, time)``, and the state to go on from."""
        hidden, state = self.hidden(tokens, state)
        return self.head(hidden, target), (state[0].detach(), state[1].detach())
