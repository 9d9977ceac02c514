"""Tables with a JSON object per line, ``.jsonl`` and ``.ndjson``."""

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import polars as pl

from .columns import Batch, Columns, Layout, Record
from .files import Advance, read_lines

#: Objects that are held at once.
ROWS = 1 << 16


def read_json_lines(file: Path, columns: Columns, advance: Advance, layout: Layout) -> Iterator[Batch]:
    """Python reads the objects, since not every polars takes numbers for strings. Memory: the values of `ROWS` objects.

    A column is there if one object has it.
    """
    records = _records(file, advance, layout.encoding)
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
        """The next objects, or None if there are no more; adds their columns to ``found``."""
        part = cls([], {name: [] for name in (*columns.names(), columns.timestamp)})
        for number, record in islice(records, ROWS):
            part.lines.append(number)
            found.update(dict.fromkeys(record))
            for name, values in part.values.items():
                values.append(record.get(name))
        return part if part.lines else None

    def records(self) -> Iterator[tuple[str, Record]]:
        """See `Batch.records`."""
        for number, row in zip(self.lines, zip(*self.values.values(), strict=True), strict=True):
            yield f"line {number}", dict(zip(self.values, row, strict=True))


def _records(file: Path, advance: Advance, encoding: str) -> Iterator[tuple[int, Record]]:
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
