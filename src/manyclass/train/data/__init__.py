"""Reading data into class ids."""

from .interactions import Interactions, encode_interactions, read_interactions
from .labelled import Labelled, read_labelled
from .spool import Ragged
from .synth import synthesise
from .text import encode_text, prepare_text, python_sources
from .vocabulary import Vocabulary

__all__ = [
    "Interactions",
    "Labelled",
    "Ragged",
    "Vocabulary",
    "encode_interactions",
    "encode_text",
    "prepare_text",
    "python_sources",
    "read_interactions",
    "read_labelled",
    "synthesise",
]
