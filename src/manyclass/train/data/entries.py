"""The interactions of a file as numbers, on disk in the order of the file."""

from array import array
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import polars as pl

from ..records import quoted
from . import spool
from .columns import SEPARATORS, Batch, Columns, Layout, shell
from .files import Advance, read_lines
from .spool import Spool
from .tables import is_table, read_table
from .vocabulary import numbering

#: Rows that people are shown, and items of each.
PREVIEW, SHOWN = 3, 8
#: Lines of a file of sequences that are checked for being rows of a table.
LOOKED_AT = 10
#: Digits of a time: rows that end with so many, and are equally long, are no sequences.
TIME_DIGITS = 9
#: Times that quantiles are estimated from.
SAMPLE = 1 << 20


class Names:
    """The names in a column of a table that comes in batches; memory: each name once."""

    def __init__(self) -> None:
        #: Numbers from 0 in the order of first sight.
        self.numbers = numbering()

    def codes(self, column: pl.Series) -> np.ndarray:
        """Return the numbers of a batch, shape ``(rows,)``, int32; -1 where there is no name."""
        rows = column.to_frame("name").with_row_index("row").drop_nulls()
        groups = rows.group_by("name", maintain_order=True).agg("row")
        numbers = np.fromiter(map(self.numbers.__getitem__, groups["name"].to_list()), np.int32, len(groups))
        codes = np.full(len(column), -1, dtype=np.int32)
        codes[groups["row"].explode().to_numpy()] = np.repeat(numbers, groups["row"].list.len().to_numpy())
        return codes


class FirstValues:
    """The first value that each user has in a column that comes in batches; memory: names, 4 bytes per user."""

    def __init__(self) -> None:
        self.names = Names()
        self._codes = np.empty(0, dtype=np.int32)

    def add(self, users: np.ndarray, column: pl.Series) -> None:
        """Look at a batch; ``users``, shape ``(rows,)``, tells whose values these are."""
        more = int(users.max()) + 1 - len(self._codes)
        if more > 0:  # twice as many, so that all growing together costs no more than the last
            self._codes = np.append(self._codes, np.full(max(more, len(self._codes)), -1, dtype=np.int32))
        codes = self.names.codes(column)
        known = np.flatnonzero(codes >= 0)
        owners, first = np.unique(users[known], return_index=True)
        new = self._codes[owners] < 0
        self._codes[owners[new]] = codes[known[first[new]]]

    def codes(self, users: int) -> np.ndarray:
        """Return the number of the value of each of ``users``, or -1; shape ``(users,)``, int32."""
        return self._codes[:users]


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
        """Return the first and the last time, for people; None without times."""
        parts = [(chunk.min(), chunk.max()) for chunk in self.spool.chunks()]
        if self.spool.dtype == np.int8 or not parts:
            return None
        ends = pl.Series([min(low for low, _ in parts), max(high for _, high in parts)])
        return " to ".join(map(str, ends if self._unit is None else ends.cast(self._unit)))

    def quantiles(self, shares: tuple[float, ...]) -> list[float]:
        """Return the times that these shares of all interactions are before, about; memory: a sample."""
        stride = max(1, len(self.spool) // SAMPLE)
        sample = np.concatenate([chunk[::stride] for chunk in self.spool.chunks()])
        return [float(value) for value in np.quantile(sample, shares, method="higher")]

    def _parse(self, column: pl.Series) -> pl.Series:
        """Parse strings; null where a string does not parse like the others."""
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


class Entries(NamedTuple):
    """One entry for each interaction; users, items and values are numbered by first sight."""

    users: Spool
    items: Spool
    #: All equal if the file has no times.
    times: Times
    num_users: int
    item_names: list[str]
    #: Of each column of user features.
    features: list[FirstValues]
    #: The first rows as they were read, for people.
    preview: list[str]


@contextmanager
def read_entries(
    file: Path, folder: Path, columns: Columns, user_first: bool, advance: Advance, layout: Layout
) -> Iterator[Entries]:
    """Read a file into temporary files in ``folder``; memory: names, and a batch."""
    with Spool(folder, np.int32) as users, Spool(folder, np.int32) as items, Times(file, folder) as times:
        if is_table(file, layout):
            if user_first:
                raise ValueError(f"{file}: user_first is for one sequence per line, but this file has columns")
            yield _read_table(file, columns, advance, layout, users, items, times)
        else:
            if columns.features:
                named = list(columns.features)
                raise ValueError(f"{file}: features {named} need columns, but this file has one sequence per line")
            if layout.headerless:
                raise ValueError(f"{file}: --no-header is for tables; say what separates the fields: --sep")
            yield _read_sequences(file, user_first, advance, layout, users, items, times)


def _read_table(
    file: Path, columns: Columns, advance: Advance, layout: Layout, users: Spool, items: Spool, times: Times
) -> Entries:
    user_names, item_names = Names(), Names()
    features = [FirstValues() for _ in columns.features]
    preview: list[str] = []
    for batch in read_table(file, columns, advance, layout):
        for row in batch.frame.head(PREVIEW - len(preview)).iter_rows(named=True):
            preview.append(", ".join(f"{name} {quoted(str(value))}" for name, value in row.items()))
        owners = user_names.codes(batch.frame[columns.user])
        users.append(owners)
        items.append(item_names.codes(batch.frame[columns.item]))
        for values, column in zip(features, columns.features, strict=True):
            values.add(owners, batch.frame[column])
        if columns.timestamp in batch.frame.columns:
            times.append(batch, columns.timestamp)
        else:
            times.append_none(len(batch.frame))
    return Entries(users, items, times, len(user_names.numbers), list(item_names.numbers), features, preview)


def _read_sequences(
    file: Path, user_first: bool, advance: Advance, layout: Layout, users: Spool, items: Spool, times: Times
) -> Entries:
    """Read one sequence per line; a user with several lines has one sequence."""
    user_names, item_names = numbering(), numbering()
    owners, lengths, codes = array("i"), array("q"), array("i")
    sequences, preview = 0, []
    first = _FirstLines(file)

    def flush() -> None:
        users.append(np.repeat(np.array(owners), np.array(lengths)))
        items.append(np.array(codes))
        times.append_none(len(codes))
        for part in (owners, lengths, codes):
            del part[:]

    for number, line in read_lines(file, advance, layout.encoding):
        words = line.split()
        if not words:
            continue
        if not layout.sequences:
            first.check(line)
        owner = words.pop(0) if user_first else None
        if not words:
            raise ValueError(f"{file}, line {number}: user {quoted(owner)} has no items")
        if len(preview) < PREVIEW:
            some = " ".join(map(quoted, words[:SHOWN])) + (" …" if len(words) > SHOWN else "")
            preview.append(f"{'a sequence' if owner is None else f'user {quoted(owner)}'}: {some}")
        owners.append(sequences if owner is None else user_names[owner])
        lengths.append(len(words))
        codes.extend(map(item_names.__getitem__, words))
        sequences += 1
        if len(codes) >= spool.CHUNK:
            flush()
    flush()
    if not sequences:
        raise ValueError(f"{file}: no sequences in the file")
    first.check(None)
    users_found = len(user_names) if user_first else sequences
    return Entries(users, items, times, users_found, list(item_names), [], preview)


class _FirstLines:
    """The first lines of a file of sequences: refuse what looks like rows of a table."""

    def __init__(self, file: Path) -> None:
        self._file, self._lines, self._done = file, [], False

    def check(self, line: str | None) -> None:
        """Look at the next line, or at the end of the file."""
        if self._done:
            return
        if line is not None:
            self._lines.append(line)
        if len(self._lines) == LOOKED_AT or (line is None and self._lines):
            self._done = True
            first, insist = quoted(self._lines[0]), "or --sequences if each line is a sequence"
            if self._lines[0].lstrip().startswith(("[", "{")):
                raise ValueError(
                    f"{self._file}: looks like JSON, {first}; write an object per line to .jsonl, {insist}"
                )
            for separator in (*SEPARATORS, *" " * _ends_with_times(self._lines)):
                if all(separator in text for text in self._lines):
                    raise ValueError(
                        f"{self._file}: looks like a table, {first}; give --sep {shell(separator)}, with "
                        f"--no-header if the first line is a row, {insist}"
                    )


def _ends_with_times(lines: list[str]) -> bool:
    """Whether lines are like ``user item 880606923``; the first may be a header."""
    rows = [line.split() for line in lines]
    times = all(row[-1].isdecimal() and len(row[-1]) >= TIME_DIGITS for row in rows[1:] or rows)
    return times and {len(row) for row in rows} <= {3, 4, 5} and len({len(row) for row in rows}) == 1
