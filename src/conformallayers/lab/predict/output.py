"""Write predictions as a table, CSV or JSON lines, and progress to standard error."""

from __future__ import annotations

import csv
import json
import re
import sys
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from typing import Any, TextIO

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

from ...errors import ClosedPipe
from .arrays import Array

FORMATS = ("table", "csv", "jsonl")
_FIELDS = ("label", "class", "probability", "score")  # of a Choice, in files
# Spreadsheets take a cell that begins so for a formula, unless it is a number or standard input.
_FORMULA = re.compile(r"'*[=+\-@\t\r\n\uff0b\uff0d\uff1d\uff20]")
_NO_FORMULA = re.compile(r"[+-]?\d+(\.\d+)?|-(\[\d+\])?")
_WIDEST = 60  # most characters of the column of names


@dataclass(frozen=True)
class Choice:
    """A class: its label and index, its softmax probability, and its score."""

    label: str
    index: int
    probability: float
    score: float


@dataclass(frozen=True)
class Prediction:
    """The most likely classes of one sample, best first."""

    name: str
    choices: tuple[Choice, ...]


def likeliest(name: str, scores: Array, top: int, label: Callable[[int], str]) -> Prediction:
    """Return the classes with the largest scores; ties keep the order of the classes.

    Examples:
        >>> likeliest("a.png", np.array([0.0, np.log(3.0)]), 1, str).choices
        (Choice(label='1', index=1, probability=0.75, score=1.09861),)
    """
    wide = scores.astype(np.float64)
    powers = np.exp(wide - wide.max())
    shares = powers / powers.sum()
    order = np.argsort(-wide, kind="stable")[:top]
    return Prediction(
        name,
        tuple(Choice(label(int(i)), int(i), _digits(shares[i]), _digits(wide[i])) for i in order),
    )


def _digits(value: Any) -> float:
    """Round to six significant digits, the precision of float32."""
    return float(f"{float(value):.6g}")


class Writer:
    """Write predictions in one of the formats."""

    def __init__(self, stream: TextIO, format: str, top: int) -> None:
        self._stream, self._format, self._top = stream, format, top
        self._begun = False
        self._widths = [0] * (top + 1)

    def write(self, predictions: Sequence[Prediction]) -> None:
        """Write rows and flush them; raise ClosedPipe if nobody reads them any more."""
        try:
            self._write(predictions)
            self._stream.flush()
        except BrokenPipeError as error:
            raise ClosedPipe from error

    def _write(self, predictions: Sequence[Prediction]) -> None:
        if self._format == "table":
            self._table(predictions)
        elif self._format == "csv":
            rows = csv.writer(self._stream, lineterminator="\n")
            if not self._begun:
                ranks = ["", *(f"_{rank}" for rank in range(2, self._top + 1))]
                rows.writerow(["path", *(f"{name}{rank}" for rank in ranks for name in _FIELDS)])
            for found in predictions:
                values = (value for choice in found.choices for value in astuple(choice))
                rows.writerow(map(csv_text, (found.name, *values)))
        else:
            for found in predictions:
                top = [dict(zip(_FIELDS, astuple(choice), strict=True)) for choice in found.choices]
                self._stream.write(json.dumps({"path": found.name, "top": top}) + "\n")
        self._begun = True

    def _table(self, predictions: Sequence[Prediction]) -> None:
        rows = [[printable(p.name), *map(_cell, p.choices)] for p in predictions]
        if not self._begun:
            rows.insert(0, ["image", *(f"{rank}." for rank in range(1, self._top + 1))])
        for row in rows:  # a column never gets narrower
            self._widths = [max(w, len(cell)) for w, cell in zip(self._widths, row, strict=True)]
        self._widths[0] = min(self._widths[0], _WIDEST)
        for row in rows:
            cells = (cell.ljust(w) for w, cell in zip(self._widths, row, strict=True))
            self._stream.write("  ".join(cells).rstrip() + "\n")


def csv_text(value: str | float) -> str:
    """Write a cell; an apostrophe stands before text that a spreadsheet would run as a formula.

    It also stands before such text with apostrophes of its own, so that different texts stay different.

    Examples:
        >>> csv_text("=1+1"), csv_text("-1"), csv_text("cat"), csv_text(-1e-9), csv_text("'=a")
        ("'=1+1", '-1', 'cat', '-1e-09', "''=a")
    """
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    return f"'{text}" if _FORMULA.match(text) and not _NO_FORMULA.fullmatch(text) else text


def _cell(choice: Choice) -> str:
    return f"{printable(choice.label)} {100 * choice.probability:.1f} % ({choice.score:.2f})"


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


def progress_bar(stream: TextIO, count: Callable[[], int | None]) -> Progress:
    """Return a bar on standard error, shown if that is a terminal and the rows go elsewhere."""
    shown = sys.stderr.isatty() and not stream.isatty()
    bar = Progress(
        *(BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()),
        console=Console(stderr=True),
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
        disable=not shown,
    )
    bar.add_task("", total=count() if shown else None)
    return bar
