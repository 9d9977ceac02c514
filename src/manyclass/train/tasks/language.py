"""Predict each word of a text from the words before it."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from ..data import Vocabulary
from ..data.characters import BUCKETS, write_ngrams
from ..data.files import Advance
from ..data.spool import Ragged, load_array
from ..data.text import WORD, encode_text, prepare_text, python_sources
from ..models import LSTM, Attributes, Tower
from ..settings import LanguageSettings
from .base import Batch, Task, copied, own_part, tensor, write_facts

#: Without a held-out file, this share at the end of the text is held out, up to a number of words.
HELDOUT = 0.05
MOST_HELDOUT = 200_000
#: Number of streams of held-out text, fewer if it is short, and the length of a window in words.
STREAMS = 16
WINDOW = 50
#: Words that people are shown after reading.
SHOWN = 12


class Language(Task[LanguageSettings]):
    """Streams of a text, walked along ``length`` words at a time."""

    name = "lm"
    recurrent = True
    ranked = False

    def __init__(
        self, settings: LanguageSettings, folder: Path, vocabulary: Vocabulary, part: tuple[int, int] = (0, 1)
    ) -> None:
        super().__init__(settings, folder, vocabulary, part)
        text = load_array(folder / "train.npy", np.int32, self.num_classes)
        if settings.heldout is None:
            border = len(text) - min(MOST_HELDOUT, int(HELDOUT * len(text)))
            self.text, heldout = text[:border], text[border:]
        else:
            self.text, heldout = text, load_array(folder / "heldout.npy", np.int32, self.num_classes)
        self.streams = self._cut(self.text, settings.batch)
        self.steps_per_epoch = (self.streams.shape[1] - 1) // settings.length
        if self.steps_per_epoch < 1:
            raise ValueError(
                f"a text of {len(self.text)} words is too short for --batch {settings.batch} "
                f"and --length {settings.length}"
            )
        self.heldout_streams = self._streams(heldout)
        self.test_streams = None
        if settings.test is not None:
            self.test_streams = self._streams(load_array(folder / "test.npy", np.int32, self.num_classes))
            self.test_examples = self.test_streams.shape[0] * (self.test_streams.shape[1] - 1)
        self.attributes = self._attributes(folder) if settings.output == "characters" else None
        self.train_examples = self.steps_per_epoch * settings.batch * settings.length
        self.heldout_examples = self.heldout_streams.shape[0] * (self.heldout_streams.shape[1] - 1)

    @classmethod
    def _streams(cls, text: np.ndarray) -> np.ndarray:
        """Cut a text to evaluate on."""
        if len(text) < 2:
            raise ValueError(f"a text to evaluate on has {len(text)} words; at least 2 are needed")
        return cls._cut(text, max(1, min(STREAMS, len(text) // WINDOW)))

    @staticmethod
    def _cut(text: np.ndarray, streams: int) -> np.ndarray:
        return text[: len(text) // streams * streams].reshape(streams, -1)

    @staticmethod
    def prepare(settings: LanguageSettings, folder: Path, advance: Advance) -> Vocabulary:
        """Number the words; see `Task.prepare`."""
        files = list(python_sources()) if settings.text is None else settings.text
        options = {"split": settings.split, "advance": advance, "encoding": settings.encoding}
        vocabulary = prepare_text(files, folder / "train.npy", min_count=settings.min_count, **options)
        what = str(files[0]) if len(files) == 1 else f"{len(files):,} files"
        facts = _facts(what, folder / "train.npy", vocabulary)
        for name, file in (("heldout", settings.heldout), ("test", settings.test)):
            if file is not None:
                encode_text([file], folder / f"{name}.npy", vocabulary, **options)
                facts += _facts(str(file), folder / f"{name}.npy", vocabulary)
        if settings.output == "characters":
            write_ngrams(vocabulary.names, folder, "characters")
        write_facts(folder, facts)
        return vocabulary

    def trunk(self) -> nn.Module:
        """Return the paper's LSTM."""
        settings = self.settings
        return LSTM(self.num_classes, settings.features, settings.layers, settings.dropout, self.tower())

    def tower(self) -> nn.Module | None:
        """Return a network on character n-grams, with ``--output characters``."""
        return None if self.attributes is None else Tower(self.attributes, self.settings.features)

    def _attributes(self, folder: Path) -> Attributes:
        grams, none = Ragged.load(folder, "characters", BUCKETS), torch.empty(self.num_classes, 0)
        if len(grams) != self.num_classes:
            raise ValueError(f"{folder / 'characters'}: not of the words of the vocabulary")
        return Attributes(none.int(), 0, none, [(copied(grams.values), copied(grams.offsets))], BUCKETS)

    def batch(self, step: int) -> Batch:
        """Return the next ``length`` words of all streams."""
        start = step % self.steps_per_epoch * self.settings.length
        return _window(own_part(self.streams, self.part)[:, start : start + self.settings.length + 1])

    def heldout(self, limit: int | None = None, test: bool = False, seen: bool = False) -> Iterator[Batch]:
        """Yield the held-out or the test text from its beginning, in streams."""
        if seen:
            self.recommends()
        streams = self.test_streams if test and self.test_streams is not None else self.heldout_streams
        words = streams.shape[1]
        if limit is not None:
            words = min(words, 1 + -(-limit // len(streams)))
        for start in range(0, words - 1, WINDOW):
            yield _window(streams[:, start : min(words, start + WINDOW + 1)])

    def encode(self, line: str) -> Batch:
        """Encode the words of a line; words that are not classes count as rare."""
        words = WORD.findall(line) if self.settings.split == "words" else line.split()
        if not words:
            raise ValueError("no words to predict from")
        tokens = tensor(np.array([[self.ids.get(word, 0) for word in words]]))
        return Batch((tokens,), tokens.new_empty(1, len(words), 0))

    def pairs(self) -> tuple[Tensor, Tensor]:
        """Return all words and their predecessors."""
        return tensor(self.text[1:]), tensor(self.text[:-1])


def _facts(what: str, tokens: Path, vocabulary: Vocabulary) -> list[str]:
    """Describe what was read, with classes as words, so that users can spot a wrong reading."""
    text = load_array(tokens, np.int32)
    rare = int((text == 0).sum())
    shown = " ".join(vocabulary.names[index] for index in text[:SHOWN])
    return [f"{what}: {len(text):,} words, {rare:,} of them rare", f"  {shown} …"]


def _window(part: np.ndarray) -> Batch:
    tokens = tensor(part)
    return Batch((tokens[:, :-1],), tokens[:, 1:].unsqueeze(-1), tokens[:, :-1])
