"""The command line."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

app = typer.Typer(
    help="Train a softmax over thousands to millions of classes by adaptive, kernel based sampling.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
bench = typer.Typer(help="Measure speed: alternatives side by side in one run, as ratios.", no_args_is_help=True)
app.add_typer(bench, name="bench")

Out = Annotated[Path, typer.Option(help="Folder for figures and plots; made if it is missing.")]
Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads; default: what torch chooses.")]


def _start(out: Path, threads: int | None) -> Console:
    import torch

    out.mkdir(parents=True, exist_ok=True)  # first, so that a bad path does not cost the work

    if threads is not None:
        torch.set_num_threads(threads)
    torch.sparse.check_sparse_tensor_invariants.disable()  # else torch warns that this is its default
    return Console()


@app.command()
def demo(
    steps: Annotated[int, typer.Option(min=6, help="Training steps of each run.")] = 200,
    out: Out = Path("out"),
    seed: Annotated[int, typer.Option(help="Seed of the weights and the draws.")] = 0,
    threads: Threads = None,
) -> None:
    """Train a language model on the Python standard library's sources: full softmax against sampled softmax."""
    from . import demo

    demo.run(steps, out, seed, _start(out, threads))


@bench.command()
def bias(
    text: Annotated[
        list[Path] | None, typer.Option(help="Text files to train on; default: the Python standard library's sources.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Training steps of the model.")] = 400,
    out: Out = Path("out"),
    seed: Annotated[int, typer.Option(help="Seed of the weights and the draws.")] = 0,
    threads: Threads = None,
) -> None:
    """Bias of every sampler on a trained model, against what it costs. About 5 minutes."""
    from .bench import bias

    bias.run(out, _start(out, threads), text, steps, seed)


@bench.command()
def draws(out: Out = Path("out"), threads: Threads = None) -> None:
    """Draws from class counts: the native alias kernel against its reference and against torch."""
    from .bench import draws

    draws.run(out, _start(out, threads))


@bench.command()
def step(out: Out = Path("out"), threads: Threads = None) -> None:
    """Whole training steps of every output layer from 10⁴ to 8·10⁶ classes. About 6 minutes."""
    from .bench import step

    step.run(out, _start(out, threads))


@bench.command()
def tree(out: Out = Path("out"), threads: Threads = None) -> None:
    """The kernel tree against dense kernel sampling, uniform sampling and the full softmax. About 5 minutes."""
    from .bench import tree

    tree.run(out, _start(out, threads))
