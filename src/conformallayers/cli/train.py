"""conformallayers train: its options are the fields of TrainConfig."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from ..lab.options import DataOptions
from ..lab.training.config import DERIVED, TrainConfig
from .models import Flat, print_accuracies

if TYPE_CHECKING:
    Options = dict[str, Any]
else:
    # Not TrainConfig itself: a preset fills in the options that are not given, then all are checked.
    _fields = {
        name: field.annotation
        for name, field in TrainConfig.model_fields.items()
        if name not in ("network", "dataset", *DERIVED)
    }
    Options = TypedDict("Options", _fields, total=False)
    Options.__doc__ = TrainConfig.__doc__  # cyclopts takes the help texts from it


def train(
    network: str,
    dataset: str,
    *,
    options: Flat[Options | None] = None,
    out: Path | None = None,
    resume: bool = False,
    figures: bool = True,
    data: Flat[DataOptions] = DataOptions(),
) -> None:
    """Train a network, and measure it folded and layer by layer.

    Args:
        network: Class of conformallayers.networks, such as LeNetCL, or one of your own: FILE.py:NAME.
        dataset: mnist, fashion-mnist, cifar10, digits, or a folder with one sub-folder per class.
        out: Folder of the run; by default runs/NETWORK-DATASET-seedN.
        resume: Continue the run in that folder.
        figures: Draw the curves, and write the confusion matrix of the test images.
    """
    from ..lab.training.train import train as run_training

    places = {"out": out, "resume": resume, "figures": figures, "warn": True, **vars(data)}
    result = run_training(network=network, dataset=dataset, **places, **(options or {}))
    if os.environ.get("RANK", "0") == "0":  # one of several processes prints
        shares = result.row["accuracy_layers"], result.row["accuracy_folded"]
        print_accuracies(result.row["samples"]["test"], *shares)
        print(f"Wrote {result.folder}/")
