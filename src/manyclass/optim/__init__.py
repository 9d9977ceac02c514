"""Optimisers of torch that take dense and sparse gradients together."""

from .adam import Adam, AdamW
from .others import SGD, Adagrad

__all__ = ["SGD", "Adagrad", "Adam", "AdamW"]
