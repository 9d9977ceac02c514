"""Interactions by user and time, without having them all in memory."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from . import spool
from .ragged import Ragged
from .spool import Spool, tally


def group(
    users: Spool,
    items: Spool,
    times: Spool,
    classes: np.ndarray,
    num_users: int,
    folder: Path,
    borders: Sequence[float] = (),
) -> Iterator[tuple[Ragged, np.ndarray]]:
    """The classes of users ``0 … num_users - 1``, some users at a time; those of a user by time, equal times in order.

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
    """The interactions with a class, in order, a chunk at a time."""
    for owners, codes, when in zip(users.chunks(), items.chunks(), times.chunks(), strict=True):
        found = classes[codes]
        kept = found >= 0
        part = np.empty(np.count_nonzero(kept), dtype=dtype)
        part["user"], part["class"], part["time"] = owners[kept], found[kept], when[kept]
        yield part


def _order(users: np.ndarray, times: np.ndarray) -> np.ndarray | slice:
    """What puts interactions in the order of users, then times, then as they are; arguments of shape ``(n,)``."""
    later = (users[1:] > users[:-1]) | ((users[1:] == users[:-1]) & (times[1:] >= times[:-1]))
    if later.all():  # many files are in order
        return slice(None)
    by_time = np.argsort(times, kind="stable")
    return by_time[np.argsort(_narrow(users)[by_time], kind="stable")]


def _narrow(numbers: np.ndarray) -> np.ndarray:
    """Small integers in as few bytes as they need: 16 bits are sorted in linear time."""
    return numbers.astype(np.min_scalar_type(numbers.max(initial=0)))
