"""Which user chose which item, in order: sequences of class ids."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ...checks import positive_int
from ..atomic import replacing
from ..records import quoted
from . import spool
from .columns import Columns, Layout
from .entries import Entries, read_entries
from .files import Advance, ignore
from .spool import Ragged, RaggedWriter, Spool, tally
from .vocabulary import Vocabulary, inverse, ranking

UNKNOWN = "<unknown>"
USUAL = Layout()


class Interactions(NamedTuple):
    """Sequences of items and the features of the users they belong to."""

    #: Item ids (int32), one row per user, or per line of a file without users, in the order of first sight. A row is
    #: empty if none of its items is a class. On disk, mapped into memory.
    sequences: Ragged
    #: The items by falling count, equal counts by first sight in the file.
    vocabulary: Vocabulary
    #: Ids into ``feature_names``, shape ``(rows, columns)``, int32; the first value that a user has in the file.
    features: np.ndarray
    #: ``column=value``; the first is ``<unknown>``, for users without a value.
    feature_names: list[str]
    #: What was read, in lines for people: numbers, notes, and the first rows.
    facts: list[str]


def read_interactions(
    file: Path,
    folder: Path,
    name: str,
    *,
    user: str = "user",
    item: str = "item",
    timestamp: str = "timestamp",
    features: Sequence[str] = (),
    user_first: bool = False,
    min_count: int = 1,
    known: Sequence[str] = (),
    late: tuple[float, ...] = (),
    layout: Layout = USUAL,
    advance: Advance = ignore,
) -> Interactions:
    """Read interactions to train on; items seen less than ``min_count`` times are dropped, unless they are ``known``.

    Items that are ``known``, each listed once, are classes even without interactions.

    ``.csv``, ``.tsv``, ``.inter``, ``.parquet``, ``.jsonl`` and ``.ndjson`` have the named columns. ``.data`` and
    ``.dat``, as of MovieLens, have no header: their columns are numbered from 1. The items of a user are put in the
    order of the timestamp, equal ones in the order of the file. Without a column ``timestamp`` the order is that of the
    file. Any other file has one sequence per line, items separated by blanks; with ``user_first`` the first word of a
    line is its user. ``layout`` can say otherwise. All but ``.parquet`` may be compressed (``.gz``, ``.xz``, ``.bz2``).

    The result is in ``folder``: ``{name}.values.npy`` and ``{name}.offsets.npy``, the sequences, and
    ``{name}.users.npy``, the features. With ``late``, rising shares such as ``(0.8, 0.9)``, there is
    ``{name}.late.npy``, too: how many of each user's items come after each share of the interactions by time, and
    before the next, int64 ``(rows, shares)``. Memory: the names of users, items and features, and a chunk; on disk, in
    ``folder`` and for the time of reading, some 40 bytes per interaction.
    """
    positive_int("min_count", min_count)
    columns = Columns(user, item, timestamp, features)
    with read_entries(file, folder, columns, user_first, advance, layout) as entries:
        counts = tally(entries.items.chunks(), len(entries.item_names))
        numbers = {item_name: index for index, item_name in enumerate(entries.item_names)} if known else {}
        listed = np.array([numbers[item_name] for item_name in known if item_name in numbers], dtype=np.int64)
        order = ranking(counts, min_count, listed)
        cold = [item_name for item_name in known if item_name not in numbers]
        if len(order) < 2:
            only = f"only one item, {quoted(entries.item_names[0])}"
            which = only if len(counts) == 1 else f"{len(order)} of {len(counts)} items"
            rare = "" if min_count == 1 else f" seen min_count={min_count} times"
            raise ValueError(f"{file}: {which}{rare}; at least 2 are needed")
        names = [*(entries.item_names[index] for index in order), *cold]
        vocabulary = Vocabulary(names, np.append(counts[order], np.zeros(len(cold), dtype=np.int64)))
        feature_names = [UNKNOWN]
        for column, values in zip(features, entries.features, strict=True):
            feature_names += [f"{column}={value}" for value in values.names.numbers]
        classes = inverse(order, len(counts), missing=-1)
        rare = f" of items seen less than {min_count} times"
        facts = _facts(file, entries, columns, counts[classes < 0].sum(), rare)
        if late and entries.times.spool.dtype == np.int8:
            raise ValueError(f"{file}: --split time needs a column of the time")
        return _write(entries, classes, vocabulary, features, feature_names, facts, folder, name, late)


def _facts(file: Path, entries: Entries, columns: Columns, dropped: int, why: str) -> list[str]:
    """Describe what was read, so that users can spot a wrong reading."""
    span = entries.times.span()
    facts = [f"{len(entries.items):,} rows, {entries.num_users:,} users, {len(entries.item_names):,} items"]
    facts += [f"times {span}"] if span else []
    facts += [f"dropped {dropped:,} rows{why}"] if dropped else []
    return [f"{file}: {', '.join(facts)}", *(f"  {row}" for row in entries.preview), *dict.fromkeys(columns.notes)]


def encode_interactions(
    file: Path,
    folder: Path,
    name: str,
    vocabulary: Vocabulary,
    feature_names: list[str],
    *,
    user: str = "user",
    item: str = "item",
    timestamp: str = "timestamp",
    features: Sequence[str] = (),
    user_first: bool = False,
    layout: Layout = USUAL,
    advance: Advance = ignore,
) -> Interactions:
    """Read held-out interactions with the names of the training data: unknown items are dropped, values become 0.

    Otherwise as :func:`read_interactions`.
    """
    columns = Columns(user, item, timestamp, features)
    with read_entries(file, folder, columns, user_first, advance, layout) as entries:
        ids = vocabulary.ids()
        classes = np.array([ids.get(item_name, -1) for item_name in entries.item_names], dtype=np.int32)
        if classes.max() < 0:
            raise ValueError(f"{file}: none of its items is in the vocabulary")
        counts = tally(entries.items.chunks(), len(entries.item_names))
        facts = _facts(file, entries, columns, counts[classes < 0].sum(), " of items that are no class")
        return _write(entries, classes, vocabulary, features, feature_names, facts, folder, name)


def _write(
    entries: Entries,
    classes: np.ndarray,
    vocabulary: Vocabulary,
    columns: Sequence[str],
    feature_names: list[str],
    facts: list[str],
    folder: Path,
    name: str,
    late: tuple[float, ...] = (),
) -> Interactions:
    """Group by user; ``classes`` has the class of each item, or -1, shape ``(items,)``."""
    borders = entries.times.quantiles(late) if late else ()
    with RaggedWriter(folder) as writer:
        later = []
        parts = group(entries.users, entries.items, entries.times.spool, classes, entries.num_users, folder, borders)
        for rows, counts in parts:
            writer.append(rows)
            later.append(counts)
        sequences = writer.save(name)
    if late:
        from_border = np.concatenate(later)
        from_border[:, :-1] -= from_border[:, 1:]
        with replacing(folder / f"{name}.late.npy") as temporary, temporary.open("wb") as out:
            np.save(out, from_border)
    ids = {feature: index for index, feature in enumerate(feature_names)}
    features = np.zeros((entries.num_users, len(columns)), dtype=np.int32)
    for position, (column, values) in enumerate(zip(columns, entries.features, strict=True)):
        # The last is for users without a value, whose code is -1.
        numbers = np.array([*(ids.get(f"{column}={value}", 0) for value in values.names.numbers), 0], dtype=np.int32)
        features[:, position] = numbers[values.codes(entries.num_users)]
    with replacing(folder / f"{name}.users.npy") as temporary, temporary.open("wb") as out:
        np.save(out, features)
    return Interactions(sequences, vocabulary, features, feature_names, facts)


def group(
    users: Spool,
    items: Spool,
    times: Spool,
    classes: np.ndarray,
    num_users: int,
    folder: Path,
    borders: Sequence[float] = (),
) -> Iterator[tuple[Ragged, np.ndarray]]:
    """Yield the classes of users ``0 … num_users - 1``, some users at a time, sorted by time; ties keep their order.

    With them comes how many of each user's interactions are at each border of the time or after it, int64
    ``(users, borders)``.

    ``classes`` has the class of each item, or -1: those are left out. The three spools have an entry for each
    interaction. Users are put into bins of about ``CHUNK`` interactions each; one pass brings every interaction to
    its bin on disk, and then the bins are sorted one by one. ``O(n)`` disk, in ``folder``; memory: some 40
    bytes per user, a chunk, and the longest sequence.
    """
    kept = (owners[classes[codes] >= 0] for owners, codes in zip(users.chunks(), items.chunks(), strict=True))
    lengths = tally(kept, num_users)
    ends = np.cumsum(lengths)
    bins = _narrow(np.maximum(ends - 1, 0) // spool.CHUNK)
    # shape: (bins + 1,): the first user, and the first place, of each
    first_user = np.searchsorted(bins, np.arange(int(bins[-1]) + 2, dtype=np.int64))
    first_place = np.concatenate(([0], ends))[first_user]
    with Spool(folder, [("user", np.int32), ("class", np.int32), ("time", times.dtype)]) as entries:
        place = first_place.copy()
        for part in _entries(users, items, times, classes, entries.dtype):
            number = bins[part["user"]]
            part = part[np.argsort(number, kind="stable")]
            counts = np.bincount(number, minlength=1)
            start = 0
            for index in np.flatnonzero(counts):
                entries.write(place[index], part[start : start + counts[index]])
                place[index] += counts[index]
                start += counts[index]
        for index in range(len(first_user) - 1):
            start, end = first_place[index : index + 2]
            part = entries.read(start, end - start)
            order = _order(part["user"] - first_user[index], part["time"])
            here = lengths[first_user[index] : first_user[index + 1]]
            owner = part["user"] - first_user[index]
            after = [np.bincount(owner[part["time"] >= border], minlength=len(here)) for border in borders]
            counts = np.array(after, dtype=np.int64).reshape(len(borders), len(here)).T
            yield Ragged.from_lengths(part["class"][order], here), counts


def _entries(users: Spool, items: Spool, times: Spool, classes: np.ndarray, dtype: np.dtype) -> Iterator[np.ndarray]:
    """Yield the interactions with a class, in order, a chunk at a time."""
    for owners, codes, when in zip(users.chunks(), items.chunks(), times.chunks(), strict=True):
        found = classes[codes]
        kept = found >= 0
        part = np.empty(np.count_nonzero(kept), dtype=dtype)
        part["user"], part["class"], part["time"] = owners[kept], found[kept], when[kept]
        yield part


def _order(users: np.ndarray, times: np.ndarray) -> np.ndarray | slice:
    """Return the stable order of interactions by user, then by time; arguments of shape ``(n,)``."""
    later = (users[1:] > users[:-1]) | ((users[1:] == users[:-1]) & (times[1:] >= times[:-1]))
    if later.all():  # many files are in order
        return slice(None)
    by_time = np.argsort(times, kind="stable")
    return by_time[np.argsort(_narrow(users)[by_time], kind="stable")]


def _narrow(numbers: np.ndarray) -> np.ndarray:
    """Store integers in as few bytes as they need: numpy sorts 16 bits in linear time."""
    return numbers.astype(np.min_scalar_type(numbers.max(initial=0)))
