"""Experiment 3: inference time against depth, for DkNet and for both paths of DkNetCL."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import nn

from ... import networks
from ...folding.fold import fold
from ...testing import fold_error
from ..checks import require_positive, torch_settings
from ..measure import interleave
from ..options import DepthOptions
from ..report import figures
from .engines import run_module
from .records import Cells, Records, Row

RELU, LAYERS, FOLDED = "DkNet", "DkNetCL, layer by layer", "DkNetCL, folded"
_STYLES = {
    RELU: {"color": figures.ORANGE, "marker": "s"},
    LAYERS: {"color": figures.BLUE, "marker": "v"},
    FOLDED: {"color": figures.GREEN, "marker": "o"},
}


def run_depth(*, say: Callable[[str], object] = print, **options: Any) -> Row:
    """Time the three paths at each depth in turn, with random weights and pixels.

    Args:
        say: receives one line per depth.
        **options: fields of :class:`conformallayers.lab.options.DepthOptions`.
    """
    chosen = DepthOptions(**options)
    require_positive("experiment 3", chosen, "depths", "batch", "executions")
    records = Records(
        "experiment 3",
        chosen,
        name="times",
        key=("depth",),
        cells=cells,
        figure=partial(depth_figure, batch=chosen.batch),
        figure_name="figure",
        settings=("batch", "executions", "threads"),
        say=say,
    )
    with torch_settings(chosen.threads), records:
        for depth in chosen.depths:
            records.row(depth, partial(measure, depth, chosen))
    return records.record


def measure(depth: int, options: DepthOptions) -> Row:
    """Return the row of one depth: milliseconds per batch (median and quartiles) by path."""
    with torch_settings(seed=0):
        relu, conformal = networks.DkNet(depth).eval(), networks.DkNetCL(depth).eval()
        x = torch.rand(options.batch, *networks.IMAGE_SHAPE)
    started = time.perf_counter()
    folded = fold(conformal, networks.IMAGE_SHAPE)
    seconds = time.perf_counter() - started
    models: dict[str, nn.Module] = {RELU: relu, LAYERS: conformal, FOLDED: folded}
    engines = {name: partial(run_module, model, x) for name, model in models.items()}
    times = interleave(engines, options.executions, calls=5)
    return {
        "depth": depth,
        "strategy": folded.strategy,
        "fold_seconds": round(seconds, 3),
        "fold_error": fold_error(conformal, folded, x[:8]),
        "milliseconds": {name: timing.milliseconds for name, timing in times.items()},
    }


def cells(rows: Sequence[Row]) -> Cells:
    """Return a table of the medians, and of the time of DkNet over that of the fold."""
    lines = []
    for row in sorted(rows, key=lambda row: int(row["depth"])):
        times = [row["milliseconds"][name]["median"] for name in _STYLES]
        lines.append([str(row["depth"]), *(f"{t:.2f}" for t in (*times, times[0] / times[-1]))])
    return ["k", *(f"{name}, ms" for name in _STYLES), f"{RELU} / folded"], lines


def depth_figure(rows: Sequence[Row], batch: int) -> Figure:
    """Plot the time per batch against depth with quartiles, one line per path."""
    rows = sorted(rows, key=lambda row: int(row["depth"]))
    depths = [row["depth"] for row in rows]
    with figures.styled(6.8, 4.4) as (figure, axes):
        for name, style in _STYLES.items():
            found = [row["milliseconds"][name] for row in rows]
            median, low, high = ([t[key] for t in found] for key in ("median", "low", "high"))
            (line,) = axes.plot(depths, median, markersize=4, label=name, **style)
            axes.fill_between(depths, low, high, color=line.get_color(), alpha=0.2, linewidth=0)
        axes.set(xlabel="depth k", ylabel=f"milliseconds, batch of {batch}", yscale="log")
        figures.plain_ticks(axes.yaxis)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.3, which="both")
        figures.legend_below(figure, axes, 3)
    return figure
