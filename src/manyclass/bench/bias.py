"""Error against cost of every sampler on two trained models, at equal numbers of negatives."""

import copy
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor, nn

from .. import diagnostics, functional, fused, samplers
from ..sampled import SampledSoftmax
from . import judges
from .judges import EXAMPLES, SESSIONS, WORDS, Examples, Judge
from .step import OWN, POOL, time_steps
from .timing import settle, write_csv

# Negatives per example, own and shared together; the second is the default of the layer.
TOTALS = (1024, OWN + POOL, 8192 + OWN)
# Negatives per example of the samplers that draw for each example.
FEW = (16, 64, 256)
DRAWS = 40
# Trees of blocks that share these draws, each of another order of the classes. A tree whose search misses a class of
# much mass can have twice the error of another.
TREES = 5
# Steps before each measurement, so that a sampler follows recent queries as it does in training.
WARM_UP = 40
UNIFORM, UNIGRAM, BLOCKS = "uniform pool", "unigram pool", "blocks"
# Bounds for the default setting: bias in nats, and error divided by that of the best static pool.
MOST_BIAS, MOST_ERROR = 0.02, 0.5
# The lines of the plot: a few samplers, in Okabe and Ito's colours. The softmax as a sampler has no error, but costs
# more than the full softmax.
LINES = {
    UNIFORM: ("#999999", "o"),
    UNIGRAM: ("#E69F00", "s"),
    "unigram": ("#CC79A7", "D"),
    "quadratic tree": ("#0072B2", "^"),
    BLOCKS: ("#009E73", "P"),
}


class Alternative(NamedTuple):
    """A sampler to measure with some numbers of samples."""

    name: str
    sampler: samplers.Sampler
    num_samples: tuple[int, ...]
    draws: int = DRAWS


class Row(NamedTuple):
    """One sampler with one number of negatives."""

    model: str
    prediction: str
    sampler: str
    #: Negatives of each example alone, and those that the batch shares.
    own: int
    pool: int
    #: Mean of sampled minus full loss in nats, and its standard error over draws.
    bias: float
    bias_error: float
    #: Root mean square of sampled minus full loss, over examples and draws.
    error: float
    #: Root mean square of the relative error of the gradient by the query.
    gradient_error: float
    #: Of a whole training step of the layer: draw, loss, gradients, SGD, update of the sampler.
    microseconds_per_example: float
    #: A step of the full softmax divided by this one.
    full_over_this: float


def run(out: Path, console: Console, texts: list[Path] | None, steps: int, epochs: float, seed: int) -> None:
    """Train the models, measure all samplers on them, print a table and verdicts, write a CSV and a plot."""
    rows: list[Row] = []
    notes: list[str] = []
    with Progress(console=console) as progress:
        for judge in _judges(texts, steps, epochs, seed, progress):
            full = full_seconds(judge)
            alternatives = list(_alternatives(judge))
            for alternative in progress.track(alternatives, description=f"{judge.model}, {judge.prediction}"):
                rows += measure(judge, alternative, full)
            notes.append(_note(judge, full))
    write_csv(out / "bias.csv", Row._fields, rows)
    show(rows, console)
    _plot(rows, out / "bias.png")
    for line in [
        *notes,
        f"{torch.get_num_threads()} threads, seed {seed}, batches of {EXAMPLES}, {WARM_UP} steps of warm-up",
        f"errors of blocks over {TREES} trees",
        f"figures: {out / 'bias.csv'}",
        f"plot:    {out / 'bias.png'}",
        *verdicts(rows),
    ]:
        console.print(line, soft_wrap=True)


def _judges(texts: list[Path] | None, steps: int, epochs: float, seed: int, progress: Progress) -> Iterator[Judge]:
    """Train one model after the other; one with the absolute softmax, which suits symmetric kernels."""
    yield judges.words(texts, "softmax", steps, seed, progress)
    yield judges.words(texts, "absolute", steps, seed, progress)
    yield judges.sessions(epochs, seed, progress)


def _alternatives(judge: Judge) -> Iterable[Alternative]:
    """List the samplers that a model is measured with."""
    n, d = judge.weight.shape
    counts = torch.bincount(judge.pairs[:, 1], minlength=n) + 1
    if judge.prediction == "softmax":
        yield Alternative(UNIFORM, samplers.Uniform(n, scope="batch"), TOTALS)
        yield Alternative(UNIGRAM, samplers.Unigram(counts, scope="batch"), TOTALS)
        yield Alternative("uniform", samplers.Uniform(n), FEW)
        yield Alternative("unigram", samplers.Unigram(counts), FEW)
        if judge.model == WORDS:
            yield Alternative("bigram", samplers.Bigram(judge.pairs, n), FEW)
        yield Alternative("softmax", samplers.create("softmax", n, d), FEW[:2], DRAWS // 10)
    else:
        yield Alternative("quartic", samplers.create("quartic", n, d), FEW[:2], DRAWS // 10)
    yield Alternative("quadratic tree", samplers.create("quadratic", n, d), FEW, DRAWS // 2)
    blocks = samplers.Blocks(n, d, own=OWN, prediction=judge.prediction)
    yield Alternative(BLOCKS, blocks, tuple(total - OWN for total in TOTALS))


def measure(judge: Judge, alternative: Alternative, full: float) -> Iterable[Row]:
    """Warm up a sampler on other batches, then measure it; ``full`` is a step of the full softmax in seconds."""
    trees = TREES if isinstance(alternative.sampler, samplers.Blocks) else 1
    numbers, draws = alternative.num_samples, max(1, alternative.draws // trees)
    others = [
        _measured(judges.reordered(judge, tree), copy.deepcopy(alternative.sampler), numbers, draws, tree)[2]
        for tree in range(1, trees)
    ]
    head, step, first = _measured(judge, alternative.sampler, numbers, draws, 0)
    # Timing is last, since its steps change the sampler, and their number depends on the machine.
    settle(head.sampler)
    for number, *parts in zip(numbers, first, *others, strict=True):
        found = diagnostics.Measured(*(torch.cat(part) for part in zip(*parts, strict=True)))
        head.num_samples = number
        seconds = time_steps({alternative.name: step})[alternative.name]
        # The mean over examples of each draw: the examples of a pool do not err independently.
        means = found.difference.mean(dim=1)
        each = alternative.sampler.scope == "example"
        yield Row(
            model=judge.model,
            prediction=judge.prediction,
            sampler=alternative.name,
            own=number if each else getattr(alternative.sampler, "own", 0),
            pool=0 if each else number,
            bias=float(means.mean()),
            bias_error=float(means.std()) / math.sqrt(len(means)),
            error=float(found.difference.square().mean().sqrt()),
            gradient_error=float(found.gradient.square().mean().sqrt()),
            microseconds_per_example=seconds / EXAMPLES * 1e6,
            full_over_this=full / seconds,
        )


def _measured(
    judge: Judge, sampler: samplers.Sampler, numbers: Iterable[int], draws: int, seed: int
) -> tuple[SampledSoftmax, Callable[[], None], list[diagnostics.Measured]]:
    """Return a layer with the judge's weights, its training step, and how it did with each number of samples."""
    n, d = judge.weight.shape
    head = SampledSoftmax(d, n, sampler, prediction=judge.prediction)
    with torch.no_grad():
        head.weight.copy_(judge.weight)
    step = _steps(head.parameters(), head, judge.others)
    torch.manual_seed(seed)
    measured = []
    for number in numbers:
        head.num_samples = number
        for _ in range(WARM_UP):
            step()
        measured.append(_compare(judge, sampler, number, draws, seed))
    return head, step, measured


def _compare(judge: Judge, sampler: samplers.Sampler, number: int, draws: int, seed: int) -> diagnostics.Measured:
    """Draw for the measured batch as a training step would, but without updating the sampler."""
    _, prediction, weight, (query, target, context), *_ = judge
    generator = torch.Generator().manual_seed(seed)

    def exact(query: Tensor) -> Tensor:
        return functional.full_softmax_loss(query, weight, target, reduction="none", prediction=prediction)

    def sampled(query: Tensor) -> Tensor:
        options: dict[str, Any] = {"exclude": target, "context": context, "generator": generator}
        draw = sampler.draw(query.detach(), number, **options)
        return fused.sampled_loss(query, weight, None, target, draw, prediction=prediction, sparse=True)[0]

    return diagnostics.measure(query, exact, sampled, draws)


def _steps(parameters: Iterable[Tensor], loss: Callable[..., Tensor], batches: list[Examples]) -> Callable[[], None]:
    """Return a training step that cycles through the batches. Its learning rate of 0 keeps the weights."""
    optimizer, following = torch.optim.SGD(parameters, lr=0.0), itertools.cycle(batches)

    def step() -> None:
        query, target, context = next(following)
        optimizer.zero_grad()
        loss(query.detach().requires_grad_(), target, context=context).backward()
        optimizer.step()

    return step


def full_seconds(judge: Judge) -> float:
    """Time a step of the full softmax."""
    weight = nn.Parameter(judge.weight.clone())

    def loss(query: Tensor, target: Tensor, context: Tensor) -> Tensor:
        return F.linear_cross_entropy(query, weight, target)

    return time_steps({"full": _steps([weight], loss, judge.others)})["full"]


def verdicts(rows: list[Row]) -> list[str]:
    """Print for each model whether the default setting is within the bounds."""
    lines = []
    for model in (WORDS, SESSIONS):
        blocks, static = _default_and_best_static(rows, model)
        ratio = blocks.error / static.error
        lines += [
            f"{_passed(abs(blocks.bias) <= MOST_BIAS)}  {model}: |bias| of blocks is {abs(blocks.bias):.4f} nats, "
            f"at most {MOST_BIAS} allowed",
            f"{_passed(ratio <= MOST_ERROR)}  {model}: error of blocks is {blocks.error:.4f}, {ratio:.2f} times that "
            f"of the {static.sampler} of {static.pool:,}, at most {MOST_ERROR} times allowed",
        ]
    return lines


def _passed(reached: bool) -> str:
    return "PASS" if reached else "FAIL"


def _default_and_best_static(rows: list[Row], model: str) -> tuple[Row, Row]:
    """Find blocks with the default setting, and the better static pool with as many negatives per example."""
    equal = [row for row in _plain(rows, model) if row.own + row.pool == OWN + POOL]
    (blocks,) = (row for row in equal if row.sampler == BLOCKS)
    return blocks, min((row for row in equal if row.sampler in (UNIFORM, UNIGRAM)), key=lambda row: row.error)


def _plain(rows: list[Row], model: str) -> list[Row]:
    return [row for row in rows if (row.model, row.prediction) == (model, "softmax")]


def _note(judge: Judge, full: float) -> str:
    n, d = judge.weight.shape
    logits = judge.measured.query @ judge.weight.T
    return (
        f"{judge.model}, {judge.prediction}: {n:,} classes, {d} features, trained with the full softmax; "
        f"standard deviation of the logits {float(logits.std(dim=1).mean()):.1f}; "
        f"a step of the full softmax takes {full / EXAMPLES * 1e6:.0f} µs per example"
    )


def show(rows: list[Row], console: Console) -> None:
    """Print a table for each model."""
    titles = ("sampler", "own", "pool", "bias (nats)", "error", "gradient error", "µs per example", "full / this")
    for model, prediction in dict.fromkeys(row[:2] for row in rows):
        table = Table(title=f"{model}, {prediction}", box=box.SIMPLE, padding=(0, 1, 0, 0))
        for title in titles:
            table.add_column(title, justify="left" if title == "sampler" else "right")
        for row in rows:
            if row[:2] == (model, prediction):
                table.add_row(
                    row.sampler,
                    f"{row.own:,}",
                    f"{row.pool:,}",
                    f"{row.bias:+.4f}±{row.bias_error:.4f}",
                    f"{row.error:.4f}",
                    f"{row.gradient_error:.3f}",
                    f"{row.microseconds_per_example:.0f}",
                    f"{row.full_over_this:.1f}×",
                )
        console.print(table)


def _plot(rows: list[Row], file: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 5), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    ratios = []
    for model, axes in zip((WORDS, SESSIONS), panels, strict=True):
        plain = _plain(rows, model)
        for name, (colour, marker) in LINES.items():
            line = [row for row in plain if row.sampler == name]
            costs, errors = [row.microseconds_per_example for row in line], [row.error for row in line]
            axes.plot(costs, errors, color=colour, marker=marker, label=name)
            for row, where in zip(line, zip(costs, errors, strict=True), strict=True):
                note = {"textcoords": "offset points", "color": colour, "size": 8}
                axes.annotate(f"{row.own + row.pool}", where, (5, 4), **note)
        full = plain[0].full_over_this * plain[0].microseconds_per_example
        axes.axvline(full, color="#444444", linestyle="--", label="full softmax (no error)")
        axes.set(xscale="log", yscale="log", title=model, xlabel="microseconds per example, whole training step")
        axes.grid(alpha=0.3, which="both")
        blocks, static = _default_and_best_static(rows, model)
        ratios.append(f"{blocks.error / static.error:.2f} on {model}")
    panels[0].set_ylabel("error of the loss in nats, root mean square")
    figure.suptitle(
        f"Error of blocks / error of the best static pool, {OWN + POOL:,} negatives per example: {', '.join(ratios)}\n"
        "Lower left is better. Numbers beside points are negatives per example."
    )
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=6, fontsize=9)
    figure.savefig(file, dpi=120)
