"""Small, readable models to put the output layer on."""

from .language import LanguageModel

__all__ = ["LanguageModel"]
