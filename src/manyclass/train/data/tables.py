"""Tables of interactions, batch by batch."""

from collections.abc import Callable, Iterator
from pathlib import Path

import polars as pl

from .columns import Batch, Columns
from .delimited import read_delimited
from .files import Advance, bare_suffix
from .json_lines import read_json_lines
from .parquet import read_parquet

_READERS: dict[str, Callable[[Path, Columns, Advance], Iterator[Batch]]] = {
    ".csv": read_delimited,
    ".tsv": read_delimited,
    ".parquet": read_parquet,
    ".jsonl": read_json_lines,
    ".ndjson": read_json_lines,
}
SUFFIXES = tuple(_READERS)


def read_table(file: Path, columns: Columns, advance: Advance) -> Iterator[Batch]:
    """The wanted columns of a file. Every row has a user, an item, and a time if there is such a column.

    Memory: a batch, of some 100,000 rows.
    """
    rows = 0
    for frame, records in _READERS[bare_suffix(file)](file, columns, advance):
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
