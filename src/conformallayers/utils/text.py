"""Plain text for explanations and errors: tables, counts, calls of a graph, suggestions."""

from __future__ import annotations

import difflib
import re
import unicodedata
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # so that text without graphs does not wait for torch
    from torch import fx

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

    Upper and lower case, hyphens and underscores do not matter, and initials stand for the words of
    a choice. A word that is one of the choices needs no suggestion.

    Examples:
        >>> suggest("lenetcl", ["LeNet", "LeNetCL"]), suggest("lr", ["learning_rate"])
        (' Did you mean "LeNetCL"?', ' Did you mean "learning_rate"?')
        >>> suggest("svhn", ["mnist", "cifar10"])
        ''
    """
    names = list(choices)
    if word in names:
        return ""
    keys = [_comparable(name) for name in names]
    initials = ["".join(part[0] for part in key.split("-") if part) for key in keys]
    asked = _comparable(word)
    close = difflib.get_close_matches(asked, keys, n=1)
    if close:
        found = names[keys.index(close[0])]
    elif len(asked) > 1 and asked in initials:
        found = names[initials.index(asked)]
    else:
        return ""
    return f' Did you mean "{found}"?'


def call_text(node: fx.Node) -> str:
    """Format a graph node as Python code.

    Examples:
        >>> import torch
        >>> from torch import fx
        >>> graph = fx.symbolic_trace(lambda x: torch.cat([x * 2, x.flatten(1)], dim=1)).graph
        >>> [call_text(node) for node in graph.nodes]
        ['x', 'mul(x, 2)', 'x.flatten(1)', 'cat([mul, flatten], dim=1)', 'output(cat)']
    """
    if node.op in ("placeholder", "get_attr"):
        return str(node.target)
    values = [str(value) for value in node.args]
    named = [f"{key}={value}" for key, value in node.kwargs.items()]
    if node.op == "call_method":
        return f"{values[0]}.{node.target}({', '.join([*values[1:], *named])})"
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", node)
    return f"{name}({', '.join([*values, *named])})"


def is_number(cell: str) -> bool:
    """Check whether a table cell starts like a number; an empty cell counts as one.

    Examples:
        >>> [is_number(cell) for cell in ("-1.5 ms", ".5", "", "-", "-abc", "inf")]
        [True, True, True, False, False, False]
    """
    return not cell or cell.lstrip("-+.")[:1].isdigit()


def _comparable(word: str) -> str:
    return word.casefold().replace("_", "-").strip("-")
