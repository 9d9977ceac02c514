"""Names as bags of hashed character n-grams."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from .spool import Ragged, RaggedWriter

#: Lengths of the n-grams, with ``<`` and ``>`` around a name; the whole name is one more.
SIZES = (3, 4)
#: Features that n-grams are hashed to.
BUCKETS = 1 << 18
#: Names that are hashed at a time.
NAMES = 1 << 16
_STEP, _MIX = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD6E8FEB86659FD93)


def write_ngrams(names: Sequence[str], folder: Path, name: str) -> None:
    """Write the n-grams of each name as `Ragged` rows of numbers below `BUCKETS`; memory: some names."""
    with RaggedWriter(folder) as writer:
        for start in range(0, len(names), NAMES):
            writer.append(ngrams(names[start : start + NAMES]))
        writer.save(name)


def ngrams(names: Sequence[str]) -> Ragged:
    """Hash the n-grams of each name, those of one length after those of another, then the whole name."""
    marked = [f"<{name}>" for name in names]
    lengths = np.fromiter(map(len, marked), np.int64, len(marked))
    text = np.frombuffer("".join(marked).encode("utf-32-le", "surrogatepass"), np.uint32).astype(np.uint64)
    owner, ends = np.repeat(np.arange(len(marked)), lengths), np.cumsum(lengths)
    owners, hashes = zip(*_grams(text, owner, ends), strict=True)
    order = np.argsort(np.concatenate(owners), kind="stable")
    counts = np.bincount(np.concatenate(owners), minlength=len(marked))
    mixed = np.concatenate(hashes)[order]
    mixed = (mixed ^ (mixed >> np.uint64(32))) * _MIX
    return Ragged.from_lengths((mixed >> np.uint64(33)).astype(np.int64) % BUCKETS, counts)


def _grams(text: np.ndarray, owner: np.ndarray, ends: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield numbers of names and the hash of an n-gram of each, by length, then for whole names."""
    for size in SIZES:
        starts = np.flatnonzero(np.arange(len(text)) + size <= ends[owner])
        hashed = np.zeros(len(starts), dtype=np.uint64)
        for place in range(size):
            hashed = (hashed + text[starts + place]) * _STEP
        yield owner[starts], hashed
    # The sum over a name of its characters, each times a power of its place: one pass for names of any length.
    place = np.arange(len(text)) - (ends - np.diff(ends, prepend=0))[owner]
    powers = np.multiply.accumulate(np.full(int(place.max(initial=0)) + 1, _STEP))
    terms = np.add.accumulate(text * powers[place])
    upto = np.concatenate([np.zeros(1, np.uint64), terms])
    yield np.arange(len(ends)), upto[ends] - upto[ends - np.diff(ends, prepend=0)]
