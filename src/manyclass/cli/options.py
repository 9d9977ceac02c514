"""Options that several commands have."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

Out = Annotated[Path, typer.Option(help="Folder for figures and plots; made if it is missing.")]
Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads; default: what torch chooses.")]
Seed = Annotated[int, typer.Option(help="Seed of the weights and the draws.")]


def start(out: Path, threads: int | None) -> Console:
    """Make the folder ``out`` and set the number of threads."""
    from . import console

    out.mkdir(parents=True, exist_ok=True)  # first, so that a bad path does not cost the work
    return console.start(threads)
