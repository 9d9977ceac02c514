"""The interactions of a file as numbers, on disk in the order of the file."""

from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..records import quoted
from . import spool
from .columns import Columns, Layout
from .files import Advance, read_lines
from .names import FirstValues, Names
from .spool import Spool
from .tables import is_table, read_table
from .times import Times
from .vocabulary import numbering

#: Rows that people are shown, and items of each.
PREVIEW, SHOWN = 3, 8
#: Lines of a file of sequences that are checked for being rows of a table, and what would separate the fields.
LOOKED_AT = 10
SEPARATORS = ("\t", "::", ";", ",", "|")
SHELL = {"\t": "tab"}


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
    """One sequence per line; a user with several lines has one sequence."""
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
        self._file, self._lines = file, []

    def check(self, line: str | None) -> None:
        """Look at the next line, or at the end of the file."""
        if line is not None and len(self._lines) < LOOKED_AT:
            self._lines.append(line)
        if len(self._lines) == LOOKED_AT or (line is None and self._lines):
            for separator in SEPARATORS:
                counts = {text.count(separator) for text in self._lines}
                if len(counts) == 1 and counts != {0}:
                    option = SHELL.get(separator, repr(separator))
                    raise ValueError(
                        f"{self._file}: looks like a table, {quoted(self._lines[0])}; give --sep {option}, with "
                        "--no-header if the first line is a row, or --sequences if each line is a sequence"
                    )
            self._lines = [""] * (LOOKED_AT + 1)  # enough
