"""Predict the labels of documents with sparse features."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from ..data import Vocabulary
from ..data.files import Advance
from ..data.labelled import read_labelled
from ..data.spool import Ragged, load_array
from ..data.texts import Texts
from ..models import BagOfFeatures
from ..records import typed
from ..settings import ClassifySettings
from .base import EVALUATED, IGNORE, Batch, Task, every, read_facts, tensor, write_facts

#: Without a held-out file, one document of this many is held out.
HELDOUT = 10
_KINDS = {True: "texts", False: "numbered features"}
PAIR = re.compile(r"(\d+):([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)")


class _Part:
    """Documents: features with values of norm 1, and labels."""

    def __init__(self, folder: Path, name: str, num_classes: int, num_features: int) -> None:
        self.labels = Ragged.load(folder, f"{name}.labels", num_classes)
        self.features = Ragged.load(folder, f"{name}.features", num_features)
        self.values = load_array(folder / f"{name}.values.npy", np.float32)
        if len(self.labels) != len(self.features) or len(self.values) != len(self.features.values):
            raise ValueError(f"{folder / name}: labels, features and values are not of the same documents")
        self.label_count = self.labels.lengths()
        self.rows = np.flatnonzero(self.label_count)  # documents without labels are not examples

    def batch(self, rows: np.ndarray) -> Batch:
        """Return some documents, and their labels, padded to the most that one of them has."""
        starts = self.features.offsets[rows]
        sizes = self.features.offsets[rows + 1] - starts
        offsets = np.cumsum(sizes) - sizes
        places = np.repeat(starts - offsets, sizes) + np.arange(sizes.sum())
        labels = self.labels.padded(rows, int(self.label_count[rows].max(initial=1)), IGNORE)
        values = torch.from_numpy(self.values[places])
        inputs = tensor(self.features.values[places]), tensor(offsets), _unit(values, tensor(sizes))
        return Batch(inputs, tensor(labels).unsqueeze(1))


class Classify(Task[ClassifySettings]):
    """Documents in an order that is new in each epoch; every label of a document is an example."""

    name = "classify"

    def __init__(
        self, settings: ClassifySettings, folder: Path, vocabulary: Vocabulary, part: tuple[int, int] = (0, 1)
    ) -> None:
        super().__init__(settings, folder, vocabulary, part)
        self.num_features: int = typed(read_facts(folder).get("num_features"), int, f"{folder}: num_features")
        self.hashed: bool = typed(read_facts(folder).get("hashed"), bool, f"{folder}: hashed")
        if self.hashed and self.num_features != settings.buckets:
            raise ValueError(f"{folder}: the words were hashed to {self.num_features} features")
        sizes = self.num_classes, self.num_features
        self.train = _Part(folder, "train", *sizes)
        if settings.heldout is None:
            self.held, self.held_rows = self.train, self.train.rows[::HELDOUT]
            self.rows = np.setdiff1d(self.train.rows, self.held_rows, assume_unique=True)
        else:
            self.held = _Part(folder, "heldout", *sizes)
            self.rows, self.held_rows = self.train.rows, self.held.rows
        self.test_part = _Part(folder, "test", *sizes) if settings.test is not None else None
        self.test_examples = 0 if self.test_part is None else len(self.test_part.rows)
        if not len(self.rows) or not len(self.held_rows):
            raise ValueError(f"{len(self.train.rows)} documents with labels are too few to train and to evaluate on")
        self.train_examples, self.heldout_examples = len(self.rows), len(self.held_rows)
        self.steps_per_epoch = -(-len(self.rows) // settings.batch)

    @staticmethod
    def prepare(settings: ClassifySettings, folder: Path, advance: Advance) -> Vocabulary:
        """Number the labels; see `Task.prepare`."""
        options = {"advance": advance, "encoding": settings.encoding, "texts": _texts(settings)}
        train = read_labelled(settings.data, folder, "train", min_count=settings.min_count, **options)
        vocabulary, num_features, facts = train.vocabulary, train.num_features, train.facts
        for name, file in (("heldout", settings.heldout), ("test", settings.test)):
            if file is not None:
                more = read_labelled(file, folder, name, vocabulary, num_features, **options)
                if more.hashed != train.hashed:
                    raise ValueError(f"{file}: {_KINDS[more.hashed]}, but {settings.data} has {_KINDS[train.hashed]}")
                facts += more.facts
        write_facts(folder, facts, num_features=num_features, hashed=train.hashed)
        return vocabulary

    def trunk(self) -> nn.Module:
        """Return a bag of features."""
        return BagOfFeatures(self.num_features, self.settings.features, self.settings.dropout)

    def batch(self, step: int) -> Batch:
        """Return some documents."""
        return self.train.batch(self.rows[self._epoch_rows(step, len(self.rows)).numpy()])

    def heldout(self, limit: int | None = None, test: bool = False, seen: bool = False) -> Iterator[Batch]:
        """Yield the held-out or test documents."""
        if seen:
            self.recommends()
        part, rows = self.held, self.held_rows
        if test and self.test_part is not None:
            part, rows = self.test_part, self.test_part.rows
        chosen = every(rows, limit)
        for start in range(0, len(chosen), EVALUATED):
            yield part.batch(chosen[start : start + EVALUATED])

    def encode(self, line: str) -> Batch:
        """Encode a document: a text if the training data have texts, else ``feature:value feature:value …``."""
        if self.hashed:
            ids, values = _texts(self.settings).features(line)
            if not ids:
                raise ValueError("no words to predict from")
            return _document(ids, values.tolist())
        pairs = [PAIR.fullmatch(word) for word in line.split()]
        if not pairs or None in pairs:
            raise ValueError("a document is `feature:value feature:value …`")
        ids, values = zip(*((int(pair[1]), float(pair[2])) for pair in pairs if pair), strict=True)
        if max(ids) >= self.num_features:
            raise ValueError(f"feature {max(ids)} is not below {self.num_features}")
        return _document(ids, values)

    def pairs(self) -> tuple[Tensor, Tensor]:
        """Return all labels; a label has no predecessor."""
        chosen = np.zeros(len(self.train.labels), dtype=bool)
        chosen[self.rows] = True
        labels = tensor(self.train.labels.values[np.repeat(chosen, self.train.label_count)])
        return labels, torch.full_like(labels, IGNORE)


def _texts(settings: ClassifySettings) -> Texts:
    columns = settings.text_column, settings.label_column, settings.label_sep
    return Texts(settings.ngrams, settings.buckets, *columns)


def _document(ids: Sequence[int], values: Sequence[float]) -> Batch:
    """Return one document without labels."""
    weights = _unit(torch.tensor(values), torch.tensor([len(values)]))
    return Batch((torch.tensor(ids), torch.tensor([0]), weights), torch.empty(1, 1, 0, dtype=torch.long))


def _unit(values: Tensor, sizes: Tensor) -> Tensor:
    """Scale the values of each document, ``sizes`` of them, to norm 1."""
    document = torch.arange(len(sizes)).repeat_interleave(sizes)
    norm = values.new_zeros(len(sizes)).index_add(0, document, values.square()).sqrt().clamp(min=1e-12)
    return values / norm[document]
