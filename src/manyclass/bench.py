"""Benchmarks: alternatives side by side in one run, as ratios."""

import csv
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from . import ops
from .alias import AliasTable

SIZES = (10_000, 1_000_000, 10_000_000)


def best_of(alternatives: dict[str, Callable[[], object]], repeats: int = 7) -> dict[str, float]:
    """Seconds of each alternative: the best of ``repeats`` rounds, in which all take turns."""
    best = dict.fromkeys(alternatives, float("inf"))
    for _ in range(repeats + 1):  # the first round warms up and is rarely the best
        for name, call in alternatives.items():
            started = time.perf_counter()
            call()
            best[name] = min(best[name], time.perf_counter() - started)
    return best


def draws(out: Path, console: Console, batch: int = 256, num_samples: int = 64) -> None:
    """Draws from class frequencies: the native alias kernel, its reference, and what torch offers."""
    out.mkdir(parents=True, exist_ok=True)  # first, so that a bad path does not cost the work
    table = Table(
        title=f"{batch} × {num_samples} draws from class counts, {torch.get_num_threads()} threads, best of 7"
    )
    table.add_column("classes", justify="right")
    names = ["native alias", "reference alias", "inverse of the cdf", "torch.multinomial"]
    for name in names:
        table.add_column(name, justify="right")
    rows = []
    for num_classes in SIZES:
        generator = torch.Generator().manual_seed(0)
        counts = torch.randint(1, 1000, (num_classes,), generator=generator)
        alias = AliasTable(counts)
        uniform = torch.rand(batch, num_samples, dtype=torch.float64, generator=generator)
        start, length = torch.zeros(batch, dtype=torch.long), torch.full((batch,), num_classes)
        cells = (alias.threshold, alias.alias, start, length, uniform)
        weight = counts.float()
        seconds = best_of(
            {
                names[0]: lambda cells=cells: ops.alias_draw(*cells),
                names[1]: lambda cells=cells: ops.alias_draw_reference(*cells),
                names[2]: lambda alias=alias, u=uniform: torch.searchsorted(alias.cumulative, u * alias.cumulative[-1]),
                names[3]: lambda weight=weight: torch.multinomial(weight, batch * num_samples, replacement=True),
            }
        )
        fastest = seconds[names[0]]
        table.add_row(f"{num_classes:,}", *(f"{s * 1e3:.2f} ms ({s / fastest:.1f}×)" for s in seconds.values()))
        rows += [[num_classes, name, s, s / fastest] for name, s in seconds.items()]
    console.print(table)
    with (out / "draws.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["classes", "method", "seconds", "ratio to native alias"], *rows])
    console.print(f"figures: {out / 'draws.csv'}", soft_wrap=True)
