"""Text as a sequence of class ids on disk."""

import re
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from ...checks import one_of, positive_int
from .files import UTF_8, Advance, ignore, read_pieces
from .spool import Spool, save_array
from .vocabulary import Vocabulary, inverse, numbering, ranking

#: How text becomes words: ``words`` are runs of letters and digits, and single symbols; ``blanks`` splits at white
#: space and puts ``<eos>`` at the end of every line that is not blank.
SPLITS = ("words", "blanks")
RARE, EOS = "<rare>", "<eos>"
WORD = re.compile(r"\w+|[^\w\s]")
_LINE_ENDS = re.compile(r"\n\s*")


def prepare_text(
    files: Sequence[Path],
    tokens: Path,
    *,
    min_count: int = 2,
    split: str = "words",
    encoding: str = UTF_8,
    advance: Advance = ignore,
) -> Vocabulary:
    """Write the class ids of a text to ``tokens``, an int32 ``.npy`` file of shape ``(length,)``.

    Class 0 is ``<rare>``: all words seen less than ``min_count`` times. The others are numbered by falling count,
    equal counts by first sight. The text is read once; memory: the vocabulary and a piece of the text.
    """
    positive_int("min_count", min_count)
    ids = numbering()
    ids[RARE] = 0
    counts = np.zeros(1, dtype=np.int64)
    with Spool(tokens.parent, np.int32) as raw:
        for words in _split(files, split, encoding, advance):
            numbers = np.fromiter(map(ids.__getitem__, words), dtype=np.int32, count=len(words))
            raw.append(numbers)
            more = np.bincount(numbers, minlength=len(ids))
            more[: len(counts)] += counts
            counts = more
        names = ", ".join(map(str, files))
        if not counts.any():
            raise ValueError(f"{names}: no words")
        total, counts[0] = counts.sum(), 0
        order = np.concatenate(([0], ranking(counts, min_count)))
        counts = counts[order]
        counts[0] = total - counts.sum()
        if np.count_nonzero(counts) < 2:
            raise ValueError(f"{names}: only one class in the text: too few words occur min_count={min_count} times")
        classes = inverse(order, len(ids), missing=0)
        save_array(tokens, np.int32, len(raw), (classes[chunk] for chunk in raw.chunks()))
    words = list(ids)
    return Vocabulary([words[index] for index in order], counts)


def encode_text(
    files: Sequence[Path],
    tokens: Path,
    vocabulary: Vocabulary,
    *,
    split: str = "words",
    encoding: str = UTF_8,
    advance: Advance = ignore,
) -> None:
    """Write the class ids of a text as :func:`prepare_text` does, with its vocabulary; unknown words are class 0."""
    ids = vocabulary.ids()
    with Spool(tokens.parent, np.int32) as raw:
        for words in _split(files, split, encoding, advance):
            numbers = np.fromiter((ids.get(word, 0) for word in words), dtype=np.int32, count=len(words))
            raw.append(numbers)
        if not len(raw):
            raise ValueError(f"{', '.join(map(str, files))}: no words")
        raw.save(tokens)


def _split(files: Sequence[Path], split: str, encoding: str, advance: Advance) -> Iterator[list[str]]:
    one_of("split", split, SPLITS)
    for file in files:
        words = []
        for text in read_pieces(file, advance, encoding):
            words = WORD.findall(text) if split == "words" else _LINE_ENDS.sub(f" {EOS} ", text).split()
            yield words
        if words and split == "blanks":
            yield [EOS]


def python_sources() -> Iterator[Path]:
    """Return the source files of the running Python's standard library, in a fixed order that mixes its parts."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(path for path in root.rglob("*.py") if "site-packages" not in path.parts)
    # A part of the library at the end would be unlike all the rest: deal the files out like cards.
    return (path for start in range(37) for path in files[start::37] if _is_utf8(path))


def _is_utf8(path: Path) -> bool:
    """Return whether a file is UTF-8: some sources of Python's tests are not, on purpose."""
    try:
        path.read_bytes().decode()
    except UnicodeDecodeError:
        return False
    return True
