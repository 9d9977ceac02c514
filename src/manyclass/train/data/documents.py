"""Documents with labels and features on their way to a result."""

from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from . import spool
from .ragged import Ragged
from .spool import Spool
from .vocabulary import numbering


class Part(NamedTuple):
    """Some documents."""

    #: Labels, numbered by first sight.
    labels: Ragged
    features: Ragged
    #: Aligned with ``features.values``.
    values: np.ndarray


class Documents:
    """Documents in the order they came, on disk, their lengths too; memory: each label once, and a chunk."""

    def __init__(self, folder: Path):
        #: Of each label, by first sight.
        self.numbers = numbering()
        self.largest_feature = -1
        # One after the other: labels, how many a document has, features, how many, values.
        self._buffers = array("i"), array("i"), array("i"), array("i"), array("f")
        self._spools = tuple(Spool(folder, buffer.typecode) for buffer in self._buffers)
        # How many of each are in one part.
        self._sizes: list[list[int]] = []

    def __enter__(self) -> "Documents":
        return self

    def __exit__(self, *error: object) -> None:
        for one in self._spools:
            one.__exit__()

    def append(self, names: Sequence[int], ids: Sequence[int], values: np.ndarray) -> None:
        """Add a document with these labels, feature ids and values of features (float32)."""
        labels, label_lengths, features, feature_lengths, weights = self._buffers
        labels.extend(map(self.numbers.__getitem__, names))
        label_lengths.append(len(names))
        features.extend(ids)
        feature_lengths.append(len(ids))
        weights.frombytes(values.tobytes())
        if len(labels) + len(features) >= spool.CHUNK:
            self.flush()

    def flush(self) -> None:
        """Bring the last documents to the disk."""
        self._sizes.append([len(buffer) for buffer in self._buffers])
        self.largest_feature = int(np.array(self._buffers[2]).max(initial=self.largest_feature))
        for one, buffer in zip(self._spools, self._buffers, strict=True):
            one.append(np.array(buffer))
            del buffer[:]

    def label_chunks(self) -> Iterator[np.ndarray]:
        """The labels of all documents."""
        return self._spools[0].chunks()

    def parts(self) -> Iterator[Part]:
        """All documents, a chunk at a time."""
        places = [0] * len(self._spools)
        for sizes in self._sizes:
            read = [one.read(*where) for one, *where in zip(self._spools, places, sizes, strict=True)]
            labels, label_lengths, features, feature_lengths, values = read
            yield Part(
                Ragged.from_lengths(labels, label_lengths), Ragged.from_lengths(features, feature_lengths), values
            )
            places = [place + size for place, size in zip(places, sizes, strict=True)]
