"""Arrays on disk instead of in memory: temporary spools, and rows of different lengths."""

import tempfile
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ..atomic import replacing
from ..records import first_line, regular

#: Numbers in memory at a time.
CHUNK = 1 << 20


class Spool:
    """Numbers of one type in a temporary file; memory: what is being written or read.

    The file is in ``folder`` without a name, so it is gone when the spool is closed, however the process ends.
    """

    def __init__(self, folder: Path, dtype: npt.DTypeLike):
        self.dtype = np.dtype(dtype)
        self._length = 0
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115

    def __enter__(self) -> "Spool":
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def __len__(self) -> int:
        return self._length

    def append(self, numbers: npt.ArrayLike) -> None:
        """Add numbers at the end."""
        self.write(self._length, numbers)

    def write(self, start: int, numbers: npt.ArrayLike) -> None:
        """Put numbers at ``start`` and after it."""
        array = np.ascontiguousarray(numbers, dtype=self.dtype)
        self._file.seek(start * self.dtype.itemsize)
        self._file.write(array.tobytes())
        self._length = max(self._length, start + len(array))

    def read(self, start: int, count: int) -> np.ndarray:
        """Return at most ``count`` numbers from ``start``."""
        self._file.seek(start * self.dtype.itemsize)
        count = max(0, min(count, self._length - start))
        return np.frombuffer(self._file.read(count * self.dtype.itemsize), dtype=self.dtype)

    def chunks(self) -> Iterator[np.ndarray]:
        """Yield all numbers in order, ``CHUNK`` at a time, so that spools of one length are read side by side."""
        for start in range(0, self._length, CHUNK):
            yield self.read(start, CHUNK)

    def save(self, file: Path) -> None:
        """Write all to a ``.npy`` file, whole or not at all."""
        save_array(file, self.dtype, self._length, self.chunks())


def save_array(file: Path, dtype: npt.DTypeLike, length: int, chunks: Iterable[np.ndarray]) -> None:
    """Write a ``.npy`` file of shape ``(length,)``, whole or not at all; memory: one of the chunks."""
    header = {"descr": np.lib.format.dtype_to_descr(np.dtype(dtype)), "fortran_order": False, "shape": (length,)}
    with replacing(file) as temporary, temporary.open("wb") as out:
        np.lib.format.write_array_header_1_0(out, header)
        for chunk in chunks:
            out.write(np.ascontiguousarray(chunk, dtype=dtype).tobytes())


def load_array(file: Path, dtype: npt.DTypeLike, below: int | None = None, dims: int = 1) -> np.ndarray:
    """Map a ``.npy`` file into memory, read only.

    Args:
        file: where it is; it cannot hold Python objects, so reading it runs no code.
        dtype: what its numbers must be.
        below: its numbers must be in ``[0, below)``; None: any.
        dims: number of dimensions that it must have.
    """
    try:
        array = np.lib.format.open_memmap(regular(file), mode="r")
    except (ValueError, EOFError, OverflowError, MemoryError, TypeError) as error:
        raise ValueError(f"{file}: not an array that manyclass wrote: {first_line(error)}") from None
    if array.dtype != dtype or array.ndim != dims:
        raise ValueError(f"{file}: must be {np.dtype(dtype)} of {dims} dimensions, not {array.dtype} of {array.ndim}")
    if below is not None and array.size and (array.min() < 0 or array.max() >= below):
        wrong = array.min() if array.min() < 0 else array.max()
        raise ValueError(f"{file}: {wrong} is not in [0, {below})")
    return array


def tally(numbers: Iterable[np.ndarray], size: int) -> np.ndarray:
    """Return how often each of ``0 … size - 1`` occurs in the chunks, shape ``(size,)``, int64."""
    counts = np.zeros(size, dtype=np.int64)
    for chunk in numbers:
        counts += np.bincount(chunk, minlength=size)
    return counts


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
        """Return one row as a view."""
        return self.values[self.offsets[index] : self.offsets[index + 1]]

    def lengths(self) -> np.ndarray:
        """Return the length of each row, shape ``(rows,)``."""
        return np.diff(self.offsets)

    def padded(self, rows: np.ndarray, length: int, fill: int) -> np.ndarray:
        """Return the last ``length`` values of each row, padded on the left; shape ``(len(rows), length)``."""
        index = self.offsets[rows + 1][:, None] - np.arange(length, 0, -1)
        inside = index >= self.offsets[rows][:, None]
        out = np.full(index.shape, fill, dtype=self.values.dtype)
        out[inside] = self.values[index[inside]]
        return out

    def keep(self, values: np.ndarray) -> "Ragged":
        """Keep only the values where the mask is true. A row may become empty, but it stays."""
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
    """Write rows of int32 to ``folder``, part by part; memory: one part."""

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
