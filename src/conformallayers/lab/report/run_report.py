"""Write a training run as one HTML page: result, curves, confusion matrix, mistakes and options."""

from __future__ import annotations

import csv
from pathlib import Path

from ... import __version__
from ...errors import refusal
from ..training.outcome import CONFUSION, MISTAKES, TRAINING
from ..training.runs import CONFIG, METRICS, RESULT
from .report import read, write_page
from .sections import Context, embedded_picture, percent, short_commit

_ACCURACIES = {
    "test, folded": "accuracy_folded",
    "test, layer by layer": "accuracy_layers",
    "validation, last epoch": "accuracy_validation",
    "training, last epoch": "accuracy_train",
}
_CAPTIONS = {
    TRAINING: "Loss, accuracy and learning rate by epoch.",
    CONFUSION: "Test images by true and predicted class.",
    MISTAKES: "Test images of the surest mistakes: true class, predicted class and its probability.",
}


def write_run_report(run: Path, out: Path | None = None) -> Path:
    """Write the page of a run and return its path.

    Args:
        run: the folder of a finished run.
        out: the file; None means ``report.html`` in that folder.
    """
    if not (run / RESULT).is_file():
        got, remedy = f"{run}, no folder", "Check the path: --out of conformallayers train."
        if run.is_dir():
            got = f"{run} without {RESULT}"
            remedy = "Finish the run: conformallayers train with --resume."
        raise refusal("report RUN", "the folder of a finished run", got, remedy)
    return write_page(out or run / "report.html", "run.html.jinja", _context(run))


def _context(run: Path) -> Context:
    result = read(run / RESULT, "network", "dataset", "command", "samples")
    config = read(run / CONFIG, "network", "dataset")
    options = {key: value for key, value in config.items() if value not in (None, [], False)}
    network, dataset = str(config["network"]), str(config["dataset"])
    figures = {caption: embedded_picture(run, name) for name, caption in _CAPTIONS.items()}
    return {
        "title": f"{network.rpartition(':')[2]}, {Path(dataset).name}",
        "version": __version__,
        "commit": short_commit(result.get("commit")),
        "command": result["command"],
        "samples": result["samples"],
        "strategy": result.get("strategy"),
        "accuracies": [
            [name, percent(result[key])]
            for name, key in _ACCURACIES.items()
            if result.get(key) is not None
        ],
        "figures": {caption: picture for caption, picture in figures.items() if picture},
        "epochs": _table(run / METRICS),
        "confusion": _table(run / f"{CONFUSION}.csv"),
        "options": [[key, str(value)] for key, value in options.items() if key != "commit"],
    }


def _table(path: Path) -> list[list[str]]:
    """Return the rows of a CSV file, the header first; none if there is no such file."""
    if not path.is_file():
        return []
    with path.open(newline="", encoding="utf-8") as stream:
        return [list(row) for row in csv.reader(stream)]
