"""A classifier for documents of sparse features."""

from torch import Tensor, nn


class BagOfFeatures(nn.Module):
    """Weighted sum of feature embeddings, scaled to the document's norm, then one hidden layer.

    Args:
        num_features: size of the feature vocabulary.
        features: size of the embeddings and of the output.
        dropout: share of the values that are dropped before the last layer.
    """

    def __init__(self, num_features: int, features: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.EmbeddingBag(num_features, features, mode="sum", sparse=True)
        nn.init.normal_(self.embedding.weight, std=0.5)
        self.layers = nn.Sequential(nn.ReLU(), nn.Dropout(dropout), nn.Linear(features, features))

    def forward(
        self,
        ids: Tensor,  # shape: (values of all documents,)
        offsets: Tensor,  # shape: (batch,)
        values: Tensor,  # shape: (values of all documents,), of norm 1 in each document
    ) -> Tensor:
        """Return the hidden layer ``(batch, 1, features)``."""
        return self.layers(self.embedding(ids, offsets, per_sample_weights=values)).unsqueeze(1)
