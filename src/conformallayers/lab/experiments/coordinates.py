"""Parallel coordinates: one curve per trial through one axis per hyperparameter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch
from matplotlib.path import Path as Curve

from ..report import figures
from . import paper

_OPTIMIZER = 3  # the axis that has names and no numbers
_TITLES = ("batch size", "epochs", "learning rate", "optimiser", "validation\naccuracy (%)")
_BEND = 0.45  # distance of the control points from their axes, as a share of the gap


def parallel_coordinates(trials: Sequence[dict[str, Any]], title: str) -> Figure:
    """Draw trials, rows of study.json, as curves coloured by accuracy, the best on top."""
    rows = sorted(trials, key=lambda row: row["validation_accuracy"])
    values = np.array([_numbers(row) for row in rows])
    low, high = _bounds(values)
    heights = (values - low) / (high - low)
    colours = matplotlib.colormaps["cividis"]
    with figures.styled(9, 4.2) as (figure, axes):
        for rank, curve in enumerate(heights):
            line: Any = {"edgecolor": colours(curve[-1]), "facecolor": "none", "linewidth": 2}
            place = 2 + rank / len(rows)
            axes.add_patch(PathPatch(smooth(curve), zorder=place, alpha=0.9, **line))
        for place in range(len(_TITLES)):
            _draw_axis(axes, place, low[place], high[place])
        axes.set(xlim=(-0.35, len(_TITLES) - 0.5), ylim=(-0.06, 1.06), yticks=[])
        axes.set_xticks(range(len(_TITLES)), _TITLES)
        axes.tick_params(axis="x", length=0, pad=8)
        axes.spines[:].set_visible(False)
        axes.set_title(f"{title}: the best {len(rows)} of the search")
    return figure


def smooth(heights: Sequence[float]) -> Curve:
    """Return a curve through (0, heights[0]), (1, heights[1]), … that is horizontal at each."""
    points, codes = [(0.0, heights[0])], [Curve.MOVETO]
    for place in range(len(heights) - 1):
        before, after = heights[place], heights[place + 1]
        points += [(place + _BEND, before), (place + 1 - _BEND, after), (place + 1, after)]
        codes += [Curve.CURVE4] * 3
    return Curve(points, codes)


def _numbers(row: dict[str, Any]) -> list[float]:
    """Return a trial in the order of the axes."""
    options = (row["batch_size"], row["epochs"], row["learning_rate"])
    return [*options, paper.OPTIMIZERS.index(row["optimizer"]), 100 * row["validation_accuracy"]]


def _bounds(values: Any) -> Any:
    """Return the lower and the upper ends of the axes, (2, axes)."""
    _, epochs, _, _, shares = values.T
    margin = max(0.05, 0.05 * (shares.max() - shares.min()))
    lengths = (min(paper.EPOCHS[0], epochs.min()), paper.EPOCHS[1])
    names = (-0.5, len(paper.OPTIMIZERS) - 0.5)
    found = (shares.min() - margin, shares.max() + margin)
    return np.array([paper.BATCH_SIZES, lengths, paper.LEARNING_RATES, names, found]).T


def _draw_axis(axes: Any, place: int, low: float, high: float) -> None:
    axes.plot([place, place], [0, 1], color="#333333", linewidth=1, zorder=4)
    marks = [(share, low + share * (high - low)) for share in (0, 0.25, 0.5, 0.75, 1)]
    digits = (".0f", ".0f", ".3g", "", ".2f")[place]
    texts = [(share, format(value, digits)) for share, value in marks]
    if place == _OPTIMIZER:
        texts = [((n - low) / (high - low), name) for n, name in enumerate(paper.OPTIMIZERS)]
    for height, text in texts:
        axes.plot([place - 0.03, place], [height, height], color="#333333", linewidth=1, zorder=4)
        box = {"facecolor": "white", "alpha": 0.75, "edgecolor": "none", "pad": 0.8}
        axes.text(
            place - 0.05, height, text, ha="right", va="center", fontsize=9, bbox=box, zorder=5
        )
