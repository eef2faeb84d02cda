"""Pages of sections as one self-contained HTML file: text, tables and embedded figures."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jinja2

from ... import __version__
from ...errors import refusal
from ...utils.files import replace_file
from ...utils.text import is_number

# A paragraph, a table, a figure or a command, which the template shows by its "kind".
Block = dict[str, Any]


def text(words: str) -> Block:
    """Return a paragraph."""
    return {"kind": "text", "words": words}


def title(words: str) -> Block:
    """Return a heading within a section."""
    return {"kind": "title", "words": words}


def missing(command: str, what: str = "Not measured yet") -> Block:
    """Return the command that measures what a section lacks."""
    return {"kind": "missing", "command": command, "what": what}


def table(header: Sequence[str], lines: Iterable[Sequence[object]], summary: str = "") -> Block:
    """Return a table, collapsed under a summary if there is one; columns of numbers are right-aligned."""
    rows = [[str(cell) for cell in line] for line in lines]
    numeric = [all(map(is_number, column)) for column in zip(*rows, strict=True)]
    numeric = numeric or [False] * len(header)
    return {"kind": "table", "header": header, "rows": rows, "numeric": numeric, "summary": summary}


def picture(folder: Path, name: str, caption: str) -> Block:
    """Return a figure of a folder; nothing is shown if there is no such file."""
    path, uri = folder / f"{name}.png", None
    if path.exists():
        uri = f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode('ascii')}"
    return {"kind": "picture", "uri": uri, "caption": caption}


def source(record: Block) -> Block:
    """Return the command, commit and machine of a record."""
    machine = record.get("machine", {})
    details = [f"{key} {machine[key]}" for key in ("threads", "torch", "python") if key in machine]
    details = [f"commit {short_commit(record.get('commit'))}", *details]
    return {"kind": "source", "command": record.get("command", "unknown"), "details": details}


def short_commit(commit: str | None) -> str:
    """Shorten one or several commits, and mark those with uncommitted changes.

    Examples:
        >>> short_commit("0123456789abcdef-changed, fedcba9876543210")
        '0123456789 (changed), fedcba9876'
    """
    return ", ".join(
        one[:10] + (" (changed)" if one.endswith("-changed") else "")
        for one in (commit or "unknown").split(", ")
    )


def write_page(out: Path, heading: str, sections: dict[str, list[Block]]) -> Path:
    """Write the sections, by their headings, into a file, and return its path."""
    if out.is_dir():
        remedy = "Give a file name such as report.html."
        raise refusal("report --out", "a file", f"the folder {out}", remedy)
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("conformallayers.lab.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    template = environment.get_template("page.html.jinja")
    html = template.render(heading=heading, sections=sections, version=__version__)
    out.parent.mkdir(parents=True, exist_ok=True)
    replace_file(out, [html.encode()])
    return out
