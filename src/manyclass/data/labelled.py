"""Documents with features and many labels, in the text format of extreme classification."""

import re
from array import array
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..checks import positive_int
from .files import Advance, ignore, read_lines
from .ragged import Ragged
from .vocabulary import Vocabulary, inverse, ranking

_HEADER = re.compile(r"\s*(\d+)\s+(\d+)\s+(\d+)\s*")


class Labelled(NamedTuple):
    """The documents that have at least one label."""

    #: Class ids (int32), a row per document.
    labels: Ragged
    #: Feature ids (int32), a row per document.
    features: Ragged
    #: What the features weigh, aligned with ``features.values``; float32.
    values: np.ndarray
    num_features: int
    #: The label numbers of the file by falling count, equal counts by first sight.
    vocabulary: Vocabulary


class _Limits(NamedTuple):
    documents: int
    features: int
    labels: int


def read_labelled(
    file: Path,
    vocabulary: Vocabulary | None = None,
    num_features: int | None = None,
    *,
    min_count: int = 1,
    advance: Advance = ignore,
) -> Labelled:
    """Read ``label,label feature:value feature:value …``, a document per line, after an optional header
    ``documents features labels``.

    A line that starts with a blank has no labels, and is left out. So are labels seen less than ``min_count`` times
    or, for held-out data, not in the given ``vocabulary``, features from ``num_features`` on, and then documents
    without a label.
    """
    positive_int("min_count", min_count)
    limits = None
    numbers: defaultdict[int, int] = defaultdict()
    numbers.default_factory = numbers.__len__  # a new label gets the next number
    labels, label_lengths = array("i"), array("q")
    features, feature_lengths, values = array("i"), array("q"), array("f")
    documents = 0
    for number, line in read_lines(file, advance):
        if number == 1 and (header := _HEADER.fullmatch(line)):
            limits = _Limits(*map(int, header.groups()))
        elif line:
            documents += 1
            names, ids, weights = _parse(f"{file}, line {number}", line, limits)
            if names:
                labels.extend(map(numbers.__getitem__, names))
                label_lengths.append(len(names))
                features.extend(ids)
                values.frombytes(weights.tobytes())
                feature_lengths.append(len(ids))
    if not documents:
        raise ValueError(f"{file}: no documents in the file")
    if limits and limits.documents != documents:
        raise ValueError(f"{file}: the header says {limits.documents} documents, but there are {documents}")
    if not label_lengths:
        raise ValueError(f"{file}: no document has a label")
    codes = np.array(labels, dtype=np.int32)
    vocabulary, classes = _classes(file, list(numbers), codes, vocabulary, min_count)
    feature_ids = np.array(features, dtype=np.int32)
    if num_features is None:
        num_features = limits.features if limits else int(feature_ids.max(initial=-1)) + 1
    classes = classes[codes]
    kept_labels = Ragged.from_lengths(classes, np.array(label_lengths)).keep(classes >= 0)
    some = kept_labels.lengths() > 0
    if not some.any():
        raise ValueError(f"{file}: none of its labels is in the vocabulary")
    lengths = np.array(feature_lengths)
    kept = np.repeat(some, lengths) & (feature_ids < num_features)
    rows = Ragged.from_lengths(feature_ids, lengths).keep(kept)
    return Labelled(
        Ragged.from_lengths(kept_labels.values, kept_labels.lengths()[some]),
        Ragged.from_lengths(rows.values, rows.lengths()[some]),
        np.array(values, dtype=np.float32)[kept],
        num_features,
        vocabulary,
    )


def _classes(
    file: Path, numbers: list[int], codes: np.ndarray, vocabulary: Vocabulary | None, min_count: int
) -> tuple[Vocabulary, np.ndarray]:
    """The vocabulary, and the class of each label by first sight, or -1: shape ``(len(numbers),)``."""
    if vocabulary is not None:
        known = vocabulary.ids()
        return vocabulary, np.array([known.get(str(number), -1) for number in numbers], dtype=np.int32)
    counts = np.bincount(codes, minlength=len(numbers))
    order = ranking(counts, min_count)
    if len(order) < 2:
        which = f"only one label, {numbers[0]}" if len(numbers) == 1 else f"{len(order)} of {len(numbers)} labels"
        rare = "" if min_count == 1 else f" seen min_count={min_count} times"
        raise ValueError(f"{file}: {which}{rare}; at least 2 are needed")
    names = [str(numbers[index]) for index in order]
    return Vocabulary(names, counts[order]), inverse(order, len(numbers), missing=-1)


def _parse(place: str, line: str, limits: _Limits | None) -> tuple[list[int], list[int], np.ndarray]:
    """The labels, feature ids and values of a line."""
    words = line.split()
    names = [] if line[0].isspace() else [_whole(place, "label", label) for label in words.pop(0).split(",")]
    pairs = [word.split(":") for word in words]
    try:
        ids = [int(feature) for feature, _ in pairs]
        with np.errstate(over="ignore"):
            weights = np.array([float(value) for _, value in pairs]).astype(np.float32)
    except ValueError:
        broken = next(word for word in words if not _is_pair(word))
        raise ValueError(f"{place}: {broken!r} is not feature:value") from None
    if not np.isfinite(weights).all():
        broken = words[int(np.flatnonzero(~np.isfinite(weights))[0])]
        raise ValueError(f"{place}: {broken!r} is not a finite number in 32 bits")
    for what, found, limit in (
        ("label", names, limits.labels if limits else 2**31),
        ("feature", ids, limits.features if limits else 2**31),
    ):
        if found and (min(found) < 0 or max(found) >= limit):
            wrong = min(found) if min(found) < 0 else max(found)
            raise ValueError(f"{place}: {what} {wrong} is not in [0, {limit})")
    return names, ids, weights


def _whole(place: str, what: str, word: str) -> int:
    try:
        return int(word)
    except ValueError:
        hint = "; a line without labels starts with a blank" if ":" in word else ""
        raise ValueError(f"{place}: {what} {word!r} is not a number{hint}") from None


def _is_pair(word: str) -> bool:
    feature, _, value = word.partition(":")
    try:
        int(feature)
        float(value)
    except ValueError:
        return False
    return True
