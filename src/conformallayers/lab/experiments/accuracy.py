"""Experiments 1 and 2: train the cells of Tables I and II."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from rich.console import Console

from ...errors import ConformalError, refusal
from ...utils.files import write_json
from ...utils.text import table
from ..checks import require_choice, require_same
from ..training.config import DEFAULTS, TrainConfig, make_config
from ..training.evaluate import CHECKPOINT
from ..training.presets import resolved
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
    chosen = AccuracyOptions(seed=seeds, variant=variants, **options)
    rows: list[Row] = []
    failed: list[str] = []
    for one in seeds:
        for name in variants or [None]:
            for cell in select_cells(number, chosen.network, chosen.dataset, name):
                try:
                    rows.append(_row(cell, name, one, chosen, console))
                except Stopped as stop:
                    message = str(stop).partition(" To go on")[0]
                    text = f"{file_name(cell, name, one)}: {message} To go on, repeat the command."
                    raise Stopped(text) from stop
                except ConformalError as error:
                    failed.append(file_name(cell, name, one))
                    console.print(f"{failed[-1]}: {error}", highlight=False, markup=False)
    console.print(accuracy_table(rows), highlight=False, markup=False, soft_wrap=True)
    if failed:
        got = f"the errors above in {', '.join(failed)}"
        remedy = "Do what they say, then repeat the command: finished cells are kept."
        raise refusal(f"experiment {number}", "every cell trained", got, remedy)
    return rows


def select_cells(
    number: int,
    network: Sequence[str] = (),
    dataset: Sequence[str] = (),
    variant: str | None = None,
) -> list[Cell]:
    """Return the cells of an experiment that pass all filters; an empty filter passes all.

    Examples:
        >>> [cell.name for cell in select_cells(2, ["LeNetCL"], ["mnist", "cifar10"])]
        ['LeNetCL-mnist', 'LeNetCL-cifar10']
    """
    known = {
        "variant": paper.VARIANTS,
        "network": paper.NETWORKS[number],
        "dataset": paper.DATASETS,
    }
    given = {"variant": [variant] if variant else [], "network": network, "dataset": dataset}
    for option, names in given.items():
        for name in names:
            where = f"experiment {number} --{option}"
            require_choice(where, name, known[option], "Name one of them.")
    networks = (paper.VARIANTS[variant].networks if variant else None) or paper.NETWORKS[number]
    found = [
        cell
        for cell in paper.CELLS
        if cell.network in (network or paper.NETWORKS[number])
        and cell.network in networks
        and cell.dataset in (dataset or paper.DATASETS)
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
    named = [{**row, "setting": row["variant"] or "paper's"} for row in rows]
    lines = []
    for key, found in grouped(named, *header[:4]).items():
        shares, published = [row["accuracy"] for row in found], found[0]["paper_accuracy"]
        difference = f"{100 * (fmean(shares) - published):+.2f}"
        measured = [f"{100 * published:.2f} %", mean_and_spread(shares), difference]
        lines.append([*map(str, key), *measured])
    return table(header, lines)


def _row(
    cell: Cell, variant: str | None, seed: int, chosen: AccuracyOptions, console: Console
) -> Row:
    """Return the row of a cell: the one on disk, or else train it or continue its run."""
    name = file_name(cell, variant, seed)
    path, folder = chosen.out / f"{name}.json", chosen.runs / name
    if chosen.again:
        for file in (path, *(folder / one for one in (CHECKPOINT, CONFIG, METRICS, RESULT))):
            file.unlink(missing_ok=True)
    config = config_of(cell, variant, seed, threads=chosen.threads, device=chosen.device)
    if path.exists():
        remedy = "Train it --again, or name another --out."
        where = f"experiment {cell.experiment}"
        found = read_record(path, where, "network", "dataset", remedy=remedy)
        row = {**DEFAULTS, **found}  # older rows lack newer options
        require_same(f"{path},", row, config.model_dump(exclude={"threads", "device"}), remedy)
        return row
    console.print(f"{name}: {config.command({})}", highlight=False)
    result = train(
        out=folder,
        resume=True,
        data_root=chosen.data_root,
        verify=chosen.verify,
        console=console,
        **config.model_dump(),
    )
    row = {
        **result.row,
        "experiment": cell.experiment,
        "variant": variant,
        "paper_accuracy": cell.accuracy,
        # The command must give the same cell elsewhere, so it names no folders.
        "command": config.command({"no_check": not chosen.verify}),
    }
    chosen.out.mkdir(parents=True, exist_ok=True)
    write_json(path, row)
    return row
