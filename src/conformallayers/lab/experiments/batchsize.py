"""Experiment 4: time and memory of inference against batch size, for D3ModNet and D3ModNetCL.

``python -m conformallayers.lab.experiments.batchsize`` reads options as JSON, measures one path at one batch size
in this process, and prints the row.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import nn

from ... import networks
from ...folding.fold import fold
from ...utils.text import size
from ..checks import require_positive
from ..measure import interleave, parse_size, peak, settle
from ..options import BatchOptions
from ..report import figures
from .engines import run_module
from .records import Cells, Records, Row, grouped

RELU, LAYERS, FOLDED = PATHS = "D3ModNet", "D3ModNetCL, layer by layer", "D3ModNetCL, folded"
_MOST = 2**20  # images per batch
_FINE = 64  # the bisection stops at a relative resolution of 1/64
_FIRST = 256  # batch size at which the search for the largest batch starts
_SECONDS = 20.0  # time limit of a row


def measure_alone(path: str, batch: int, **options: Any) -> Row:
    """Return the row of :func:`measure_here` from a new process; ``failed`` has the reason of a failure."""
    wanted = json.dumps({"path": path, "batch": batch, **options})
    command = [sys.executable, "-m", "conformallayers.lab.experiments.batchsize", wanted]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        row: Row = json.loads(done.stdout.splitlines()[-1])
        return row
    lines = done.stderr.strip().splitlines()
    reason = lines[-1] if lines else f"the process ended with {done.returncode}"
    return {"path": path, "batch": batch, "failed": reason[:200]}


def measure_here(path: str, batch: int, *, executions: int, threads: int | None = None) -> Row:
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
    row = {"path": path, "batch": batch, "milliseconds": times[path].milliseconds}
    return {**row, "peak_bytes": peak() - before}


def run_batches(
    *,
    say: Callable[[str], object] = print,
    measure: Callable[..., Row] = measure_alone,
    **options: Any,
) -> Row:
    """Measure every path at every batch size, each in its own process; write after each.

    Args:
        say: receives one line per row.
        measure: returns the row of a path and a batch size.
        **options: fields of :class:`conformallayers.lab.options.BatchOptions`.
    """
    chosen = BatchOptions(**options)
    budget = None if chosen.memory is None else parse_size(chosen.memory, "experiment 4 --memory")
    require_positive("experiment 4", chosen, "batches", "executions")
    how: Any = {"settings": ("executions", "threads"), "say": say}
    limits = Records(
        "experiment 4", chosen, "limits", ("path", "budget_bytes"), cells=limit_cells, **how
    )

    def figure(rows: list[Row]) -> Figure:
        return batch_figure(rows, list(limits.rows.values()))

    rows = Records(
        *("experiment 4", chosen, "batches", ("path", "batch")),
        cells=cells,
        figure=figure,
        figure_name="figure",
        **how,
    )
    with rows, limits:
        for path in PATHS:
            alone = partial(measure, path, threads=chosen.threads)
            for batch in chosen.batches:
                rows.row((path, batch), partial(alone, batch, executions=chosen.executions))
            if budget is not None:
                measured = {
                    b: row.get("peak_bytes") for (p, b), row in rows.rows.items() if p == path
                }
                limits.row((path, budget), partial(_limit, path, budget, measured, alone))
    return rows.record


def _limit(
    path: str, budget: int, tried: dict[int, int | None], measure: Callable[..., Row]
) -> Row:
    """Return the largest batch of a path that fits into a memory budget."""

    def needed(batch: int) -> int | None:
        if batch not in tried:
            tried[batch] = measure(batch, executions=1).get("peak_bytes")
        return tried[batch]

    largest = largest_within(budget, needed)
    found = {"path": path, "budget_bytes": budget, "largest_batch": largest}
    return {**found, "peak_bytes": tried.get(largest)}


def largest_within(
    budget: int, needed: Callable[[int], int | None], first: int = _FIRST, most: int = _MOST
) -> int:
    """Return the largest batch whose bytes fit a budget, to one part in 64; 0 if one image exceeds it.

    Examples:
        >>> largest_within(100_000, lambda batch: 100 * batch)
        1000
    """

    def fits(batch: int) -> bool:
        bytes_needed = needed(batch)
        return bytes_needed is not None and bytes_needed <= budget

    # Double until a batch does not fit, then bisect between the last two.
    low, high = 0, min(first, most)
    while fits(high):
        low = high
        if high == most:
            return most
        high = min(2 * high, most)
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


def batch_figure(rows: Sequence[Row], limits: Sequence[Row] = ()) -> Figure:
    """Plot time and memory against batch size, one line per path."""
    with figures.styled(9.6, 4.2, columns=2) as (figure, (left, right)):
        for index, (path, found) in enumerate(grouped(rows, "path").items()):
            style = figures.line_style(index, path)
            chosen = sorted(found, key=lambda row: int(row["batch"]))
            times = [row["milliseconds"]["median"] for row in chosen]
            left.plot([row["batch"] for row in chosen], times, **style)
            grown = [(r["batch"], r["peak_bytes"] / 2**20) for r in chosen if r["peak_bytes"] > 0]
            if grown:
                right.plot(*zip(*grown, strict=True), **style)
        for budget in sorted({row["budget_bytes"] for row in limits}):
            right.axhline(budget / 2**20, color="#777777", linestyle="--", linewidth=1)
            place = {"transform": right.get_yaxis_transform(), "va": "bottom", "color": "#555555"}
            right.text(0.01, budget / 2**20, size(budget), **place)
        left.set(ylabel="milliseconds per batch")
        right.set(ylabel="memory beyond the network, MiB")
        for axes in (left, right):
            axes.set(xlabel="images per batch", xscale="log", yscale="log")
            figures.plain_ticks(axes.xaxis, axes.yaxis)
            axes.grid(alpha=0.3)
        figures.legend_below(figure, left)
    return figure


if __name__ == "__main__":
    print(json.dumps(measure_here(**json.loads(sys.argv[1]))))
