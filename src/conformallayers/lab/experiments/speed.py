"""Experiments 3 and 4: the paper's networks with ReLU, layer by layer and folded, against depth and batch size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import product
from multiprocessing import get_context
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import nn

from ... import networks
from ...errors import first_line
from ...folding.fold import fold
from ...testing import fold_error
from ...utils.text import count, size
from ..checks import torch_settings
from ..measure import interleave, peak, settle
from ..options import BatchOptions, DepthOptions
from ..report import figures
from .bench import run_module
from .records import Cells, Records, Row, grouped

_EXECUTIONS = 100
_SECONDS = 20.0  # time limit of a row of experiment 4
_GPU = 4 * 2**30  # bytes of the GPU for which the paper counts images


def paths(name: str) -> tuple[str, str, str]:
    """Return what a ReLU network, its conformal counterpart and the fold of that are called in records."""
    return name, f"{name}CL, layer by layer", f"{name}CL, folded"


def run_depth(options: DepthOptions) -> Row:
    """Time the three paths at each depth in turn, with random weights and pixels; return the record."""
    figure = partial(depth_figure, batch=options.batch)
    settings = ("batch", "executions", "threads")
    records = Records(
        "experiment 3", options, "times", ("depth",), depth_cells, figure, settings=settings
    )
    with torch_settings(options.threads), records:
        for depth in options.depths:
            records.row(depth, measure=partial(measure_depth, depth, options))
    return records.record


def measure_depth(depth: int, options: DepthOptions) -> Row:
    """Return the row of one depth: milliseconds per batch (median and quartiles) by path."""
    with torch_settings(seed=0):
        relu, conformal = networks.DkNet(depth).eval(), networks.DkNetCL(depth).eval()
        x = torch.rand(options.batch, *networks.IMAGE_SHAPE)
    folded = fold(conformal, networks.IMAGE_SHAPE)
    models = zip(paths("DkNet"), (relu, conformal, folded), strict=True)
    engines = {name: partial(run_module, model, x) for name, model in models}
    return {
        "depth": depth,
        "strategy": folded.strategy,
        "fold_error": fold_error(conformal, folded, x[:8]),
        "milliseconds": interleave(engines, options.executions, calls=5),
    }


def depth_cells(rows: Sequence[Row]) -> Cells:
    """Return a table of the medians, and of the time of DkNet over that of the fold."""
    lines = []
    for row in sorted(rows, key=lambda row: int(row["depth"])):
        times = [row["milliseconds"][name]["median"] for name in paths("DkNet")]
        lines.append([str(row["depth"]), *(f"{t:.2f}" for t in (*times, times[0] / times[-1]))])
    return ["k", *(f"{name}, ms" for name in paths("DkNet")), "DkNet / folded"], lines


def depth_figure(rows: Sequence[Row], batch: int) -> Figure:
    """Plot the median time per batch against depth, one line per path."""
    with figures.styled(6.8, 4.4, legend=3) as (figure, axes):
        lines = {
            name: [(row["depth"], row["milliseconds"][name]["median"]) for row in rows]
            for name in paths("DkNet")
        }
        figures.draw_lines(axes, lines)
        axes.set(xlabel="depth k", ylabel=f"milliseconds, batch of {batch}", yscale="log")
    return figure


def run_batchsize(options: BatchOptions) -> Row:
    """Measure every path at every batch size, each in a process of its own; return the record."""
    key, settings = ("path", "batch"), ("threads",)
    records = Records(
        *("experiment 4", options, "batches", key, batch_cells, batch_figure), settings=settings
    )
    with records:
        for path, batch in product(paths("D3ModNet"), options.batches):
            measure = partial(measure_alone, path, batch, threads=options.threads)
            records.row(path, batch, measure=measure)
    return records.record


def measure_alone(
    path: str, batch: int, executions: int = _EXECUTIONS, threads: int | None = None
) -> Row:
    """Return the row of :func:`measure_here` from a new process; ``failed`` has the reason of a failure."""
    try:
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            return pool.submit(measure_here, path, batch, executions, threads).result()
    except (MemoryError, RuntimeError) as error:  # a process that is killed breaks the pool
        return {"path": path, "batch": batch, "failed": first_line(error)}


def measure_here(path: str, batch: int, executions: int, threads: int | None) -> Row:
    """Return time and memory of a path in this process.

    The memory is the peak growth of the process after imports, network, fold and one warm-up
    image: the batch, the activations between the layers, and the scores.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    torch.manual_seed(0)
    relu, _, folded = paths("D3ModNet")
    model: nn.Module = networks.D3ModNet() if path == relu else networks.D3ModNetCL()
    model.eval()
    if path == folded:
        model = fold(model, networks.IMAGE_SHAPE)
    run_module(model, torch.rand(1, *networks.IMAGE_SHAPE))
    before = settle()
    run = partial(run_module, model, torch.rand(batch, *networks.IMAGE_SHAPE))
    times = interleave({path: run}, executions, calls=1, pause=0.0, budget=_SECONDS)
    row = {"path": path, "batch": batch, "milliseconds": times[path]}
    return {**row, "peak_bytes": peak() - before}


def batch_cells(rows: Sequence[Row]) -> Cells:
    """Return a table of time and memory by path and batch size, and of the images that 4 GiB hold at that rate."""
    lines = []
    for row in rows:
        if "failed" not in row:
            used, batch = max(1, row["peak_bytes"]), row["batch"]
            line = [row["path"], str(batch), f"{row['milliseconds']['median']:.2f}"]
            lines.append([*line, size(used), count(_GPU * batch / used)])
    return ["path", "batch", "ms a batch", "memory", "images in 4 GiB"], lines


def batch_figure(rows: Sequence[Row]) -> Figure:
    """Plot time and memory against batch size, one line per path."""
    measured = grouped((row for row in rows if "failed" not in row), "path")
    with figures.styled(9.6, 4.2, columns=2, legend=2) as (figure, (left, right)):
        panels: list[tuple[Any, str, Callable[[Row], float]]] = [
            (left, "milliseconds per batch", lambda row: row["milliseconds"]["median"]),
            (right, "memory beyond the network, MiB", lambda row: row["peak_bytes"] / 2**20),
        ]
        for axes, label, value in panels:
            lines = {
                path: [(row["batch"], value(row)) for row in found]
                for path, found in measured.items()
            }
            figures.draw_lines(axes, lines)
            axes.set(xlabel="images per batch", ylabel=label, xscale="log", yscale="log")
    return figure
