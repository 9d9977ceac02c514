"""Optimisers of torch that take dense and sparse gradients together."""

from .optimisers import SGD, Adagrad, Adam, AdamW

__all__ = ["SGD", "Adagrad", "Adam", "AdamW"]
