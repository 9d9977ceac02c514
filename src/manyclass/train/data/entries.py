"""The interactions of a file as numbers, on disk in the order of the file."""

from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

from . import spool
from .columns import Columns
from .files import Advance, bare_suffix, read_lines
from .names import FirstValues, Names
from .spool import Spool
from .tables import SUFFIXES, read_table
from .times import Times
from .vocabulary import numbering


class Entries(NamedTuple):
    """One entry for each interaction; users, items and values are numbered by first sight."""

    users: Spool
    items: Spool
    #: All equal if the file has no times.
    times: Spool
    num_users: int
    item_names: list[str]
    #: Of each column of user features.
    features: list[FirstValues]


@contextmanager
def read_entries(file: Path, folder: Path, columns: Columns, user_first: bool, advance: Advance) -> Iterator[Entries]:
    """Read a file into temporary files in ``folder``; memory: names, and a batch."""
    with Spool(folder, np.int32) as users, Spool(folder, np.int32) as items, Times(file, folder) as times:
        if bare_suffix(file) in SUFFIXES:
            if user_first:
                raise ValueError(f"{file}: user_first is for one sequence per line, but this file has columns")
            yield _read_table(file, columns, advance, users, items, times)
        else:
            if columns.features:
                named = list(columns.features)
                raise ValueError(f"{file}: features {named} need columns, but this file has one sequence per line")
            yield _read_sequences(file, user_first, advance, users, items, times)


def _read_table(file: Path, columns: Columns, advance: Advance, users: Spool, items: Spool, times: Times) -> Entries:
    user_names, item_names = Names(), Names()
    features = [FirstValues() for _ in columns.features]
    for batch in read_table(file, columns, advance):
        owners = user_names.codes(batch.frame[columns.user])
        users.append(owners)
        items.append(item_names.codes(batch.frame[columns.item]))
        for values, column in zip(features, columns.features, strict=True):
            values.add(owners, batch.frame[column])
        if columns.timestamp in batch.frame.columns:
            times.append(batch, columns.timestamp)
        else:
            times.append_none(len(batch.frame))
    return Entries(users, items, times.spool, len(user_names.numbers), list(item_names.numbers), features)


def _read_sequences(
    file: Path, user_first: bool, advance: Advance, users: Spool, items: Spool, times: Times
) -> Entries:
    """One sequence per line; a user with several lines has one sequence."""
    user_names, item_names = numbering(), numbering()
    owners, lengths, codes = array("i"), array("q"), array("i")
    sequences = 0

    def flush() -> None:
        users.append(np.repeat(np.array(owners), np.array(lengths)))
        items.append(np.array(codes))
        times.append_none(len(codes))
        for part in (owners, lengths, codes):
            del part[:]

    for number, line in read_lines(file, advance):
        words = line.split()
        if not words:
            continue
        owner = words.pop(0) if user_first else None
        if not words:
            raise ValueError(f"{file}, line {number}: user {owner!r} has no items")
        owners.append(sequences if owner is None else user_names[owner])
        lengths.append(len(words))
        codes.extend(map(item_names.__getitem__, words))
        sequences += 1
        if len(codes) >= spool.CHUNK:
            flush()
    flush()
    if not sequences:
        raise ValueError(f"{file}: no sequences in the file")
    return Entries(users, items, times.spool, len(user_names) if user_first else sequences, list(item_names), [])
