"""Which user chose which item, in order: sequences of class ids."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..checks import positive_int
from .files import bare_suffix, read_lines
from .ragged import Ragged
from .tables import SUFFIXES, read_table
from .vocabulary import Vocabulary, inverse, ranking

UNKNOWN = "<unknown>"


class Interactions(NamedTuple):
    """Sequences of items and the features of the users they belong to."""

    #: Item ids (int32), one row per user, or per line of a file without users, in the order of first sight. A row is
    #: empty if none of its items is a class.
    sequences: Ragged
    #: The items by falling count, equal counts by first sight in the file.
    vocabulary: Vocabulary
    #: Ids into ``feature_names``, shape ``(rows, columns)``, int32; the first value that a user has in the file.
    features: np.ndarray
    #: ``column=value``; the first is ``<unknown>``, for users without a value.
    feature_names: list[str]


class _Coded(NamedTuple):
    """Names as numbers, in the order of first sight; ``-1`` where there is none."""

    codes: np.ndarray
    names: list[str]


class _Raw(NamedTuple):
    """All interactions of a file, one entry each, in the order of the file."""

    users: np.ndarray
    items: _Coded
    features: list[_Coded]
    #: The entries by user, those of a user by time.
    order: np.ndarray


def read_interactions(
    file: Path,
    *,
    user: str = "user",
    item: str = "item",
    timestamp: str = "timestamp",
    features: Sequence[str] = (),
    user_first: bool = False,
    min_count: int = 1,
) -> Interactions:
    """Read interactions to train on; items seen less than ``min_count`` times are dropped.

    ``.csv``, ``.tsv``, ``.parquet``, ``.jsonl`` and ``.ndjson`` have the named columns, and the items of a user are
    put in the order of the timestamp, equal ones in the order of the file. Without a column ``timestamp`` the order
    is that of the file. Any other file has one sequence per line, items separated by blanks; with ``user_first`` the
    first word of a line is its user. All but ``.parquet`` may be compressed (``.gz``, ``.xz``, ``.bz2``).
    Memory: these columns, and the file if it is compressed.
    """
    positive_int("min_count", min_count)
    raw = _read(file, user, item, timestamp, features, user_first)
    counts = np.bincount(raw.items.codes, minlength=len(raw.items.names))
    order = ranking(counts, min_count)
    if len(order) < 2:
        which = f"only one item, {raw.items.names[0]!r}" if len(counts) == 1 else f"{len(order)} of {len(counts)} items"
        rare = "" if min_count == 1 else f" seen min_count={min_count} times"
        raise ValueError(f"{file}: {which}{rare}; at least 2 are needed")
    vocabulary = Vocabulary([raw.items.names[index] for index in order], counts[order])
    feature_names = [UNKNOWN]
    for column, coded in zip(features, raw.features, strict=True):
        feature_names += [f"{column}={name}" for name in coded.names]
    return _encode(raw, inverse(order, len(counts), missing=-1), vocabulary, features, feature_names)


def encode_interactions(
    file: Path,
    vocabulary: Vocabulary,
    feature_names: list[str],
    *,
    user: str = "user",
    item: str = "item",
    timestamp: str = "timestamp",
    features: Sequence[str] = (),
    user_first: bool = False,
) -> Interactions:
    """Read held-out interactions with the names of the training data: unknown items are dropped, values become 0."""
    raw = _read(file, user, item, timestamp, features, user_first)
    ids = vocabulary.ids()
    classes = np.array([ids.get(name, -1) for name in raw.items.names], dtype=np.int32)
    if classes.max() < 0:
        raise ValueError(f"{file}: none of its items is in the vocabulary")
    return _encode(raw, classes, vocabulary, features, feature_names)


def _encode(
    raw: _Raw,
    classes: np.ndarray,
    vocabulary: Vocabulary,
    columns: Sequence[str],
    feature_names: list[str],
) -> Interactions:
    """Group by user; ``classes`` has the class of each item, or -1, shape ``(items,)``."""
    values = classes[raw.items.codes][raw.order]
    sequences = Ragged.from_lengths(values, np.bincount(raw.users)).keep(values >= 0)
    ids = {name: index for index, name in enumerate(feature_names)}
    features = np.zeros((len(sequences), len(columns)), dtype=np.int32)
    for position, (column, coded) in enumerate(zip(columns, raw.features, strict=True)):
        known = np.flatnonzero(coded.codes >= 0)
        users, first = np.unique(raw.users[known], return_index=True)
        numbers = np.array([ids.get(f"{column}={name}", 0) for name in coded.names], dtype=np.int32)
        features[users, position] = numbers[coded.codes[known[first]]]
    return Interactions(sequences, vocabulary, features, feature_names)


def _read(
    file: Path,
    user: str,
    item: str,
    timestamp: str,
    features: Sequence[str],
    user_first: bool,
) -> _Raw:
    if bare_suffix(file) in SUFFIXES:
        if user_first:
            raise ValueError(f"{file}: user_first is for one sequence per line, but this file has columns")
        table = read_table(file, user, item, timestamp, features)
        users, items, *others = (_Coded(*table.codes(column)) for column in (user, item, *features))
        order = np.lexsort((table.times, users.codes))
        return _Raw(users.codes, items, others, order)
    if features:
        raise ValueError(f"{file}: features {list(features)} need columns, but this file has one sequence per line")
    return _read_sequences(file, user_first)


def _read_sequences(file: Path, user_first: bool) -> _Raw:
    """One sequence per line; a user with several lines has one sequence."""
    users: defaultdict[str | int, int] = defaultdict()
    users.default_factory = users.__len__  # a new name gets the next number
    items: defaultdict[str, int] = defaultdict()
    items.default_factory = items.__len__
    codes, owners, lengths = [], [], []
    for number, line in read_lines(file):
        words = line.split()
        if not words:
            continue
        owner = words.pop(0) if user_first else number
        if not words:
            raise ValueError(f"{file}, line {number}: user {owner!r} has no items")
        codes.append(np.fromiter(map(items.__getitem__, words), dtype=np.int32, count=len(words)))
        owners.append(users[owner])
        lengths.append(len(words))
    if not codes:
        raise ValueError(f"{file}: no sequences in the file")
    by_entry = np.repeat(np.array(owners, dtype=np.int32), lengths)
    coded = _Coded(np.concatenate(codes), list(items))
    return _Raw(by_entry, coded, [], np.argsort(by_entry, kind="stable"))
