"""The interface between a task and the training loop."""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from ..data import Vocabulary
from ..data.files import Advance
from ..records import read_json
from ..settings import Settings

IGNORE = -100
#: Held-out examples in one batch, for tasks with independent examples.
EVALUATED = 512

S = TypeVar("S", bound=Settings)


class Batch(NamedTuple):
    """Inputs of a trunk, and the targets of its hidden states ``(batch, time, features)``."""

    inputs: tuple[Tensor, ...]
    #: Classes, ``(batch, time, labels)``; `IGNORE` where there is none.
    target: Tensor
    #: The class before, for the bigram sampler, ``(batch, time)``.
    context: Tensor | None = None
    #: Classes that each row has had before, ``(batch, most of them)``, padded with `IGNORE`; only where asked for.
    seen: Tensor | None = None

    def to(self, device: torch.device) -> "Batch":
        """Move all tensors to a device."""
        inputs = tuple(value.to(device) for value in self.inputs)
        return Batch(inputs, *(None if value is None else value.to(device) for value in self[1:]))  # pyright: ignore


class Task(ABC, Generic[S]):
    """A data set, prepared in a folder. A batch is a function of the step, so a run can resume at any step.

    Args:
        settings: of the run.
        folder: the output of `prepare`.
        vocabulary: the classes.
        part: which of how many processes this one is: batches have only its part of the rows.
    """

    #: On the command line.
    name: str
    #: Whether batches of an epoch are consecutive text, so that the trunk's state carries over.
    recurrent = False
    train_examples: int
    heldout_examples: int
    #: 0 without test data.
    test_examples: int = 0
    steps_per_epoch: int
    #: The default measure to select the best checkpoint by.
    measure = "loss"
    #: Whether rankings are measured in training, besides the loss.
    ranked = True

    def __init__(self, settings: S, folder: Path, vocabulary: Vocabulary, part: tuple[int, int] = (0, 1)) -> None:
        self.settings, self.part = settings, part
        self.vocabulary = vocabulary
        self.num_classes = len(vocabulary.names)
        self._permutation: tuple[int, Tensor] = (-1, torch.empty(0))

    @staticmethod
    @abstractmethod
    def prepare(settings: Any, folder: Path, advance: Advance) -> Vocabulary:
        """Read the files of the user, once, into arrays in ``folder``."""

    @abstractmethod
    def trunk(self) -> nn.Module:
        """Return the model below the output layer."""

    def tower(self) -> nn.Module | None:
        """Return a network that encodes classes, or None for a table of class embeddings."""
        return None

    @abstractmethod
    def batch(self, step: int) -> Batch:
        """Return the batch of a step, counted from 0."""

    @abstractmethod
    def heldout(self, limit: int | None = None, test: bool = False, seen: bool = False) -> Iterator[Batch]:
        """Yield batches of held-out or ``test`` data with about ``limit`` examples; ``seen`` adds `Batch.seen`."""

    @abstractmethod
    def encode(self, line: str) -> Batch:
        """Encode a line to predict from; its target is empty."""

    @abstractmethod
    def pairs(self) -> tuple[Tensor, Tensor]:
        """Return the training targets, and the class before each or `IGNORE`, both ``(examples,)``."""

    @cached_property
    def ids(self) -> dict[str, int]:
        """The class of each name."""
        return self.vocabulary.ids()

    @property
    def selects(self) -> str | None:
        """The measure that the best checkpoint is selected by; None: the last one is kept."""
        return self.settings.select or (self.measure if self.test_examples else None)

    def recommends(self) -> None:
        """Raise unless examples have a history of classes that can be excluded."""
        raise ValueError("--exclude-seen is for recommenders: next-item")

    def unknown(self, line: str) -> list[str]:
        """Return the parts of a line that `encode` leaves out, since training has not seen them."""
        return []

    def _epoch_rows(self, step: int, examples: int) -> Tensor:
        """Return the examples of a step, in an order that is new in each epoch, shape ``(batch,)``."""
        epoch, place = divmod(step, self.steps_per_epoch)
        if self._permutation[0] != epoch:
            generator = torch.Generator().manual_seed(self.settings.seed * 1_000_003 + epoch)
            self._permutation = (epoch, torch.randperm(examples, generator=generator))
        size = self.settings.batch  # pyright: ignore[reportAttributeAccessIssue]
        return own_part(self._permutation[1][place * size : (place + 1) * size], self.part)


def own_part(rows: Any, part: tuple[int, int]) -> Any:
    """Return the consecutive rows of one process; sizes of processes differ by at most one."""
    rank, world = part
    return rows[rank * len(rows) // world : (rank + 1) * len(rows) // world]


def write_facts(folder: Path, lines: list[str], **facts: Any) -> None:
    """Write facts about the data as JSON, and ``lines`` about them to print."""
    (folder / "facts.json").write_text(json.dumps({"lines": lines, **facts}))


def read_facts(folder: Path) -> dict[str, Any]:
    """Return what `write_facts` wrote."""
    return read_json(folder / "facts.json")


def tensor(array: np.ndarray) -> Tensor:
    """Return class ids as an int64 tensor; copies memory-mapped arrays."""
    return torch.from_numpy(np.asarray(array, dtype=np.int64))


def copied(array: np.ndarray) -> Tensor:
    """Copy an array that may be memory-mapped."""
    return torch.from_numpy(np.array(array))


def every(rows: Any, limit: int | None) -> Any:
    """Return at most ``limit`` of the rows, at even distances."""
    if limit is None or limit >= len(rows):
        return rows
    return rows[np.linspace(0, len(rows) - 1, limit).astype(np.int64)]
