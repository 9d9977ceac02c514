"""Tables of interactions, batch by batch."""

from collections.abc import Callable, Iterator
from pathlib import Path

import polars as pl

from .columns import Batch, Columns, Layout
from .delimited import SUFFIXES, read_delimited
from .files import Advance, bare_suffix
from .json_lines import read_json_lines
from .parquet import read_parquet

_READERS: dict[str, Callable[[Path, Columns, Advance, Layout], Iterator[Batch]]] = {
    ".parquet": read_parquet,
    ".jsonl": read_json_lines,
    ".ndjson": read_json_lines,
}


def is_table(file: Path, layout: Layout) -> bool:
    """Whether a file is read as a table, not as one sequence per line."""
    suffix = bare_suffix(file)
    return not layout.sequences and (layout.separator is not None or suffix in _READERS or suffix in SUFFIXES)


def read_table(file: Path, columns: Columns, advance: Advance, layout: Layout) -> Iterator[Batch]:
    """The wanted columns of a file. Every row has a user, an item, and a time if there is such a column.

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
