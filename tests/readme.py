"""The generated tables of the docs; ``python tests/readme.py`` writes them."""

import csv
import math
import re
from collections.abc import Iterable
from pathlib import Path

from manyclass import samplers
from manyclass.bench import optimum, step
from manyclass.experiments import comparison, comparison_report, pace, quality, reproduce, times
from manyclass.experiments.reproduce import Point

DOCS = Path(__file__).parent.parent / "docs"
README = DOCS.parent / "README.md"
PAGE, RELATED, MEASURED, OVERVIEW, REPRODUCTION, RESULTS = (
    DOCS / "samplers.md",
    DOCS / "related-work.md",
    DOCS / "measured.md",
    DOCS / "results.md",
    DOCS / "reproduction.md",
    DOCS / "results",
)
# Layers of the README's table, as `manyclass bench step` calls them, and what the README calls them.
LAYERS = {
    step.PLAIN: "full softmax in a plain Python process",
    step.FULL: "full softmax in a process that keeps freed memory, like all below",
    "quadratic": "the paper's quadratic kernel",
    step.CLUSTERED: "`manyclass`, default, classes in clusters as after a training",
    step.BLOCKS: "`manyclass`, default, classes without structure as before it",
    step.EQUAL_NEGATIVES: "uniform pool of as many negatives: faster, with a larger error",
}


def with_table(text: str, name: str = "samplers", table: str | None = None) -> str:
    """Put a table between its two comments: that of all samplers, if no other is given."""
    place = re.compile(rf"(<!-- {name}: [^\n]* -->\n).*?(<!-- end of {name} -->\n)", re.S)
    # Links in the samplers' descriptions start at the root.
    content = samplers.table().replace("](docs/", "](") if table is None else table
    written, places = place.subn(lambda found: f"{found[1]}\n{content}\n{found[2]}", text)
    assert places == 1, f"there must be comments around the table of {name} once, not {places} times"
    return written


def with_results(text: str, groups: dict[str, list[comparison.Result]]) -> str:
    """Put the tables of the committed results into the page of related work."""
    text = with_table(text, "comparison", comparison_report.overview(groups))
    return with_table(text, "optimum", optimum.markdown(RESULTS / optimum.FILE))


def comparison_groups() -> dict[str, list[comparison.Result]]:
    """Read the committed results of `manyclass compare`."""
    return comparison_report.grouped("quick", comparison.DATASETS, RESULTS)


def rows(header: Iterable[str], lines: Iterable[Iterable[str]]) -> str:
    """Lay out a table whose first column is text."""
    header = list(header)
    rule = ["---", *["---:"] * (len(header) - 1)]
    return "".join(f"| {' | '.join(line)} |\n" for line in [header, rule, *lines])


def results(name: str) -> list[dict[str, str]]:
    """Read a CSV of the results."""
    with (RESULTS / name).open(newline="") as file:
        return list(csv.DictReader(file))


def step_table() -> str:
    """Steps of some layers with a million classes, from `manyclass bench step`."""
    steps = [row for row in results("step.csv") if (row["in_features"], row["num_classes"]) == ("64", "1000000")]
    seconds = {row["layer"]: float(row["seconds"]) for row in steps}
    fulls = (step.PLAIN, step.FULL)
    lines = [
        (title, f"{1e3 * seconds[name]:.1f}", *(f"{seconds[full] / seconds[name]:.1f}×" for full in fulls))
        for name, title in LAYERS.items()
    ]
    return rows(("output layer", "milliseconds", "plain full softmax / this", "full softmax / this"), lines)


def sizes_table() -> str:
    """Steps as the classes grow, from `manyclass bench step`."""
    steps = [row for row in results("step.csv") if row["in_features"] == "64"]
    sizes = list(dict.fromkeys(row["num_classes"] for row in steps))
    names = (step.PLAIN, step.FULL, step.EQUAL_NEGATIVES, step.EQUAL_ROWS, step.TENSORFLOW, step.BLOCKS, step.CLUSTERED)
    cells = {(row["num_classes"], row["layer"]): f"{1e3 * float(row['seconds']):.1f}" for row in steps}
    lines = [(f"{int(size):,}", *(cells.get((size, name), "left out") for name in names)) for size in sizes]
    return rows(("classes", *names), lines)


def settings_table() -> str:
    """Errors of static pools and of settings of blocks on trained models, from `manyclass bench settings`."""
    measured = results("settings.csv")
    models = list(dict.fromkeys(row["model"] for row in measured))
    cells: dict[tuple[str, str, str], list[str]] = {}
    for row in measured:
        cell = f"{float(row['error']):.3f}, {float(row['gradient_error']):.3f}"
        cells.setdefault((row["sampler"], row["own"], row["pool"]), []).append(cell)
    return rows(("sampler", "own", "pool", *models), [(*setting, *line) for setting, line in cells.items()])


def quality_table() -> str:
    """Complete trainings with blocks against those with the full softmax, from `manyclass reproduce quality`."""
    found = list(quality.read(RESULTS).values())
    lines = []
    for dataset, optimizer in quality.PAIRS:
        full, blocks = (
            [one for one in found if one.trial[:3] == (dataset, sampler, optimizer)] for sampler in ("full", "blocks")
        )
        compared = quality.compare(blocks, full)
        if compared is None:
            continue
        seeds = {one.trial.seed for one in full} & {one.trial.seed for one in blocks}
        mean = [quality.estimate(values).mean for values in ([one.loss for one in full], [one.recall for one in full])]
        cells = (
            str(len(seeds)),
            f"{mean[0]:.3f}",
            f"{mean[1]:.4f}",
            compared.loss.text("+"),
            compared.recall.text("+"),
        )
        lines.append((f"{dataset}, {optimizer}", *cells))
    header = ("data, optimiser", "seeds", "full: loss", "full: recall@20", "blocks: Δ loss", "blocks: Δ recall@20")
    return rows(header, lines)


def ends(dataset: str) -> dict[Point, list[float]]:
    """Read how the runs of `manyclass reproduce bias` end: the held-out losses of the seeds, by point with seed 0."""
    found: dict[Point, list[float]] = {}
    for point, evaluations in reproduce.read("converged", RESULTS):
        if point.dataset == dataset:
            found.setdefault(point._replace(seed=0), []).append(evaluations[-1].heldout_loss)
    return found


def ends_table(dataset: str) -> str:
    """Lay out how the runs end: means over seeds, perplexities or losses."""
    perplexity = reproduce.DATASETS[dataset].perplexity

    def text(losses: list[float]) -> str:
        values = [math.exp(loss) for loss in losses] if perplexity else losses
        mean = f"{sum(values) / len(values):,.{1 if perplexity else 3}f}"
        return f"{mean} ({len(values)})" if len(values) > 1 else mean

    return sweep_table({point: text(losses) for point, losses in ends(dataset).items()})


def presets_table(dataset: str) -> str:
    """Lay out how the runs of the paper's setting end, and the same runs of the preset `converged`: perplexities."""
    lines, wanted = [], {curve.point for curve in reproduce.read("paper", RESULTS)}
    for preset in ("converged", "paper"):
        for point, evaluations in reproduce.read(preset, RESULTS):
            if point.dataset == dataset and point in wanted:
                end = evaluations[-1]
                cells = f"{end.epoch:.0f}", f"{end.step:,}", f"{math.exp(end.heldout_loss):.1f}"
                lines.append((f"`{preset}`, {point.sampler}", *cells))
    return rows(("preset, sampler", "epochs", "steps", "held-out perplexity"), lines)


def gaps_table(dataset: str) -> str:
    """Lay out how far the runs end above the full softmax with the same prediction: nats, means over seeds."""
    means = {point: sum(losses) / len(losses) for point, losses in ends(dataset).items()}
    full = {point.prediction: mean for point, mean in means.items() if point.sampler == reproduce.FULL}
    gaps = {point: f"{mean - full[point.prediction]:+.3f}" for point, mean in means.items() if point.negatives}
    return sweep_table(gaps)


def times_table(dataset: str) -> str:
    """Lay out the times of `manyclass reproduce times`."""
    times_of = times.read("converged", RESULTS)
    return sweep_table({point: f"{value:.1f}" for point, value in times_of.items() if point.dataset == dataset})


def sweep_table(cells: dict[Point, str]) -> str:
    """Lay out runs of one data set by sampler and number of negatives."""
    names = [name for name in (*reproduce.SAMPLERS, reproduce.BLOCKS) if any(point.sampler == name for point in cells)]
    dataset = next(iter(cells)).dataset

    def cell(name: str, sampler: str, negatives: int | None) -> str:
        prediction = "absolute" if name in reproduce.ABSOLUTE else "softmax"
        return cells.get(Point(dataset, sampler, prediction, negatives, 0), "–")

    lines = []
    if any(point.sampler == reproduce.FULL for point in cells):
        lines.append(("all", *(cell(name, reproduce.FULL, None) for name in names)))
    for negatives in sorted({point.negatives for point in cells if point.negatives}):
        lines.append((str(negatives), *(cell(name, name, negatives) for name in names)))
    return rows(("negatives", *names), lines)


def peers_table() -> str:
    """Steps of other libraries' layers, from `peers/steps.py`."""
    found: dict[str, dict[str, float]] = {}
    for row in results("peers.csv"):
        found.setdefault(row["layer"], {})[row["num_classes"]] = float(row["seconds"])
    sizes, ours = list(next(iter(found.values()))), found["manyclass, default"]
    lines = [
        (layer, *(f"{1e3 * seconds[size]:.1f} ({seconds[size] / ours[size]:.1f}×)" for size in sizes))
        for layer, seconds in found.items()
    ]
    return rows(("layer", *(f"{int(size):,} classes (this / `manyclass`)" for size in sizes)), lines)


def pace_table() -> str:
    """Lay out the time to the loss of the full softmax, from `manyclass reproduce pace`."""
    found: dict[tuple[str, int], list[pace.Row]] = {}
    for row in pace.read(RESULTS):
        found.setdefault((row.dataset, row.classes), []).append(row)
    lines = []
    for (name, classes), group in found.items():
        for one in (compared := pace.results(group)):
            reached = f"{one.cpu_seconds:,.0f} ({compared[0].cpu_seconds / one.cpu_seconds:.1f}×)"
            losses = f"{one.same_steps:.3f}", f"{one.lowest:.3f}"
            cells = (f"{one.milliseconds:,.0f}", *losses, reached if math.isfinite(one.cpu_seconds) else "not reached")
            lines.append((f"{pace.DATASETS[name].title}, {classes:,}", one.method, *cells))
    header = ("data, classes", "method", "ms per step", "lowest loss in the steps of full", "in three times as many")
    return rows((*header, "CPU seconds to the lowest loss of full (full / this)"), lines)


def generated() -> dict[Path, str]:
    """Compose the pages that hold tables of results."""
    overview = OVERVIEW.read_text("utf-8")
    for name, table in {"peers": peers_table(), "pace": pace_table(), "quality": quality_table()}.items():
        overview = with_table(overview, name, table)
    measured = MEASURED.read_text("utf-8")
    for name, table in {"sizes": sizes_table(), "settings": settings_table(), "quality": quality_table()}.items():
        measured = with_table(measured, name, table)
    sweep = REPRODUCTION.read_text("utf-8")
    for dataset in ("ptb", "beauty", "synth"):
        sweep = with_table(sweep, f"ends-{dataset}", ends_table(dataset))
        sweep = with_table(sweep, f"times-{dataset}", times_table(dataset))
    sweep = with_table(sweep, "gaps-ptb", gaps_table("ptb"))
    sweep = with_table(sweep, "presets-ptb", presets_table("ptb"))
    return {
        REPRODUCTION: sweep,
        README: with_table(README.read_text("utf-8"), "steps", step_table()),
        MEASURED: measured,
        OVERVIEW: overview,
    }


if __name__ == "__main__":
    for page, text in generated().items():
        page.write_text(text, "utf-8")
    PAGE.write_text(with_table(PAGE.read_text("utf-8")), "utf-8")
    groups = comparison_groups()
    RELATED.write_text(with_results(RELATED.read_text("utf-8"), groups), "utf-8")
    (RESULTS / comparison_report.PAGE).write_text(comparison_report.page(groups), "utf-8")
    comparison_report.plot(groups, RESULTS / comparison_report.PLOT)
