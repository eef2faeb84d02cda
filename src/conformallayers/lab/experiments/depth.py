"""Experiment 3: the time of inference against depth, for DkNet and for DkNetCL in both paths."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import matplotlib
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor, nn

from ... import networks
from ...errors import refusal
from ...folding.fold import fold
from ...nn.container import layer_by_layer
from ...testing import fold_error
from ..report import figures
from .records import Row, command_line, kept, provenance, write_record
from .timing import Timing, interleave

DEPTHS = tuple(range(1, 31))
RELU, LAYERS, FOLDED = "DkNet", "DkNetCL, layer by layer", "DkNetCL, folded"
NAME = "times"
_CALLS = 5  # of every turn


def run_depth(
    *,
    depths: Sequence[int] = (),
    batch: int = 64,
    executions: int = 100,
    seed: int = 0,
    threads: int | None = None,
    strategy: str = "auto",
    resume: bool = False,
    out: Path = Path("results/experiment3"),
    say: Callable[[str], object] = print,
) -> Row:
    """Time the three paths at each depth; write times.json, times.csv and the figure after each.

    Args:
        depths: numbers of convolutions; none are 1 to 30.
        batch: images of a batch, with uniform random pixels.
        executions: timed calls of each path at each depth, at least; the paths take turns.
        seed: of weights, which are uniform as torch makes them, and images.
        threads: of torch; None leaves them.
        strategy: of the fold.
        resume: keep the depths that the file in ``out`` has.
        out: the folder.
        say: is told a line for each depth.
    """
    depths = tuple(depths) or DEPTHS
    _check(depths, batch, executions)
    options: Row = {"batch": batch, "executions": executions, "seed": seed, "strategy": strategy}
    options["threads"] = threads
    record = kept(out / f"{NAME}.json", options, resume)
    rows = {row["depth"]: row for row in record.get("rows", [])}
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        shown = {**options, "depths": depths if depths != DEPTHS else ()}
        source = provenance(command_line(["experiment", "3"], shown), record)
        for depth in depths:
            if depth not in rows:
                rows[depth] = measured(depth, batch, executions, seed, strategy)
                say(_line(rows[depth]))
            ordered = [rows[key] for key in sorted(rows)]
            record = {**source, "options": options, "rows": ordered}
            write_record(out, NAME, record, ordered)
            figures.save(depth_figure(ordered, batch), out, "figure")
    except KeyboardInterrupt as stop:
        again = command_line(["experiment", "3"], {**shown, "out": out, "resume": True})
        raise KeyboardInterrupt(
            f"Interrupted: {len(rows)} depths kept. To go on: {again}"
        ) from stop
    finally:
        torch.set_num_threads(before)
    return record


def measured(depth: int, batch: int, executions: int, seed: int, strategy: str) -> Row:
    """Return the row of one depth: milliseconds of a batch (median and quartiles) by path."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        relu, conformal = networks.DkNet(depth).eval(), networks.DkNetCL(depth).eval()
        x = torch.rand(batch, *networks.IMAGE_SHAPE)
    started = time.perf_counter()
    folded = fold(conformal, networks.IMAGE_SHAPE, strategy=strategy)
    seconds = time.perf_counter() - started

    engines = {RELU: partial(_run, relu, x), LAYERS: partial(_run, conformal, x)}
    engines[FOLDED] = partial(_run, folded, x)
    times = interleave(engines, rounds=math.ceil(executions / _CALLS), calls=_CALLS)
    return {
        "depth": depth,
        "strategy": folded.strategy,
        "fold_seconds": round(seconds, 3),
        "fold_error": fold_error(conformal, folded, x[:8]),
        "milliseconds": {name: milliseconds(timing) for name, timing in times.items()},
    }


def milliseconds(timing: Timing) -> dict[str, float]:
    """Return a timing as it is written."""
    return {key: round(1e3 * getattr(timing, key), 4) for key in ("median", "low", "high")}


def depth_figure(rows: Sequence[Row], batch: int) -> Figure:
    """Draw the time of a batch against depth, with its quartiles, one line a path."""
    styles = {RELU: (figures.ORANGE, "s"), LAYERS: (figures.BLUE, "v"), FOLDED: ("#009E73", "o")}
    with matplotlib.rc_context(figures.STYLE):
        figure = Figure(figsize=(6.8, 4.4), layout="constrained")
        axes = figure.subplots()
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
        axes.legend()
    return figure


def _run(model: nn.Module, x: Tensor) -> object:
    with torch.inference_mode(), layer_by_layer():
        return model(x)


def _line(row: Row) -> str:
    times = ", ".join(f"{key} {v['median']:.2f} ms" for key, v in row["milliseconds"].items())
    return f"k = {row['depth']}: {times} ({row['strategy']})"


def _check(depths: Sequence[int], batch: int, executions: int) -> None:
    for name, values in (("depths", depths), ("batch", [batch]), ("executions", [executions])):
        if any(value < 1 for value in values):
            where, got = f"experiment 3 --{name}", ", ".join(map(str, values))
            raise refusal(
                where, "whole numbers > 0", got, "See conformallayers experiment 3 --help."
            )
