"""Records that print as text in a terminal and as HTML in a notebook, both from the same blocks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import NamedTuple

from .text import is_number, table


class Table(NamedTuple):
    """A header and rows of cells."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]


Block = str | Table  # a paragraph, or a table


class Printed:
    """A record that consists of blocks: prints them one below the other, and shows them in a notebook.

    A subclass defines ``_blocks``. An empty paragraph is an empty line.
    """

    def _blocks(self) -> Iterable[Block]:
        """Return what to print, in order."""
        raise TypeError(f"{type(self).__name__} does not say what it prints")

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
    """Write blocks as HTML. Every character of them is text: nothing is markup.

    Examples:
        >>> html(["a < b", Table(["name", "n"], [["<b>", "12"]])])
        '<pre>a &lt; b</pre><table><thead><tr><th>name</th><th>n</th></tr></thead><tbody><tr><td style="text-align: left">&lt;b&gt;</td><td style="text-align: right">12</td></tr></tbody></table>'
    """
    return "".join(_paragraph(b) if isinstance(b, str) else _table(b) for b in blocks if b)


def _paragraph(text: str) -> str:
    return f"<pre>{escape(text)}</pre>"


def _table(block: Table) -> str:
    header = "".join(f"<th>{escape(cell)}</th>" for cell in block.header)
    rows = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in block.rows)
    return f"<table><thead><tr>{header}</tr></thead><tbody>{rows}</tbody></table>"


def _cell(text: str) -> str:
    side = "right" if text and is_number(text) else "left"
    return f'<td style="text-align: {side}">{escape(text)}</td>'
