"""Trained runs side by side: a table for the terminal, a plot, and one HTML page."""

import json
import math
import textwrap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from .. import samplers
from ..train.atomic import replacing
from . import curves, page
from .runs import Run

TASKS = {"lm": "Language model", "next-item": "Next item", "classify": "Classification"}
TITLE = "Held-out loss in nats, always that of the full softmax"
STEPS, SECONDS = "training steps", "training time (seconds)"
LOSS = "held-out loss, full softmax (nats)"
TRAINING_LOSS = "training loss, as sampled (nats)"
BIAS = "measured bias of the loss (nats)"
NONE = "–"
DIVERGED = "diverged"


def table(runs: Sequence[Run]) -> Table:
    """Return the runs' losses and speeds, for the terminal."""
    header, rows = _summary(runs)
    result = Table(title=TITLE, caption=" ".join(filter(None, (_caveat(runs), _protocol(runs)))) or None)
    for index, column in enumerate(header):
        result.add_column(column, justify="left" if index < 2 else "right", overflow="fold")
    for row in rows:
        result.add_row(*map(Text, row))  # not plain strings: a folder may be called [red]
    return result


def plot(runs: Sequence[Run], file: Path, caption: str = "") -> None:
    """Draw the held-out loss against steps and against training time, as a PNG."""
    legend = _legend(runs)
    title = "\n".join(filter(None, (_title(runs), textwrap.fill(caption, 110))))
    figure = curves.draw(title, legend, _panels(runs)[:2])
    with replacing(file) as temporary:
        figure.savefig(temporary, dpi=120, format="png")


def write(runs: Sequence[Run], file: Path) -> None:
    """Write one self-contained HTML page: table, curves, evaluations, settings."""
    names = _labels(runs)
    title, caveat = _title(runs), _caveat(runs)
    figure = curves.draw(title, _legend(runs), _panels(runs))
    parts = [
        page.element("h1", title),
        page.element("p", caveat, class_="warning") if caveat else page.element("p", _lowest(runs)),
        page.element("h2", f"{len(runs)} runs" if len(runs) > 1 else "Run"),
        page.element("p", f"{TITLE}."),
        page.table(*_summary(runs)),
        *([page.element("p", protocol)] if (protocol := _protocol(runs)) else []),
        page.element("h2", "Curves"),
        page.image(curves.svg(figure), "image/svg+xml", f"curves of {', '.join(_legend(runs))}"),
    ]
    metrics = _keys(run.measures for run in runs)
    if metrics:
        evaluated = [(name, run) for name, run in zip(names, runs, strict=True) if run.measures]
        rows = [[name, *(_metric(run, metric) for metric in metrics)] for name, run in evaluated]
        parts += [page.element("h2", "Evaluation"), page.table(["run", *metrics], rows)]
    parts.append(page.element("h2", "Settings"))
    if len(runs) > 1:
        parts.append(
            page.element("p", "Rows with a ● differ between the runs. The others have one value for all runs.")
        )
    parts.append(page.comparison(names, _side_by_side([run.config["settings"] for run in runs])))
    rest = [{key: value for key, value in run.config.items() if key != "settings"} for run in runs]
    parts += [page.element("h2", "What was run"), page.comparison(names, _side_by_side(rest))]
    with replacing(file) as temporary:
        temporary.write_text(page.document(title, parts), encoding="utf-8")


def _panels(runs: Sequence[Run]) -> list[curves.Panel]:
    """Return panels of the held-out loss by steps and by time, and of training loss and bias if measured."""

    def panel(x: str, name: str, label: str, limits: tuple[float, float]) -> curves.Panel:
        columns = [(run.column("step" if x == STEPS else "seconds"), run.column(name)) for run in runs]
        return curves.Panel(x, label, columns, limits)

    found = [panel(x, "heldout_loss", LOSS, _loss_limits(runs)) for x in (STEPS, SECONDS)]
    seen = [loss for run in runs for loss in run.column("train_loss") if math.isfinite(loss)]
    if seen:
        found.append(panel(STEPS, "train_loss", TRAINING_LOSS, curves.limits(seen, 1.2 * seen[0])))
    known = [bias for run in runs for bias in run.column("bias") if math.isfinite(bias)]
    if known:
        found.append(panel(STEPS, "bias", BIAS, curves.limits([0.0, *known])))
    return found


def _loss_limits(runs: Sequence[Run]) -> tuple[float, float]:
    """Return axis limits for all losses, cut off above the start so that diverging runs do not squeeze others."""
    first = [run.rows[0]["heldout_loss"] for run in runs if math.isfinite(run.rows[0]["heldout_loss"])]
    losses = [loss for run in runs for loss in run.column("heldout_loss")]
    return curves.limits(losses, 1.2 * max(first) if first else math.inf)


def _side_by_side(dicts: Sequence[dict[str, Any]]) -> dict[str, list[str]]:
    return {key: [_shown(one.get(key)) for one in dicts] for key in _keys(dicts)}


def _labels(runs: Sequence[Run]) -> list[str]:
    """Return a name for each run: the shortest end of its path that is unique."""
    if not runs:
        raise ValueError("there are no runs to report")
    names = [run.name for run in runs]
    for depth in range(2, max(len(run.folder.parts) for run in runs) + 1):
        names = [
            str(Path(*run.folder.parts[-depth:])) if names.count(name) > 1 else name
            for name, run in zip(names, runs, strict=True)
        ]
    return names


def _legend(runs: Sequence[Run]) -> list[str]:
    """Return the runs' names for curves, marked if a run diverged, since its curve may not show it."""
    pairs = zip(_labels(runs), runs, strict=True)
    return [name if math.isfinite(run.loss) else f"{name} ({DIVERGED})" for name, run in pairs]


def _title(runs: Sequence[Run]) -> str:
    sizes = sorted({run.config["num_classes"] for run in runs})
    classes = f"{sizes[0]:,}" if len(sizes) == 1 else f"{sizes[0]:,} to {sizes[-1]:,}"
    tasks = {TASKS.get(run.task, "Training") for run in runs}
    return f"{tasks.pop() if len(tasks) == 1 else 'Training'} over {classes} classes"


def _caveat(runs: Sequence[Run]) -> str | None:
    """Return why the losses of the runs do not compare, if so."""
    kinds = {"task": "tasks", "num_classes": "numbers of classes", "heldout_examples": "held-out data"}
    for key, what in kinds.items():
        if len({run.config.get(key) for run in runs}) > 1:
            return f"The runs have different {what}: their losses do not compare."
    return None


def _protocol(runs: Sequence[Run]) -> str | None:
    """Return what the rankings of the runs are of, or that they cannot be compared."""
    ways = {_way(run) for run in runs if run.task != "lm" and run.measures}
    if len(ways) > 1:
        return "The runs were ranked in different ways: their recall, MRR and NDCG do not compare."
    return ways.pop() if ways else None


def _way(run: Run) -> str:
    """Return how `manyclass evaluate` ranked."""
    examples, on, probe = (run.measures.get(name) for name in ("examples", "on", "probe"))
    number = f"{examples:,}" if isinstance(examples, int) else str(examples)
    seen = "left out" if run.measures.get("exclude_seen") is True else "part"
    items = f"; items that a user had before are {seen} of them" if run.task == "next-item" else ""
    which = "held-out" if on == "heldout" else on
    return f"Rankings on {number} {which} examples{'' if probe is None else f' through {probe} blocks'}{items}."


def _lowest(runs: Sequence[Run]) -> str:
    """Return one sentence on the best run."""
    good = [(run.loss, name, run) for name, run in zip(_labels(runs), runs, strict=True) if math.isfinite(run.loss)]
    if not good:
        return "Every run diverged." if len(runs) > 1 else "The run diverged."
    loss, name, run = min(good, key=lambda one: one[0])
    steps = f"{run.rows[-1]['step']:,.0f} steps, {run.rows[-1]['seconds']:,.1f} seconds of training"
    which = f"Lowest held-out loss at the end: {name}," if len(runs) > 1 else "Held-out loss at the end:"
    return f"{which} {loss:.3f} nats after {steps}."


def _summary(runs: Sequence[Run]) -> tuple[list[str], list[list[str]]]:
    """Return the header and rows of the main table; columns that no run fills are left out."""
    full = next((run.steps_per_second for run in runs if run.sampler == "full"), math.nan)
    metrics = _keys(run.measures for run in runs if run.task != "lm")
    columns: dict[str, Callable[[Run], str]] = {
        "sampler": lambda run: run.sampler,
        "negatives": _negatives,
        "loss": lambda run: f"{run.loss:.3f}" if math.isfinite(run.loss) else DIVERGED,
        "perplexity": lambda run: _number(_perplexity(run.loss)) if run.task == "lm" else NONE,
    }
    # The table has room for three measures, at the largest cut-off that all evaluated runs have. The page has all.
    cutoffs = [{name.partition("@")[2] for name in run.measures if name.startswith("recall@")} for run in runs]
    common = set.intersection(*filter(None, cutoffs)) if any(cutoffs) else set()
    largest = max(map(int, common), default=0)
    for metric in metrics:
        if metric in (f"recall@{largest}", f"mrr@{largest}", f"ndcg@{largest}"):
            columns[metric] = lambda run, metric=metric: _metric(run, metric)
    columns["steps/s"] = lambda run: _number(run.steps_per_second)
    columns["speed-up"] = lambda run: NONE if math.isnan(s := run.steps_per_second / full) else f"{s:.1f}×"
    cells = {header: [cell(run) for run in runs] for header, cell in columns.items()}
    kept = {"run": _labels(runs)} | {header: column for header, column in cells.items() if set(column) != {NONE}}
    return list(kept), [list(row) for row in zip(*kept.values(), strict=True)]


def _negatives(run: Run) -> str:
    """Return the number of own and shared negatives of a step at the end of a run."""
    if run.sampler == "full":
        return "all"
    settings = run.config["settings"]
    number = run.rows[-1]["num_samples"]
    if math.isnan(number):
        return NONE
    kind = samplers.named(run.sampler) if run.sampler in samplers.names() else samplers.Sampler
    scope, default = settings.get("scope") or kind.scope, samplers.options(kind).get("own")
    own = ""
    if default and settings.get("tolerance") is None:  # else they follow the pool
        own = f"{settings.get('own') or default} each, "
    return f"{own}{number:.0f} {'shared' if scope == 'batch' else 'each'}"


def _perplexity(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.nan


def _number(value: float) -> str:
    if not math.isfinite(value):
        return NONE
    return f"{value:,.0f}" if 100 <= abs(value) < 1e7 else f"{value:.3g}"


def _shown(value: Any) -> str:
    """Format a setting so that two settings that differ look different."""
    if value is None:
        return NONE
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _metric(run: Run, name: str) -> str:
    value = run.measures.get(name)
    return f"{value:.4g}" if isinstance(value, float) else _shown(value)


def _keys(dicts: Iterable[dict[str, Any]]) -> list[str]:
    """Return all keys, in the order in which they appear first."""
    return list(dict.fromkeys(key for one in dicts for key in one))
