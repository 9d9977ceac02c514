"""The names of the classes."""

import hashlib
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import polars as pl

from ..atomic import replacing
from ..records import first_line, regular


class Vocabulary(NamedTuple):
    """What the classes are called, and how often each occurs in the training data."""

    names: list[str]
    #: Shape ``(num_classes,)``, int64.
    counts: np.ndarray

    def ids(self) -> dict[str, int]:
        """Return the class of each name."""
        return {name: index for index, name in enumerate(self.names)}

    def write(self, file: Path) -> None:
        """Write a parquet file with the columns ``name`` and ``count``, whole or not at all."""
        frame = pl.DataFrame({"name": pl.Series(self.names, dtype=pl.String), "count": self.counts})
        with replacing(file) as temporary:
            frame.write_parquet(temporary)

    @classmethod
    def read(cls, file: Path) -> "Vocabulary":
        """Read what :meth:`write` wrote."""
        with regular(file).open("rb") as source:
            try:
                frame = pl.read_parquet(source, columns=["name", "count"])
            except pl.exceptions.PolarsError as error:
                raise ValueError(f"{file}: not a vocabulary: {first_line(error)}") from None
        if frame.schema != {"name": pl.String, "count": pl.Int64} or any(frame.null_count().row(0)):
            raise ValueError(f"{file}: not a vocabulary: must have a name and a count, an integer, for each class")
        return cls(frame["name"].to_list(), frame["count"].to_numpy().astype(np.int64))


def digest(file: Path) -> str:
    """Return the SHA-256 of a file. Files that differ are not parsed: polars can crash on broken ones."""
    return hashlib.sha256(regular(file).read_bytes()).hexdigest()


def numbering() -> defaultdict[Any, int]:
    """Return a dictionary that gives every new name the next number, from 0."""
    numbers: defaultdict[Any, int] = defaultdict()
    numbers.default_factory = numbers.__len__
    return numbers


def ranking(counts: np.ndarray, min_count: int, listed: npt.ArrayLike = ()) -> np.ndarray:
    """Return the indices by falling count, equal counts by index.

    Those that count less than ``min_count`` are left out, unless they are ``listed``.
    """
    kept = counts >= min_count
    kept[np.asarray(listed, dtype=np.int64)] = True
    order = np.argsort(-counts, kind="stable")
    return order[kept[order]]


def inverse(order: np.ndarray, size: int, missing: int) -> np.ndarray:
    """Return the position of each of ``0 … size - 1`` in ``order``, or ``missing``; shape ``(size,)``, int32."""
    position = np.full(size, missing, dtype=np.int32)
    position[order] = np.arange(len(order), dtype=np.int32)
    return position
