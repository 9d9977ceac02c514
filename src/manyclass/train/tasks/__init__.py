"""Training tasks: each turns files into batches, and hidden states into predictions."""

from typing import Any

from ..settings import ClassifySettings, LanguageSettings, NextItemSettings
from .base import Batch, Task
from .classify import Classify
from .language import Language
from .next_item import NextItem

__all__ = ["TASKS", "Batch", "Classify", "Language", "NextItem", "Task"]

#: By name on the command line: settings, and the task that they are for.
TASKS: dict[str, tuple[type[Any], type[Task[Any]]]] = {
    Language.name: (LanguageSettings, Language),
    NextItem.name: (NextItemSettings, NextItem),
    Classify.name: (ClassifySettings, Classify),
}
