"""Experiment 4: time and memory of inference against batch size, for D3ModNet and D3ModNetCL."""

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
from ...utils.text import count, size
from ..measure import interleave, peak, settle
from ..options import BatchOptions
from ..report import figures
from .bench import run_module
from .records import Cells, Records, Row, grouped

RELU, LAYERS, FOLDED = PATHS = "D3ModNet", "D3ModNetCL, layer by layer", "D3ModNetCL, folded"
_EXECUTIONS = 100
_SECONDS = 20.0  # time limit of a row
_GPU = 4 * 2**30  # bytes of the GPU for which the paper counts images


def run_batchsize(options: BatchOptions) -> Row:
    """Measure every path at every batch size, each in a process of its own; return the record."""
    key, settings = ("path", "batch"), ("threads",)
    records = Records(
        *("experiment 4", options, "batches", key, cells, batch_figure), settings=settings
    )
    with records:
        for path, batch in product(PATHS, options.batches):
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
    model: nn.Module = networks.D3ModNet() if path == RELU else networks.D3ModNetCL()
    model.eval()
    if path == FOLDED:
        model = fold(model, networks.IMAGE_SHAPE)
    run_module(model, torch.rand(1, *networks.IMAGE_SHAPE))
    before = settle()
    run = partial(run_module, model, torch.rand(batch, *networks.IMAGE_SHAPE))
    times = interleave({path: run}, executions, calls=1, pause=0.0, budget=_SECONDS)
    row = {"path": path, "batch": batch, "milliseconds": times[path]}
    return {**row, "peak_bytes": peak() - before}


def cells(rows: Sequence[Row]) -> Cells:
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
    with figures.styled(9.6, 4.2, columns=2) as (figure, (left, right)):
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
        figures.legend_below(figure, left)
    return figure
