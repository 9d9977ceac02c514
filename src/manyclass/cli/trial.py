"""Commands to try everything without data: synth and demo."""

from pathlib import Path
from typing import Annotated

import typer

from .options import Out, Seed, Threads, start


def synth(
    out: Annotated[Path, typer.Argument(help="File: .csv, .tsv, .parquet, .jsonl, or .txt with a sequence per line.")],
    items: Annotated[int, typer.Option(min=2, max=10_000_000, help="Classes.")] = 100_000,
    users: Annotated[int, typer.Option(min=1, help="Users.")] = 50_000,
    length: Annotated[int, typer.Option(min=2, help="Interactions of each user.")] = 20,
    seed: Seed = 0,
) -> None:
    """Write interactions of a latent-factor model with Zipf popularity, to try everything at scale without data."""
    from rich.progress import Progress

    from ..train.data.synth import synthesise

    with Progress(transient=True) as progress:
        bar = progress.add_task("interactions", total=users * length)
        synthesise(
            out, items=items, users=users, length=length, seed=seed, advance=lambda done: progress.advance(bar, done)
        )
    print(f"{users * length:,} interactions of {users:,} users with up to {items:,} items: {out}")
    print(f"next: manyclass train next-item --interactions {out}")


def demo(
    steps: Annotated[int, typer.Option(min=6, help="Training steps of each run.")] = 120,
    out: Out = Path("out"),
    seed: Seed = 0,
    threads: Threads = None,
) -> None:
    """Train a word model and a recommender with all classes, a uniform pool and blocks. About 3 minutes."""
    from . import demo

    demo.run(steps, out, seed, start(out, threads))
