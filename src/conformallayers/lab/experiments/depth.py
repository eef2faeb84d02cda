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
from ...utils.timing import interleave
from ..checks import require_positive
from ..report import figures
from ..settings import torch_settings
from .engines import run_module
from .options import DepthOptions
from .records import Measurements, Row

DEPTHS = tuple(range(1, 31))
RELU, LAYERS, FOLDED = "DkNet", "DkNetCL, layer by layer", "DkNetCL, folded"
NAME = "times"


def run_depth(*, say: Callable[[str], object] = print, **options: Any) -> Row:
    """Time the three paths at each depth, and write times.json after each depth.

    Weights and pixels are random and uniform. The paths take turns.

    Args:
        say: receives one line per depth.
        **options: fields of :class:`conformallayers.lab.experiments.options.DepthOptions`.
    """
    chosen = DepthOptions(**options)
    require_positive("experiment 3", chosen, "depths", "batch", "executions")
    measurements = Measurements(
        "experiment 3",
        chosen,
        settings=("batch", "executions", "seed", "strategy", "threads"),
        name=NAME,
        key=("depth",),
        say=say,
    )

    def draw(rows: list[Row]) -> None:
        figures.save(depth_figure(rows, chosen.batch), chosen.out, "figure")

    with torch_settings(chosen.threads), measurements.drawing(draw):
        for depth in chosen.depths or DEPTHS:
            measurements.row(depth, partial(measure, depth, chosen))
    return measurements.record


def measure(depth: int, options: DepthOptions) -> Row:
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
    """Plot the time per batch against depth, one line per path."""
    styles = {
        RELU: {"color": figures.ORANGE, "marker": "s"},
        LAYERS: {"color": figures.BLUE, "marker": "v"},
        FOLDED: {"color": figures.GREEN, "marker": "o"},
    }
    times = {
        row["depth"]: {name: [*found.values()] for name, found in row["milliseconds"].items()}
        for row in sorted(rows, key=lambda row: int(row["depth"]))
    }
    return figures.depth_figure(times, batch, styles)
