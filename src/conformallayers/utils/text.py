"""Plain text: tables, counts, and calls of a graph, for explanations and errors."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Lay out rows under a header; columns whose every cell is a number are right-aligned."""
    columns = list(zip(header, *rows, strict=True))
    widths = [max(len(cell) for cell in column) for column in columns]
    right = [i > 0 and bool(rows) and all(map(_numeric, c[1:])) for i, c in enumerate(columns)]

    def line(cells: Sequence[str]) -> str:
        aligned = (
            cell.rjust(width) if flush else cell.ljust(width)
            for cell, width, flush in zip(cells, widths, right, strict=True)
        )
        return "  ".join(aligned).rstrip()

    rule = "  ".join("-" * width for width in widths)
    return "\n".join([line(header), rule, *(line(row) for row in rows)])


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


def call_text(node: fx.Node) -> str:
    """Write a node of a graph as one would in Python.

    Examples:
        >>> import torch
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


def _numeric(cell: str) -> bool:
    return not cell or cell[0].isdigit() or cell[0] in "-+."
