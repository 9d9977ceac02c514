"""A table of items: categories, numbers and texts that describe each of them."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import polars as pl

from ..atomic import replacing
from ..records import quoted
from .columns import Batch, Columns, Layout
from .files import Advance
from .spool import Ragged, RaggedWriter, load_array
from .tables import is_table, read_table
from .texts import Texts
from .vocabulary import numbering

#: How a column is read.
KINDS = ("category", "number", "text")
#: Texts are words and pairs of words, hashed.
TEXTS = Texts(ngrams=2, buckets=1 << 17)
#: Numbers are clipped at this many standard deviations from their mean.
FARTHEST = 5.0
#: Of the files in the run's folder.
NAME = "items"


class Feature(NamedTuple):
    """A column of the table."""

    column: str
    kind: str

    @staticmethod
    def parse(text: str) -> "Feature":
        """Parse ``column`` or ``column:kind``; the default kind is a category."""
        column, colon, kind = text.rpartition(":")
        return Feature(column, kind) if colon and kind in KINDS else Feature(text, KINDS[0])


class Items(NamedTuple):
    """Attributes of all classes, written to a folder by `write`."""

    #: Shape ``(num_classes, columns)``, int32, in ``[0, num_values)``; 0 is for what is unknown.
    categories: np.ndarray
    num_values: int
    #: Shape ``(num_classes, columns)``, float32; 0 is for what is unknown.
    numbers: np.ndarray
    #: A row of hashed words for each class, for each column of texts.
    texts: list[Ragged]

    @staticmethod
    def load(folder: Path, features: Sequence[Feature], num_classes: int, num_values: int) -> "Items":
        """Map the arrays into memory."""
        categories = load_array(folder / f"{NAME}.categories.npy", np.int32, num_values, dims=2)
        numbers = load_array(folder / f"{NAME}.numbers.npy", np.float32, dims=2)
        kinds = [feature.kind for feature in features]
        texts = [Ragged.load(folder, f"{NAME}.{place}", TEXTS.buckets) for place in range(kinds.count("text"))]
        shapes = [(num_classes, kinds.count("category")), (num_classes, kinds.count("number"))]
        if [categories.shape, numbers.shape] != shapes or any(len(text) != num_classes for text in texts):
            raise ValueError(f"{folder / NAME}: the items do not have the features that the settings name")
        if not np.isfinite(numbers).all():
            raise ValueError(f"{folder / NAME}.numbers.npy: not finite")
        return Items(categories, num_values, numbers, texts)


class Table(NamedTuple):
    """The items of a file, and the cells of each feature, None for an empty cell."""

    names: list[str]
    cells: list[list[str | None]]


def read_items(file: Path, item: str, features: Sequence[Feature], encoding: str, advance: Advance) -> Table:
    """Read a table that has a row for each item; memory: the table."""
    layout = Layout(encoding=encoding)
    if not is_table(file, layout):
        raise ValueError(f"{file}: --items must be a table: .csv, .tsv, .parquet, .jsonl or RecBole's .item")
    wanted = [feature.column for feature in features]
    columns = Columns(item, item, item, wanted)
    names: list[str] = []
    cells: list[list[str | None]] = [[] for _ in features]
    for batch in read_table(file, columns, advance, layout):
        for feature in features:
            if feature.kind == "number":
                _check_numbers(file, batch, feature.column)
        names += batch.frame[item].to_list()
        for column, found in zip(wanted, cells, strict=True):
            found += batch.frame[column].to_list()
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ValueError(f"{file}: item {quoted(name)} has more than one row")
        seen.add(name)
    return Table(names, cells)


def _check_numbers(file: Path, batch: Batch, column: str) -> None:
    """Raise if a cell is neither empty nor a finite number."""
    cells = batch.frame[column]
    parsed = cells.cast(pl.Float64, strict=False)
    if (parsed.is_finite().fill_null(False) | cells.is_null() | (cells.str.strip_chars() == "")).all():
        return
    for place, record in batch.records():
        if record.get(column) and not math.isfinite(_number(record[column])):
            raise ValueError(f"{file}, {place}: {column} must be a number, got {quoted(record[column])}")


def _number(text: str | None) -> float:
    """Parse a finite number; NaN for anything else."""
    try:
        value = float(text) if text and text.strip() else math.nan
    except ValueError:
        return math.nan
    return value if math.isfinite(value) else math.nan


def write_items(table: Table, features: Sequence[Feature], names: Sequence[str], folder: Path) -> int:
    """Write the attributes of the classes ``names``, and return the number of values that categories have."""
    place = {name: row for row, name in enumerate(table.names)}
    rows = [place.get(name, -1) for name in names]
    values, categories, numbers, texts = numbering(), [], [], 0
    values[""] = 0
    for feature, cells in zip(features, table.cells, strict=True):
        chosen = [cells[row] if row >= 0 else None for row in rows]
        if feature.kind == "category":
            keys = [(feature.column, cell) if cell else "" for cell in chosen]
            categories.append(np.fromiter(map(values.__getitem__, keys), np.int32, len(keys)))
        elif feature.kind == "number":
            numbers.append(_standardised(np.array([_number(cell) for cell in chosen])))
        else:
            with RaggedWriter(folder) as writer:
                writer.append(Ragged.from_rows(_hashed(chosen)))
                writer.save(f"{NAME}.{texts}")
            texts += 1
    for name, columns, dtype in (("categories", categories, np.int32), ("numbers", numbers, np.float32)):
        array = np.stack(columns, axis=1) if columns else np.empty((len(names), 0))
        with replacing(folder / f"{NAME}.{name}.npy") as temporary, temporary.open("wb") as out:
            np.save(out, array.astype(dtype))
    return len(values)


def _hashed(texts: Sequence[str | None]) -> Iterator[list[int]]:
    for text in texts:
        yield TEXTS.features(text or "")[0]


def _standardised(values: np.ndarray) -> np.ndarray:
    """Scale to mean 0 and standard deviation 1; missing values become 0."""
    known = values[~np.isnan(values)]
    mean, spread = (known.mean(), known.std()) if len(known) else (0.0, 1.0)
    return np.nan_to_num((values - mean) / (spread or 1.0)).clip(-FARTHEST, FARTHEST)
