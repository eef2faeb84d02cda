"""Add finished training runs to the networks that ship with the package."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from ..errors import refusal
from ..folding.folded import Folded
from ..folding.save import save
from ..zoo.catalogue import ENDING, FOLDER, Record, read_record
from .data.datasets import load
from .experiments.bench import multiply_adds, weights
from .options import DataOptions
from .training import run_folder
from .training.evaluate import DATA, accuracy
from .training.saved_models import load_model

_ONLY_CLASSES = "Every image gets one of these classes, even if it shows something else."
# The images that networks of a data set are for.
LIMITS = {
    "digits": "One handwritten digit, light on black, scaled to 8×8. With 450 test images the "
    "accuracy is known to about one point.",
    "mnist": "One handwritten digit, light on black, centred in 28×28 as in MNIST.",
    "fashion-mnist": "One piece of clothing, light on black, filling 28×28 as in Fashion-MNIST.",
    "cifar10": "One object that fills a colour photograph of 32×32.",
}


def build_zoo(
    runs: Sequence[str | os.PathLike[str]], out: Path = FOLDER, options: DataOptions = DATA
) -> list[Record]:
    """Write the fold of each run with its record, after checking that it is as accurate as the run."""
    records = []
    for run in runs:
        name, folded = _folded_run(Path(run))
        about = folded.about or {}
        data = load(about["dataset"], options.data_root, verify=options.verify)
        share = accuracy(folded, data, folded.input_shape)
        if share != about["accuracy"]:
            expected = f"the accuracy of its run, {about['accuracy']}"
            remedy = "Take the data set and the versions that it was trained with."
            raise refusal(f"zoo build: {name}", expected, str(share), remedy)
        save(folded, path := out / f"{name}{ENDING}")
        records.append(record := read_record(path))
        print(f"Wrote {path}: {100 * record.accuracy:.2f} %, {record.bytes:,} bytes")
    return records


def _folded_run(folder: Path) -> tuple[str, Folded]:
    """Return the name and the fold of a finished run, with the record as its notes."""
    where = f"zoo build {folder}"
    if not (folder / run_folder.RESULT).is_file():
        got = f"no {run_folder.RESULT} in it"
        remedy = "Check the path, or finish the run: conformallayers train with --resume."
        raise refusal(where, "the folder of a finished run", got, remedy)
    result = run_folder.read_record(folder / run_folder.RESULT, where)
    loaded = load_model(folder, "zoo build")
    config = loaded.config
    if config is None or config.dataset not in LIMITS or loaded.labels is None:
        got, remedy = f"one on {loaded.about.get('dataset')}", "Name another run."
        raise refusal(where, f"a run on one of {', '.join(LIMITS)}", got, remedy)
    folded = loaded.fold("zoo build")
    preset = config.preset or ("micro" if config.network.startswith("Stage") else None)
    with run_folder.readable(where, folder / run_folder.RESULT):
        folded.about = {
            **(folded.about or {}),
            "network": f"{config.network} {preset}" if preset else config.network,
            "input_shape": list(folded.input_shape),
            "accuracy": result["accuracy"],
            "images": result["samples"]["test"],
            "multiply_adds": multiply_adds(folded),
            "weights": weights(folded),
            "parameters": result["parameters"],
            "command": config.command({}),
            "commit": result["commit"],
            "licence": "Apache-2.0",
            "limits": f"{LIMITS[config.dataset]} {_ONLY_CLASSES}",
        }
    family = "relu-" if config.network == "StageReLUNet" else ""
    return f"{config.dataset}-{family}{preset or config.network.lower()}", folded
