"""Experiment 3: inference time against depth, for DkNet and for both paths of DkNetCL."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

import torch
from matplotlib.figure import Figure
from torch import nn

from ... import networks
from ...folding.fold import fold
from ...testing import fold_error
from ..checks import torch_settings
from ..measure import interleave
from ..options import DepthOptions
from ..report import figures
from .bench import run_module
from .records import Cells, Records, Row

RELU, LAYERS, FOLDED = PATHS = "DkNet", "DkNetCL, layer by layer", "DkNetCL, folded"


def run_depth(options: DepthOptions) -> Row:
    """Time the three paths at each depth in turn, with random weights and pixels; return the record."""
    figure = partial(depth_figure, batch=options.batch)
    settings = ("batch", "executions", "threads")
    records = Records(
        "experiment 3", options, "times", ("depth",), cells, figure, settings=settings
    )
    with torch_settings(options.threads), records:
        for depth in options.depths:
            records.row(depth, measure=partial(measure, depth, options))
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
    return {
        "depth": depth,
        "strategy": folded.strategy,
        "fold_seconds": round(seconds, 3),
        "fold_error": fold_error(conformal, folded, x[:8]),
        "milliseconds": interleave(engines, options.executions, calls=5),
    }


def cells(rows: Sequence[Row]) -> Cells:
    """Return a table of the medians, and of the time of DkNet over that of the fold."""
    lines = []
    for row in sorted(rows, key=lambda row: int(row["depth"])):
        times = [row["milliseconds"][name]["median"] for name in PATHS]
        lines.append([str(row["depth"]), *(f"{t:.2f}" for t in (*times, times[0] / times[-1]))])
    return ["k", *(f"{name}, ms" for name in PATHS), f"{RELU} / folded"], lines


def depth_figure(rows: Sequence[Row], batch: int) -> Figure:
    """Plot the median time per batch against depth, one line per path."""
    with figures.styled(6.8, 4.4) as (figure, axes):
        lines = {
            name: [(row["depth"], row["milliseconds"][name]["median"]) for row in rows]
            for name in PATHS
        }
        figures.draw_lines(axes, lines)
        axes.set(xlabel="depth k", ylabel=f"milliseconds, batch of {batch}", yscale="log")
        figures.legend_below(figure, axes, 3)
    return figure
