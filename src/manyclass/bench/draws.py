"""Draws from class frequencies: the native alias kernel, its reference, and what torch offers."""

from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from .. import ops
from ..alias import AliasTable
from .timing import best_of, write_csv

SIZES = (10_000, 1_000_000, 10_000_000)
METHODS = ("native alias", "reference alias", "inverse cdf", "torch.multinomial")


def run(out: Path, console: Console, batch: int = 256, num_samples: int = 64) -> None:
    """Time ``batch × num_samples`` draws for each number of classes."""
    title = f"{batch} × {num_samples} draws from class counts, {torch.get_num_threads()} threads, best of 7"
    table = Table("classes", *METHODS, title=title)
    rows = []
    for num_classes in SIZES:
        generator = torch.Generator().manual_seed(0)
        counts = torch.randint(1, 1000, (num_classes,), generator=generator)
        alias, weight = AliasTable(counts), counts.float()
        uniform = torch.rand(batch, num_samples, dtype=torch.float64, generator=generator)
        start, length = torch.zeros(batch, dtype=torch.long), torch.full((batch,), num_classes)
        cells = (alias.threshold, alias.alias, start, length, uniform)
        calls = (
            lambda cells=cells: ops.alias_draw(*cells),
            lambda cells=cells: ops.alias_draw_reference(*cells),
            lambda alias=alias, u=uniform: torch.searchsorted(alias.cumulative, u * alias.cumulative[-1]),
            lambda weight=weight: torch.multinomial(weight, batch * num_samples, replacement=True),
        )
        seconds = best_of(dict(zip(METHODS, calls, strict=True)))
        fastest = seconds[METHODS[0]]
        table.add_row(f"{num_classes:,}", *(f"{s * 1e3:.2f} ms ({s / fastest:.1f}×)" for s in seconds.values()))
        rows += [(num_classes, name, s, s / fastest) for name, s in seconds.items()]
    console.print(table)
    write_csv(out / "draws.csv", ("classes", "method", "seconds", "ratio to native alias"), rows)
    console.print(f"figures: {out / 'draws.csv'}", soft_wrap=True)
