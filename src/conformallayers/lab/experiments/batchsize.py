"""Experiment 4: time and memory of inference against batch size, for D3ModNet and D3ModNetCL."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import torch
from matplotlib.figure import Figure

from ... import networks
from ...errors import refusal
from ...folding.fold import fold
from ...folding.strategies import STRATEGIES
from ...utils.memory import available, parse_size
from ...utils.text import size
from ..report import figures
from .inference import FOLDED, LAYERS, RELU, measure_alone
from .records import Row, command_line, kept, provenance, write_record

NAME = "batches"
_MOST = 2**20  # images of a batch
_SHARE = 0.6  # of the memory that is left: the most a batch may be expected to need
_FINE = 64  # the bisection ends when its two ends differ by less than one in so many
_FIRST = 256  # where the search for the largest batch begins
_COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")


def run_batches(
    *,
    batches: Sequence[int] = (),
    memory: str | None = None,
    strategies: Sequence[str] = ("auto", "banded"),
    executions: int = 100,
    seconds: float = 20.0,
    seed: int = 0,
    threads: int | None = None,
    resume: bool = False,
    out: Path = Path("results/experiment4"),
    say: Callable[[str], object] = print,
    measure: Callable[..., Row] = measure_alone,
) -> Row:
    """Measure every path at every batch size, each in its own process; write after each.

    Args:
        batches: their sizes; none are the powers of two up to what memory holds.
        memory: a budget such as ``"4GiB"``: find the largest batch of each path within it.
        strategies: of the folds of D3ModNetCL; ``auto`` is settled once, before measuring.
        executions: timed calls.
        seconds: fewer calls when they take longer than this.
        seed: of weights and images.
        threads: of torch; None leaves them.
        resume: keep the rows that the file in ``out`` has.
        out: the folder.
        say: is told a line for each row.
        measure: gives the row of a path and a batch size.
    """
    budget = None if memory is None else parse_size(memory, "experiment 4 --memory")
    if any(batch < 1 for batch in batches) or executions < 1 or seconds <= 0:
        got = f"{list(batches)}, {executions} and {seconds:g}"
        remedy = "See conformallayers experiment 4 --help."
        raise refusal("experiment 4", "batches, executions and seconds > 0", got, remedy)
    options: Row = {"executions": executions, "seconds": seconds, "seed": seed, "threads": threads}
    record = kept(out / f"{NAME}.json", options, resume)
    shown = {"batches": tuple(batches), "memory": memory, "strategies": tuple(strategies)}
    shown |= options
    source = provenance(command_line(["experiment", "4"], shown), record)
    source["machine"]["threads"] = threads or source["machine"]["threads"]
    table = _Table(out, {**source, "options": options}, record, options, measure, say)
    try:
        for path in (RELU, LAYERS, *_folded(strategies, seed)):
            for batch in batches or powers(path, table):
                table.row(path, batch)
            if budget is not None:
                table.limit(path, budget)
            table.draw()
    except KeyboardInterrupt as stop:
        again = command_line(["experiment", "4"], {**shown, "out": out, "resume": True})
        table.draw()
        done = f"Interrupted: {len(table.rows)} rows kept."
        raise KeyboardInterrupt(f"{done} To go on: {again}") from stop
    return table.record


class _Table:
    """The rows so far; every new one is written at once."""

    def __init__(
        self,
        out: Path,
        source: Row,
        before: Row,
        options: Row,
        measure: Callable[..., Row],
        say: Callable[[str], object],
    ) -> None:
        self.out, self.source, self.options, self.measure, self.say = (
            out, source, options, measure, say,
        )  # fmt: skip
        rows = before.get("rows", [])
        self.rows: dict[tuple[str, int], Row] = {(row["path"], row["batch"]): row for row in rows}
        self.limits: list[Row] = before.get("limits", [])

    @property
    def record(self) -> Row:
        return {**self.source, "rows": list(self.rows.values()), "limits": self.limits}

    def row(self, path: str, batch: int) -> Row:
        """Return the row of a path and a batch size, measured now if it is not there yet."""
        if (path, batch) not in self.rows:
            self.rows[path, batch] = self.measure(path, batch, **self.options)
            self.say(_line(self.rows[path, batch]))
            self._write()
        return self.rows[path, batch]

    def limit(self, path: str, budget: int) -> None:
        """Find the largest batch of a path that needs no more memory than the budget."""
        if any(row["path"] == path and row["budget_bytes"] == budget for row in self.limits):
            return
        quick = {**self.options, "executions": 1}
        tried: dict[int, int | None] = {
            batch: row.get("peak_bytes") for (name, batch), row in self.rows.items() if name == path
        }

        def needed(batch: int) -> int | None:
            if batch not in tried:
                tried[batch] = self.measure(path, batch, **quick).get("peak_bytes")
            return tried[batch]

        largest = largest_within(budget, needed)
        found = {"path": path, "budget_bytes": budget, "largest_batch": largest}
        self.limits.append({**found, "peak_bytes": tried.get(largest)})
        self.say(f"{path}: at most {largest} images in {size(budget)}")
        self._write()

    def _write(self) -> None:
        write_record(self.out, NAME, self.record, list(self.rows.values()))

    def draw(self) -> None:
        """Write the figure."""
        good = [row for row in self.rows.values() if "failed" not in row]
        if good:
            figures.save(batch_figure(good, self.limits), self.out, "figure")


def powers(path: str, table: _Table) -> Iterator[int]:
    """Yield powers of two while the next is expected to fit into the memory that is left."""
    batch, before = 1, 0
    while batch <= _MOST:
        yield batch
        row = table.row(path, batch)
        room = available()
        if "failed" in row:
            return
        # Small batches grow by less than a page or an arena: the larger half tells.
        before = max(before, row["peak_bytes"])
        if room is not None and 2 * before > _SHARE * room:
            return
        batch *= 2


def largest_within(
    budget: int, needed: Callable[[int], int | None], first: int = _FIRST, most: int = _MOST
) -> int:
    """Return the largest batch within a budget, to one part in 64; 0 if not even one image is.

    Args:
        budget: bytes.
        needed: gives the bytes of a batch, or None if it could not be run.
        first: where to begin.
        most: where to stop.

    Examples:
        >>> largest_within(100_000, lambda batch: 100 * batch)
        1000
    """

    def fits(batch: int) -> bool:
        bytes_needed = needed(batch)
        return bytes_needed is not None and bytes_needed <= budget

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
    """Draw the time and the memory of a batch against its size, one line a path."""
    with matplotlib.rc_context(figures.STYLE):
        figure = Figure(figsize=(9.6, 4.2), layout="constrained")
        left, right = figure.subplots(1, 2)
        for index, path in enumerate(dict.fromkeys(row["path"] for row in rows)):
            style: Any = {"color": _COLOURS[index % len(_COLOURS)], "markersize": 4}
            style |= {"marker": "sovD^<"[index % 6], "label": path}
            chosen = sorted((r for r in rows if r["path"] == path), key=lambda row: row["batch"])
            sizes = [row["batch"] for row in chosen]
            left.plot(sizes, [row["milliseconds"]["median"] for row in chosen], **style)
            grown = [(r["batch"], r["peak_bytes"] / 2**20) for r in chosen if r["peak_bytes"] > 0]
            if grown:
                right.plot(*zip(*grown, strict=True), **style)
        for budget in sorted({row["budget_bytes"] for row in limits}):
            right.axhline(budget / 2**20, color="#777777", linestyle="--", linewidth=1)
        left.set(ylabel="milliseconds of a batch")
        right.set(ylabel="memory beyond the network, MiB")
        for axes in (left, right):
            axes.set(xlabel="images in a batch", xscale="log", yscale="log")
            figures.plain_ticks(axes.xaxis, axes.yaxis)
            axes.grid(alpha=0.3)
        figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return figure


def _folded(strategies: Sequence[str], seed: int) -> list[str]:
    """Return the folded paths; auto becomes the strategy that it takes on this machine."""
    names = []
    for strategy in strategies:
        known = ("auto", *STRATEGIES)
        if strategy not in known:
            expected = f"one of {', '.join(known)}"
            raise refusal("experiment 4 --strategies", expected, repr(strategy), "Try auto.")
        if strategy == "auto":
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                model = networks.D3ModNetCL().eval()
            strategy = fold(model, networks.IMAGE_SHAPE).strategy
        names.append(FOLDED + strategy)
    return list(dict.fromkeys(names))


def _line(row: Row) -> str:
    if "failed" in row:
        return f"{row['path']}, batch {row['batch']}: {row['failed']}"
    time, grown = row["milliseconds"]["median"], size(row["peak_bytes"])
    return f"{row['path']}, batch {row['batch']}: {time:.2f} ms, {grown}"
