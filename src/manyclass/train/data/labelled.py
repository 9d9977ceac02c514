"""Documents with features and many labels, in the text format of extreme classification."""

import re
from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ...checks import positive_int
from ..records import quoted
from . import spool
from .files import UTF_8, Advance, ignore, read_lines
from .spool import Ragged, RaggedWriter, Spool, load_array, tally
from .texts import Texts, is_text, read_texts
from .vocabulary import Vocabulary, inverse, numbering, ranking

_HEADER = re.compile(r"\s*(\d+)\s+(\d+)\s+(\d+)\s*")

#: Documents that people are shown, and labels and features of each.
PREVIEW, SHOWN = 3, 6
TEXTS = Texts()


class Part(NamedTuple):
    """Some documents."""

    #: Labels, numbered by first sight.
    labels: Ragged
    features: Ragged
    #: Aligned with ``features.values``.
    values: np.ndarray


class Documents:
    """Documents in the order they came, on disk, their lengths too; memory: each label once, and a chunk."""

    def __init__(self, folder: Path):
        #: Of each label, by first sight.
        self.numbers = numbering()
        self.largest_feature = -1
        # One after the other: labels, how many a document has, features, how many, values.
        self._buffers = array("i"), array("i"), array("i"), array("i"), array("f")
        self._spools = tuple(Spool(folder, buffer.typecode) for buffer in self._buffers)
        # How many of each are in one part.
        self._sizes: list[list[int]] = []

    def __enter__(self) -> "Documents":
        return self

    def __exit__(self, *error: object) -> None:
        for one in self._spools:
            one.__exit__()

    def append(self, names: Sequence[int], ids: Sequence[int], values: np.ndarray) -> None:
        """Add a document with these labels, feature ids and values of features (float32)."""
        labels, label_lengths, features, feature_lengths, weights = self._buffers
        labels.extend(map(self.numbers.__getitem__, names))
        label_lengths.append(len(names))
        features.extend(ids)
        feature_lengths.append(len(ids))
        weights.frombytes(values.tobytes())
        if len(labels) + len(features) >= spool.CHUNK:
            self.flush()

    def flush(self) -> None:
        """Bring the last documents to the disk."""
        self._sizes.append([len(buffer) for buffer in self._buffers])
        self.largest_feature = int(np.array(self._buffers[2]).max(initial=self.largest_feature))
        for one, buffer in zip(self._spools, self._buffers, strict=True):
            one.append(np.array(buffer))
            del buffer[:]

    def label_chunks(self) -> Iterator[np.ndarray]:
        """Return the labels of all documents."""
        return self._spools[0].chunks()

    def parts(self) -> Iterator[Part]:
        """Yield all documents, a chunk at a time."""
        places = [0] * len(self._spools)
        for sizes in self._sizes:
            read = [one.read(*where) for one, *where in zip(self._spools, places, sizes, strict=True)]
            labels, label_lengths, features, feature_lengths, values = read
            yield Part(
                Ragged.from_lengths(labels, label_lengths), Ragged.from_lengths(features, feature_lengths), values
            )
            places = [place + size for place, size in zip(places, sizes, strict=True)]


class Labelled(NamedTuple):
    """The documents that have at least one label, on disk and mapped into memory."""

    #: Class ids (int32), a row per document.
    labels: Ragged
    #: Feature ids (int32), a row per document.
    features: Ragged
    #: What the features weigh, aligned with ``features.values``; float32.
    values: np.ndarray
    num_features: int
    #: The label numbers of the file by falling count, equal counts by first sight.
    vocabulary: Vocabulary
    #: Whether the documents are texts, whose words were hashed to features.
    hashed: bool
    #: What was read, in lines for people.
    facts: list[str]


class _Limits(NamedTuple):
    documents: int
    features: int
    labels: int


def read_labelled(
    file: Path,
    folder: Path,
    name: str,
    vocabulary: Vocabulary | None = None,
    num_features: int | None = None,
    *,
    min_count: int = 1,
    texts: Texts = TEXTS,
    encoding: str = UTF_8,
    advance: Advance = ignore,
) -> Labelled:
    """Read ``label,label feature:value feature:value …``, a document per line, after an optional header
    ``documents features labels``; or labelled texts, see `read_texts`.

    A line that starts with a blank has no labels, and is left out. So are labels seen less than ``min_count`` times
    or, for held-out data, not in the given ``vocabulary``, features from ``num_features`` on, and then documents
    without a label.

    The result is in ``folder``: ``{name}.labels.values.npy`` and ``{name}.labels.offsets.npy``, the same for
    ``features``, and ``{name}.values.npy``. Memory: the labels' names, and a chunk; on disk, in ``folder`` and for
    the time of reading, some 16 bytes for each feature of a document, and for each label.
    """
    positive_int("min_count", min_count)
    with Documents(folder) as documents:
        lines = read_lines(file, advance, encoding)
        start = list(islice(lines, 1))
        hashed = bool(start) and is_text(file, start[0][1])
        lines = chain(start, lines)
        if hashed:
            limits, (count, preview) = None, _read_texts(file, lines, documents, texts)
        else:
            limits, count = _read(file, lines, documents)
            preview = _preview(documents)
        vocabulary, classes = _classes(file, documents, vocabulary, min_count)
        if num_features is None:
            num_features = limits.features if limits else documents.largest_feature + 1
            num_features = texts.buckets if hashed else num_features
        with (
            RaggedWriter(folder) as labels,
            RaggedWriter(folder) as features,
            Spool(folder, np.float32) as values,
        ):
            for part in documents.parts():
                found = classes[part.labels.values]
                kept_labels = Ragged(found, part.labels.offsets).keep(found >= 0)
                some = kept_labels.lengths() > 0
                kept = np.repeat(some, part.features.lengths()) & (part.features.values < num_features)
                kept_features = part.features.keep(kept)
                labels.append(Ragged.from_lengths(kept_labels.values, kept_labels.lengths()[some]))
                features.append(Ragged.from_lengths(kept_features.values, kept_features.lengths()[some]))
                values.append(part.values[kept])
            if not len(labels):
                raise ValueError(f"{file}: none of its labels is in the vocabulary")
            values.save(folder / f"{name}.values.npy")
            return Labelled(
                labels.save(f"{name}.labels"),
                features.save(f"{name}.features"),
                load_array(folder / f"{name}.values.npy", np.float32),
                num_features,
                vocabulary,
                hashed,
                [_fact(file, count, len(labels), documents, num_features, hashed), *preview],
            )


def _fact(file: Path, count: int, kept: int, documents: Documents, num_features: int, hashed: bool) -> str:
    dropped = f", dropped {count - kept:,} documents without a label that is a class" if kept < count else ""
    features = f"words hashed to {num_features:,} features" if hashed else f"{num_features:,} features"
    return f"{file}: {count:,} documents, {len(documents.numbers):,} labels, {features}{dropped}"


def _preview(documents: Documents) -> list[str]:
    """Show the first documents as they were read."""
    part, names = next(documents.parts()), list(documents.numbers)
    shown = []
    for row in range(min(PREVIEW, len(part.labels))):
        labels = ", ".join(str(names[label]) for label in part.labels.row(row)[:SHOWN])
        begin, end = part.features.offsets[row : row + 2]
        pairs = zip(part.features.row(row)[:SHOWN], part.values[begin:end][:SHOWN], strict=True)
        more = " …" if end - begin > SHOWN else ""
        shown.append(f"  labels {labels}: {' '.join(f'{feature}:{value:g}' for feature, value in pairs)}{more}")
    return shown


def _read_texts(
    file: Path, lines: Iterable[tuple[int, str]], documents: Documents, texts: Texts
) -> tuple[int, list[str]]:
    """Add the texts of a file that have labels; returns their number, and the first ones for people."""
    count, preview = 0, []
    for labels, text in read_texts(file, iter(lines), texts):
        count += 1
        if labels:
            documents.append(list(dict.fromkeys(labels)), *texts.features(text))  # pyright: ignore
        if len(preview) < PREVIEW:
            preview.append(f"  labels {', '.join(map(quoted, labels[:SHOWN])) or 'none'}: {quoted(text)}")
    documents.flush()
    if not count:
        raise ValueError(f"{file}: no documents in the file")
    if not documents.numbers:
        raise ValueError(f"{file}: no document has a label")
    return count, preview


def _read(file: Path, lines: Iterable[tuple[int, str]], documents: Documents) -> tuple[_Limits | None, int]:
    """Add the documents of a file that have labels; returns what its header says, and the number of documents."""
    limits, count = None, 0
    for number, line in lines:
        if number == 1 and (header := _HEADER.fullmatch(line)):
            limits = _Limits(*map(int, header.groups()))
        elif line:
            count += 1
            names, ids, values = _parse(f"{file}, line {number}", line, limits)
            if names:
                documents.append(names, ids, values)
    documents.flush()
    if not count:
        raise ValueError(f"{file}: no documents in the file")
    if limits and limits.documents != count:
        raise ValueError(f"{file}: the header says {limits.documents} documents, but there are {count}")
    if not documents.numbers:
        raise ValueError(f"{file}: no document has a label")
    return limits, count


def _classes(
    file: Path, documents: Documents, vocabulary: Vocabulary | None, min_count: int
) -> tuple[Vocabulary, np.ndarray]:
    """Return the vocabulary, and the class of each label by first sight, or -1: shape ``(labels,)``."""
    numbers: list[int | str] = list(documents.numbers)
    if vocabulary is not None:
        known = vocabulary.ids()
        return vocabulary, np.array([known.get(str(number), -1) for number in numbers], dtype=np.int32)
    counts = tally(documents.label_chunks(), len(numbers))
    order = ranking(counts, min_count)
    if len(order) < 2:
        which = (
            f"only one label, {quoted(numbers[0])}" if len(numbers) == 1 else f"{len(order)} of {len(numbers)} labels"
        )
        rare = "" if min_count == 1 else f" seen min_count={min_count} times"
        raise ValueError(f"{file}: {which}{rare}; at least 2 are needed")
    names = [str(numbers[index]) for index in order]
    return Vocabulary(names, counts[order]), inverse(order, len(numbers), missing=-1)


def _parse(place: str, line: str, limits: _Limits | None) -> tuple[list[int], list[int], np.ndarray]:
    """Return the labels, feature ids and values of a line."""
    words = line.split()
    names = [] if line[0].isspace() else [_whole(place, "label", label) for label in words.pop(0).split(",")]
    pairs = [word.split(":") for word in words]
    try:
        ids = [int(feature) for feature, _ in pairs]
        with np.errstate(over="ignore"):
            weights = np.array([float(value) for _, value in pairs]).astype(np.float32)
    except ValueError:
        broken = next(word for word in words if not _is_pair(word))
        raise ValueError(f"{place}: {quoted(broken)} is not feature:value") from None
    if not np.isfinite(weights).all():
        broken = words[int(np.flatnonzero(~np.isfinite(weights))[0])]
        raise ValueError(f"{place}: {quoted(broken)} is not a finite number in 32 bits")
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
        hint = (
            "; a line without labels starts with a blank" if ":" in word else "; texts have labels like __label__sport"
        )
        raise ValueError(f"{place}: {what} {quoted(word)} is not a number{hint}") from None


def _is_pair(word: str) -> bool:
    feature, _, value = word.partition(":")
    try:
        int(feature)
        float(value)
    except ValueError:
        return False
    return True
