"""The style of all figures, with the colour-blind safe Okabe-Ito and PuOr, and the figures of runs and the demo."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
from cycler import cycler
from matplotlib.figure import Figure

from ...utils.files import staged_files

_COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]
STYLE: Any = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.prop_cycle": cycler(color=_COLOURS),
}


def save(figure: Figure, folder: Path, name: str) -> Path:
    """Write a figure as PNG without a date; return its path."""
    path = folder / f"{name}.png"
    with matplotlib.rc_context(STYLE), staged_files(path) as (staged,):
        options: Any = {"dpi": 150, "facecolor": "white", "metadata": {"Date": None}}
        figure.savefig(staged, format="png", **options)
    return path


@contextmanager
def styled(
    width: float, height: float, rows: int = 1, columns: int = 1, legend: int = 0
) -> Iterator[tuple[Figure, Any]]:
    """Yield a figure (in inches) and its axes, an array if several, to be drawn in the common style.

    A legend of so many columns goes below the axes, where it covers no curve.
    """
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        yield figure, figure.subplots(rows, columns)
        if legend:
            style: Any = {
                "frameon": False,
                "fontsize": 9,
                "columnspacing": 1.2,
                "handlelength": 1.6,
            }
            handles = figure.axes[0].get_legend_handles_labels()
            figure.legend(*handles, loc="outside lower center", ncols=legend, **style)


def draw_lines(axes: Any, lines: Mapping[str, Sequence[tuple[float, float]]]) -> None:
    """Draw a line with markers through the points (x, y) of each label."""
    for index, (label, points) in enumerate(lines.items()):
        xs, ys = zip(*sorted(points), strict=True)
        axes.plot(xs, ys, marker="sovD^<P"[index % 7], markersize=4, label=label)
    axes.grid(alpha=0.3)


def training_figure(history: Sequence[dict[str, Any]], title: str) -> Figure:
    """Draw loss, known accuracies and learning rate of each epoch."""
    panels = {
        "loss": ("loss",),
        "accuracy": ("train_accuracy", "validation_accuracy", "test_accuracy"),
        "learning rate": ("learning_rate",),
    }
    with styled(7.2, 6.0, rows=3) as (figure, grid):
        for axes, (label, keys) in zip(grid, panels.items(), strict=True):
            lines = {
                key.partition("_")[0]: [(row["epoch"], row[key]) for row in history if key in row]
                for key in keys
            }
            draw_lines(axes, {name: points for name, points in lines.items() if points})
            axes.set(ylabel=label)
            axes.xaxis.get_major_locator().set_params(integer=True)
        grid[1].legend(frameon=False)
        grid[2].set(xlabel="epoch")
        figure.suptitle(title.replace("$", r"\$"))  # or matplotlib would read a formula
    return figure
