"""Add finished training runs to the networks that ship with the package."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from torch import nn

from ..errors import refusal
from ..folding.files import load as load_file
from ..folding.files import save
from ..folding.fold import fold
from ..networks.base import Network
from ..utils.files import staged_files
from ..zoo.catalogue import ENDING, FOLDER, network_files, read_record
from ..zoo.records import Record
from .data.catalogue import SHAPES
from .data.datasets import Dataset
from .data.datasets import load as load_dataset
from .data.image_adapter import from_images, native_shape
from .experiments.deployed import multiply_adds, weights
from .training.config import make_config
from .training.evaluate import accuracy
from .training.runs import CONFIG, RESULT
from .training.saved_models import Loaded, load_model

LARGEST_ZOO = 3_000_000  # bytes of all files together
_WHERE = "zoo build"
_LICENCE = "Apache-2.0"
_ONLY_CLASSES = "Every image gets one of these classes, also one that shows something else."
# Notes on the images that networks of a data set are for.
LIMITS = {
    "digits": "One handwritten digit, light on black, scaled to 8×8. With 450 test images the "
    "accuracy is known to about one point.",
    "mnist": "One handwritten digit, light on black, centred in 28×28 as in MNIST.",
    "fashion-mnist": "One piece of clothing, light on black, filling 28×28 as in Fashion-MNIST.",
    "cifar10": "One object that fills a colour photograph of 32×32.",
}


def build_zoo(
    runs: Sequence[str | os.PathLike[str]],
    out: Path = FOLDER,
    *,
    data_root: str | os.PathLike[str] | None = None,
    verify: bool = True,
    say: Callable[[str], object] = print,
) -> list[Record]:
    """Write a file with a record for each run; files of the same names are replaced.

    Every file is loaded, folded and measured on the test images before it is put into place: its
    accuracy must be that of the run. All files are written, or none.

    Args:
        runs: folders of finished runs; or names of the zoo, to count their costs again after a change
            of the folding.
        out: the folder of the files.
        data_root, verify: as in :func:`conformallayers.lab.data.datasets.load`.
        say: receives a line for each network.
    """
    shipped = network_files()
    found = [
        _again(shipped[os.fspath(run)]) if os.fspath(run) in shipped else read_run(Path(run))
        for run in runs
    ]
    names = [one.path.stem for one in found]
    if not names or len(set(names)) < len(names):
        expected, got = "runs of different networks or data sets", ", ".join(names) or "none"
        raise refusal(_WHERE, expected, got, "Give one run for each.")
    datasets = {
        name: load_dataset(name, data_root, verify=verify)
        for name in {one.about["dataset"] for one in found}
    }
    out.mkdir(parents=True, exist_ok=True)
    paths = [out / one.path.name for one in found]
    with staged_files(*paths) as temporary:
        staged = [Path(name) for name in temporary]
        for one, path in zip(found, staged, strict=True):
            save(one.module, path, labels=one.labels, about=one.about)
            _check_accuracy(one, path, datasets[one.about["dataset"]])
        others = set(out.glob(f"*{ENDING}")) - set(paths)
        total = sum(path.stat().st_size for path in (*staged, *others))
        if total > LARGEST_ZOO:
            expected = f"at most {LARGEST_ZOO:,} bytes in all"
            raise refusal(_WHERE, expected, f"{total:,}", "Leave a network out.")
    records = [read_record(path) for path in paths]
    for record in records:
        say(f"{record.name}: {100 * record.accuracy:.2f} %, {record.bytes:,} bytes")
    return records


def read_run(folder: Path) -> Loaded:
    """Return the network of a finished run for images in their stored shape, with the name and notes of its file."""
    if not (folder / RESULT).is_file():
        got = f"{folder} without {RESULT}"
        raise refusal(_WHERE, "the folder of a finished run", got, "Train it to the end.")
    result = json.loads((folder / RESULT).read_text("utf-8"))
    config = make_config(**json.loads((folder / CONFIG).read_text("utf-8")))
    loaded = load_model(folder, _WHERE)
    if not loaded.folds or loaded.dataset not in LIMITS or loaded.labels is None:
        expected = f"a network with ConformalLayers, trained on one of {', '.join(LIMITS)}"
        got = f"{config.network} on {config.dataset}"
        raise refusal(f"{_WHERE} {folder}", expected, got, "Name another run.")
    shape = SHAPES[loaded.dataset]
    model = from_images(loaded.module, shape, _WHERE)
    if native_shape(model) != shape:
        expected, remedy = "a network that centres its images", "Train it with --centre."
        raise refusal(f"{_WHERE} {folder}", expected, "one that does not", remedy)
    network = next(module for module in model.modules() if isinstance(module, Network))
    preset = network.arguments.get("preset")
    about = {
        "network": f"{config.network} {preset}" if preset else config.network,
        "dataset": loaded.dataset,
        "epoch": loaded.about["epoch"],
        "white": loaded.about["white"],
        "input_shape": list(shape),
        "accuracy": result["accuracy"],
        "images": result["samples"]["test"],
        **_costs(model, shape),
        "parameters": result["parameters"],
        "command": config.command({}),
        "commit": result["commit"],
        "licence": _LICENCE,
        "limits": f"{LIMITS[loaded.dataset]} {_ONLY_CLASSES}",
    }
    path = Path(f"{loaded.dataset}-{preset or config.network.lower()}{ENDING}")
    return Loaded(model, path, loaded.labels, about)


def _again(path: Path) -> Loaded:
    """Return a shipped network with the present costs of its fold."""
    loaded = load_model(path, _WHERE)
    costs = _costs(loaded.module, loaded.about["input_shape"])
    return replace(loaded, about={**loaded.about, **costs})


def _costs(model: nn.Module, shape: Sequence[int]) -> dict[str, int]:
    folded = fold(model, tuple(shape))
    return {"multiply_adds": multiply_adds(folded), "weights": weights(folded)}


def _check_accuracy(one: Loaded, path: Path, data: Dataset) -> None:
    """Refuse a file whose fold is not as accurate as the run."""
    folded = fold(load_file(path), tuple(one.about["input_shape"]))
    share = accuracy(folded, data.test_images, data.test_labels, shape=folded.input_shape)
    if share != one.about["accuracy"]:
        expected = f"the accuracy of its run, {one.about['accuracy']}"
        remedy = "Take the data set and the versions that it was trained with."
        raise refusal(f"{_WHERE}: {one.path.stem}", expected, str(share), remedy)
