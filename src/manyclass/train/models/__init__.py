"""Small, readable models to put the output layer on; they map their inputs to hidden states."""

from .classifier import BagOfFeatures
from .language import LSTM
from .next_item import FeedForward, Transformer
from .towers import Attributes, Tower

__all__ = ["LSTM", "Attributes", "BagOfFeatures", "FeedForward", "Tower", "Transformer"]
