"""The figures of `manyclass reproduce`: those of the paper from its curves, and that of `quality` from its runs."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..train.atomic import replacing
from .reproduce import BLOCKS, DATASETS, FIXED, FULL, Curve, Point

# The colours of Okabe and Ito, which colour-blind readers can distinguish.
STYLES = {
    "uniform": ("#999999", "o"),
    "unigram": ("#E69F00", "s"),
    "bigram": ("#CC79A7", "D"),
    "quadratic": ("#0072B2", "^"),
    "quartic": ("#56B4E9", "v"),
    "softmax": ("#000000", "x"),
    BLOCKS: ("#D55E00", "*"),
}
BASELINES = {"softmax": ("full softmax", "--"), "absolute": ("full softmax, absolute", ":")}
AXES = {"epoch": "epochs", "cpu_seconds": "training time (CPU seconds)"}
SHADES = "viridis"


def draw(figure: str, curves: Sequence[Curve], out: Path, note: str) -> list[Path]:
    """Draw ``bias``, ``samples`` or ``distributions``; the latter two for each data set, against epochs and time.

    A sweep may have just begun: data sets without anything to compare are left out, and times that are not known.
    """
    if not _datasets(curves):
        return []
    if figure == "bias":
        bias(curves, out / "bias.png", note)
        return [out / "bias.png"]
    files = []
    for name in _datasets(curves):
        for against, suffix in (("epoch", ""), ("cpu_seconds", "-time")):
            own = [curve for curve in curves if curve.point.dataset == name]
            if any(getattr(curve.rows[-1], against) is None for curve in own):
                continue
            files.append(out / f"{figure}-{name}{suffix}.png")
            said = f"{_length(own)}; {note}"
            {"samples": samples, "distributions": distributions}[figure](own, files[-1], said, against)
    return files


def bias(curves: Sequence[Curve], file: Path, note: str) -> None:
    """Draw figure 2: final quality against the number of negatives, one panel per data set."""
    names = _datasets(curves)
    figure, panels = _figure(len(names), note)
    for name, axes in zip(names, panels, strict=True):
        own = [curve for curve in curves if curve.point.dataset == name]
        for sampler, (colour, marker) in STYLES.items():
            finals = _finals(own, sampler)
            if finals:
                _line_with_band(axes, finals, marker=marker, color=colour, label=sampler)
        numbers = sorted({curve.point.negatives for curve in own if curve.point.negatives})
        for prediction, (label, dashes) in BASELINES.items():
            values = [_final(curve) for curve in own if curve.point[1:3] == (FULL, prediction)]
            if values and numbers:
                ends = dict.fromkeys((numbers[0], numbers[-1]), values)
                _line_with_band(axes, ends, color="#444444", linestyle=dashes, label=label)
        axes.set(xscale="log", xlabel="negatives per example, m", ylabel=_quality(name))
        axes.set_xticks(numbers, [str(number) for number in numbers])
        axes.minorticks_off()
        points = {f"{point.sampler}, m = {point.negatives}": point for point, _ in own}
        _range(axes, curves, name, f"{_title(name)}: {_length(own)}", points)
    _legend(figure, panels)
    figure.savefig(file, dpi=110)


def samples(curves: Sequence[Curve], file: Path, note: str, against: str = "epoch") -> None:
    """Draw figure 3 and its appendix: convergence by number of negatives, one panel per sampler."""
    name = curves[0].point.dataset
    found = [sampler for sampler in STYLES if any(curve.point.sampler == sampler for curve in curves)]
    figure, panels = _figure(len(found), note)
    numbers = sorted({curve.point.negatives for curve in curves if curve.point.negatives})
    shade = _shades(len(numbers))
    for sampler, axes in zip(found, panels, strict=True):
        own = [curve for curve in curves if curve.point.sampler == sampler and curve.point.seed == 0]
        for curve in own:
            colour = shade(numbers.index(curve.point.negatives or 0))
            _draw(axes, curve, against, color=colour, marker=".", label=f"m = {curve.point.negatives}")
        prediction = own[0].point.prediction
        _baselines(axes, curves, against, (prediction,))
        axes.set(xlabel=AXES[against], ylabel=_quality(name))
        axes.legend(fontsize="small")
        points = {f"m = {curve.point.negatives}": curve.point for curve in own}
        _range(axes, curves, name, f"{_title(name)}: {sampler}", points)
    figure.savefig(file, dpi=110)


def distributions(curves: Sequence[Curve], file: Path, note: str, against: str = "epoch") -> None:
    """Draw figure 4 and its appendix: convergence by sampler, one panel per number of negatives."""
    name = curves[0].point.dataset
    there = {curve.point.negatives for curve in curves}
    numbers = [number for number in FIXED if number in there]
    figure, panels = _figure(len(numbers), note)
    for number, axes in zip(numbers, panels, strict=True):
        for sampler, (colour, marker) in STYLES.items():
            for curve in curves:
                if curve.point.sampler == sampler and curve.point.negatives == number and curve.point.seed == 0:
                    _draw(axes, curve, against, color=colour, marker=marker, markersize=4, label=sampler)
        _baselines(axes, curves, against, tuple(BASELINES))
        axes.set(xlabel=AXES[against], ylabel=_quality(name))
        points = {curve.point.sampler: curve.point for curve in curves if curve.point.negatives == number}
        _range(axes, curves, name, f"{_title(name)}: m = {number}", points)
    _legend(figure, panels)
    figure.savefig(file, dpi=110)


def against_time(panels: Mapping[str, Mapping[str, Sequence[Sequence[tuple[float, float]]]]], file: Path) -> None:
    """Draw held-out loss against training time: thin lines for single seeds, a thick line for their mean.

    Args:
        panels: for the title of each panel, the curves of each sampler: seconds and losses.
        file: the PNG to write.
    """
    note = "Held-out loss of each seed (thin) and mean over seeds (thick), measured on a part of the held-out examples"
    figure, grid = _figure(len(panels), note)
    for (title, samplers), axes in zip(panels.items(), grid, strict=True):
        for sampler, curves in samplers.items():
            _seeds_and_mean(axes, sampler, curves)
        axes.set(xscale="log", xlabel="training time (seconds, 1 thread)", ylabel="held-out cross entropy (nats)")
        axes.set_title(title, fontsize="medium")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
        _seconds_axis(axes)
    with replacing(file) as temporary:
        figure.savefig(temporary, dpi=110)


def _seeds_and_mean(axes: Any, sampler: str, curves: Sequence[Sequence[tuple[float, float]]]) -> None:
    colour, marker = STYLES.get(sampler, ("#000000", "o"))
    for curve in curves:
        axes.plot(*zip(*curve, strict=True), color=colour, linewidth=0.7, alpha=0.6)
    # The runs of a sampler are evaluated at the same steps.
    means = [[sum(values) / len(curves) for values in zip(*at, strict=True)] for at in zip(*curves, strict=True)]
    seconds, losses = zip(*means, strict=True) if means else ((), ())
    label = sampler if means else f"{sampler}: missing"
    axes.plot(seconds, losses, color=colour, marker=marker, linewidth=2, label=label)


def _seconds_axis(axes: Any) -> None:
    """Label 1, 2 and 5 of each power of ten with plain numbers."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())


def _figure(count: int, note: str) -> tuple[Any, list[Any]]:
    """Return a figure with ``count`` panels."""
    from matplotlib.figure import Figure

    columns = 2 if count == 4 else min(count, 4)
    rows = math.ceil(count / columns)
    figure = Figure(figsize=(4.6 * columns, 3.9 * rows + 0.4), layout="constrained")
    figure.suptitle(note, fontsize="small", color="#555555")
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    for spare in panels[count:]:
        spare.remove()
    return figure, panels[:count]


def _range(axes: Any, curves: Sequence[Curve], name: str, title: str, points: dict[str, Point]) -> None:
    """Limit the axis to losses near the full softmax, and list runs that end above in the title."""
    finals = {curve.point: _final(curve) for curve in curves if curve.point.dataset == name}
    best = min(value for point, value in finals.items() if point.sampler == FULL)
    if DATASETS[name].perplexity:
        low, high = 0.95 * best, 3 * best
        axes.set_yscale("log")
    else:
        low, high = best - 0.15, best + 1.5
    axes.set_ylim(low, high)
    above = [
        f"{label}: {finals[point]:,.{0 if high > 100 else 1}f}"
        for label, point in points.items()
        if finals[point] > high
    ]
    axes.set_title(
        title + "".join(f"\nabove: {'; '.join(above[start : start + 2])}" for start in range(0, len(above), 2))
    )
    axes.title.set_fontsize("medium")
    _quality_axis(axes, name)


def _legend(figure: Any, panels: Iterable[Any]) -> None:
    """Draw one legend below all panels, with what any of them shows."""
    found = {}
    for axes in panels:
        handles, labels = axes.get_legend_handles_labels()
        found |= dict(zip(labels, handles, strict=True))
    labels = [name for name in (*STYLES, *(label for label, _ in BASELINES.values())) if name in found]
    columns = 5 if figure.get_figwidth() > 8 else 3
    handles = [found[label] for label in labels]
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize="small")


def _draw(axes: Any, curve: Curve, against: str, **style: Any) -> None:
    rows = [row for row in curve.rows if row.step > 0]
    scale = _scale(curve.point.dataset)
    axes.plot([getattr(row, against) for row in rows], [scale(row.heldout_loss) for row in rows], **style)


def _baselines(axes: Any, curves: Sequence[Curve], against: str, predictions: tuple[str, ...]) -> None:
    for curve in curves:
        point = curve.point
        if point.sampler == FULL and point.prediction in predictions and point.seed == 0:
            label, dashes = BASELINES[point.prediction]
            _draw(axes, curve, against, color="#444444", linestyle=dashes, label=label)


def _finals(curves: Sequence[Curve], sampler: str) -> dict[int, list[float]]:
    """Return the final quality of each seed, for each number of negatives in rising order."""
    found: dict[int, list[float]] = {}
    for curve in sorted(curves, key=lambda curve: curve.point.negatives or 0):
        if curve.point.sampler == sampler and curve.point.negatives:
            found.setdefault(curve.point.negatives, []).append(_final(curve))
    return found


def _line_with_band(axes: Any, finals: Mapping[int, Sequence[float]], color: str, **style: Any) -> None:
    """Draw the mean over seeds, and a band from the best to the worst of them."""
    values = list(finals.values())
    axes.plot(list(finals), [sum(each) / len(each) for each in values], color=color, **style)
    axes.fill_between(list(finals), [*map(min, values)], [*map(max, values)], color=color, alpha=0.2)


def _final(curve: Curve) -> float:
    return _scale(curve.point.dataset)(curve.rows[-1].heldout_loss)


def _scale(dataset: str) -> Callable[[float], float]:
    return (lambda loss: math.exp(min(loss, 50))) if DATASETS[dataset].perplexity else (lambda loss: loss)


def _quality(dataset: str) -> str:
    return "held-out perplexity" if DATASETS[dataset].perplexity else "held-out cross entropy (nats)"


def _quality_axis(axes: Any, dataset: str) -> None:
    from matplotlib.ticker import ScalarFormatter

    axes.grid(alpha=0.3, which="both")
    if DATASETS[dataset].perplexity:
        axes.yaxis.set_major_formatter(ScalarFormatter())
        axes.yaxis.set_minor_formatter(ScalarFormatter())


def _title(dataset: str) -> str:
    return DATASETS[dataset].title


def _length(curves: Sequence[Curve]) -> str:
    last = curves[0].rows[-1]
    return f"{last.step:,.0f} steps, {last.epoch:.2g} epoch{'' if last.epoch == 1 else 's'}"


def _datasets(curves: Sequence[Curve]) -> list[str]:
    """Return the data sets that have runs of the full softmax and of a sampler."""
    kinds = {(curve.point.dataset, curve.point.sampler == FULL) for curve in curves}
    return [name for name in DATASETS if {(name, True), (name, False)} <= kinds]


def _shades(count: int) -> Callable[[int], Any]:
    from matplotlib import colormaps

    colours = colormaps[SHADES]
    return lambda index: colours(0.9 * index / max(1, count - 1))
