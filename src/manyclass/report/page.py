"""Parts of a self-contained HTML page: tables, and curves as SVG. Text comes in as it is and is escaped here."""

import math
from collections.abc import Sequence
from html import escape

# Okabe and Ito's colours for all kinds of colour vision, less yellow, which white paper swallows, and black. The
# numbers of colours and of shapes have no common factor: up to 42 curves differ.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#888888")
# Circle, square, triangle up, diamond, triangle down, plus: around (0, 0).
SHAPES = (
    "M-3.5 0a3.5 3.5 0 1 0 7 0a3.5 3.5 0 1 0-7 0z",
    "M-3-3h6v6h-6z",
    "M0-4l4 7h-8z",
    "M0-4.5l4 4.5l-4 4.5l-4-4.5z",
    "M0 4l4-7h-8z",
    "M-1.3-4h2.6v2.7h2.7v2.6h-2.7v2.7h-2.6v-2.7h-2.7v-2.6h2.7z",
)
DASHES = ((), (7, 3), (2, 2), (9, 3, 2, 3), (14, 4), (4, 6))

WIDTH, HEIGHT = 520, 340
LEFT, RIGHT, TOP, BOTTOM = 72, 500, 12, 288
# A curve of many points has about this many markers.
MOST_MARKERS = 25

CSS = """
:root { color-scheme: light dark; --ink: #1c1e21; --paper: #fff; --line: #d5d8dd; --head: #f3f5f7; --mark: #fff3d6 }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e6ea; --paper: #15181c; --line: #3a4048; --head: #20252b; --mark: #46391a }
}
body { margin: 2rem auto; max-width: 76rem; padding: 0 1.25rem; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, "Segoe UI", "Helvetica Neue", "DejaVu Sans", sans-serif }
h1 { font-size: 1.7rem; line-height: 1.25; margin: 0 0 .5rem; overflow-wrap: anywhere }
h2 { font-size: 1.15rem; margin: 2.25rem 0 .5rem }
p { margin: 0 0 .75rem; overflow-wrap: anywhere }
.warning { background: var(--mark); padding: .4rem .8rem; border-radius: .3rem }
.scroll { overflow-x: auto }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums }
th, td { padding: .3rem .8rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap }
tr:first-child th { background: var(--head); font-weight: 600; vertical-align: bottom }
th:first-child { text-align: left; font-weight: 600; position: sticky; left: 0; background: var(--paper);
  min-width: 7rem; max-width: 22rem; white-space: normal; overflow-wrap: anywhere }
.settings th:first-child { white-space: nowrap }
.settings th, .settings td { text-align: left }
.settings tr:first-child th + th { min-width: 5rem; max-width: 12rem; white-space: normal; overflow-wrap: break-word }
.settings tr.differs > * { background: var(--mark) }
.charts { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)) }
figure { margin: 0 }
.legend { display: flex; flex-wrap: wrap; gap: .15rem 1.25rem; list-style: none; margin: 0 0 .75rem; padding: 0;
  font-size: .85rem }
.legend li { display: flex; align-items: center; gap: .4rem; overflow-wrap: anywhere }
.legend svg { width: 40px; height: 14px; flex: none }
figure > svg { display: block; width: 100%; height: auto; max-width: 44rem; font-size: 13px }
svg text { fill: currentColor }
.grid { stroke: currentColor; opacity: .15 }
.axis { stroke: currentColor; opacity: .6 }
"""


def document(title: str, parts: Sequence[str]) -> str:
    """A whole page of HTML ``parts``."""
    body = "\n".join(parts)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>{CSS}</style>
</head>
<body>
{body}
</body>
</html>
"""


def element(tag: str, text: str, **attributes: object) -> str:
    """An element that holds text; ``class_`` stands for ``class``."""
    given = "".join(f' {key.rstrip("_")}="{escape(str(value))}"' for key, value in attributes.items())
    return f"<{tag}{given}>{escape(text)}</{tag}>"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table with a header row, in which the first cell of each row is a header too."""
    lines = [_header(header)]
    lines += [element("th", row[0], scope="row") + "".join(element("td", text) for text in row[1:]) for row in rows]
    return '<div class="scroll"><table>\n' + "\n".join(f"<tr>{line}</tr>" for line in lines) + "\n</table></div>"


def comparison(names: Sequence[str], rows: dict[str, list[str]]) -> str:
    """A table of settings, a column for each name: rows whose values differ come first, others have one wide cell."""
    lines = [f"<tr>{_header(['setting', *names])}</tr>"]
    for key, values in sorted(rows.items(), key=lambda row: len(set(row[1])) == 1):
        if len(set(values)) > 1:
            cells = "".join(element("td", value) for value in values)
            lines.append(f'<tr class="differs">{element("th", f"● {key}", scope="row")}{cells}</tr>')
        else:
            cell = element("td", values[0], colspan=len(names))
            lines.append(f"<tr>{element('th', key, scope='row')}{cell}</tr>")
    return '<div class="scroll"><table class="settings">\n' + "\n".join(lines) + "\n</table></div>"


def legend(names: Sequence[str]) -> str:
    """The names of the curves, each with its colour, dashes and shape."""
    items = [
        f'<li><svg viewBox="0 0 40 14" aria-hidden="true"><path d="M0 7h40" {_stroke(index)}/>'
        f"{_marker(index, 20, 7)}</svg>{element('span', name)}</li>"
        for index, name in enumerate(names)
    ]
    return '<ul class="legend">\n' + "\n".join(items) + "\n</ul>"


def chart(
    x_label: str,
    y_label: str,
    names: Sequence[str],
    curves: Sequence[tuple[list[float], list[float]]],
    y_limits: tuple[float, float],
) -> str:
    """Curves ``(x, y)`` in a frame from x = 0 on. Points that are not finite are gaps, those outside are cut off."""
    right_end = max((max(x) for x, _ in curves), default=0) or 1.0
    low, high = y_limits

    def place(x: float, y: float) -> tuple[float, float]:
        return LEFT + x / right_end * (RIGHT - LEFT), BOTTOM + (y - low) / (high - low) * (TOP - BOTTOM)

    lines = [f'<path class="axis" fill="none" d="M{LEFT} {TOP}V{BOTTOM}H{RIGHT}"/>']
    for tick in ticks(0, right_end):
        across = place(tick, low)[0]
        lines.append(f'<path class="grid" d="M{across:.1f} {TOP}V{BOTTOM}"/>')
        lines.append(_text(f"{tick:,.10g}", across, BOTTOM + 19))
    for tick in ticks(low, high):
        up = place(0, tick)[1]
        lines.append(f'<path class="grid" d="M{LEFT} {up:.1f}H{RIGHT}"/>')
        lines.append(_text(f"{tick:,.10g}", LEFT - 8, up + 4.5, anchor="end"))
    lines.append(_text(x_label, (LEFT + RIGHT) / 2, HEIGHT - 12))
    lines.append(_text(y_label, 16, (TOP + BOTTOM) / 2, turned=True))

    # An inner picture cuts off what lies outside of the frame; a margin keeps markers on its edge whole.
    box = (LEFT - 5, TOP - 5, RIGHT - LEFT + 10, BOTTOM - TOP + 10)
    x, y, width, height = box
    view = " ".join(map(str, box))
    lines.append(f'<svg x="{x}" y="{y}" width="{width}" height="{height}" viewBox="{view}">')
    for index, (name, (xs, ys)) in enumerate(zip(names, curves, strict=True)):
        points = [(x, y, *place(x, y)) for x, y in zip(xs, ys, strict=True)]
        drawn = [point for point in points if math.isfinite(point[1])]
        path, pen = "", "M"
        for _, y, across, up in points:
            path += f"{pen}{across:.1f} {up:.1f}" if math.isfinite(y) else ""
            pen = "L" if math.isfinite(y) else "M"
        if path:
            lines.append(f'<path fill="none" d="{path}" {_stroke(index)}/>')
        for x, y, across, up in drawn[:: marker_stride(len(drawn))]:
            lines.append(_marker(index, across, up, f"{name}: {y:.4g} at {x:,.10g}"))
    lines.append("</svg>")
    label = escape(f"{y_label} against {x_label}")
    picture = "\n".join(lines)
    return f'<figure><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">\n{picture}\n</svg></figure>'


def limits(values: Sequence[float], most: float = math.inf) -> tuple[float, float]:
    """A range with some air around all finite values, at most up to ``most``; never empty."""
    finite = [value for value in values if math.isfinite(value)] or [0.0, 1.0]
    low = min(finite)
    high = max(low, min(max(finite), most))
    air = 0.04 * (high - low) or 0.1 * abs(high) or 1.0
    return low - air, high + air


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round numbers in ``[low, high]``, about ``most`` or fewer."""
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    return [index * step for index in range(math.ceil(low / step), math.floor(high / step) + 1)]


def marker_stride(points: int) -> int:
    """How many points it is from one marker to the next."""
    return max(1, math.ceil(points / MOST_MARKERS))


def _header(names: Sequence[str]) -> str:
    return "".join(element("th", name, scope="col") for name in names)


def _text(text: str, x: float, y: float, *, anchor: str = "middle", turned: bool = False) -> str:
    turn = f' transform="rotate(-90 {x:.1f} {y:.1f})"' if turned else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{turn}>{escape(text)}</text>'


def _stroke(index: int) -> str:
    dashes = " ".join(map(str, DASHES[index // len(COLOURS) % len(DASHES)]))
    dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
    return f'stroke="{COLOURS[index % len(COLOURS)]}" stroke-width="1.8" stroke-linejoin="round"{dashed}'


def _marker(index: int, x: float, y: float, tip: str = "") -> str:
    shape, colour = SHAPES[index % len(SHAPES)], COLOURS[index % len(COLOURS)]
    title = element("title", tip) if tip else ""
    return f'<path transform="translate({x:.1f} {y:.1f})" d="{shape}" fill="{colour}">{title}</path>'
