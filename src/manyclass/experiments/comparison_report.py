"""What `manyclass compare` shows: a table for each data set, in the terminal and as Markdown, and a plot."""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ..train.atomic import replacing
from . import reproduce
from .comparison import CURVES, CUTOFF, FILE, METHODS, Result, read
from .reproduce import BLOCKS, FULL

#: Times are measured until the held-out loss is within this many nats of the full softmax at its end.
NEAR = (0.5, 0.1)
#: Methods that end further above the full softmax are not in the plot.
SHOWN = 1.5
#: Colours of the most important lines.
STRONG = {FULL: "black", BLOCKS: "red"}
#: Their outputs estimate no log probabilities, so the loss of the softmax of these outputs is in parentheses.
NOT_NORMALISED = ("negative",)
PAGE, PLOT = "comparison.md", "comparison.png"
HEADER = (
    "method",
    "loss",
    "Δ full",
    f"recall@{CUTOFF}",
    f"mrr@{CUTOFF}",
    "ms/step",
    *(f"s to full + {near}" for near in NEAR),
    "MB",
    "bias",
)


def summarise(preset: str, datasets: Sequence[str], out: Path, console: Console) -> None:
    """Print a table for each data set, write them as Markdown, and draw the plot."""
    groups = grouped(preset, datasets, out)
    for name, group in groups.items():
        console.print(table(name, group))
    files = [out / FILE, out / CURVES]
    if groups:
        files += [out / PAGE, out / PLOT]
        with replacing(out / PAGE) as temporary:
            temporary.write_text(page(groups), "utf-8")
        plot(groups, out / PLOT)
    for file in files:
        console.print(str(file), soft_wrap=True)


def grouped(preset: str, datasets: Sequence[str], out: Path) -> dict[str, list[Result]]:
    """Read the results of each data set that has some."""
    results = [one for one in read(out).values() if one.trial.preset == preset]
    groups = {name: [one for one in results if one.trial.dataset == name] for name in datasets}
    return {name: group for name, group in groups.items() if group}


def table(dataset: str, results: Sequence[Result]) -> Table:
    """Lay out one data set for the terminal."""
    made = Table(title=title(dataset, results), caption="CPU time of training on one thread; bias in nats")
    for number, name in enumerate(HEADER):
        made.add_column(name, justify="left" if number == 0 else "right")
    for row in rows(results):
        made.add_row(*row)
    return made


def page(groups: Mapping[str, Sequence[Result]]) -> str:
    """Lay out all data sets as a Markdown page."""
    sections = [f"## {title(name, group)}\n\n{_markdown(HEADER, rows(group))}" for name, group in groups.items()]
    return "\n".join(["# Comparison\n", overview(groups), *sections])


def overview(groups: Mapping[str, Sequence[Result]]) -> str:
    """Lay out the difference to full, recall and time per step of all data sets in one Markdown table."""
    cells = {name: {row[0]: (row[2], row[3], row[5]) for row in rows(group)} for name, group in groups.items()}
    header = ["method", *(f"{name}: {HEADER[column]}" for name in groups for column in (2, 3, 5))]
    methods = [method for method in METHODS if any(method in found for found in cells.values())]
    lines = [
        [method, *(cell for found in cells.values() for cell in found.get(method, ("",) * 3))] for method in methods
    ]
    return _markdown(header, lines)


def _markdown(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    every = [header, ("---", *["---:"] * (len(header) - 1)), *lines]
    return "".join(f"| {' | '.join(line)} |\n" for line in every)


def title(dataset: str, results: Sequence[Result]) -> str:
    """Name the data set, the length of the runs and the number of seeds."""
    steps, seeds = {one.steps for one in results}, {one.trial.seed for one in results}
    return f"{reproduce.DATASETS[dataset].title}, {max(steps)} steps, {len(seeds)} seed{'s' * (len(seeds) > 1)}"


def rows(results: Sequence[Result]) -> list[tuple[str, ...]]:
    """Return the cells of one data set, a row per method, best loss first: means over seeds."""
    methods: dict[str, list[Result]] = {}
    for one in results:
        methods.setdefault(one.trial.method, []).append(one)
    order = sorted(methods, key=lambda method: (method in NOT_NORMALISED, mean(one.loss for one in methods[method])))
    baseline = mean(one.loss for one in methods.get(FULL, ()))
    end = end_of_full(results)
    return [_row(method, methods[method], baseline, end) for method in order]


def _row(method: str, runs: Sequence[Result], baseline: float, end: float) -> tuple[str, ...]:
    loss = mean(one.loss for one in runs)
    if method in NOT_NORMALISED:
        losses, times = [f"({loss:.3f})", "–"], ["–"] * len(NEAR)
    else:
        losses = [f"{loss:.3f}", _cell(loss - baseline, "+.3f")]
        times = [_cell(mean(one.seconds_to(end + near) for one in runs), ".1f") for near in NEAR]
    return (
        method,
        *losses,
        f"{mean(one.recall for one in runs):.4f}",
        f"{mean(one.mrr for one in runs):.4f}",
        f"{mean(1000 * one.cpu_seconds / one.steps for one in runs):.0f}",
        *times,
        _cell(mean(one.megabytes for one in runs), ".0f"),
        _cell(mean(one.bias for one in runs), "+.3f"),
    )


def end_of_full(results: Sequence[Result]) -> float:
    """Return where the curves of the full softmax end, on a part of the held-out examples; nan if they are missing."""
    return mean(one.curve[-1][1] for one in results if one.trial.method == FULL and one.curve)


def mean(values: Iterable[float]) -> float:
    """Return the mean; nan without values."""
    values = list(values)
    return sum(values) / len(values) if values else math.nan


def _cell(value: float, style: str) -> str:
    return f"{value:{style}}" if math.isfinite(value) else "–"


def plot(groups: Mapping[str, Sequence[Result]], file: Path) -> None:
    """Draw held-out loss against CPU seconds, a panel per data set; names are at the ends, from the first seed."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    figure = Figure(figsize=(6.5 * len(groups), 6.5), layout="constrained")
    panels = figure.subplots(1, len(groups), squeeze=False)[0]
    colours = {method: colormaps["tab20"](number % 20) for number, method in enumerate(METHODS)} | STRONG
    for (dataset, results), axes in zip(groups.items(), panels, strict=True):
        end = end_of_full(results)
        limit = end + SHOWN if math.isfinite(end) else math.inf
        runs = [one for one in results if one.curve and one.curve[-1][1] <= limit]
        for one in runs:
            method = one.trial.method
            width = 2.5 if method in STRONG else 1
            axes.plot(*zip(*one.curve, strict=True), color=colours[method], linewidth=width, marker=".")
        axes.set(xscale="log", xlabel="training time (CPU seconds, one thread)", ylabel="held-out loss (nats)")
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 3.0)))
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_ylim(top=min(limit, axes.get_ylim()[1]))
        first = min(one.trial.seed for one in results)
        ends = {one.trial.method: one.curve[-1] for one in runs if one.trial.seed == first}
        low, high = axes.get_ylim()
        for method, height in apart({method: loss for method, (_, loss) in ends.items()}, (high - low) / 42).items():
            axes.annotate(
                method,
                ends[method],
                xytext=(1.02, (height - low) / (high - low)),
                textcoords="axes fraction",
                fontsize="small",
                color=colours[method],
                va="center",
                arrowprops={"arrowstyle": "-", "color": colours[method], "linewidth": 0.4, "alpha": 0.6},
            )
        left_out = sorted({one.trial.method for one in results} - {one.trial.method for one in runs})
        note = f"\nending more than {SHOWN} above full: {', '.join(left_out)}" if left_out else ""
        axes.set_title(title(dataset, results) + note, fontsize="small", wrap=True)
        axes.grid(alpha=0.3)
    with replacing(file) as temporary:
        figure.savefig(temporary, dpi=110, format="png")


def apart(heights: Mapping[str, float], least: float) -> dict[str, float]:
    """Move the heights of labels up where needed, so that neighbours are at least ``least`` apart."""
    placed: dict[str, float] = {}
    last = -math.inf
    for name, height in sorted(heights.items(), key=lambda item: item[1]):
        last = placed[name] = max(height, last + least)
    return placed
