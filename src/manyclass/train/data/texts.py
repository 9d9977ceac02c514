"""Labelled texts: fastText's lines, and tables with columns of texts and labels. Words become hashed features."""

import csv
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np

from ..records import quoted
from .files import LONGEST, bare_suffix

#: What starts a label in fastText's format.
PREFIX = "__label__"
TABLES = {".csv": ",", ".tsv": "\t", ".jsonl": None, ".ndjson": None}
#: Labels, and the text that they are of.
Row = tuple[list[str], str]


class Texts(NamedTuple):
    """How labelled texts are read, and how they become features."""

    #: Words in a row that are one feature, from 1 up to this many.
    ngrams: int = 1
    #: Features that words are hashed to.
    buckets: int = 1 << 18
    text: str = "text"
    label: str = "label"
    #: Between the labels of a cell of a table; None: a cell is one label.
    separator: str | None = None

    def features(self, text: str) -> tuple[list[int], np.ndarray]:
        """Return the features of a text, each once, and how often they occur, float32. Labels in it do not count."""
        words = [word for word in text.split() if not word.startswith(PREFIX)]
        spans = (
            " ".join(words[start : start + size])
            for size in range(1, self.ngrams + 1)
            for start in range(len(words) - size + 1)
        )
        counts = Counter(crc32(span.encode()) % self.buckets for span in spans)
        return list(counts), np.array(list(counts.values()), dtype=np.float32)


def is_text(file: Path, first: str) -> bool:
    """Return whether a file, whose first line is given, has texts; else it has numbered features."""
    return bare_suffix(file) in TABLES or any(word.startswith(PREFIX) for word in first.split())


def read_texts(file: Path, lines: Iterator[tuple[int, str]], texts: Texts) -> Iterator[Row]:
    """Read labels and texts from numbered lines."""
    suffix = bare_suffix(file)
    if suffix not in TABLES:
        for _, line in lines:
            words = line.split()
            if words:
                yield [word.removeprefix(PREFIX) for word in words if word.startswith(PREFIX)], line.strip()
        return
    records = _objects(file, lines) if TABLES[suffix] is None else _cells(file, lines, TABLES[suffix])
    for place, record in records:
        for column in (texts.text, texts.label):
            if column not in record:
                there = ", ".join(map(quoted, list(record)[:20]))
                raise ValueError(f"{place}: no column {quoted(column)}; there are {there}")
        text, labels = record[texts.text], record[texts.label]
        if not isinstance(text, str):
            raise ValueError(f"{place}: {texts.text} must be a text, got {quoted(text)}")
        if labels is None or labels == "":
            labels = []
        elif isinstance(labels, str):
            labels = labels.split(texts.separator) if texts.separator else [labels]
        elif not isinstance(labels, list):
            labels = [labels]
        yield [label if isinstance(label, str) else json.dumps(label) for label in labels], text


def _cells(file: Path, lines: Iterator[tuple[int, str]], separator: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    csv.field_size_limit(LONGEST)
    names: list[str] | None = None
    reader = csv.reader((f"{line}\n" for _, line in lines), delimiter=separator, strict=True)
    try:
        for row in reader:
            if names is None:
                names = row or None
            elif row:
                place = f"{file}, line {reader.line_num}"
                if len(row) != len(names):
                    raise ValueError(f"{place}: {len(row)} fields, but the header has {len(names)}")
                yield place, dict(zip(names, row, strict=True))
    except csv.Error as error:
        raise ValueError(f"{file}, line {reader.line_num}: {error}") from None


def _objects(file: Path, lines: Iterator[tuple[int, str]]) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, line in lines:
        if not line.strip():
            continue
        place = f"{file}, line {number}"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{place}: not JSON: {error}") from None
        if not isinstance(record, dict):
            raise ValueError(f"{place}: not a JSON object")
        yield place, record
