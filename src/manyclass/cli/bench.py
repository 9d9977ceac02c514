"""`manyclass bench`: one command for each measurement."""

from pathlib import Path
from typing import Annotated

import typer

from .options import Out, Seed, Threads, start

app = typer.Typer(help="Measure speed: alternatives side by side in one run, as ratios.", no_args_is_help=True)


@app.command()
def bias(
    text: Annotated[
        list[Path] | None, typer.Option(help="Text files to train on; default: the Python standard library's sources.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Training steps of the language model.")] = 400,
    epochs: Annotated[float, typer.Option(min=0.0, help="Epochs of the recommender, on synthetic sessions.")] = 6.0,
    out: Out = Path("out"),
    seed: Annotated[int, typer.Option(help="Seed of the data, the weights and the order of batches.")] = 0,
    threads: Threads = None,
) -> None:
    """Measure error and cost of every sampler on two trained models. About 20 minutes."""
    from ..bench import bias

    bias.run(out, start(out, threads), text, steps, epochs, seed)


@app.command()
def distributed(
    classes: Annotated[int, typer.Option(min=64, help="Classes of all processes together.")] = 1_000_000,
    processes: Annotated[list[int] | None, typer.Option(min=1, help="Repeatable; default: 1, 2 and 4.")] = None,
    out: Out = Path("out"),
) -> None:
    """Measure steps of the sharded layer: time, bytes and memory. Also print an estimate for 64 machines."""
    from ..bench import distributed

    distributed.run(out, start(out, None), classes, processes or [1, 2, 4])


@app.command()
def draws(out: Out = Path("out"), threads: Threads = None) -> None:
    """Time draws from class counts: the native alias kernel, its reference, and torch."""
    from ..bench import draws

    draws.run(out, start(out, threads))


@app.command()
def identifiers(
    text: Annotated[list[Path], typer.Option(help="A text of many different words, such as source code; repeatable.")],
    min_count: Annotated[int, typer.Option(min=1, help="Classes are words that occur at least this often.")] = 3,
    features: Annotated[int, typer.Option(min=1, help="Size of embeddings and hidden layers.")] = 64,
    seconds: Annotated[float, typer.Option(min=0.1, help="CPU seconds of training for each method.")] = 150.0,
    every: Annotated[int, typer.Option(min=1, help="Steps between evaluations.")] = 500,
    positions: Annotated[int, typer.Option(min=1, help="Held-out positions of an evaluation.")] = 1000,
    out: Out = Path("out"),
    threads: Threads = 1,
) -> None:
    """Train a word model with a character encoder: in-batch negatives, pools and blocks at equal steps and time.

    Methods that are already in the CSV file in --out are not trained again.
    """
    from ..bench import identifiers

    identifiers.run(out, start(out, threads), text, min_count, features, seconds, every, positions)


@app.command()
def optim(
    classes: Annotated[int, typer.Option(min=1000, help="Number of classes.")] = 1_000_000,
    out: Out = Path("out"),
    threads: Threads = None,
) -> None:
    """Time training steps of the default layer with every optimiser, against sparse SGD. About 2 minutes."""
    from ..bench import optim

    optim.run(out, start(out, threads), classes)


@app.command()
def optimum(
    negatives: Annotated[list[int] | None, typer.Option(min=1, help="Repeatable; default: 4, 16 and 64.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Training steps of each loss.")] = 500,
    out: Out = Path("out"),
    threads: Threads = None,
) -> None:
    """What each sampled loss converges to, against known probabilities: the bias of its outputs. Some 20 seconds."""
    from ..bench import optimum

    optimum.run(out, start(out, threads), negatives or [4, 16, 64], steps)


@app.command()
def stalls(
    classes: Annotated[int, typer.Option(min=1000, help="Number of classes.")] = 5_000_000,
    steps: Annotated[int, typer.Option(min=2, help="Timed steps, spread over the growth of a tree.")] = 300,
    out: Out = Path("out"),
    threads: Threads = None,
) -> None:
    """Time the slowest training step of blocks while it replaces its tree. About 3 minutes."""
    from ..bench import stalls

    stalls.run(out, start(out, threads), classes, steps)


@app.command()
def retrieval(
    classes: Annotated[
        list[int] | None, typer.Option(min=2000, help="Repeatable; default: 100,000 and 1,000,000.")
    ] = None,
    features: Annotated[int, typer.Option(min=1, help="Size of the class embeddings.")] = 64,
    queries: Annotated[int, typer.Option(min=1, help="Queries in one call.")] = 1000,
    out: Out = Path("out"),
    seed: Seed = 0,
    threads: Threads = None,
) -> None:
    """Measure recall and time per query: the tree of a trained layer, exact search, and faiss."""
    from ..bench import retrieval

    console = start(out, threads)
    retrieval.run(out, console, classes or [100_000, 1_000_000], features, queries, seed)


@app.command()
def settings(
    runs: Annotated[list[Path], typer.Argument(help="Folders of trained runs.")],
    out: Out = Path("out"),
    threads: Threads = None,
) -> None:
    """Measure error and cost of blocks with several settings, and of static pools, on your trained models."""
    from ..bench import settings

    settings.run(out, start(out, threads), runs)


@app.command()
def step(out: Out = Path("out"), threads: Threads = None) -> None:
    """Time training steps of every output layer from 10⁴ to 8·10⁶ classes, and profile one. About 10 minutes."""
    from ..bench import step

    step.run(out, start(out, threads))


@app.command()
def towers(
    classes: Annotated[int, typer.Option(min=100, help="Number of classes.")] = 5000,
    steps: Annotated[int, typer.Option(min=1, help="Training steps of each layer.")] = 500,
    seeds: Annotated[int, typer.Option(min=1, help="Trainings of each layer.")] = 3,
    out: Out = Path("out"),
    threads: Threads = None,
) -> None:
    """Compare sampled and full training of an item tower, and measure memory. About 6 minutes."""
    from ..bench import towers

    towers.run(out, start(out, threads), classes, steps, seeds)


@app.command()
def tree(out: Out = Path("out"), threads: Threads = None) -> None:
    """Time the kernel tree, dense kernel sampling, uniform sampling and the full softmax. About 5 minutes."""
    from ..bench import tree

    tree.run(out, start(out, threads))
