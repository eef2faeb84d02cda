"""Write predictions as a table, CSV or JSON lines."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from typing import Any, TextIO

import numpy as np

from ...errors import ClosedPipe
from ...utils.text import csv_text, printable
from ..data.images import Array

FORMATS = ("table", "csv", "jsonl")
_FIELDS = ("label", "class", "probability", "score")  # of a Choice, in files
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
        self._stream, self._top = stream, top
        self._rows = {"table": self._table, "csv": self._csv, "jsonl": self._jsonl}[format]
        self._begun = False
        self._widths = [0] * (top + 1)

    def write(self, predictions: Sequence[Prediction]) -> None:
        """Write rows and flush them; raise ClosedPipe if nobody reads them any more."""
        try:
            self._rows(predictions)
            self._stream.flush()
        except BrokenPipeError as error:
            raise ClosedPipe from error
        self._begun = True

    def _csv(self, predictions: Sequence[Prediction]) -> None:
        rows = csv.writer(self._stream, lineterminator="\n")
        if not self._begun:
            ranks = ["", *(f"_{rank}" for rank in range(2, self._top + 1))]
            rows.writerow(["path", *(f"{name}{rank}" for rank in ranks for name in _FIELDS)])
        for found in predictions:
            values = (value for choice in found.choices for value in astuple(choice))
            rows.writerow(map(csv_text, (found.name, *values)))

    def _jsonl(self, predictions: Sequence[Prediction]) -> None:
        for found in predictions:
            top = [dict(zip(_FIELDS, astuple(choice), strict=True)) for choice in found.choices]
            self._stream.write(json.dumps({"path": found.name, "top": top}) + "\n")

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


def _cell(choice: Choice) -> str:
    return f"{printable(choice.label)} {100 * choice.probability:.1f} % ({choice.score:.2f})"
