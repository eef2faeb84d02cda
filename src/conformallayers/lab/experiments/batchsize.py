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
from ...container import layer_by_layer
from ...folding.fold import fold
from ...utils.memory import parse_size, peak, settle
from ...utils.text import size
from ...utils.timing import Timing, call_seconds
from ..checks import require_positive
from ..report import figures
from .options import BatchOptions
from .records import Measurements, Row

RELU, LAYERS, FOLDED = PATHS = "D3ModNet", "D3ModNetCL, layer by layer", "D3ModNetCL, folded"
NAME = "batches"
_MOST = 2**20  # images per batch
_FINE = 64  # the bisection stops at a relative resolution of 1/64
_FIRST = 256  # batch size at which the search for the largest batch starts


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


def measure_here(
    path: str,
    batch: int,
    *,
    executions: int,
    seconds: float,
    seed: int = 0,
    threads: int | None = None,
) -> Row:
    """Return time and memory of a path in this process.

    The memory is the peak growth of the process after imports, network, fold and one warm-up
    image: the batch, the activations between the layers, and the scores.

    Args:
        path: one of PATHS.
        batch: number of images.
        executions: timed calls.
        seconds: time limit; slow paths are called less often, but at least once.
        seed: of weights and images.
        threads: of torch; None keeps the current number.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    torch.manual_seed(seed)
    model = _network(path)
    with torch.inference_mode(), layer_by_layer():
        model(torch.rand(1, *networks.IMAGE_SHAPE))
        before = settle()
        x = torch.rand(batch, *networks.IMAGE_SHAPE)
        model(x)
        times: list[float] = []
        while len(times) < executions and (not times or sum(times) < seconds):
            times.append(call_seconds(lambda: model(x)))
        grown = peak() - before
    return {
        "path": path,
        "batch": batch,
        "milliseconds": Timing.of(times).milliseconds,
        "executions": len(times),
        "peak_bytes": grown,
    }


def _network(path: str) -> nn.Module:
    if path == RELU:
        return networks.D3ModNet().eval()
    model = networks.D3ModNetCL().eval()
    return model if path == LAYERS else fold(model, networks.IMAGE_SHAPE)


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
        **options: fields of :class:`conformallayers.lab.experiments.options.BatchOptions`.
    """
    chosen = BatchOptions(**options)
    budget = None if chosen.memory is None else parse_size(chosen.memory, "experiment 4 --memory")
    require_positive("experiment 4", chosen, "batches", "executions", "seconds")
    measurements = Measurements(
        "experiment 4",
        chosen,
        settings=("executions", "seconds", "seed", "threads"),
        name=NAME,
        key=("path", "batch"),
        say=say,
    )

    def draw(rows: list[Row]) -> None:
        figures.save(batch_figure(rows, measurements.limits), chosen.out, "figure")

    with measurements.drawing(draw):
        for path in PATHS:
            for batch in chosen.batches:
                alone = partial(measure, path, batch, **measurements.settings)
                measurements.row((path, batch), alone)
            if budget is not None:
                _find_limit(
                    path, budget, measurements, partial(measure, path, **measurements.settings)
                )
    return measurements.record


def _find_limit(
    path: str, budget: int, measurements: Measurements, measure: Callable[..., Row]
) -> None:
    """Record the largest batch of a path that fits into a memory budget."""
    limits = measurements.limits
    if any(row["path"] == path and row["budget_bytes"] == budget for row in limits):
        return
    tried: dict[int, int | None] = {
        batch: row.get("peak_bytes")
        for (name, batch), row in measurements.rows.items()
        if name == path
    }

    def needed(batch: int) -> int | None:
        if batch not in tried:
            tried[batch] = measure(batch, executions=1).get("peak_bytes")
        return tried[batch]

    largest = largest_within(budget, needed)
    found = {"path": path, "budget_bytes": budget, "largest_batch": largest}
    limits.append({**found, "peak_bytes": tried.get(largest)})
    measurements.say(f"{path}: at most {largest} images in {size(budget)}")
    measurements.write()


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


def batch_figure(rows: Sequence[Row], limits: Sequence[Row] = ()) -> Figure:
    """Plot time and memory against batch size, one line per path."""
    with figures.styled(9.6, 4.2, columns=2) as (figure, (left, right)):
        for index, path in enumerate(dict.fromkeys(row["path"] for row in rows)):
            style: Any = {"color": figures.COLOURS[index % len(figures.COLOURS)], "markersize": 4}
            style |= {"marker": "sovD^<"[index % 6], "label": path}
            chosen = sorted((r for r in rows if r["path"] == path), key=lambda row: row["batch"])
            sizes = [row["batch"] for row in chosen]
            left.plot(sizes, [row["milliseconds"]["median"] for row in chosen], **style)
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
