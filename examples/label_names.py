"""Documents with several labels, where a label is what a network makes of its name.

    python examples/label_names.py --labels 50000

Data is synthetic. Names are made of three words out of a few hundred, and a document has words of its labels' names
among random ones. One label in ten occurs in no training document: its name is all that the model knows of it. The
script prints the exact loss and the precision for old and for new labels.
"""

import argparse
import time
import zlib

import torch
from torch import Tensor, nn

import manyclass

BUCKETS, WORDS_IN_NAME, WORDS_IN_DOCUMENT = 20_000, 3, 12
SYLLABLES = [first + second for first in "bdfgklmnprstvz" for second in "aeiou"]


def buckets_of(word: str) -> list[int]:
    """Hash the character n-grams of a word, n = 3 and 4, and the word itself."""
    marked = f"<{word}>"
    parts = {marked, *(marked[i : i + n] for n in (3, 4) for i in range(len(marked) - n + 1))}
    return sorted(zlib.crc32(part.encode()) % BUCKETS for part in parts)


class Text(nn.Module):
    """Bags of words to embeddings, by hashed n-grams: ``(*shape, words)`` → ``(*shape, features)``."""

    def __init__(self, words: list[str], features: int) -> None:
        super().__init__()
        found = [buckets_of(word) for word in words]
        width = max(map(len, found))
        # One row of n-grams per word; bucket BUCKETS is padding, and so is the last row for a missing word.
        rows = [row + [BUCKETS] * (width - len(row)) for row in [*found, []]]
        self.register_buffer("buckets", torch.tensor(rows))
        self.embedding = nn.EmbeddingBag(BUCKETS + 1, 64, mode="mean", padding_idx=BUCKETS)
        self.layers = nn.Sequential(nn.ReLU(), nn.Linear(64, features))

    def forward(self, words: Tensor) -> Tensor:
        """Numbers of words, −1 for none."""
        bags = self.buckets[words].flatten(-2)
        return self.layers(self.embedding(bags.flatten(0, -2))).unflatten(0, bags.shape[:-1])


class LabelTower(nn.Module):
    """Label ids to embeddings, by their names."""

    def __init__(self, names: Tensor, text: Text) -> None:
        super().__init__()
        self.register_buffer("names", names)
        self.text = text

    def forward(self, ids: Tensor) -> Tensor:
        """Ids ``(k,)`` → ``(k, features)``."""
        return self.text(self.names[ids])


def documents(
    number: int, names: Tensor, choices: Tensor, words: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Documents ``(number, WORDS_IN_DOCUMENT)`` and one to three labels of each, padded with −100."""
    labels = choices[torch.randint(len(choices), (number, 3), generator=generator)]
    missing = torch.arange(3) >= torch.randint(1, 4, (number, 1), generator=generator)
    labels = labels.masked_fill(missing, -100)
    text = torch.randint(words, (number, WORDS_IN_DOCUMENT), generator=generator)
    mentioned = names[labels.clamp(min=0)].flatten(1)
    kept = (torch.rand(mentioned.shape, generator=generator) < 0.9) & ~missing.repeat_interleave(WORDS_IN_NAME, dim=1)
    return torch.cat([text, mentioned.where(kept, -1)], dim=1), labels


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Train and evaluate; return what is printed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--labels", type=int, default=10_000)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--features", type=int, default=64)
    parser.add_argument("--num-samples", type=int, default=1024)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)

    torch.manual_seed(options.seed)
    generator = torch.Generator().manual_seed(options.seed)
    numbers = torch.randint(len(SYLLABLES), (400, 3), generator=generator)
    words = ["".join(SYLLABLES[number] for number in row) for row in numbers.tolist()]
    names = torch.randint(len(words), (options.labels, WORDS_IN_NAME), generator=generator)
    is_new = torch.rand(options.labels, generator=generator) < 0.1
    old, new = (~is_new).nonzero().squeeze(1), is_new.nonzero().squeeze(1)

    trunk = Text(words, options.features)
    tower = LabelTower(names, Text(words, options.features))
    head = manyclass.SampledSoftmax(
        options.features,
        options.labels,
        num_samples=options.num_samples,
        own=8,
        classes=tower,
        cosine=manyclass.Cosine(10.0, learn_scale=True),
    )
    optimizer = torch.optim.Adam([*trunk.parameters(), *head.parameters()], lr=5e-3)
    start = time.perf_counter()
    for _ in range(options.steps):
        text, target = documents(options.batch, names, old, len(words), generator)
        loss = head(trunk(text), target)  # every label against the classes that are no label of its document
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    seconds = time.perf_counter() - start

    head.refresh()
    head.eval()
    result = {"milliseconds per step": 1000 * seconds / options.steps}
    with torch.no_grad():
        for kind, choices in (("old", old), ("new", new)):
            text, target = documents(512, names, choices, len(words), generator)
            query = trunk(text)
            result[f"loss of {kind} labels"] = float(head(query, target))
            best = head.predict(query)
            result[f"precision@1 of {kind} labels"] = float((best.unsqueeze(1) == target).any(dim=1).double().mean())
    for name, value in result.items():
        print(f"{name:28} {value:8.3f}")
    return result


if __name__ == "__main__":
    main()
