"""Reading data into tensors of class ids."""

from .corpus import Corpus, python_corpus

__all__ = ["Corpus", "python_corpus"]
