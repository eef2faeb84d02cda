"""A small HTML page in one file: text escaped, pictures and style inside, no script, no link out."""

from __future__ import annotations

import base64
import html
from collections.abc import Iterable, Sequence
from pathlib import Path
from string import Template

_STYLE = """
:root { --ink: #1a1a1a; --soft: #5c5c5c; --line: #d9d9d9; --tint: #f5f6f8; --blue: #005a8d; }
* { box-sizing: border-box; }
body { margin: 0; color: var(--ink); background: #fff; font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 66rem; margin: 0 auto; padding: 1.5rem 1.25rem 4rem; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0.5rem 0; }
h2 { font-size: 1.35rem; margin: 2.75rem 0 0.5rem; padding-top: 0.75rem; border-top: 2px solid var(--ink); }
h3 { font-size: 1.05rem; margin: 1.75rem 0 0.4rem; }
p { max-width: 46rem; margin: 0.5rem 0; }
nav { display: flex; flex-wrap: wrap; gap: 0.25rem 1rem; margin: 1rem 0; }
a { color: var(--blue); }
.scroll { overflow-x: auto; margin: 0.75rem 0; }
table { border-collapse: separate; border-spacing: 0; font-size: 0.92rem; font-variant-numeric: tabular-nums; }
th, td { padding: 6px 0.9rem 6px 0; line-height: 22px; text-align: left; vertical-align: top; border-bottom: 1px solid var(--line); }
thead th { border-bottom: 2px solid var(--soft); vertical-align: bottom; font-weight: 600; }
tbody th { font-weight: 500; }
td.number, th.number { text-align: right; white-space: nowrap; }
td strong, td small { white-space: nowrap; }
small, .source { color: var(--soft); font-size: 0.82rem; }
.source { max-width: none; }
.missing { border-left: 4px solid #d55e00; background: var(--tint); padding: 0.5rem 0.9rem; margin: 0.75rem 0; }
figure { margin: 1rem 0; }
figure img { width: 100%; max-width: 52rem; height: auto; display: block; }
figcaption { color: var(--soft); font-size: 0.85rem; }
code { font: 0.88em ui-monospace, monospace; overflow-wrap: anywhere; }
td code { display: block; min-width: 17rem; }
summary { cursor: pointer; color: var(--blue); padding: 0.35rem 0; }
@media (max-width: 40rem) {
  body { font-size: 15px; }
  main { padding: 1rem 0.9rem 3rem; }
  h1 { font-size: 1.5rem; }
  th, td { padding-right: 0.6rem; }
  td small { white-space: normal; }
  figure.wide { overflow-x: auto; }
  figure.wide img { min-width: 38rem; }
  tbody th:first-child, thead th:first-child { position: sticky; left: 0; background: #fff; }
}
@media print { details > * { display: block; } }
"""

_PAGE = Template("""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>$style</style>
</head>
<body>
<main>
$body
</main>
</body>
</html>
""")
_SPECS = {".svg": "image/svg+xml", ".png": "image/png"}


class Markup(str):
    """HTML that is ready; any other string is escaped where it is used."""

    __slots__ = ()


def markup(value: object) -> Markup:
    """Return HTML as it is, and anything else escaped.

    Examples:
        >>> markup("1 < 2 & so on")
        '1 &lt; 2 &amp; so on'
    """
    return value if isinstance(value, Markup) else Markup(html.escape(str(value)))


def tag(name: str, *content: object, **attributes: str) -> Markup:
    """Return an element with its content; an attribute ``kind`` is written ``class``.

    Examples:
        >>> tag("p", "a < b", kind="source")
        '<p class="source">a &lt; b</p>'
    """
    written = "".join(
        f' {"class" if key == "kind" else key}="{html.escape(value)}"'
        for key, value in attributes.items()
    )
    inside = "".join(markup(part) for part in content)
    return Markup(f"<{name}{written}>{inside}</{name}>")


def join(parts: Iterable[object]) -> Markup:
    """Return parts one after the other."""
    return Markup("\n".join(markup(part) for part in parts))


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> Markup:
    """Return a table that scrolls where it is too wide; columns of numbers stand to the right."""
    numeric = [
        bool(rows) and all(_is_number(row[place]) for row in rows) for place in range(len(header))
    ]
    kinds: list[dict[str, str]] = [{"kind": "number"} if flag else {} for flag in numeric]
    head = [tag("th", text, scope="col", **kinds[place]) for place, text in enumerate(header)]
    lines = []
    for row in rows:
        cells = [tag("th", row[0], scope="row")]
        cells += [tag("td", cell, **kinds[place]) for place, cell in enumerate(row) if place]
        lines.append(tag("tr", *cells))
    body = tag("table", tag("thead", tag("tr", *head)), tag("tbody", *lines))
    return tag("div", body, kind="scroll")


def picture(path: Path, caption: str, wide: bool = False) -> Markup:
    """Return a picture of a file, inside the page; a wide one scrolls on a narrow screen."""
    data = base64.b64encode(path.read_bytes()).decode("ascii")
    source = f"data:{_SPECS[path.suffix]};base64,{data}"
    image = Markup(f'<img src="{source}" alt="{html.escape(caption)}">')
    kind = {"kind": "wide"} if wide else {}
    return tag("figure", image, tag("figcaption", caption), **kind)


def page(title: str, body: Sequence[object]) -> str:
    """Return the whole page."""
    return _PAGE.substitute(title=html.escape(title), style=_STYLE, body=join(body))


def _is_number(cell: object) -> bool:
    text = str(cell).lstrip("+-−")
    return not text or text[0].isdigit()
