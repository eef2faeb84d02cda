"""Write a training run as one HTML page: result, curves, confusion matrix, mistakes and options."""

from __future__ import annotations

import csv
from pathlib import Path

from ...errors import refusal
from ..experiments.records import read_record
from ..training.outcome import CONFUSION, MISTAKES, TRAINING
from ..training.runs import CONFIG, METRICS, RESULT
from .page import Block, picture, source, table, text, write_page

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
    result = read_record(run / RESULT, "report", "network", "dataset", "command", "samples")
    config = read_record(run / CONFIG, "report", "network", "dataset")
    options = {key: value for key, value in config.items() if value not in (None, [], False)}
    network, dataset = str(config["network"]), str(config["dataset"])
    samples, strategy = result["samples"], result.get("strategy")
    folded = f"; folded by {strategy}" if strategy else ""
    accuracies = [
        (name, f"{100 * result[key]:.2f} %")
        for name, key in _ACCURACIES.items()
        if result.get(key) is not None
    ]
    sections = {
        "Accuracy": [
            text(f"{samples['train']} training images, {samples['test']} test images{folded}."),
            table(["images", "accuracy"], accuracies),
            source(result),
        ],
        "Figures": [picture(run, name, caption) for name, caption in _CAPTIONS.items()],
        "Tables": [
            *_csv_table(run / f"{CONFUSION}.csv", "Confusion matrix"),
            *_csv_table(run / METRICS, "Epochs"),
            table(["option", "value"], options.items(), "Options"),
        ],
    }
    heading = f"{network.rpartition(':')[2]}, {Path(dataset).name}"
    return write_page(out or run / "report.html", heading, sections)


def _csv_table(path: Path, summary: str) -> list[Block]:
    """Return the table of a CSV file; none if there is no such file."""
    if not path.is_file():
        return []
    with path.open(newline="", encoding="utf-8") as stream:
        header, *rows = csv.reader(stream)
    return [table(header, rows, summary)]
