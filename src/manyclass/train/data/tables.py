"""Tables, batch by batch: JSON lines, ``.parquet`` and, by `read_delimited`, text."""

import json
import os
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import polars as pl

from ..records import first_line, regular
from .columns import Batch, Columns, Layout, Record
from .delimited import SUFFIXES, read_delimited
from .files import Advance, bare_suffix, read_lines

#: Objects, and rows of ``.parquet`` files, that are held at once.
OBJECTS, ROWS = 1 << 16, 1 << 18


def read_json_lines(file: Path, columns: Columns, advance: Advance, layout: Layout) -> Iterator[Batch]:
    """Read objects with Python's json, since some versions of polars do not read numbers as strings.

    A column is there if one object has it. Memory: the values of `OBJECTS` objects.
    """
    records = _objects(file, advance, layout.encoding)
    found: dict[str, None] = {}
    untimed = None  # the first line, if no object has had a time so far
    while part := _Part.take(records, columns, found):
        timed = columns.timestamp in found or not columns.time_may_be_missing()
        required = {columns.user, columns.item, *[columns.timestamp] * timed}
        if not required <= found.keys():
            for _, record in records:
                found.update(dict.fromkeys(record))
            columns.find(file, found)  # raises, unless a later object has it: then these lack a value
        if untimed is not None and timed:
            raise ValueError(f"{file}, line {untimed}: no {columns.timestamp!r}")
        if not timed:
            untimed = untimed or part.lines[0]
            del part.values[columns.timestamp]
        frame = pl.DataFrame({name: pl.Series(values, dtype=pl.String) for name, values in part.values.items()})
        yield Batch(frame, part.records)
    if not found:
        raise ValueError(f"{file}: the file is empty")
    columns.find(file, found)


class _Part(NamedTuple):
    """Some objects. They are taken apart at once: Python is slow when many dictionaries are alive."""

    #: The number of each object's line.
    lines: list[int]
    #: Of each wanted column.
    values: dict[str, list[str | None]]

    @classmethod
    def take(cls, records: Iterator[tuple[int, Record]], columns: Columns, found: dict[str, None]) -> "_Part | None":
        """Return the next objects, or None if there are no more; adds their columns to ``found``."""
        part = cls([], {name: [] for name in (*columns.names(), columns.timestamp)})
        for number, record in islice(records, OBJECTS):
            part.lines.append(number)
            found.update(dict.fromkeys(record))
            for name, values in part.values.items():
                values.append(record.get(name))
        return part if part.lines else None

    def records(self) -> Iterator[tuple[str, Record]]:
        """See `Batch.records`."""
        for number, row in zip(self.lines, zip(*self.values.values(), strict=True), strict=True):
            yield f"line {number}", dict(zip(self.values, row, strict=True))


def _objects(file: Path, advance: Advance, encoding: str) -> Iterator[tuple[int, Record]]:
    for number, line in read_lines(file, advance, encoding):
        if line.strip():
            yield number, _object(f"{file}, line {number}", line)


def _object(place: str, line: str) -> Record:
    try:
        record = json.loads(line, parse_int=str, parse_float=str)  # 1.50 stays 1.50
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{place}: not JSON: {error}") from None
    if not isinstance(record, dict):
        raise ValueError(f"{place}: not a JSON object")
    return {
        key: value if value is None or isinstance(value, str) else json.dumps(value) for key, value in record.items()
    }


def read_parquet(file: Path, columns: Columns, advance: Advance, _layout: Layout) -> Iterator[Batch]:
    """Read a parquet file. Memory: `ROWS` rows and their compressed row group.

    Polars decodes a row group from its start for each of these slices, so groups of many millions of rows are slow.
    """
    with regular(file).open("rb") as source:  # names the file if it cannot be read, which polars may not
        size = source.seek(0, os.SEEK_END)
    try:
        table = pl.scan_parquet(file, glob=False)
        chosen = columns.find(file, table.collect_schema().names())
        table = table.select(pl.col(found).alias(name) for name, found in chosen.items())
        table = table.with_columns(pl.col(columns.names()).cast(pl.String))
        rows = table.select(pl.len()).collect().item()
        for start in range(0, rows, ROWS):
            frame = table.slice(start, ROWS).collect()
            yield Batch(frame, partial(_rows, frame, start))
            advance(size * (start + len(frame)) // rows - size * start // rows)
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException) as error:
        raise ValueError(f"{file}: {first_line(error)}") from None


def _rows(frame: pl.DataFrame, start: int) -> Iterator[tuple[str, Record]]:
    for number, row in enumerate(frame.iter_rows(named=True), start + 1):
        yield f"row {number}", {key: None if value is None else str(value) for key, value in row.items()}


_READERS: dict[str, Callable[[Path, Columns, Advance, Layout], Iterator[Batch]]] = {
    ".parquet": read_parquet,
    ".jsonl": read_json_lines,
    ".ndjson": read_json_lines,
}


def is_table(file: Path, layout: Layout) -> bool:
    """Return whether a file is read as a table, not as one sequence per line."""
    suffix = bare_suffix(file)
    return not layout.sequences and (layout.separator is not None or suffix in _READERS or suffix in SUFFIXES)


def read_table(file: Path, columns: Columns, advance: Advance, layout: Layout) -> Iterator[Batch]:
    """Yield the wanted columns of a file. Every row has a user, an item, and a time if there is such a column.

    Memory: a batch, of some 100,000 rows.
    """
    rows = 0
    reader = read_delimited if layout.separator is not None else _READERS.get(bare_suffix(file), read_delimited)
    for frame, records in reader(file, columns, advance, layout):
        required = [name for name in (columns.user, columns.item, columns.timestamp) if name in frame.columns]
        empty = pl.any_horizontal(pl.col(required).is_null(), pl.col(columns.user, columns.item) == "")
        missing = frame.select(empty).to_series()
        if missing.any():
            # A blank line of a csv file is an empty row to polars: only the second look can tell.
            for place, record in records():
                for column in required:
                    if not record.get(column):
                        raise ValueError(f"{file}, {place}: no {column!r}")
            frame = frame.filter(~missing)
        if len(frame):
            rows += len(frame)
            yield Batch(frame, records)
    if not rows:
        raise ValueError(f"{file}: no rows in the file")
