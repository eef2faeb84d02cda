"""Experiments 1 and 2: train the cells of Tables I and II, one after the other."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console

from ...errors import ConformalError, refusal
from ...utils.files import write_json
from ...utils.text import table
from ..training.config import DEFAULTS, TrainConfig, make_config
from ..training.evaluate import CHECKPOINT
from ..training.recipes import resolved
from ..training.runs import CONFIG, METRICS, RESULT
from ..training.train import Stopped, train
from . import paper
from .paper import Cell
from .records import mean_and_spread

Row = dict[str, Any]
UNCHECKED = ", other data"  # behind the setting of rows whose data was not compared with the set's


def run_accuracy(
    number: int,
    *,
    cells: Sequence[str] = (),
    network: Sequence[str] = (),
    dataset: Sequence[str] = (),
    variant: str | Sequence[str] | None = None,
    seed: int | Sequence[int] = 0,
    threads: int | None = None,
    device: str = "cpu",
    again: bool = False,
    out: Path = Path("results/accuracy"),
    runs: Path = Path("runs"),
    data_root: Path | None = None,
    verify: bool = True,
    console: Console | None = None,
) -> list[Row]:
    """Train the cells of an experiment that are not finished, and return the rows of all chosen.

    A cell that was interrupted goes on from its last epoch. One that fails, for want of data or
    with a loss that is no number, is named at the end and does not stop the others.

    Args:
        number: 1 for Table I, 2 for Table II.
        cells, network, dataset: which cells; nothing named is all.
        variant: rows of :data:`conformallayers.lab.experiments.paper.VARIANTS`; None is the paper's.
        seed: one or several; the table then has mean and standard deviation.
        threads, device: of every run.
        again: throw finished cells and their runs away.
        out: the folder for one JSON file a cell.
        runs: the folder for the runs.
        data_root, verify: as in :func:`conformallayers.lab.data.datasets.load`.
        console: where to show progress; None takes the terminal.
    """
    console = console or Console()
    rows: list[Row] = []
    failed: list[str] = []
    names = [variant] if isinstance(variant, str) else variant
    variants: Sequence[str | None] = names or [None]
    jobs = [
        (cell, kind, one)
        for one in ([seed] if isinstance(seed, int) else seed)
        for kind in variants
        for cell in chosen(number, cells, network, dataset, kind)
    ]
    for cell, kind, one in jobs:
        config = config_of(cell, kind, one, threads=threads, device=device)
        name = file_name(cell, kind, one)
        path, folder = out / f"{name}.json", runs / name
        if again:
            _forget(path, folder)
        row = _finished(path, config, verify)
        if row is None:
            console.print(f"{name}: {_setting_text(config)}", highlight=False)
            try:
                row = _trained(cell, kind, config, folder, data_root, verify, console)
            except Stopped as stop:
                message = str(stop).partition(" To go on")[0]
                raise Stopped(f"{name}: {message} To go on, repeat the command.") from stop
            except ConformalError as error:
                console.print(f"{name}: {error}", highlight=False, markup=False)
                failed.append(name)
                continue
            out.mkdir(parents=True, exist_ok=True)
            write_json(path, row)
        rows.append(row)
    console.print(accuracy_table(rows), highlight=False, markup=False, soft_wrap=True)
    if failed:
        got = f"the errors above in {', '.join(failed)}"
        remedy = "Do what they say, then repeat the command: finished cells are kept."
        raise refusal(f"experiment {number}", "every cell trained", got, remedy)
    return rows


def chosen(
    number: int,
    cells: Sequence[str] = (),
    network: Sequence[str] = (),
    dataset: Sequence[str] = (),
    variant: str | None = None,
) -> list[Cell]:
    """Return the cells of an experiment that the filters leave; refuse names that it has not.

    Examples:
        >>> [cell.name for cell in chosen(2, network=["LeNetCL"], dataset=["mnist", "cifar10"])]
        ['LeNetCL-mnist', 'LeNetCL-cifar10']
    """
    every = [cell for cell in paper.CELLS if cell.experiment == number]
    _check_known(number, "--variant", [variant] if variant else [], list(paper.VARIANTS))
    _check_known(number, "--cells", cells, [cell.name for cell in every])
    _check_known(number, "--network", network, paper.NETWORKS[number])
    _check_known(number, "--dataset", dataset, paper.DATASETS)
    meant = paper.VARIANTS[variant].networks if variant else None
    found = [
        cell
        for cell in every
        if (not cells or cell.name in cells)
        and (not network or cell.network in network)
        and (not dataset or cell.dataset in dataset)
        and (meant is None or cell.network in meant)
    ]
    if not found:
        where, remedy = f"experiment {number}", "Name fewer of them."
        raise refusal(where, "at least one cell", "none that fits all options", remedy)
    return found


def config_of(cell: Cell, variant: str | None, seed: int, **options: Any) -> TrainConfig:
    """Return the options of the run of a cell."""
    setting = paper.VARIANTS[variant].setting(cell) if variant else cell.setting
    options = {**setting, **options, "seed": seed}
    return make_config(**resolved({"network": cell.network, "dataset": cell.dataset, **options}))


def file_name(cell: Cell, variant: str | None, seed: int) -> str:
    """Return the name of a cell's file and run: NETWORK-DATASET[-VARIANT][-seedN].

    Examples:
        >>> file_name(paper.CELLS[0], "better", 0), file_name(paper.CELLS[0], None, 3)
        ('BaseLinearNet-mnist-better', 'BaseLinearNet-mnist-seed3')
    """
    parts = [cell.name, *([variant] if variant else []), *([f"seed{seed}"] if seed else [])]
    return "-".join(parts)


def accuracy_table(rows: Sequence[Row]) -> str:
    """Return the rows beside the paper's figures; those that differ in their seed are one line."""
    header = ["network", "dataset", "setting", "epochs", "paper", "here", "difference"]
    lines: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        setting = (row["variant"] or "paper's") + ("" if row.get("checked", True) else UNCHECKED)
        key = (row["network"], row["dataset"], setting, str(row["epochs"]))
        lines.setdefault(key, []).append(row)
    return table(header, [[*key, *_figures(found)] for key, found in lines.items()])


def _figures(rows: Sequence[Row]) -> list[str]:
    shares, published = [row["accuracy"] for row in rows], rows[0]["paper_accuracy"]
    difference = f"{100 * (fmean(shares) - published):+.2f}"
    return [f"{100 * published:.2f} %", mean_and_spread(shares), difference]


def _trained(
    cell: Cell,
    variant: str | None,
    config: TrainConfig,
    folder: Path,
    data_root: Path | None,
    verify: bool,
    console: Console,
) -> Row:
    options = config.model_dump(exclude={"network", "dataset"})
    place: dict[str, Any] = {"data_root": data_root, "verify": verify, "console": console}
    result = train(cell.network, cell.dataset, out=folder, resume=True, **place, **options)
    return {
        **result.row,
        "experiment": cell.experiment,
        "variant": variant,
        "paper_accuracy": cell.accuracy,
        # Where data and run lie on this machine is not what makes the cell.
        "command": config.command({"no_check": not verify}),
        "checked": verify,
    }


def _finished(path: Path, config: TrainConfig, verify: bool) -> Row | None:
    """Return the row of a cell that is finished; refuse one of another setting."""
    if not path.exists():
        return None
    try:
        row: Row = {**DEFAULTS, "checked": True, **json.loads(path.read_text("utf-8"))}
        options = config.model_dump(exclude={"threads", "device"})
        for name, value in {**options, "checked": verify}.items():
            if row[name] != value:
                expected, remedy = f"{name} {value!r}", "Train it --again, or name another --out."
                raise refusal(str(path), expected, repr(row[name]), remedy)
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        remedy = "Train it --again, or name another --out."
        raise refusal(str(path), "the row of a cell", "another file", remedy) from error
    return row


def _forget(path: Path, folder: Path) -> None:
    for old in (path, *(folder / name for name in (CHECKPOINT, CONFIG, METRICS, RESULT))):
        old.unlink(missing_ok=True)


def _check_known(number: int, option: str, names: Sequence[str], known: Sequence[str]) -> None:
    for name in names:
        if name not in known:
            expected = f"one of {', '.join(known)}"
            where = f"experiment {number} {option}"
            raise refusal(
                where, expected, repr(name), f"See conformallayers experiment {number} --help."
            )


def _setting_text(config: TrainConfig) -> str:
    return (
        f"{config.epochs} epochs, batch size {config.batch_size}, {config.optimizer}, "
        f"learning rate {config.learning_rate:g}, {config.schedule}"
    )
