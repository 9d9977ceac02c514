"""Selection of the columns of a table, and the rows read from it."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import polars as pl

from ..records import quoted
from .files import bare_suffix

#: A row in Python: strings, or None for an empty cell.
Record = dict[str, str | None]
#: Names of columns that a message lists.
LISTED = 20
#: What may be between the fields of a table, and how a shell takes those that it does not take in quotes.
SEPARATORS = ("\t", "::", ";", ",", "|")
SHELL = {"\t": "tab"}
#: What RecBole calls the columns of its ``.inter`` and ``.item`` files, after a colon and a type are cut off.
RECBOLE = {"user": "user_id", "item": "item_id"}


class Layout(NamedTuple):
    """Options for reading a text file, where its name does not decide."""

    #: Between the fields of a table; None: what the name of the file says.
    separator: str | None = None
    #: Whether the first line of a table is a row, so that columns are numbered from 1.
    headerless: bool = False
    encoding: str = "utf-8"
    #: Whether each line is a sequence, even if it looks like a row of a table.
    sequences: bool = False


@dataclass
class Columns:
    """What the columns of interactions are called."""

    user: str
    item: str
    timestamp: str
    #: Of the users.
    features: Sequence[str]
    #: What a person should know about how they were found.
    notes: list[str] = field(default_factory=list)

    def names(self) -> list[str]:
        """Return the columns that name something, each once."""
        return list(dict.fromkeys((self.user, self.item, *self.features)))

    def time_may_be_missing(self) -> bool:
        """Return whether the timestamp has its usual name, and is nothing else."""
        return self.timestamp == "timestamp" and self.timestamp not in self.names()

    def find(self, file: Path, names: Iterable[str], headerless: bool = False) -> dict[str, str]:
        """Find the columns to read among the ``names`` of a file, and return what each of them is called there.

        A number stands for the column at that place, counted from 1, if no column has that name.
        """
        wanted, names = list(dict.fromkeys((self.user, self.item, self.timestamp, *self.features))), list(names)
        recbole = bare_suffix(file) in (".inter", ".item")
        known = {name.partition(":")[0] if recbole else name: name for name in names}
        usual = _usual_places(len(names)) if headerless else RECBOLE if recbole else {}
        found = {}
        for column in wanted:
            place = int(column) if column.isdecimal() else 0
            if column in known:
                found[column] = known[column]
            elif usual.get(column) in known:
                found[column] = known[usual[column]]
            elif 1 <= place <= len(names):
                found[column] = names[place - 1]
            elif not (column == self.timestamp and self.time_may_be_missing()):
                raise ValueError(f"{file}: no column {quoted(column)}; there are {_listed(names)}")
        if headerless:
            places = ", ".join(f"{quoted(column)} is column {place}" for column, place in found.items())
            self.notes.append(f"{file} has no header: {places}")
        else:
            taken = [place for column, place in found.items() if column.isdecimal() and column != place]
            self.notes += [f"{file}: column {names.index(name) + 1} is {quoted(name)}" for name in taken]
        if self.timestamp not in found:
            self.missing_time(file, names)
        return found

    def missing_time(self, file: Path, names: Iterable[str]) -> None:
        """Note that the order of the file stands for the time."""
        alike = [name for name in names if "time" in name.lower() or "date" in name.lower()]
        hint = f"; there is {_listed(alike)}" if alike else ""
        self.notes.append(f"{file}: no column {self.timestamp!r}, using the order of the file{hint}")


class Batch(NamedTuple):
    """Some rows of a table."""

    #: Wanted columns by the names they are wanted by. Names are strings; times are whatever the file has.
    frame: pl.DataFrame
    #: The same rows one by one in Python, each with its place in the file: slow, to find what is wrong. Raises
    #: where the file is broken. Blank lines are left out.
    records: Callable[[], Iterator[tuple[str, Record]]]


def _usual_places(count: int) -> dict[str, str]:
    """Return where a table without a header has the user, the item and the time, as MovieLens has them."""
    time = {"timestamp": "4" if count >= 4 else "3"} if count >= 3 else {}
    return {"user": "1", "item": "2", **time}


def shell(separator: str) -> str:
    """A separator as one types it behind ``--sep``."""
    return SHELL.get(separator, repr(separator))


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(map(quoted, names[:LISTED])) + more
