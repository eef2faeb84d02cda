"""Experiment 4: time and memory of inference against batch size, for D3ModNet and D3ModNetCL."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import nn

from ... import networks
from ...errors import first_line, refusal
from ...folding.fold import fold
from ...utils.text import size
from ..measure import interleave, peak, settle
from ..options import BatchOptions
from ..report import figures
from .bench import run_module
from .records import Cells, Records, Row, grouped

RELU, LAYERS, FOLDED = PATHS = "D3ModNet", "D3ModNetCL, layer by layer", "D3ModNetCL, folded"
_EXECUTIONS = 100
_SECONDS = 20.0  # time limit of a row
_FINE = 64  # the search for the largest batch stops at a relative resolution of 1/64


def run_batchsize(options: BatchOptions) -> Row:
    """Measure every path at every batch size, each in a process of its own; return the record."""
    budget = None if options.memory is None else _bytes(options.memory)
    how: Any = {"settings": ("threads",)}
    name = "experiment 4"
    rows = Records(name, options, "batches", ("path", "batch"), cells, batch_figure, **how)
    limits = Records(name, options, "limits", ("path", "budget_bytes"), limit_cells, **how)
    with rows, limits:
        for path in PATHS:
            alone = partial(measure_alone, path, threads=options.threads)
            for batch in options.batches:
                rows.row(path, batch, measure=partial(alone, batch))
            if budget is not None:
                limits.row(path, budget, measure=partial(_limit, path, budget, alone))
    return rows.record


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


def _bytes(text: str) -> int:
    """Return the bytes of a size such as ``4GiB``."""
    try:
        return int(float(text.removesuffix("GiB")) * 2**30)
    except ValueError as error:
        where, remedy = "experiment 4 --memory", "Give a number of GiB."
        raise refusal(where, "a size such as 4GiB", repr(text), remedy) from error


def _limit(path: str, budget: int, measure: Callable[..., Row]) -> Row:
    largest = largest_within(budget, lambda batch: measure(batch, 1).get("peak_bytes"))
    return {"path": path, "budget_bytes": budget, "largest_batch": largest}


def largest_within(budget: int, needed: Callable[[int], int | None]) -> int:
    """Return the largest batch whose bytes fit a budget, to one part in 64; 0 if one image exceeds it."""

    def fits(batch: int) -> bool:
        bytes_needed = needed(batch)
        return bytes_needed is not None and bytes_needed <= budget

    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
    while high - low > max(1, low // _FINE):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def cells(rows: Sequence[Row]) -> Cells:
    """Return a table of time and memory by path and batch size."""
    return ["path", "batch", "ms a batch", "memory"], [
        [
            *(row["path"], str(row["batch"]), f"{row['milliseconds']['median']:.2f}"),
            size(max(0, row["peak_bytes"])),
        ]
        for row in rows
        if "failed" not in row
    ]


def limit_cells(rows: Sequence[Row]) -> Cells:
    """Return a table of the largest batches within a memory budget."""
    return ["path", "largest batch", "budget"], [
        [row["path"], str(row["largest_batch"]), size(row["budget_bytes"])] for row in rows
    ]


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
