"""Parts of a self-contained HTML page. All text is escaped here."""

import base64
from collections.abc import Sequence
from html import escape

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
figure { margin: 0 }
figure > img { width: 100%; height: auto; max-width: 64rem; border-radius: .3rem }
"""


def document(title: str, parts: Sequence[str]) -> str:
    """Return a whole page of HTML ``parts``."""
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
    """Return an element that holds text; ``class_`` sets the attribute ``class``."""
    given = "".join(f' {key.rstrip("_")}="{escape(str(value))}"' for key, value in attributes.items())
    return f"<{tag}{given}>{escape(text)}</{tag}>"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table with a header row, in which the first cell of each row is a header too."""
    lines = [_header(header)]
    lines += [element("th", row[0], scope="row") + "".join(element("td", text) for text in row[1:]) for row in rows]
    return '<div class="scroll"><table>\n' + "\n".join(f"<tr>{line}</tr>" for line in lines) + "\n</table></div>"


def comparison(names: Sequence[str], rows: dict[str, list[str]]) -> str:
    """Return a table of settings, a column per name: first the rows that differ, then one wide cell per row."""
    lines = [f"<tr>{_header(['setting', *names])}</tr>"]
    for key, values in sorted(rows.items(), key=lambda row: len(set(row[1])) == 1):
        if len(set(values)) > 1:
            cells = "".join(element("td", value) for value in values)
            lines.append(f'<tr class="differs">{element("th", f"● {key}", scope="row")}{cells}</tr>')
        else:
            cell = element("td", values[0], colspan=len(names))
            lines.append(f"<tr>{element('th', key, scope='row')}{cell}</tr>")
    return '<div class="scroll"><table class="settings">\n' + "\n".join(lines) + "\n</table></div>"


def image(content: bytes, kind: str, text: str) -> str:
    """Embed a picture of a media type such as ``image/svg+xml``, with an alternative text."""
    data = base64.b64encode(content).decode()
    return f'<figure><img src="data:{kind};base64,{data}" alt="{escape(text)}"></figure>'


def _header(names: Sequence[str]) -> str:
    return "".join(element("th", name, scope="col") for name in names)
