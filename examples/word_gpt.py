"""A GPT over words in one file: every distinct word of the text is a class.

    python examples/word_gpt.py text8                       # http://mattmahoney.net/dc/text8.zip, unpacked
    python examples/word_gpt.py book.txt --min-count 1 --steps 500

Words are split at white space. Words below ``--min-count`` become one class, ``<unk>``. Input and output embeddings are
one table. The last twentieth of the text is held out, and the exact loss over all classes is computed on it.
"""

import argparse
import math
import time
from collections import Counter
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import manyclass


class Block(nn.Module):
    """Causal self-attention and a feed-forward network, each behind a layer norm."""

    def __init__(self, features: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(features), nn.LayerNorm(features)
        self.attend, self.project = nn.Linear(features, 3 * features), nn.Linear(features, features)
        self.feed = nn.Sequential(nn.Linear(features, 4 * features), nn.GELU(), nn.Linear(4 * features, features))

    def forward(self, x: Tensor) -> Tensor:
        """``(batch, length, features)`` → the same shape."""
        batch, length, features = x.shape
        split = self.attend(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*split, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(batch, length, features))
        return x + self.feed(self.norm2(x))


class WordGPT(nn.Module):
    """Words to hidden states, and an output layer that shares the table of words."""

    def __init__(self, words: int, features: int, layers: int, length: int, num_samples: int) -> None:
        super().__init__()
        self.words = nn.Embedding(words, features, sparse=True)
        self.places = nn.Parameter(0.02 * torch.randn(length, features))
        self.blocks = nn.Sequential(*(Block(features, heads=4) for _ in range(layers)))
        self.norm = nn.LayerNorm(features)
        nn.init.normal_(self.words.weight, std=features**-0.5)
        self.head = manyclass.SampledSoftmax(features, words, num_samples=num_samples, embedding=self.words)

    def hidden(self, tokens: Tensor) -> Tensor:
        """``(batch, length)`` → ``(batch, length, features)``."""
        return self.norm(self.blocks(self.words(tokens) + self.places[: tokens.shape[1]]))

    def forward(self, tokens: Tensor) -> Tensor:
        """Loss of each next word of ``(batch, length + 1)``: sampled in training, exact in ``eval()``."""
        return self.head(self.hidden(tokens[:, :-1]), tokens[:, 1:])


def read(file: Path, min_count: int) -> tuple[Tensor, list[str]]:
    """The text as word ids, and the words: the most frequent first, ``<unk>`` last."""
    text = file.read_text("utf-8").split()
    words = [word for word, count in Counter(text).most_common() if count >= min_count]
    index = {word: i for i, word in enumerate(words)}
    return torch.tensor([index.get(word, len(words)) for word in text]), [*words, "<unk>"]


def batch(tokens: Tensor, size: int, length: int, generator: torch.Generator) -> Tensor:
    """Random pieces of the text, ``(size, length + 1)``."""
    start = torch.randint(len(tokens) - length, (size, 1), generator=generator)
    return tokens[start + torch.arange(length + 1)]


@torch.no_grad()
def evaluate(model: WordGPT, optimizer: manyclass.optim.AdamW, tokens: Tensor, length: int) -> float:
    """Exact loss over up to 200 pieces of the held-out text."""
    optimizer.flush()  # rows without a recent gradient catch up
    model.eval()
    pieces = tokens.unfold(0, length + 1, length)[:200].split(20)
    losses = [float(model(piece)) * len(piece) for piece in pieces]
    model.train()
    return sum(losses) / sum(map(len, pieces))


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Train and evaluate; return what is printed last."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("--min-count", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--features", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--num-samples", type=int, default=4096)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--evaluations", type=int, default=10)
    options = parser.parse_args(arguments)

    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    tokens, words = read(options.text, options.min_count)
    train, held_out = tokens[: -len(tokens) // 20], tokens[-len(tokens) // 20 :]
    print(f"{len(tokens):,} words, {len(words):,} classes")
    model = WordGPT(len(words), options.features, options.layers, options.length, options.num_samples)
    optimizer = manyclass.optim.AdamW(model.parameters(), lr=options.learning_rate, weight_decay=0.01)
    warm_up = max(1, options.steps // 20)

    def factor(step: int) -> float:
        rest = (step - warm_up) / max(1, options.steps - warm_up)
        return min((step + 1) / warm_up, 0.5 + 0.5 * math.cos(math.pi * max(0.0, rest)))

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    start, loss = time.perf_counter(), math.nan
    for step in range(1, options.steps + 1):
        optimizer.zero_grad()
        sampled = model(batch(train, options.batch, options.length, generator))
        sampled.backward()
        manyclass.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        if step % math.ceil(options.steps / options.evaluations) == 0 or step == options.steps:
            loss = evaluate(model, optimizer, held_out, options.length)
            seconds = time.perf_counter() - start
            print(f"step {step:6}  {seconds:6.0f} s  sampled {sampled.detach():.3f}  exact {loss:.3f}")

    model.eval()
    log_probs, best = model.head.topk(model.hidden(held_out[: options.length].unsqueeze(0))[:, -1], 5)
    ending = " ".join(words[int(token)] for token in held_out[max(0, options.length - 8) : options.length])
    print(ending, "→", ", ".join(f"{words[int(i)]} {p:.2f}" for p, i in zip(log_probs[0].exp(), best[0], strict=True)))
    result = {"exact loss": loss, "perplexity": math.exp(loss)}
    for name, value in result.items():
        print(f"{name:12} {value:8.3f}")
    return result


if __name__ == "__main__":
    main()
