"""When interactions were, as numbers to sort by."""

from contextlib import suppress
from pathlib import Path

import numpy as np
import polars as pl

from ..records import quoted
from .columns import Batch
from .spool import Spool

#: Times that quantiles are estimated from.
SAMPLE = 1 << 20


class Times:
    """The timestamps of a file, batch by batch, on disk; memory: a batch.

    Strings are whole numbers if all of the file are, else floating point numbers, else dates, in the format of the
    first. So whole numbers become floating point numbers when one comes that is not whole.
    """

    def __init__(self, file: Path, folder: Path):
        self._file, self._folder = file, folder
        self.spool = Spool(folder, np.int64)
        #: The first of the strings, if they are dates; shape ``(1,)``.
        self._date: pl.Series | None = None
        #: What the numbers stand for, if dates.
        self._unit: pl.DataType | None = None

    def __enter__(self) -> "Times":
        return self

    def __exit__(self, *error: object) -> None:
        self.spool.__exit__()

    def append_none(self, count: int) -> None:
        """Add ``count`` interactions that have no time."""
        self._append(np.zeros(count, dtype=np.int8))

    def append(self, batch: Batch, name: str) -> None:
        """Add the column ``name`` of a batch; raises if a value is not like the others."""
        column = batch.frame[name]
        if column.dtype.is_integer() or column.dtype.is_float() or column.dtype.is_temporal():
            parsed = column
        elif column.dtype == pl.String:
            parsed = self._parse(column)
        else:
            raise ValueError(f"{self._file}: {name} must be numbers or dates, not {column.dtype}")
        wrong = parsed.is_null() | ~parsed.is_finite() if parsed.dtype.is_float() else parsed.is_null()
        if wrong.any():
            value = str(column.filter(wrong)[0])
            place = next(place for place, record in batch.records() if record[name] == value)
            raise ValueError(
                f"{self._file}, {place}: {name} {quoted(value)} is not a number, or a date like the others"
            )
        if parsed.dtype.is_temporal():
            self._unit = parsed.dtype
        self._append(parsed.to_physical().to_numpy())

    def span(self) -> str | None:
        """The first and the last time, for people; None without times."""
        parts = [(chunk.min(), chunk.max()) for chunk in self.spool.chunks()]
        if self.spool.dtype == np.int8 or not parts:
            return None
        ends = pl.Series([min(low for low, _ in parts), max(high for _, high in parts)])
        return " to ".join(map(str, ends if self._unit is None else ends.cast(self._unit)))

    def quantiles(self, shares: tuple[float, ...]) -> list[float]:
        """The times that these shares of all interactions are before, about; memory: a sample."""
        stride = max(1, len(self.spool) // SAMPLE)
        sample = np.concatenate([chunk[::stride] for chunk in self.spool.chunks()])
        return [float(value) for value in np.quantile(sample, shares, method="higher")]

    def _parse(self, column: pl.Series) -> pl.Series:
        """Null where a string is not what the others are."""
        if self._date is not None:
            # Polars takes the format from the first string that it sees.
            return pl.concat([self._date, column]).str.to_datetime(strict=False)[1:]
        numbers = column.cast(pl.Int64, strict=False)
        if numbers.null_count() or self.spool.dtype != np.int64:
            numbers = column.cast(pl.Float64, strict=False)
        if numbers.null_count() and not len(self.spool):
            with suppress(pl.exceptions.PolarsError):  # raised if the first value is no date
                dates = column.str.to_datetime(strict=False)
                if dates.null_count() < numbers.null_count():
                    self._date = column[:1]
                    return dates
        return numbers

    def _append(self, numbers: np.ndarray) -> None:
        if numbers.dtype != self.spool.dtype:
            converted = Spool(self._folder, numbers.dtype)
            for chunk in self.spool.chunks():
                converted.append(chunk)
            self.spool.__exit__()
            self.spool = converted
        self.spool.append(numbers)
