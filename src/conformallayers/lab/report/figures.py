"""The style of all figures, with the colour-blind safe Okabe-Ito and PuOr, and the figures of the demo."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter
from torch import Tensor

from ...nn.activations import ReSPro
from ...utils.files import staged_files
from ...utils.text import count

BLUE, ORANGE, GREEN = "#0072B2", "#D55E00", "#009E73"
COLOURS = (BLUE, ORANGE, GREEN, "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C564B", "#7F7F7F")
_FLOOR = -1.7  # height of the contour lines below a surface
STYLE: Any = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
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
    width: float, height: float, rows: int = 1, columns: int = 1
) -> Iterator[tuple[Figure, Any]]:
    """Yield a figure (in inches) and its axes, an array if several, to be drawn in the common style."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        yield figure, figure.subplots(rows, columns)


class PlainNumbers(LogFormatter):
    """Label the ticks that LogFormatter would label as 0.01, 1, 200, 1 k, 50 k, 1 M."""

    def __call__(self, x: float, pos: int | None = None) -> str:
        """Return the label of a tick, empty where LogFormatter leaves it out."""
        return count(x) if super().__call__(x, pos) else ""


def plain_ticks(*axes: Any) -> None:
    """Label the ticks of logarithmic axes with plain numbers."""
    for axis in axes:
        axis.set_major_formatter(PlainNumbers())
        axis.set_minor_formatter(PlainNumbers(minor_thresholds=(1.5, 0.6)))


def depth_figure(
    times: Mapping[int, Mapping[str, Sequence[float]]], batch: int, styles: Mapping[str, Any]
) -> Figure:
    """Plot milliseconds per batch against depth, with quartiles, one line per name.

    Args:
        times: median and quartiles by depth and name.
        batch: the number of images.
        styles: of the line of each name, for ``Axes.plot``.
    """
    with styled(6.8, 4.4) as (figure, axes):
        for name, style in styles.items():
            depths = [depth for depth, found in times.items() if name in found]
            median, low, high = zip(*(times[depth][name] for depth in depths), strict=True)
            (line,) = axes.plot(depths, median, **{"markersize": 4, "label": name, **style})
            axes.fill_between(depths, low, high, color=line.get_color(), alpha=0.2, linewidth=0)
        axes.set(xlabel="depth k", ylabel=f"milliseconds, batch of {batch}", yscale="log")
        plain_ticks(axes.yaxis)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.3, which="both")
        legend_below(figure, axes, 3)
    return figure


def legend_below(figure: Figure, axes: Any, columns: int = 2) -> None:
    """Add a legend below the axes, where it covers no curve."""
    style: Any = {"frameon": False, "fontsize": 9, "columnspacing": 1.2, "handlelength": 1.6}
    handles = axes.get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=columns, **style)


def respro_surface() -> Figure:
    """Draw both coordinates of ``y = 2αx/(α² + ‖x‖²)`` over the disc ‖x‖ ≤ α, for α = 3."""
    alpha = 3.0
    radius, angle = np.meshgrid(np.linspace(0, alpha, 16), np.linspace(0, 2 * np.pi, 61))
    x1, x2 = radius * np.cos(angle), radius * np.sin(angle)
    points = torch.from_numpy(np.stack([x1.ravel(), x2.ravel()], axis=1))
    y = ReSPro(alpha)(points).numpy().reshape(*x1.shape, 2)
    colours: Any = {"cmap": "cividis", "vmin": -1, "vmax": 1}
    ticks = [-alpha, 0, alpha]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9, 4.5))
        for index in range(2):
            axes: Any = figure.add_axes((0.01 + 0.5 * index, 0.03, 0.47, 0.86), projection="3d")
            height = y[..., index]
            axes.plot_surface(
                x1, x2, height, rstride=3, cstride=1, linewidth=0.3, edgecolor="white", **colours
            )
            axes.contour(x1, x2, height, 9, offset=_FLOOR, **colours)
            axes.set(xlabel="$x_1$", ylabel="$x_2$", xticks=ticks, yticks=ticks)
            axes.set(zlim=(_FLOOR, 1), zticks=[-1, -0.5, 0, 0.5, 1])
            number = index + 1
            formula = rf"$y_{number} = 2\alpha\,x_{number}\,/\,(\alpha^2 + \|x\|^2)$"
            figure.text(0.25 + 0.5 * index, 0.86, formula, ha="center", fontsize=11)
            axes.view_init(elev=22, azim=-128)
            axes.set_box_aspect((1, 1, 0.85), zoom=0.98)
        figure.suptitle(f"ReSPro for α = {alpha:g}, over ‖x‖ ≤ {alpha:g}")
    return figure


def respro_curve() -> Figure:
    """Draw ``y = 2αx/(α² + x²)`` of points with one coordinate, for some α."""
    x = torch.linspace(-4, 4, 401, dtype=torch.float64)
    with styled(6.4, 3.6) as (figure, axes):
        for alpha, colour in zip((0.5, 1.0, 2.0), COLOURS, strict=False):
            y = ReSPro(alpha)(x[:, None])[:, 0]
            axes.plot(x, y, color=colour, label=f"α = {alpha:g}")
        axes.axhline(0, color="black", linewidth=0.6)
        axes.grid(alpha=0.3)
        axes.set(xlabel="x", ylabel="y", title="ReSPro: 1 at x = α, and smaller beyond")
        axes.legend(loc="upper left", frameon=False)
    return figure


def folded_arrays(matrix: Tensor, form: Tensor, layers: str) -> Figure:
    """Draw M (d_out, d_in) and Q (d_in, d_in) of some layers, each divided by its largest entry."""
    with matplotlib.rc_context({**STYLE, "axes.spines.top": True, "axes.spines.right": True}):
        figure = Figure(figsize=(9, 5), layout="compressed")
        widths = [matrix.shape[1] / matrix.shape[0], 1]  # equal heights
        left, right = figure.subplots(1, 2, width_ratios=widths)
        image = left.imshow(_relative(matrix), cmap="PuOr", vmin=-1, vmax=1)
        right.imshow(_relative(form), cmap="PuOr", vmin=-1, vmax=1)
        left.set(title="M: one row an output", xlabel="input pixel", ylabel="output")
        right.set(title="Q: the denominator's form", xlabel="input pixel", ylabel="input pixel")
        bar = figure.colorbar(image, ax=[left, right], shrink=0.85)
        bar.set_label("entry / largest entry")
        figure.suptitle(f"{layers} as one map: y = M x / (‖x‖ + xᵀ Q x) + b")
    return figure


def _relative(array: Tensor) -> Any:
    values = array.detach().double().cpu()
    return (values / values.abs().max().clamp_min(torch.finfo(torch.float64).tiny)).numpy()
