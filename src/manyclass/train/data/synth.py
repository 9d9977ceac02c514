"""Synthetic interactions with a known distribution, for any number of classes."""

import math
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
import polars as pl

from ...checks import one_of, positive_int
from ..atomic import replacing
from .files import Advance, ignore

SUFFIXES = (".csv", ".tsv", ".parquet", ".jsonl", ".txt")
MAX_ITEMS = 10_000_000
CLUSTERS = 128
#: Strength of the influence of the user and of the previous item on the next item.
STRENGTH = 6.0
#: How far users are from the cluster they like best.
SPREAD = 0.5
#: Interactions in memory at a time.
ROWS = 1 << 18


class LatentFactors:
    """A chain of items with latent factors::

        P(i | u, j) ∝ (i + 1)^-exponent · exp(STRENGTH · (⟨u, v_c(i)⟩ + ⟨w_c(j), v_c(i)⟩)),   c(i) = i mod C

    for the item ``i`` that the user with the vector ``u`` takes after item ``j``; for the first item the term with
    ``w`` is left out. The items of a cluster share two unit vectors: ``v``, what they are, and ``w``, what follows
    them. There are ``C = min(CLUSTERS, items)`` clusters. So a draw is that of a cluster, ``O(C)``, and of an item in
    it by popularity alone, ``O(log items)``. Memory: 8 bytes per item.
    """

    def __init__(self, items: int, factors: int, exponent: float, rng: np.random.Generator):
        self.clusters = min(CLUSTERS, items)
        # shape: (C, factors) each
        self.what, self.next = (_unit(rng.standard_normal((self.clusters, factors))) for _ in range(2))
        self.follows = np.exp(STRENGTH * self.next @ self.what.T)  # shape: (C, C), the cluster before and after
        sizes = -(-(items - np.arange(self.clusters)) // self.clusters)
        self.ends = np.cumsum(sizes)
        self.mass = np.zeros(self.clusters)
        # Popularity summed up inside each cluster, plus the number of the cluster: one sorted array for all.
        self.ladder = np.empty(items)
        for cluster, (end, size) in enumerate(zip(self.ends, sizes, strict=True)):
            summed = np.cumsum(np.arange(cluster + 1.0, items + 1, self.clusters) ** -exponent)
            self.mass[cluster] = summed[-1]
            self.ladder[end - size : end] = cluster + summed / summed[-1]

    def users(self, count: int, rng: np.random.Generator) -> np.ndarray:
        """Draw user vectors around the ``v`` of a random cluster, with standard deviation ``SPREAD/√factors``.

        Shape ``(count, factors)``.
        """
        factors = self.what.shape[1]
        centre = self.what[rng.integers(self.clusters, size=count)]
        return centre + rng.standard_normal((count, factors)) * (SPREAD / math.sqrt(factors))

    def sequences(self, users: np.ndarray, length: int, rng: np.random.Generator) -> np.ndarray:
        """Draw items ``(count, length)``, int64, for users ``(count, factors)``."""
        taste = self.mass * np.exp(STRENGTH * users @ self.what.T)
        items = np.empty((len(users), length), dtype=np.int64)
        for step in range(length):
            before = items[:, step - 1] % self.clusters
            items[:, step] = self._draw(taste * self.follows[before] if step else taste, rng)
        return items

    def _draw(self, weights: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Draw an item for each row of cluster weights, shape ``(count, C)``."""
        summed = np.cumsum(weights, axis=1)
        level = rng.random(len(weights)) * summed[:, -1]
        cluster = np.minimum((summed <= level[:, None]).sum(axis=1), self.clusters - 1)
        place = np.searchsorted(self.ladder, cluster + rng.random(len(weights)), side="right")
        # Rounding must not lead out of the cluster.
        place = np.minimum(place, self.ends[cluster] - 1)
        start = np.concatenate(([0], self.ends))[cluster]
        return cluster + self.clusters * (place - start)


def synthesise(
    file: Path,
    *,
    items: int,
    users: int,
    length: int,
    factors: int = 16,
    exponent: float = 1.0,
    seed: int = 0,
    advance: Advance = ignore,
) -> None:
    """Write ``length`` interactions of each of ``users`` users with up to 10⁷ items, drawn from
    :class:`LatentFactors`.

    The suffix chooses the format: ``.csv``, ``.tsv``, ``.parquet`` and ``.jsonl`` have the columns user, item,
    timestamp; ``.txt`` has the items of a user on a line. The file appears when it is complete, and the same
    arguments give the same file. ``advance`` receives the number of further interactions. Memory: 8 bytes per item
    and a chunk.
    """
    one_of("the suffix of the file", file.suffix, SUFFIXES)
    positive_int("items", items, 2)
    if items > MAX_ITEMS:
        raise ValueError(f"items must be at most {MAX_ITEMS}, got {items}")
    for name, value in (("users", users), ("length", length), ("factors", factors)):
        positive_int(name, value)
    positive_int("seed", seed, 0)
    if not 0 <= exponent <= 4:
        raise ValueError(f"exponent must be in [0, 4], got {exponent}")
    rng = np.random.default_rng(seed)
    model = LatentFactors(items, factors, exponent, rng)

    def chunks() -> Iterator[tuple[int, np.ndarray]]:
        count = max(1, min(4096, ROWS // length))
        for start in range(0, users, count):
            some = min(count, users - start)
            yield start, model.sequences(model.users(some, rng), length, rng)
            advance(some * length)

    with replacing(file) as temporary:
        if file.suffix == ".parquet":
            _write_parquet(temporary, chunks())
        else:
            with temporary.open("wb") as out:
                for start, sequences in chunks():
                    _WRITERS[file.suffix](out, start, sequences)


def _frame(start: int, sequences: np.ndarray) -> pl.DataFrame:
    count, length = sequences.shape
    user, time = np.divmod(np.arange(count * length), length)
    return pl.DataFrame({"user": start + user, "item": sequences.ravel(), "timestamp": time})


def _write_parquet(file: Path, chunks: Iterator[tuple[int, np.ndarray]]) -> None:
    """Write parts and stream them into one file, since polars writes a parquet file from one frame."""
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        parts = []
        for start, sequences in chunks:
            parts.append(Path(folder) / f"{len(parts):06d}.parquet")
            _frame(start, sequences).write_parquet(parts[-1])
        pl.scan_parquet(parts, glob=False).sink_parquet(file)


def _write_csv(out: BinaryIO, start: int, sequences: np.ndarray) -> None:
    _frame(start, sequences).write_csv(out, include_header=start == 0)


def _write_tsv(out: BinaryIO, start: int, sequences: np.ndarray) -> None:
    _frame(start, sequences).write_csv(out, include_header=start == 0, separator="\t")


def _write_jsonl(out: BinaryIO, start: int, sequences: np.ndarray) -> None:
    _frame(start, sequences).write_ndjson(out)


def _write_txt(out: BinaryIO, start: int, sequences: np.ndarray) -> None:
    out.writelines(f"{' '.join(map(str, row))}\n".encode() for row in sequences.tolist())


_WRITERS: dict[str, Callable[[BinaryIO, int, np.ndarray], None]] = {
    ".csv": _write_csv,
    ".tsv": _write_tsv,
    ".jsonl": _write_jsonl,
    ".txt": _write_txt,
}


def _unit(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
