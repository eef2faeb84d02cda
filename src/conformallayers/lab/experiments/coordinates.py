"""Parallel coordinates: one curve per trial through one axis per hyperparameter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch
from matplotlib.path import Path as Curve
from matplotlib.ticker import LogLocator, MaxNLocator

from ..report import figures
from .space import Range, Space

_ACCURACY = "validation\naccuracy (%)"
_WIDE = 100.0  # a range whose ends differ by this factor has a logarithmic axis
_BEND = 0.45  # distance of the control points from their axes, as a share of the gap


def parallel_coordinates(trials: Sequence[dict[str, Any]], title: str, space: Space) -> Figure:
    """Draw finished trials, rows of study.json, as curves coloured by accuracy, the best on top.

    There is one axis for each option of the space, and one for the accuracy.
    """
    rows = sorted(trials, key=lambda row: row["validation_accuracy"])
    shares = [100 * row["validation_accuracy"] for row in rows]
    margin = max(0.05, 0.05 * (shares[-1] - shares[0]))
    ends: dict[str, Range | tuple[Any, ...]] = {
        **{name: _spread(end) for name, end in space.items()},
        _ACCURACY: Range(shares[0] - margin, shares[-1] + margin),
    }
    values = [{**row, _ACCURACY: share} for row, share in zip(rows, shares, strict=True)]
    heights = [[height(row[name], ends[name]) for name in ends] for row in values]
    colours = matplotlib.colormaps["cividis"]
    with figures.styled(max(6.0, 1.8 * len(ends)), 4.2) as (figure, axes):
        for rank, curve in enumerate(heights):
            line: Any = {"edgecolor": colours(curve[-1]), "facecolor": "none", "linewidth": 2}
            place = 2 + rank / len(rows)
            axes.add_patch(PathPatch(smooth(curve), zorder=place, alpha=0.9, **line))
        for place, end in enumerate(ends.values()):
            _draw_axis(axes, place, end)
        axes.set(xlim=(-0.35, len(ends) - 0.5), ylim=(-0.06, 1.06), yticks=[])
        axes.set_xticks(range(len(ends)), [name.replace("_", " ") for name in ends])
        axes.tick_params(axis="x", length=0, pad=8)
        axes.spines[:].set_visible(False)
        axes.set_title(f"{title}: the best {len(rows)} of the search")
    return figure


def height(value: Any, ends: Range | tuple[Any, ...]) -> float:
    """Return the position of a value on its axis, from 0 to 1.

    Examples:
        >>> height(0.1, Range(0.01, 1.0, log=True)), height("sgd", ("adam", "sgd"))
        (0.5, 0.75)
    """
    if not isinstance(ends, Range):
        return (ends.index(value) + 0.5) / len(ends)
    if ends.low == ends.high:
        return 0.5
    low, high, place = (
        np.log([ends.low, ends.high, value]) if ends.log else (ends.low, ends.high, value)
    )
    return float((place - low) / (high - low))


def _spread(ends: Range | tuple[Any, ...]) -> Range | tuple[Any, ...]:
    """Make a wide range logarithmic, however it was searched: good learning rates crowd at its lower end."""
    if isinstance(ends, Range) and ends.high >= _WIDE * ends.low > 0:
        return replace(ends, log=True)
    return ends


def ticks(ends: Range) -> list[float]:
    """Return round numbers on an axis.

    Examples:
        >>> ticks(Range(0.001, 1.0, log=True)), ticks(Range(8, 64)), ticks(Range(3, 3))
        ([0.001, 0.01, 0.1, 1.0], [20.0, 40.0, 60.0], [3])
    """
    if ends.low == ends.high:
        return [ends.low]
    steps = (1.0,) if ends.high >= _WIDE * ends.low else (1.0, 2.0, 5.0)
    locator: Any = LogLocator(subs=steps) if ends.log else MaxNLocator(5, steps=[1, 2, 5, 10])
    found = locator.tick_values(ends.low, ends.high)
    slack = 1e-9 * abs(ends.high)  # powers of ten are rounded
    return [value for value in found.tolist() if ends.low - slack <= value <= ends.high + slack]


def smooth(heights: Sequence[float]) -> Curve:
    """Return a Bézier curve through (0, heights[0]), (1, heights[1]), … that is horizontal at each."""
    points, codes = [(0.0, heights[0])], [Curve.MOVETO]
    for place in range(len(heights) - 1):
        before, after = heights[place], heights[place + 1]
        points += [(place + _BEND, before), (place + 1 - _BEND, after), (place + 1, after)]
        codes += [Curve.CURVE4] * 3
    return Curve(points, codes)


def _draw_axis(axes: Any, place: int, ends: Range | tuple[Any, ...]) -> None:
    axes.plot([place, place], [0, 1], color="#333333", linewidth=1, zorder=4)
    if isinstance(ends, Range):
        texts = [(height(value, ends), f"{value:g}") for value in ticks(ends)]
    else:
        texts = [(height(value, ends), str(value)) for value in ends]
    for level, text in texts:
        axes.plot([place - 0.03, place], [level, level], color="#333333", linewidth=1, zorder=4)
        box = {"facecolor": "white", "alpha": 0.75, "edgecolor": "none", "pad": 0.8}
        axes.text(
            place - 0.05, level, text, ha="right", va="center", fontsize=9, bbox=box, zorder=5
        )
