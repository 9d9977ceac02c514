"""Curves of runs, drawn by matplotlib."""

import math
from collections.abc import Sequence
from io import BytesIO
from itertools import zip_longest
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# The colours of Okabe and Ito, which colour-blind readers can distinguish, without black and without yellow, which is
# hard to see on white. The numbers of colours and of shapes have no common factor, so up to 42 curves differ.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#888888")
MARKERS = ("o", "s", "^", "D", "v", "P")
DASHES = ((None, None), (7, 3), (2, 2), (9, 3, 2, 3), (14, 4), (4, 6))
# A curve of many points has about this many markers.
MOST_MARKERS = 25
# Characters of a name in the legend, and of a line of it.
LONGEST, LINE = 60, 120


class Panel(NamedTuple):
    """One quantity of all runs."""

    x_label: str
    y_label: str
    #: ``x`` and ``y`` of each run; gaps where they are not finite.
    curves: list[tuple[list[float], list[float]]]
    y_limits: tuple[float, float]


def draw(title: str, names: Sequence[str], panels: Sequence[Panel]) -> "Figure":
    """Draw panels in two columns, with one legend for all."""
    from matplotlib.figure import Figure

    names = [name if len(name) < LONGEST else f"{name[:28]}…{name[-28:]}" for name in names]
    columns = max(1, min(len(names), LINE // (max(map(len, names)) + 8)))
    rows = math.ceil(len(panels) / 2)
    figure = Figure(figsize=(10, 0.6 + 3.6 * rows + 0.2 * math.ceil(len(names) / columns)), layout="constrained")
    handles = []
    for axes, panel in zip_longest(figure.subplots(rows, 2, squeeze=False).flat, panels):
        if panel is None:
            axes.remove()
            continue
        handles = []
        for index, (x, y) in enumerate(panel.curves):
            handles += axes.plot(
                x,
                [value if math.isfinite(value) else math.nan for value in y],
                color=COLOURS[index % len(COLOURS)],
                marker=MARKERS[index % len(MARKERS)],
                markevery=max(1, math.ceil(len(x) / MOST_MARKERS)),
                dashes=DASHES[index // len(COLOURS) % len(DASHES)],
            )
        axes.set(xlabel=panel.x_label, ylabel=panel.y_label, ylim=panel.y_limits)
        axes.grid(alpha=0.3)
    labels = [name.replace("$", r"\$") for name in names]  # a dollar would begin a formula
    figure.legend(handles, labels, loc="outside lower center", ncols=columns)
    figure.suptitle(title)
    return figure


def svg(figure: "Figure") -> bytes:
    """Return a figure as SVG, the same bytes for the same figure."""
    import matplotlib

    file = BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "manyclass"}):
        figure.savefig(file, format="svg", metadata={"Date": None})
    return file.getvalue()


def limits(values: Sequence[float], most: float = math.inf) -> tuple[float, float]:
    """Return an axis range with a margin around all finite values, cut off at ``most``; never empty."""
    finite = [value for value in values if math.isfinite(value)] or [0.0, 1.0]
    low = min(finite)
    high = max(low, min(max(finite), most))
    air = 0.04 * (high - low) or 0.1 * abs(high) or 1.0
    return low - air, high + air
