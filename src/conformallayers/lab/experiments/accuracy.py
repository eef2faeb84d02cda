"""Experiments 1 and 2: train the cells of Tables I and II."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from statistics import fmean
from typing import Any

from rich.console import Console

from ...errors import ConformalError, refusal
from ...utils.files import write_json
from ...utils.text import table
from ..checks import require_choice, require_same
from ..training.config import DEFAULTS, TrainConfig, make_config
from ..training.evaluate import CHECKPOINT
from ..training.recipes import resolved
from ..training.runs import CONFIG, METRICS, RESULT
from ..training.train import Stopped, train
from . import paper
from .options import AccuracyOptions
from .paper import Cell
from .records import Row, grouped, mean_and_spread, read_record


def run_accuracy(
    number: int,
    *,
    variant: str | Sequence[str] | None = None,
    seed: int | Sequence[int] = 0,
    console: Console | None = None,
    **options: Any,
) -> list[Row]:
    """Train the unfinished cells of an experiment, and return the rows of all selected cells.

    An interrupted cell continues after its last epoch. A cell that fails, because data is missing
    or the loss is not finite, is named at the end and does not stop the others.

    Args:
        number: 1 for Table I, 2 for Table II.
        variant: keys of ``conformallayers.lab.experiments.paper.VARIANTS``; None is the paper's.
        seed: one or several; the table shows mean and standard deviation over several.
        console: shows progress; None is the terminal.
        **options: further fields of
            :class:`conformallayers.lab.experiments.options.AccuracyOptions`.
    """
    console = console or Console()
    seeds = (seed,) if isinstance(seed, int) else tuple(seed)
    variants = (variant,) if isinstance(variant, str) else tuple(variant or ())
    selected = AccuracyOptions(seed=seeds, variant=variants, **options)
    filters = (selected.cells, selected.network, selected.dataset)
    jobs = [
        _Job(cell, name, one, selected)
        for one in seeds
        for name in variants or [None]
        for cell in select_cells(number, *filters, name)
    ]
    rows: list[Row] = []
    failed: list[str] = []
    for job in jobs:
        if selected.again:
            job.delete()
        row = job.finished()
        if row is None:
            try:
                row = job.train(console)
            except Stopped as stop:
                message = str(stop).partition(" To go on")[0]
                raise Stopped(f"{job.name}: {message} To go on, repeat the command.") from stop
            except ConformalError as error:
                console.print(f"{job.name}: {error}", highlight=False, markup=False)
                failed.append(job.name)
                continue
        rows.append(row)
    console.print(accuracy_table(rows), highlight=False, markup=False, soft_wrap=True)
    if failed:
        got = f"the errors above in {', '.join(failed)}"
        remedy = "Do what they say, then repeat the command: finished cells are kept."
        raise refusal(f"experiment {number}", "every cell trained", got, remedy)
    return rows


def select_cells(
    number: int,
    cells: Sequence[str] = (),
    network: Sequence[str] = (),
    dataset: Sequence[str] = (),
    variant: str | None = None,
) -> list[Cell]:
    """Return the cells of an experiment that pass all filters; an empty filter passes all.

    Examples:
        >>> [cell.name for cell in select_cells(2, network=["LeNetCL"], dataset=["mnist", "cifar10"])]
        ['LeNetCL-mnist', 'LeNetCL-cifar10']
    """
    every = [cell for cell in paper.CELLS if cell.experiment == number]
    filters = {
        "variant": ([variant] if variant else [], paper.VARIANTS),
        "cells": (cells, [cell.name for cell in every]),
        "network": (network, paper.NETWORKS[number]),
        "dataset": (dataset, paper.DATASETS),
    }
    for option, (names, known) in filters.items():
        for name in names:
            require_choice(f"experiment {number} --{option}", name, known, "Name one of them.")
    networks = paper.VARIANTS[variant].networks if variant else None
    found = [
        cell
        for cell in every
        if (not cells or cell.name in cells)
        and (not network or cell.network in network)
        and (not dataset or cell.dataset in dataset)
        and (networks is None or cell.network in networks)
    ]
    if not found:
        where, remedy = f"experiment {number}", "Name fewer of them."
        raise refusal(where, "at least one cell", "none that fits all options", remedy)
    return found


def config_of(cell: Cell, variant: str | None, seed: int, **options: Any) -> TrainConfig:
    """Return the configuration of the run of a cell."""
    setting = paper.VARIANTS[variant].setting(cell) if variant else cell.setting
    options = {**setting, **options, "seed": seed}
    return make_config(**resolved({"network": cell.network, "dataset": cell.dataset, **options}))


def file_name(cell: Cell, variant: str | None, seed: int) -> str:
    """Return the name of a cell's file and run folder: NETWORK-DATASET[-VARIANT][-seedN].

    Examples:
        >>> file_name(paper.CELLS[0], "better", 0), file_name(paper.CELLS[0], None, 3)
        ('BaseLinearNet-mnist-better', 'BaseLinearNet-mnist-seed3')
    """
    parts = [cell.name, *([variant] if variant else []), *([f"seed{seed}"] if seed else [])]
    return "-".join(parts)


def accuracy_table(rows: Sequence[Row]) -> str:
    """Return a table of the paper's and the measured accuracies, one line for all seeds of a cell."""
    header = ["network", "dataset", "setting", "epochs", "paper", "here", "difference"]
    named = [{"checked": True, **row, "setting": row["variant"] or "paper's"} for row in rows]
    cells = []
    for key, found in grouped(named, *header[:4], "checked").items():
        network, dataset, setting, epochs, checked = key
        shares, published = [row["accuracy"] for row in found], found[0]["paper_accuracy"]
        line = [network, dataset, setting if checked else f"{setting}, other data", str(epochs)]
        difference = f"{100 * (fmean(shares) - published):+.2f}"
        cells.append([*line, f"{100 * published:.2f} %", mean_and_spread(shares), difference])
    return table(header, cells)


class _Job:
    """The training of one cell with one seed."""

    def __init__(
        self, cell: Cell, variant: str | None, seed: int, options: AccuracyOptions
    ) -> None:
        self.cell, self.variant, self.seed, self.options = cell, variant, seed, options
        self.name = file_name(cell, variant, seed)
        self.path, self.folder = options.out / f"{self.name}.json", options.runs / self.name

    @cached_property
    def config(self) -> TrainConfig:
        runtime = {"threads": self.options.threads, "device": self.options.device}
        return config_of(self.cell, self.variant, self.seed, **runtime)

    def delete(self) -> None:
        files = (self.folder / name for name in (CHECKPOINT, CONFIG, METRICS, RESULT))
        for file in (self.path, *files):
            file.unlink(missing_ok=True)

    def finished(self) -> Row | None:
        """Return the row on disk, None if there is none; refuse a row with another setting."""
        if not self.path.exists():
            return None
        remedy = "Train it --again, or name another --out."
        options = self.config.model_dump(exclude={"threads", "device"})
        options["checked"] = self.options.verify
        where = f"experiment {self.cell.experiment}"
        found = read_record(self.path, where, "network", "dataset", remedy=remedy)
        row = {**DEFAULTS, "checked": True, **found}  # older rows lack newer options
        require_same(f"{self.path},", row, options, remedy)
        return row

    def train(self, console: Console) -> Row:
        """Train the cell, or continue its run, and write its row."""
        cell, config, verify = self.cell, self.config, self.options.verify
        setting = (
            f"{config.epochs} epochs, batch size {config.batch_size}, {config.optimizer}, "
            f"learning rate {config.learning_rate:g}, {config.schedule}"
        )
        console.print(f"{self.name}: {setting}", highlight=False)
        result = train(
            cell.network,
            cell.dataset,
            out=self.folder,
            resume=True,
            data_root=self.options.data_root,
            verify=verify,
            console=console,
            **config.model_dump(exclude={"network", "dataset"}),
        )
        row = {
            **result.row,
            "experiment": cell.experiment,
            "variant": self.variant,
            "paper_accuracy": cell.accuracy,
            # The command must give the same cell elsewhere, so it names no folders.
            "command": config.command({"no_check": not verify}),
            "checked": verify,
        }
        self.options.out.mkdir(parents=True, exist_ok=True)
        write_json(self.path, row)
        return row
