"""Rows of different lengths in two flat arrays."""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .spool import Spool, load_array


@dataclass(frozen=True)
class Ragged:
    """Row ``i`` is ``values[offsets[i]:offsets[i + 1]]``."""

    #: All rows, one after the other.
    values: np.ndarray
    #: Shape ``(rows + 1,)``, int64; starts with 0 and ends with ``len(values)``.
    offsets: np.ndarray

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def row(self, index: int) -> np.ndarray:
        """One row, without a copy."""
        return self.values[self.offsets[index] : self.offsets[index + 1]]

    def lengths(self) -> np.ndarray:
        """The length of each row, shape ``(rows,)``."""
        return np.diff(self.offsets)

    def padded(self, rows: np.ndarray, length: int, fill: int) -> np.ndarray:
        """The last ``length`` values of each of ``rows``, with ``fill`` on the left; shape ``(len(rows), length)``."""
        index = self.offsets[rows + 1][:, None] - np.arange(length, 0, -1)
        inside = index >= self.offsets[rows][:, None]
        out = np.full(index.shape, fill, dtype=self.values.dtype)
        out[inside] = self.values[index[inside]]
        return out

    def keep(self, values: np.ndarray) -> "Ragged":
        """Only the values where the mask ``values`` is true; a row may become empty, none disappears."""
        kept = np.concatenate(([0], np.cumsum(values, dtype=np.int64)))
        return Ragged(self.values[values], kept[self.offsets])

    @classmethod
    def load(cls, folder: Path, name: str, below: int | None = None) -> "Ragged":
        """Map into memory what :class:`RaggedWriter` wrote; values must be in ``[0, below)``, if given."""
        values = load_array(folder / f"{name}.values.npy", np.int32, below)
        offsets = load_array(folder / f"{name}.offsets.npy", np.int64)
        ends = len(offsets) > 0 and offsets[0] == 0 and offsets[-1] == len(values)
        if not ends or (offsets[1:] < offsets[:-1]).any():
            raise ValueError(f"{folder / name}: the offsets do not fit the values")
        return cls(values, offsets)

    @classmethod
    def from_lengths(cls, values: np.ndarray, lengths: np.ndarray) -> "Ragged":
        """Cut ``values`` into rows of the given lengths."""
        return cls(values, np.concatenate(([0], np.cumsum(lengths, dtype=np.int64))))

    @classmethod
    def from_rows(cls, rows: Iterable[Sequence[int]]) -> "Ragged":
        """Put rows of integers together, as int32."""
        values, lengths = array("i"), array("q")
        for row in rows:
            values.extend(row)
            lengths.append(len(row))
        return cls.from_lengths(np.array(values, dtype=np.int32), np.array(lengths, dtype=np.int64))


class RaggedWriter:
    """Rows of int32 that come one part after the other, on their way to ``folder``; memory: one part."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._values, self._offsets = Spool(folder, np.int32), Spool(folder, np.int64)
        self._offsets.append([0])

    def __enter__(self) -> "RaggedWriter":
        return self

    def __exit__(self, *error: object) -> None:
        self._values.__exit__()
        self._offsets.__exit__()

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def append(self, rows: Ragged) -> None:
        """Add rows at the end."""
        self._offsets.append(len(self._values) + rows.offsets[1:])
        self._values.append(rows.values)

    def save(self, name: str) -> Ragged:
        """Write ``{name}.values.npy`` and ``{name}.offsets.npy``, each whole or not at all, and map them."""
        self._values.save(self._folder / f"{name}.values.npy")
        self._offsets.save(self._folder / f"{name}.offsets.npy")
        return Ragged.load(self._folder, name)
