"""Predict the next item of a user from the items before it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..data import Vocabulary
from ..data.columns import Layout
from ..data.files import Advance
from ..data.interactions import encode_interactions, read_interactions
from ..data.items import TEXTS, Feature, Items, Table, read_items, write_items
from ..data.spool import Ragged, load_array
from ..models import Attributes, FeedForward, Tower, Transformer
from ..records import quoted, typed
from ..settings import NextItemSettings
from .base import EVALUATED, IGNORE, Batch, Task, copied, every, read_facts, tensor, write_facts

HISTORY = {"transformer": 50, "feed-forward": 3}
#: Without a held-out file, the last items of every user with at least this many are held out.
SHORTEST_HELDOUT = 3
#: Shares of the interactions, by time, before the held-out ones and before the test.
LATE = (0.8, 0.9)


class _Positions:
    """Positions in sequences, ascending, several per user, computed on demand; memory: ``O(users)``.

    Args:
        last: the last place of each user, shape ``(users,)``.
        counts: how many places each user has, shape ``(users,)``.
        step: from one place of a user to the next.
    """

    def __init__(self, last: np.ndarray, counts: np.ndarray, step: int = 1) -> None:
        self._last, self._ends, self._step = last, np.cumsum(counts), step

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, which: np.ndarray | slice) -> np.ndarray:
        if isinstance(which, slice):
            which = np.arange(*which.indices(len(self)))
        user = np.searchsorted(self._ends, which, side="right")
        return self._last[user] - (self._ends[user] - 1 - which) * self._step


class _Part:
    """Sequences, and where in them targets are; memory: some 70 bytes per user.

    Args:
        sequences: a row of items for each user.
        users: their features, shape ``(users, columns)``.
        held: how many of each user's last items are held out, shape ``(users,)``, or 0.
        tested: how many of the items after those are for the test.
    """

    def __init__(self, sequences: Ragged, users: np.ndarray, held: Any = 0, tested: Any = 0) -> None:
        self.items, self.users, self.offsets = sequences.values, users, np.array(sequences.offsets)
        lengths, ends = np.diff(self.offsets), self.offsets[1:]
        # The first item of a user has no history, so it is no target.
        self.tested = _Positions(ends - 1, np.minimum(tested, np.maximum(lengths - 1, 0)))
        self.held = _Positions(ends - 1 - tested, np.minimum(held, np.maximum(lengths - tested - 1, 0)))
        self._ends, self._counts = ends - held - tested, np.maximum(lengths - held - tested - 1, 0)
        self.targets = self.windows(1)

    @classmethod
    def load(cls, folder: Path, name: str, num_items: int, num_values: int, split: str | None = None) -> "_Part":
        """Return the part ``name`` of the arrays in ``folder``, mapped into memory."""
        sequences = Ragged.load(folder, name, num_items)
        users = load_array(folder / f"{name}.users.npy", np.int32, num_values, dims=2)
        if len(users) != len(sequences):
            raise ValueError(f"{folder / name}: sequences and features are not of the same users")
        if split is None:
            return cls(sequences, users)
        if split == "time":
            counts = load_array(folder / f"{name}.late.npy", np.int64, dims=2)
            if counts.shape != (len(sequences), 2) or (counts < 0).any():
                raise ValueError(f"{folder / name}: late.npy does not fit the sequences")
            return cls(sequences, users, *np.minimum(counts, sequences.lengths()[:, None]).T)
        some = (sequences.lengths() >= SHORTEST_HELDOUT).astype(np.int64)
        return cls(sequences, users, some, some if split == "last-two" else 0)

    def history(self, last: np.ndarray) -> np.ndarray:
        """Return all items before the positions ``last``, shape ``(positions, most of them)``, padded with `IGNORE`."""
        starts = self.offsets[np.searchsorted(self.offsets, last, side="right") - 1]
        places = last[:, None] + np.arange(-int((last - starts).max(initial=0)), 0)
        return np.where(places >= starts[:, None], self.items[places.clip(0)], IGNORE)

    def windows(self, history: int) -> _Positions:
        """Return the positions of targets such that windows of ``history`` that end there hold each target once."""
        return _Positions(self._ends - 1, -(-self._counts // history), history)

    def batch(self, last: np.ndarray, history: int, targets: int) -> Batch:
        """Return the ``history`` items before the positions ``last``, whose last ``targets`` places have a target."""
        row = np.searchsorted(self.offsets, last, side="right") - 1
        places = last[:, None] + np.arange(-history, 0)
        start = self.offsets[row][:, None]
        items = np.where(places >= start, self.items[places.clip(0)], -1)
        following = places[:, -targets:]
        target = np.where(following >= start, self.items[following + 1], IGNORE)
        inputs = tensor(items), tensor(self.users[row])
        return Batch(inputs, tensor(target).unsqueeze(-1), tensor(items[:, -targets:].clip(0)))


class NextItem(Task[NextItemSettings]):
    """Histories of users, and the item that each of them takes next."""

    name = "next-item"
    measure = "ndcg@10"

    def __init__(
        self, settings: NextItemSettings, folder: Path, vocabulary: Vocabulary, part: tuple[int, int] = (0, 1)
    ) -> None:
        super().__init__(settings, folder, vocabulary, part)
        self.history = settings.history or HISTORY[settings.model]
        self.feature_names: list[str] = typed(read_facts(folder).get("feature_names"), list[str], f"{folder}: names")
        sizes = self.num_classes, len(self.feature_names)
        split = _split(settings)
        self.train = _Part.load(folder, "train", *sizes, split)
        self.held, self.held_positions = self.train, self.train.held
        if settings.heldout is not None:
            self.held = _Part.load(folder, "heldout", *sizes)
            self.held_positions = self.held.targets
        self.tested, self.test_positions = self.train, self.train.tested
        if settings.test is not None:
            self.tested = _Part.load(folder, "test", *sizes)
            self.test_positions = self.tested.targets
        self.test_examples = len(self.test_positions)
        parts = (self.train, self.held, self.tested)
        columns = {*(each.users.shape[1] for each in parts), len(settings.user_feature or ())}
        if len(columns) > 1:
            raise ValueError(f"{folder}: the users do not have the features that the settings name")
        self.attributes = self._attributes(folder) if settings.item_feature else None
        # The transformer predicts at all positions of a window, the network only the item after it.
        self.each = settings.model == "transformer"
        self.examples = self.train.windows(self.history) if self.each else self.train.targets
        self.train_examples, self.heldout_examples = len(self.train.targets), len(self.held_positions)
        for count, what in ((self.train_examples, "training"), (self.heldout_examples, "held-out")):
            if count == 0:
                shortest = SHORTEST_HELDOUT + (split == "last-two" and what == "training")
                raise ValueError(f"no {what} examples: users need at least {shortest} items")
        self.steps_per_epoch = -(-len(self.examples) // settings.batch)

    @staticmethod
    def prepare(settings: NextItemSettings, folder: Path, advance: Advance) -> Vocabulary:
        """Number items and users; see `Task.prepare`."""
        options: dict[str, Any] = {
            "user": settings.user,
            "item": settings.item,
            "timestamp": settings.timestamp,
            "features": settings.user_feature or (),
            "user_first": settings.user_first,
            "late": LATE if _split(settings) == "time" else (),
            "layout": Layout(settings.sep, settings.no_header, settings.encoding, settings.sequences),
            "advance": advance,
        }
        features, table = [Feature.parse(text) for text in settings.item_feature or ()], None
        if settings.items is not None:
            table = read_items(settings.items, settings.item, features, settings.encoding, advance)
        known = () if table is None else table.names
        rule = {"min_count": settings.min_count, "known": known}
        train = read_interactions(settings.interactions, folder, "train", **rule, **options)
        vocabulary, feature_names, facts = train.vocabulary, train.feature_names, train.facts
        del options["late"]
        for name, file in (("heldout", settings.heldout), ("test", settings.test)):
            if file is not None:
                facts += encode_interactions(file, folder, name, vocabulary, feature_names, **options).facts
        item_values = 1
        if table is not None:
            item_values = write_items(table, features, vocabulary.names, folder)
            facts += _item_facts(settings, table, vocabulary)
        write_facts(folder, facts, feature_names=feature_names, item_values=item_values)
        return vocabulary

    def trunk(self) -> nn.Module:
        """Return the paper's network, or a transformer."""
        settings = self.settings
        more: dict[str, Any] = {"user_values": len(self.feature_names), "dropout": settings.dropout}
        more |= {"user_features": len(settings.user_feature or ()), "tower": self.tower()}
        if settings.model == "feed-forward":
            return FeedForward(self.num_classes, settings.features, self.history, **more)
        return Transformer(self.num_classes, settings.features, self.history, layers=settings.layers, **more)

    def tower(self) -> nn.Module | None:
        """Return a network on the attributes of the items, with ``--item-feature``."""
        return None if self.attributes is None else Tower(self.attributes, self.settings.features)

    def _attributes(self, folder: Path) -> Attributes:
        features = [Feature.parse(text) for text in self.settings.item_feature or ()]
        num_values: int = typed(read_facts(folder).get("item_values"), int, f"{folder}: item_values")
        items = Items.load(folder, features, self.num_classes, num_values)
        bags = [(copied(text.values), copied(text.offsets)) for text in items.texts]
        return Attributes(copied(items.categories), num_values, copied(items.numbers), bags, TEXTS.buckets)

    def batch(self, step: int) -> Batch:
        """Return some windows, in an order that is new in each epoch."""
        last = self.examples[self._epoch_rows(step, len(self.examples)).numpy()]
        return self.train.batch(last, self.history, self.history if self.each else 1)

    def heldout(self, limit: int | None = None, test: bool = False, seen: bool = False) -> Iterator[Batch]:
        """Yield the held-out or test items and the histories before them."""
        part, positions = (self.tested, self.test_positions) if test else (self.held, self.held_positions)
        chosen = every(positions, limit)
        for start in range(0, len(chosen), EVALUATED):
            last = chosen[start : start + EVALUATED]
            batch = part.batch(last, self.history, 1)
            if self.each:  # only the last place counts, of all that the transformer has
                empty = batch.target.new_full((len(batch.target), self.history - 1, 1), IGNORE)
                batch = Batch(batch.inputs, torch.cat([empty, batch.target], dim=1))
            yield batch._replace(seen=tensor(part.history(last))) if seen else batch

    def encode(self, line: str) -> Batch:
        """Encode a history, oldest item first. ``column=value`` is a user feature. Unknown items are left out."""
        names = {name: index for index, name in enumerate(self.feature_names)}
        columns = self.settings.user_feature or []
        words = line.split()
        features = {word.partition("=")[0]: names.get(word, 0) for word in words if self._feature(word)}
        items = [word for word in words if not self._feature(word)]
        known = [self.ids[word] for word in items if word in self.ids]
        if not known:
            raise ValueError(f"unknown item {quoted(items[0])}" if items else "no items to predict from")
        history = known[-self.history :]
        padded = [-1] * (self.history - len(history)) + history
        users = torch.tensor([[features.get(column, 0) for column in columns]], dtype=torch.long).view(1, -1)
        target = torch.empty(1, self.history, 0, dtype=torch.long)
        return Batch((torch.tensor([padded]), users), target, seen=torch.tensor([known]))

    def recommends(self) -> None:
        """See `Task.recommends`."""

    def unknown(self, line: str) -> list[str]:
        """Return the items that are not classes."""
        return [word for word in line.split() if not self._feature(word) and word not in self.ids]

    def _feature(self, word: str) -> bool:
        """Return whether a word is a feature of the user; a value never seen in training counts as unknown."""
        return "=" in word and word.partition("=")[0] in (self.settings.user_feature or ())

    def pairs(self) -> tuple[Tensor, Tensor]:
        """Return all items that follow another item, and that item."""
        places = self.train.targets[:]
        return tensor(self.train.items[places]), tensor(self.train.items[places - 1])


def _item_facts(settings: NextItemSettings, table: Table, vocabulary: Vocabulary) -> list[str]:
    """Describe how the table of items was read."""
    described, cold = set(table.names), int((vocabulary.counts == 0).sum())
    missing = sum(name not in described for name in vocabulary.names)
    facts = [f"{settings.items}: {len(table.names):,} items, {cold:,} of them in no interaction"]
    facts += [f"{missing:,} others are not in it, so they have no attributes"] if missing else []
    return [", ".join(facts)]


def _split(settings: NextItemSettings) -> str | None:
    """Return how the interactions are split; None if the files to evaluate on are given."""
    if settings.heldout is not None:
        return None
    return "last" if settings.test is not None else settings.split
