"""Experiment 3: inference time against depth, for DkNet and for both paths of DkNetCL."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import nn

from ... import networks
from ...folding.fold import fold
from ...session.compare import run_module
from ...testing import fold_error
from ...utils.timing import interleave
from ..checks import require_positive
from ..report import figures
from ..settings import torch_settings
from .options import DepthOptions
from .records import Measurements, Row

DEPTHS = tuple(range(1, 31))
RELU, LAYERS, FOLDED = "DkNet", "DkNetCL, layer by layer", "DkNetCL, folded"
NAME = "times"


def run_depth(*, say: Callable[[str], object] = print, **options: Any) -> Row:
    """Time the three paths at each depth; write times.json and times.csv after each.

    Weights and pixels are random and uniform. The paths take turns.

    Args:
        say: receives one line per depth.
        **options: fields of :class:`conformallayers.lab.experiments.options.DepthOptions`.
    """
    chosen = DepthOptions(**options)
    depths = tuple(chosen.depths) or DEPTHS
    require_positive("experiment 3", chosen, "depths", "batch", "executions")
    measurements = Measurements(
        ("experiment", "3"),
        chosen,
        settings=("batch", "executions", "seed", "strategy", "threads"),
        selection=("depths",),
        name=NAME,
        key=("depth",),
        line=_line,
        say=say,
        sort=True,
    )

    def draw(rows: list[Row]) -> None:
        figures.save(depth_figure(rows, chosen.batch), chosen.out, "figure")

    with torch_settings(chosen.threads), measurements.drawing(draw):
        for depth in depths:
            measurements.row(depth, partial(measured, depth, chosen))
    return measurements.record


def measured(depth: int, options: DepthOptions) -> Row:
    """Return the row of one depth: milliseconds per batch (median and quartiles) by path."""
    with torch_settings(seed=options.seed):
        relu, conformal = networks.DkNet(depth).eval(), networks.DkNetCL(depth).eval()
        x = torch.rand(options.batch, *networks.IMAGE_SHAPE)
    started = time.perf_counter()
    folded = fold(conformal, networks.IMAGE_SHAPE, strategy=options.strategy)
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


def depth_figure(rows: Sequence[Row], batch: int) -> Figure:
    """Plot the time per batch against depth, with quartiles, one line per path."""
    styles = {
        RELU: (figures.ORANGE, "s"),
        LAYERS: (figures.BLUE, "v"),
        FOLDED: (figures.GREEN, "o"),
    }
    with figures.styled(6.8, 4.4) as (figure, axes):
        depths = [row["depth"] for row in rows]
        for name, (colour, marker) in styles.items():
            times = [row["milliseconds"][name] for row in rows]
            low, high = ([entry[key] for entry in times] for key in ("low", "high"))
            medians = [entry["median"] for entry in times]
            axes.plot(depths, medians, color=colour, marker=marker, markersize=4, label=name)
            axes.fill_between(depths, low, high, color=colour, alpha=0.2, linewidth=0)
        axes.set(xlabel="depth k", ylabel=f"milliseconds, batch of {batch}", yscale="log")
        figures.plain_ticks(axes.yaxis)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3, which="both")
        figures.legend_below(figure, axes, 3)
    return figure


def _line(row: Row) -> str:
    times = ", ".join(f"{key} {v['median']:.2f} ms" for key, v in row["milliseconds"].items())
    return f"k = {row['depth']}: {times} ({row['strategy']})"
