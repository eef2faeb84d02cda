"""Records that print as text in a terminal and as HTML in a notebook, from the same blocks."""

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
