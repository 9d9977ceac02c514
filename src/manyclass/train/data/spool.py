"""Numbers on their way to a result, on the disk instead of in memory."""

import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ..atomic import replacing
from ..records import first_line, regular

#: Numbers that are held at once.
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
        """The numbers from ``start`` on, ``count`` of them or as many as there are."""
        self._file.seek(start * self.dtype.itemsize)
        count = max(0, min(count, self._length - start))
        return np.frombuffer(self._file.read(count * self.dtype.itemsize), dtype=self.dtype)

    def chunks(self) -> Iterator[np.ndarray]:
        """All numbers in order, ``CHUNK`` at a time, so that spools of one length are read side by side."""
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
    """How often each of ``0 … size - 1`` occurs in the chunks, shape ``(size,)``, int64."""
    counts = np.zeros(size, dtype=np.int64)
    for chunk in numbers:
        counts += np.bincount(chunk, minlength=size)
    return counts
