"""Experiments 1 and 2: train the cells of Tables I and II."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import fmean

from rich.console import Console

from ..checks import require_choice
from ..options import AccuracyOptions
from ..training.config import make_config, resolved
from ..training.train import train
from . import paper
from .paper import Cell
from .records import Cells, Records, Row, grouped, mean_and_spread

_KEPT = ("network", "dataset", "seed", "accuracy", *paper.SETTING, "seconds", "command", "commit")


def run_accuracy(
    number: int, options: AccuracyOptions, console: Console | None = None
) -> list[Row]:
    """Train the missing cells of Table I or II, and return the rows of all selected cells.

    An interrupted cell continues after its last epoch. A cell that fails, because data is missing
    or the loss is not finite, is named at the end and does not stop the others.
    """
    command, key = f"experiment {number}", ("network", "dataset", "variant", "seed")
    for name in options.variant:
        require_choice(f"{command} --variant", name, paper.VARIANTS, "Name one of them.")
    found = {
        (cell.network, cell.dataset, variant, seed): cell
        for seed in options.seed
        for variant in options.variant or [None]
        for cell in paper.CELLS
        if cell.network in paper.NETWORKS[number]
        and cell.dataset in (options.dataset or paper.DATASETS)
        and (cell.network, variant) != ("BaseLinearNet", "modern")  # it has no training preset
    }
    with Records(command, options, "accuracy", key, cells) as records:
        for names, cell in found.items():
            _, _, variant, seed = names
            records.row(*names, measure=partial(_train, cell, variant, seed, options, console))
    return [records.rows[names] for names in found]


def _train(
    cell: Cell, variant: str | None, seed: int, chosen: AccuracyOptions, console: Console | None
) -> Row:
    """Train a cell, or continue its run, and return its row."""
    other = paper.VARIANTS[variant] if variant else {}
    setting = {**({} if "training_preset" in other else cell.setting), **other}
    names = {"network": cell.network, "dataset": cell.dataset, "seed": seed}
    config = make_config(**resolved({**names, **setting, "threads": chosen.threads}))
    parts = [cell.network, cell.dataset, *([variant] if variant else []), f"seed{seed}"]
    result = train(
        out=Path("runs") / "-".join(parts),
        resume=True,
        data_root=chosen.data_root,
        verify=chosen.verify,
        console=console,
        **config.model_dump(),
    )
    # The command must give the same cell elsewhere, so it names no folders.
    row = {**result.row, "command": config.command({"no_check": not chosen.verify})}
    return {**{name: row[name] for name in _KEPT}, "variant": variant}


def cells(rows: Sequence[Row]) -> Cells:
    """Return a table of the paper's and the measured accuracies, one line for all seeds of a cell."""
    published = {(cell.network, cell.dataset): cell.accuracy for cell in paper.CELLS}
    header = ["network", "dataset", "setting", "epochs", "seeds", "paper", "here", "difference"]
    lines = []
    for key, found in grouped(rows, "network", "dataset", "variant", "epochs").items():
        network, dataset, variant, epochs = key
        shares, ours = [row["accuracy"] for row in found], published[network, dataset]
        line = [network, dataset, variant or "paper's", str(epochs), str(len(found))]
        difference = f"{100 * (fmean(shares) - ours):+.2f}"
        lines.append([*line, f"{100 * ours:.2f} %", mean_and_spread(shares), difference])
    return header, lines
