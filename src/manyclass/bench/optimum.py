"""What a loss converges to: one query, classes whose true probabilities are known, and a free output for each class."""

import csv
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn

from .. import FullSoftmax, SampledSoftmax, losses
from .timing import write_csv

CLASSES = 200
#: Standard deviation of ln(p / class frequency): how far this query is from the average one.
SPREAD = 1.5
#: The noise is the class frequency to this power, as in the papers of negative sampling and BlackOut.
POWER = 0.75
EXAMPLES, RATE = 256, 0.1
FILE = "optimum.csv"
HEADER = ("loss", "negatives", "kl", "log_partition")


class Problem(NamedTuple):
    """What is known about the data."""

    #: Class frequencies over all queries, shape ``(CLASSES,)``: Zipf's law.
    counts: Tensor
    #: True probabilities for the one query, shape ``(CLASSES,)``.
    p: Tensor


class Optimum(NamedTuple):
    """Where a loss ends: a line of ``optimum.csv``."""

    loss: str
    #: None for a loss over all classes.
    negatives: int | None
    #: Σ p·ln(p/p̂) in nats, where p̂ is the softmax of the outputs: 0 for a loss that estimates p.
    kl: float
    #: ln Σ exp(o) − ln n: 0 for a loss whose outputs normalise themselves.
    log_partition: float


LOSSES: dict[str, Callable[..., nn.Module]] = {
    "softmax": SampledSoftmax,
    "nce": losses.NoiseContrastive,
    "blackout": losses.BlackOut,
    "negative": losses.NegativeSampling,
}


def problem() -> Problem:
    """Return class frequencies by Zipf's law, and a query that prefers some classes."""
    counts = 1 / torch.arange(1, CLASSES + 1, dtype=torch.float64)
    preference = torch.randn(CLASSES, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return Problem(counts, (counts.log() + SPREAD * preference).softmax(dim=0))


def optimum(head: Any, name: str, negatives: int | None, p: Tensor, steps: int) -> Optimum:
    """Train the outputs, which are the class weights for the query 1; the rate falls to 0."""
    query, generator = torch.ones(EXAMPLES, 1), torch.Generator().manual_seed(1)
    optimizer = torch.optim.Adam(head.parameters(), lr=RATE)
    ends = p.cumsum(0)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = RATE * (1 - step / steps)
        # Targets in strata of equal probability: less noise than from independent draws.
        uniform = (torch.arange(EXAMPLES) + torch.rand(1, dtype=torch.float64, generator=generator)) / EXAMPLES
        target = torch.searchsorted(ends, uniform * ends[-1], right=True).clamp(max=len(p) - 1)
        optimizer.zero_grad()
        head(query, target, generator=generator).backward()
        optimizer.step()
    outputs = head.weight.detach().squeeze(-1).double()
    kl = float((p * (p.log() - outputs.log_softmax(dim=0))).sum())
    return Optimum(name, negatives, kl, float(outputs.logsumexp(dim=0)) - math.log(len(p)))


def run(out: Path, console: Console, negatives: list[int], steps: int) -> None:
    """Train every loss with each number of negatives; print and write where they end."""
    counts, p = problem()
    noise: dict[str, Any] = {"counts": counts, "power": POWER, "sparse": False}
    heads: list[tuple[str, int | None, nn.Module]] = [("softmax", None, FullSoftmax(1, CLASSES))]
    heads += [(name, m, kind(1, CLASSES, "unigram", m, **noise)) for name, kind in LOSSES.items() for m in negatives]
    ends = [optimum(head, name, number, p, steps) for name, number, head in track(heads, "losses", console=console)]
    rows = [(name, number or "", f"{kl:.5f}", f"{partition:.3f}") for name, number, kl, partition in ends]
    table = Table(*HEADER, title=f"{steps} steps; kl and ln(Z/n) in nats")
    for row in rows:
        table.add_row(*map(str, row))
    console.print(table)
    write_csv(out / FILE, HEADER, rows)
    console.print(str(out / FILE), soft_wrap=True)


def markdown(file: Path) -> str:
    """Lay out the divergences of a CSV file as a table: a row per loss, a column per number of negatives."""
    with file.open(newline="") as handle:
        kl = {(row["loss"], row["negatives"]): float(row["kl"]) for row in csv.DictReader(handle)}
    names, numbers = dict.fromkeys(name for name, _ in kl), dict.fromkeys(number for _, number in kl)
    lines = [["loss", *(f"{number} negatives" if number else "all classes" for number in numbers)]]
    lines += [["---", *["---:"] * len(numbers)]]
    lines += [[name, *(f"{kl[name, m]:.3f}" if (name, m) in kl else "–" for m in numbers)] for name in names]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
