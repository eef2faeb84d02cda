"""Parallel coordinates: one curve per trial through one axis per hyperparameter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch
from matplotlib.path import Path as Curve

from ..report import figures
from . import paper

_AXES = {
    "batch_size": "batch size",
    "epochs": "epochs",
    "learning_rate": "learning rate",
    "optimizer": "optimiser",
    "validation_accuracy": "validation\naccuracy (%)",
}
_BEND = 0.45  # distance of the control points from their axes, as a share of the gap


def parallel_coordinates(trials: Sequence[dict[str, Any]], title: str) -> Figure:
    """Draw trials, rows of study.json, as curves coloured by accuracy, the best on top."""
    rows = sorted(trials, key=lambda row: row["validation_accuracy"])
    scales = {name: _scale(name, rows) for name in _AXES}
    low, high = scales["validation_accuracy"]
    colours = matplotlib.colormaps["cividis"]
    with figures.styled(9, 4.2) as (figure, axes):
        for rank, row in enumerate(rows):
            heights = [_height(name, row, scales[name]) for name in _AXES]
            colour = colours((100 * row["validation_accuracy"] - low) / (high - low))
            line: Any = {"edgecolor": colour, "facecolor": "none", "linewidth": 2, "alpha": 0.9}
            axes.add_patch(PathPatch(smooth(heights), zorder=2 + rank / len(rows), **line))
        for place, name in enumerate(_AXES):
            _draw_axis(axes, place, name, scales[name])
        axes.set(xlim=(-0.35, len(_AXES) - 0.5), ylim=(-0.06, 1.06), yticks=[])
        axes.set_xticks(range(len(_AXES)), list(_AXES.values()))
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


def _scale(name: str, rows: Sequence[dict[str, Any]]) -> tuple[float, float]:
    if name == "validation_accuracy":
        values = [100 * row[name] for row in rows]
        margin = max(0.05, 0.05 * (max(values) - min(values)))
        return min(values) - margin, max(values) + margin
    known = {"batch_size": paper.BATCH_SIZES, "learning_rate": paper.LEARNING_RATES}
    if name in known:
        return known[name]
    if name == "epochs":
        return min(paper.EPOCHS[0], *(row[name] for row in rows)), paper.EPOCHS[1]
    return -0.5, len(paper.OPTIMIZERS) - 0.5


def _height(name: str, row: dict[str, Any], scale: tuple[float, float]) -> float:
    value = row[name]
    if name == "optimizer":
        value = paper.OPTIMIZERS.index(value)
    elif name == "validation_accuracy":
        value = 100 * value
    low, high = scale
    return float((value - low) / (high - low))


def _draw_axis(axes: Any, place: int, name: str, scale: tuple[float, float]) -> None:
    low, high = scale
    axes.plot([place, place], [0, 1], color="#333333", linewidth=1, zorder=4)
    if name == "optimizer":
        marks = [(_height(name, {name: choice}, scale), choice) for choice in paper.OPTIMIZERS]
    else:
        digits = ".2f" if name == "validation_accuracy" else ".3g" if high <= 1 else ".0f"
        shares = (0, 0.25, 0.5, 0.75, 1)
        marks = [(share, format(low + share * (high - low), digits)) for share in shares]
    for height, text in marks:
        axes.plot([place - 0.03, place], [height, height], color="#333333", linewidth=1, zorder=4)
        box = {"facecolor": "white", "alpha": 0.75, "edgecolor": "none", "pad": 0.8}
        axes.text(
            place - 0.05, height, text, ha="right", va="center", fontsize=9, bbox=box, zorder=5
        )
