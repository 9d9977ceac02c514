"""Options that several commands have."""

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ..train.settings import DEVICE

Out = Annotated[Path, typer.Option(help="Folder for figures and plots; made if it is missing.")]
Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads; default: what torch chooses.")]
Device = Annotated[str, typer.Option(help=DEVICE)]
Seed = Annotated[int, typer.Option(help="Seed of the weights and the draws.")]


def warn_of_device(device: str) -> None:
    """Raise if there is no such device, and warn on standard error about one that was never tested."""
    if device != "cpu":
        from ..train.model import device_named

        device_named(device)
        print(
            f"device {device}: tested on a simulated device only, not on a GPU; compare with --device cpu",
            file=sys.stderr,
        )


def protocol(exclude_seen: bool) -> str:
    """Describe how items are ranked, since figures are comparable only for the same ranking."""
    return f"items that a user had before are {'left out' if exclude_seen else 'part'} of the ranking"


def start(out: Path, threads: int | None) -> Console:
    """Make the folder ``out`` and set the number of threads."""
    from . import console

    out.mkdir(parents=True, exist_ok=True)  # first, so that a bad path does not cost the work
    return console.start(threads)
