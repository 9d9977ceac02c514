"""Cost against bias of every sampler on a really trained model."""

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor

from .. import functional, samplers, training
from ..console import Bar
from ..head import SampledSoftmax
from ..run import Run
from ..settings import LanguageSettings
from ..tasks import Task
from .step import training_step
from .timing import best_of, write_csv

EXAMPLES = 256
#: Examples that χ² is computed from, by enumeration of all classes.
ENUMERATED = 64
REPEATS = 40
FULL = "full softmax"


class Row(NamedTuple):
    """One sampler with one number of negatives."""

    prediction: str
    sampler: str
    #: Per example, or in the pool that all examples share.
    negatives: int
    #: χ²(p‖q) over what is drawn at once: classes, or blocks of them; mean over examples.
    chi_square: float
    #: Mean of sampled minus full loss in nats, and its standard error.
    bias: float
    error: float
    #: Of a whole training step of the layer: draw, loss, gradients, SGD, update of the sampler.
    microseconds_per_example: float


class Problem(NamedTuple):
    """A trained output layer and what it is asked for."""

    prediction: str
    weight: Tensor
    query: Tensor
    target: Tensor
    context: Tensor
    #: Training text, for the class frequencies.
    tokens: Tensor


def run(out: Path, console: Console, texts: list[Path] | None, steps: int, seed: int) -> None:
    """Train two models, measure all samplers on them, print a table, write a CSV and a plot.

    Symmetric kernels are made for the absolute softmax, so a second model is trained with it.
    """
    rows: list[Row] = []
    full, n, d = math.nan, 0, 0
    with Progress(console=console) as progress:
        for prediction in functional.PREDICTIONS:
            problem = _train(texts, prediction, steps, seed, progress)
            _, weight, query, target, *_ = problem
            n, d = weight.shape
            exact = functional.full_softmax_loss(query, weight, target, reduction="none", prediction=prediction)
            p = functional.log_prob(query[:ENUMERATED], weight, prediction=prediction).exp().double()
            if prediction == "softmax":
                full = best_of({FULL: _full_step(problem)}, repeats=3)[FULL] / EXAMPLES * 1e6
            alternatives = list(_alternatives(problem))
            for name, sampler, numbers, repeats in progress.track(alternatives, description=f"samplers, {prediction}"):
                rows += _measure(name, sampler, numbers, repeats, problem, exact, p)
        console.print(
            f"{n:,} classes, {d} features, trained for {steps} steps; measured on {EXAMPLES} held-out examples, "
            f"{torch.get_num_threads()} threads, seed {seed}",
            soft_wrap=True,
        )
    write_csv(out / "bias.csv", Row._fields, rows)
    _print(rows, full, console)
    _plot(rows, full, out / "bias.png", n)
    console.print(f"figures: {out / 'bias.csv'}\nplot:    {out / 'bias.png'}", soft_wrap=True)


def _train(texts: list[Path] | None, prediction: Any, steps: int, seed: int, progress: Progress) -> Problem:
    """A language model that was trained with blocks, and its hidden states on text it has not seen."""
    with TemporaryDirectory() as folder:
        settings = LanguageSettings(
            text=texts,
            corpus=None if texts else "python",
            prediction=prediction,
            steps=steps,
            schedule="constant",
            evaluations=1,
            eval_examples=5000,
            seed=seed,
            out=Path(folder) / "run",
        )
        task: Task[Any] = training.prepare("lm", settings)
        heldout = torch.cat([batch.target.flatten() for batch in task.heldout()])
        if len(heldout) < 4 * EXAMPLES:
            raise ValueError(
                f"the text has {task.train_examples} words to train on and {len(heldout)} held out; "
                f"at least {4 * EXAMPLES} are needed there"
            )
        training.train(task, Bar(progress, f"training, {prediction}"))
        model, *_ = training.load(Run(settings.out))
        tokens, _ = task.pairs()
    with torch.no_grad():
        # The end of each of several passages, so that examples have a past and are not neighbours.
        passages = heldout.unfold(0, 20, len(heldout) // EXAMPLES)[:EXAMPLES]
        query = model.trunk(passages[:, :-1])[0][:, -1]
    return Problem(prediction, model.head.weight.detach().clone(), query, passages[:, -1], passages[:, -2], tokens)


def _alternatives(problem: Problem) -> Iterable[tuple[str, samplers.Sampler, tuple[int, ...], int]]:
    """Samplers by name, their numbers of negatives, and how often they are drawn from."""
    n, d = problem.weight.shape
    counts = torch.bincount(problem.tokens, minlength=n) + 1
    pairs = torch.stack([problem.tokens[:-1], problem.tokens[1:]], dim=1)
    few, many = (16, 64, 256), (256, 1024, 4096)
    if problem.prediction == "softmax":
        yield "uniform", samplers.Uniform(n), few, REPEATS
        yield "unigram", samplers.Unigram(counts), few, REPEATS
        yield "unigram, one pool", samplers.Unigram(counts, scope="batch"), many, REPEATS
        yield "bigram", samplers.Bigram(pairs, n), few, REPEATS
    else:
        yield "quartic (dense)", samplers.create("quartic", n, d), few[:2], REPEATS // 10
    yield "quadratic (tree)", samplers.create("quadratic", n, d), few, REPEATS // 2
    each = samplers.Blocks(n, d, scope="example", prediction=problem.prediction)
    yield "blocks, each example", each, (32, 64, 128), REPEATS
    single = samplers.Blocks(n, d, scope="example", ending="class", prediction=problem.prediction)
    yield "blocks, a class of each", single, (4, 16, 64), REPEATS // 4
    yield "blocks, one pool", samplers.Blocks(n, d, prediction=problem.prediction), many, REPEATS


def _measure(
    name: str,
    sampler: samplers.Sampler,
    numbers: Iterable[int],
    repeats: int,
    problem: Problem,
    exact: Tensor,
    p: Tensor,
) -> Iterable[Row]:
    prediction, weight, query, target, context, _ = problem
    chi_square = math.nan
    for number in numbers:
        head = SampledSoftmax(weight.shape[1], len(weight), sampler, number, reduction="none", prediction=prediction)
        with torch.no_grad():
            head.weight.copy_(weight)
            generator = torch.Generator().manual_seed(0)
            losses = [head(query, target, context=context, generator=generator) for _ in range(repeats)]
            # The mean over examples of each draw: the examples of a pool do not err independently.
            error = (torch.stack(losses) - exact).mean(dim=1)
        if math.isnan(chi_square):
            chi_square = _chi_square(sampler, problem, p)
        head.reduction = "mean"
        # A learning rate of 0 costs the same and leaves the problem as it is.
        step = training_step(head.parameters(), lambda q, head=head: head(q, target, context=context), query, lr=0.0)
        cost = best_of({name: step}, repeats=5)[name] / EXAMPLES * 1e6
        standard_error = float(error.std()) / math.sqrt(repeats)
        yield Row(prediction, name, number, chi_square, float(error.mean()), standard_error, cost)


@torch.no_grad()
def _chi_square(sampler: samplers.Sampler, problem: Problem, p: Tensor) -> float:
    """Σ p²/q − 1 over classes, or over the blocks that are drawn whole; mean over the first examples."""
    _, weight, query, _, context, _ = problem
    if isinstance(sampler, samplers.Blocks):
        mass = torch.zeros(len(p), sampler.blocks, dtype=p.dtype).index_add(1, sampler.block_of, p)
        q = sampler._pooled_mass(query) if sampler.scope == "batch" else sampler._mass(query[: len(p)]).double()
        return float((mass.square() / q).sum(dim=-1).mean() - 1)
    if isinstance(sampler, samplers.KernelTree):  # the same distribution, found for all classes at once
        sampler = samplers.Kernel(sampler.kernel)
    sampler.update(weight)
    ids = torch.arange(len(weight)).expand(len(p), -1)
    log_q = sampler.log_prob(query[: len(p)], ids, context=context[: len(p)])
    return float((p.square() / log_q.exp()).sum(dim=-1).mean()) - 1


def _full_step(problem: Problem) -> Callable[[], None]:
    weight = torch.nn.Parameter(problem.weight.clone())
    return training_step(
        [weight], lambda q: torch.nn.functional.linear_cross_entropy(q, weight, problem.target), problem.query, lr=0.0
    )


def _print(rows: list[Row], full: float, console: Console) -> None:
    table = Table(title=f"Sampled minus full loss; a step of the full softmax takes {full:.0f} µs per example")
    for column in ("prediction", "sampler", "negatives", "χ²", "bias (nats)", "µs per example", "full / this"):
        table.add_column(column, justify="left" if column in ("prediction", "sampler") else "right")
    for row in rows:
        cost = row.microseconds_per_example
        bias = f"{row.bias:+.4f} ± {row.error:.4f}"
        numbers = (f"{row.negatives:,}", f"{row.chi_square:.2f}", bias, f"{cost:.0f}", f"{full / cost:.1f}×")
        table.add_row(row.prediction, row.sampler, *numbers)
    console.print(table)


def _plot(rows: list[Row], full: float, file: Path, num_classes: int) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 5.5), layout="constrained")
    axes = figure.subplots()
    colours = {name: f"C{i}" for i, name in enumerate(dict.fromkeys(row.sampler for row in rows))}
    for prediction, name in dict.fromkeys((row.prediction, row.sampler) for row in rows):
        own = [row for row in rows if (row.prediction, row.sampler) == (prediction, name)]
        plain = prediction == "softmax"
        label, style = (name, "-") if plain else (f"{name}, absolute softmax", ":")
        costs = [row.microseconds_per_example for row in own]
        # Below its standard error a bias is not seen: the point stands at that bound.
        height = [max(abs(row.bias), row.error) for row in own]
        axes.plot(costs, height, marker="o", label=label, linestyle=style, color=colours[name])
        for row, where in zip(own, zip(costs, height, strict=True), strict=True):
            note = {"textcoords": "offset points", "color": colours[name], "size": 8}
            axes.annotate(f"{row.negatives}" + " ↓" * (abs(row.bias) < row.error), where, (4, 4), **note)
    axes.axvline(full, color="black", linestyle="--", label="full softmax (no bias)")
    axes.set(xscale="log", yscale="log", xlabel="microseconds per example, whole training step of the layer")
    axes.set(ylabel="|bias| of the loss in nats", title=f"Cost against bias, {num_classes:,} classes")
    axes.grid(alpha=0.3, which="both")
    figure.legend(loc="outside right upper", fontsize=9)
    axes.text(
        0.01, 0.01, "numbers: negatives; ↓: below its standard error, which is shown", transform=axes.transAxes, size=8
    )
    figure.savefig(file, dpi=120)
