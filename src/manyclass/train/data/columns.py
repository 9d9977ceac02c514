"""Which columns of a table are wanted, and the rows that come."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import polars as pl

#: A row as Python sees it: strings, or None where nothing is.
Record = dict[str, str | None]


class Columns(NamedTuple):
    """What the columns of interactions are called."""

    user: str
    item: str
    timestamp: str
    #: Of the users.
    features: Sequence[str]

    def names(self) -> list[str]:
        """The columns that name something, each once."""
        return list(dict.fromkeys((self.user, self.item, *self.features)))

    def time_may_be_missing(self) -> bool:
        """Whether the timestamp has its usual name, and is nothing else."""
        return self.timestamp == "timestamp" and self.timestamp not in self.names()

    def present(self, file: Path, found: Iterable[str]) -> list[str]:
        """The columns to read, which must be among those ``found``."""
        wanted, found = list(dict.fromkeys((self.user, self.item, self.timestamp, *self.features))), list(found)
        for column in wanted:
            if column not in found and not (column == self.timestamp and self.time_may_be_missing()):
                raise ValueError(f"{file}: no column {column!r}; there are {', '.join(map(repr, found))}")
        return [column for column in wanted if column in found]


class Batch(NamedTuple):
    """Some rows of a table."""

    #: Names are strings; times are whatever the file has.
    frame: pl.DataFrame
    #: The same rows one by one in Python, each with its place in the file: slow, to find what is wrong. Raises
    #: where the file is broken. Blank lines are left out.
    records: Callable[[], Iterator[tuple[str, Record]]]


def first_line(error: Exception) -> str:
    """What polars says, without its explanations."""
    return str(error).split("\n", 1)[0]
