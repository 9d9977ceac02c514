"""Text as a sequence of class ids."""

import re
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

TOKEN = re.compile(r"\w+|[^\w\s]")
RARE = "<rare>"


class Corpus(NamedTuple):
    """A text whose words are classes, numbered by falling frequency."""

    #: Class ids in the order of the text, shape ``(length,)``.
    tokens: Tensor
    #: The word of each class; the first stands for all words that are too rare to be classes.
    vocabulary: list[str]

    @classmethod
    def from_texts(cls, texts: Iterable[str], min_count: int = 2) -> "Corpus":
        """Split texts into words and symbols; words seen less than ``min_count`` times become one class."""
        counts: Counter[str] = Counter()
        documents = []
        for text in texts:
            words = TOKEN.findall(text)
            counts.update(words)
            documents.append(words)
        vocabulary = [RARE, *(word for word, count in counts.most_common() if count >= min_count)]
        ids = {word: index for index, word in enumerate(vocabulary)}
        tokens = [torch.tensor([ids.get(word, 0) for word in words], dtype=torch.long) for words in documents]
        return cls(torch.cat(tokens), vocabulary)

    def counts(self) -> Tensor:
        """How often each class occurs, shape ``(num_classes,)``."""
        return torch.bincount(self.tokens, minlength=len(self.vocabulary))


def python_sources() -> Iterator[Path]:
    """The source files of the running Python's standard library, in a fixed order that mixes its parts."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(path for path in root.rglob("*.py") if "site-packages" not in path.parts)
    # A part of the library at the end would be unlike all the rest: deal the files out like cards.
    return (path for start in range(37) for path in files[start::37])


def python_corpus(min_count: int = 2) -> Corpus:
    """The standard library's sources: millions of words, tens of thousands of classes, on every machine."""
    corpus = Corpus.from_texts((path.read_text("utf-8", errors="replace") for path in python_sources()), min_count)
    if len(corpus.vocabulary) < 1000:
        raise FileNotFoundError(f"found no Python sources under {sysconfig.get_paths()['stdlib']}")
    return corpus
