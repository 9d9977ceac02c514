"""Tables of interactions: columns by polars, and a slow second look that finds the line of an error."""

import csv
import io
import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import polars as pl

from .files import COMPRESSED, bare_suffix, open_bytes, read_lines

SUFFIXES = (".csv", ".tsv", ".parquet", ".jsonl", ".ndjson")
_SEPARATORS = {".csv": ",", ".tsv": "\t"}


class Table(NamedTuple):
    """Columns of strings, and a number for each row to sort by."""

    frame: pl.DataFrame
    #: Shape ``(rows,)``; all equal if the file has no times.
    times: np.ndarray

    def codes(self, column: str) -> tuple[np.ndarray, list[str]]:
        """A column as numbers by first sight (int32, -1 where missing), and the names they stand for."""
        series = self.frame[column]
        names = series.drop_nulls().unique(maintain_order=True)
        numbers = pl.Series(np.arange(len(names), dtype=np.int32))
        if len(names) == 0:  # polars would not know what to replace
            return np.full(len(series), -1, dtype=np.int32), []
        codes = series.replace_strict(names, numbers, default=-1, return_dtype=pl.Int32)
        return codes.to_numpy(), names.to_list()


def read_table(file: Path, user: str, item: str, timestamp: str, features: Sequence[str]) -> Table:
    """Read the named columns; ``timestamp`` may be missing if it has its usual name."""
    wanted = list(dict.fromkeys((user, item, timestamp, *features)))
    optional = timestamp if timestamp == "timestamp" and timestamp not in (user, item, *features) else None
    suffix = bare_suffix(file)
    if suffix == ".parquet":
        frame = _read_parquet(file, wanted, optional, [*{user, item, *features}])
    elif suffix in _SEPARATORS:
        frame = _read_csv(file, wanted, optional)
    else:
        frame = _read_json(file, wanted, optional)
    required = [column for column in (user, item, timestamp) if column in frame.columns]
    missing = frame.select(pl.any_horizontal(pl.col(required).is_null(), pl.col(user, item) == "")).to_series()
    if missing.any():
        # A blank line of a csv file is an empty row to polars: only the second look can tell.
        for place, record in _records(file):
            for column in required:
                if not record.get(column):
                    raise ValueError(f"{file}, {place}: no {column!r}")
        frame = frame.filter(~missing)
    if frame.is_empty():
        raise ValueError(f"{file}: no rows in the file")
    times = _times(file, frame[timestamp]) if timestamp in frame.columns else np.zeros(len(frame), dtype=np.int8)
    return Table(frame, times)


def _present(file: Path, wanted: list[str], optional: str | None, columns: Sequence[str]) -> list[str]:
    for column in wanted:
        if column not in columns and column != optional:
            raise ValueError(f"{file}: no column {column!r}; there are {', '.join(map(repr, columns))}")
    return [column for column in wanted if column in columns]


def _read_parquet(file: Path, wanted: list[str], optional: str | None, names: list[str]) -> pl.DataFrame:
    with file.open("rb") as source:
        try:
            columns = _present(file, wanted, optional, list(pl.read_parquet_schema(source)))
            source.seek(0)
            return pl.read_parquet(source, columns=columns).with_columns(pl.col(names).cast(pl.String))
        except pl.exceptions.PolarsError as error:
            raise ValueError(f"{file}: {_first_line(error)}") from None


def _read_csv(file: Path, wanted: list[str], optional: str | None) -> pl.DataFrame:
    """All columns as strings, so that names stay what the file says."""
    if file.stat().st_size == 0:
        raise ValueError(f"{file}: the file is empty")
    # Polars maps a plain file into memory; what is compressed has to be there whole.
    source = file
    if file.suffix in COMPRESSED:
        with open_bytes(file) as compressed:
            source = io.BytesIO(compressed.read())
    separator = _SEPARATORS[bare_suffix(file)]
    quote = '"' if separator == "," else None
    options: dict[str, Any] = {"separator": separator, "quote_char": quote, "infer_schema": False, "glob": False}
    try:
        header = pl.read_csv(source, n_rows=0, **options).columns
        columns = _present(file, wanted, optional, header)
        # Polars fills short lines up with nulls; the last column shows them.
        frame = pl.read_csv(source, columns=list({*columns, header[-1]}), **options)
        if frame[header[-1]].null_count():
            _check_all(file)
    except pl.exceptions.PolarsError as error:
        _check_all(file)
        raise ValueError(f"{file}: {_first_line(error)}") from None
    return frame.select(columns)


def _read_json(file: Path, wanted: list[str], optional: str | None) -> pl.DataFrame:
    """One object per line. Python reads them, since not every polars takes numbers for strings."""
    rows: dict[str, list[str | None]] = {column: [] for column in wanted}
    columns: dict[str, None] = {}
    for _, record in _records(file):
        columns.update(dict.fromkeys(record))
        for column, values in rows.items():
            values.append(record.get(column))
    if not columns:
        raise ValueError(f"{file}: the file is empty")
    present = _present(file, wanted, optional, list(columns))
    return pl.DataFrame({column: pl.Series(rows[column], dtype=pl.String) for column in present})


def _records(file: Path) -> Iterator[tuple[str, dict[str, str | None]]]:
    """The rows of a file one by one in Python, each with its place; a broken line raises."""
    suffix = bare_suffix(file)
    if suffix == ".parquet":
        for number, row in enumerate(pl.read_parquet(file, glob=False).iter_rows(named=True), 1):
            yield f"row {number}", {key: None if value is None else str(value) for key, value in row.items()}
    elif suffix in _SEPARATORS:
        lines = (line for _, line in read_lines(file))
        if suffix == ".csv":
            reader = csv.reader(lines, strict=True)
        else:
            reader = csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE)
        try:
            header = next(reader)
            for row in reader:
                if row and len(row) != len(header):
                    raise csv.Error(f"{len(row)} fields, but the header has {len(header)}")
                if row:
                    yield f"line {reader.line_num}", dict(zip(header, row, strict=True))
        except csv.Error as error:
            raise ValueError(f"{file}, line {reader.line_num}: {error}") from None
    else:
        for number, line in read_lines(file):
            if line.strip():
                yield f"line {number}", _json_object(f"{file}, line {number}", line)


def _json_object(place: str, line: str) -> dict[str, str | None]:
    try:
        record = json.loads(line, parse_int=str, parse_float=str)  # 1.50 stays 1.50
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{place}: not JSON: {error}") from None
    if not isinstance(record, dict):
        raise ValueError(f"{place}: not a JSON object")
    return {
        key: value if value is None or isinstance(value, str) else json.dumps(value) for key, value in record.items()
    }


def _check_all(file: Path) -> None:
    for _ in _records(file):
        pass


def _first_line(error: Exception) -> str:
    return str(error).split("\n", 1)[0]


def _times(file: Path, column: pl.Series) -> np.ndarray:
    """Numbers or dates as numbers, shape ``(rows,)``."""
    if column.dtype.is_integer() or column.dtype.is_float() or column.dtype.is_temporal():
        best = column
    elif column.dtype != pl.String:
        raise ValueError(f"{file}: {column.name} must be numbers or dates, not {column.dtype}")
    else:
        best = column.cast(pl.Int64, strict=False)
        if best.null_count():
            best = column.cast(pl.Float64, strict=False)
        if best.null_count():
            with suppress(pl.exceptions.PolarsError):  # raised if the first value is no date
                best = min(best, column.str.to_datetime(strict=False), key=lambda series: series.null_count())
    wrong = best.is_null() | ~best.is_finite() if best.dtype.is_float() else best.is_null()
    if wrong.any():
        value = str(column.filter(wrong)[0])
        place = next(place for place, record in _records(file) if record[column.name] == value)
        raise ValueError(f"{file}, {place}: {column.name} {value!r} is not a number, or a date like the others")
    return best.to_physical().to_numpy()
