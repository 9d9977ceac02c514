"""Tables in ``.parquet`` files."""

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import polars as pl

from ..records import first_line, regular
from .columns import Batch, Columns, Layout, Record
from .files import Advance

#: Rows that are held at once.
ROWS = 1 << 18


def read_parquet(file: Path, columns: Columns, advance: Advance, _layout: Layout) -> Iterator[Batch]:
    """Memory: `ROWS` rows, and the row group they are in, compressed as it is in the file.

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
            yield Batch(frame, partial(_records, frame, start))
            advance(size * (start + len(frame)) // rows - size * start // rows)
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException) as error:
        raise ValueError(f"{file}: {first_line(error)}") from None


def _records(frame: pl.DataFrame, start: int) -> Iterator[tuple[str, Record]]:
    for number, row in enumerate(frame.iter_rows(named=True), start + 1):
        yield f"row {number}", {key: None if value is None else str(value) for key, value in row.items()}
