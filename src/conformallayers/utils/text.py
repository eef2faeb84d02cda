"""Text for explanations and errors: tables, in HTML too, records that print, counts, suggestions."""

from __future__ import annotations

import difflib
import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import NamedTuple

# Spreadsheets run a cell that begins like this as a formula, unless it is a number.
_FORMULA = re.compile(r"'*[=+\-@\t\r\n\uff0b\uff0d\uff1d\uff20]")
_NUMBER = re.compile(r"[+-]?\d+(\.\d+)?")


def printable(text: str) -> str:
    """Escape line breaks and terminal control codes.

    Examples:
        >>> printable("a\\x1b[31m.png")
        'a\\\\x1b[31m.png'
    """
    odd = ("C", "Zl", "Zp")  # control, unassigned, surrogates; line and paragraph separators
    return "".join(
        c.encode("unicode_escape").decode() if unicodedata.category(c).startswith(odd) else c
        for c in text
    )


def csv_text(value: str | float) -> str:
    """Write a CSV cell, with an apostrophe before text that a spreadsheet would run as a formula.

    Text that has an apostrophe there already gets another one, so that different texts stay different.

    Examples:
        >>> csv_text("=1+1"), csv_text("-1"), csv_text("cat"), csv_text(-1e-9), csv_text("'=a")
        ("'=1+1", '-1', 'cat', '-1e-09', "''=a")
    """
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    return f"'{text}" if _FORMULA.match(text) and not _NUMBER.fullmatch(text) else text


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Lay out rows under a header; columns of numbers are right-aligned."""
    columns = list(zip(header, *rows, strict=True))
    widths = [max(len(cell) for cell in column) for column in columns]
    right = [i > 0 and bool(rows) and all(map(is_number, c[1:])) for i, c in enumerate(columns)]

    def line(cells: Sequence[str]) -> str:
        aligned = (
            cell.rjust(width) if flush else cell.ljust(width)
            for cell, width, flush in zip(cells, widths, right, strict=True)
        )
        return "  ".join(aligned).rstrip()

    rule = "  ".join("-" * width for width in widths)
    return "\n".join([line(header), rule, *(line(row) for row in rows)])


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def count(number: float) -> str:
    """Write a count with three digits and a unit: 1.23 M."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= limit:
            return f"{number / limit:.3g} {unit}"
    return f"{number:.3g}"


def size(number: float) -> str:
    """Write a number of bytes: 4.2 MiB."""
    for power, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if number >= 1024**power:
            return f"{number / 1024**power:.3g} {unit}"
    return f"{number:.0f} B"


def suggest(word: str, choices: Iterable[str]) -> str:
    """Return `` Did you mean "X"?`` for the choice that is most like a word, or the empty string.

    Upper and lower case, hyphens and underscores do not matter, and initials stand for the words of a choice.

    Examples:
        >>> suggest("lenetcl", ["LeNet", "LeNetCL"]), suggest("lr", ["learning_rate"])
        (' Did you mean "LeNetCL"?', ' Did you mean "learning_rate"?')
    """
    names = {_comparable(name): name for name in choices}
    initials = {"".join(part[:1] for part in key.split("-")): key for key in names}
    asked = _comparable(word)
    found = [*difflib.get_close_matches(asked, names, n=1), initials.get(asked, "")][0]
    return f' Did you mean "{names[found]}"?' if found and names[found] != word else ""


def _comparable(word: str) -> str:
    return word.casefold().replace("_", "-").strip("-")


def is_number(cell: str) -> bool:
    """Check whether a table cell starts like a number; an empty cell counts as one.

    Examples:
        >>> [is_number(cell) for cell in ("-1.5 ms", ".5", "", "-", "-abc", "inf")]
        [True, True, True, False, False, False]
    """
    return not cell or cell.lstrip("-+.")[:1].isdigit()


# -- records that print ---------------------------------------------------------------------------------


class Table(NamedTuple):
    """A header and rows of cells."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]


Block = str | Table  # a paragraph, or a table


class Printed:
    """Print a record in a terminal and a notebook, block by block.

    A subclass defines ``_blocks``. An empty paragraph is an empty line.
    """

    def _blocks(self) -> Iterable[Block]:
        """Return the blocks in order."""
        raise TypeError(f"{type(self).__name__} does not define _blocks")

    def __str__(self) -> str:
        return "\n".join(b if isinstance(b, str) else table(*b) for b in self._blocks())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return html(self._blocks())


def separated(records: Iterable[Printed]) -> Iterator[Block]:
    """Yield the blocks of several records, with an empty line between two of them."""
    for index, record in enumerate(records):
        if index:
            yield ""
        yield from record._blocks()


def html(blocks: Iterable[Block]) -> str:
    """Write blocks as HTML; markup in them is escaped.

    Examples:
        >>> html(["a < b", Table(["name", "n"], [["<b>", "12"]])])
        '<pre>a &lt; b</pre><table><thead><tr><th>name</th><th>n</th></tr></thead><tbody><tr><td style="text-align: left">&lt;b&gt;</td><td style="text-align: right">12</td></tr></tbody></table>'
    """
    return "".join(
        f"<pre>{escape(block)}</pre>" if isinstance(block, str) else _table(block)
        for block in blocks
        if block
    )


def _table(block: Table) -> str:
    header = "".join(f"<th>{escape(cell)}</th>" for cell in block.header)
    rows = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in block.rows)
    return f"<table><thead><tr>{header}</tr></thead><tbody>{rows}</tbody></table>"


def _cell(text: str) -> str:
    side = "right" if text and is_number(text) else "left"
    return f'<td style="text-align: {side}">{escape(text)}</td>'
