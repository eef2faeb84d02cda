"""conformallayers train: its options are the fields of TrainConfig."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from ..errors import ConformalError
from ..lab.experiments.options import DataOptions
from ..lab.training.config import DERIVED, TrainConfig
from ..lab.training.recipes import recipe
from .models import Flat, given, print_accuracies

if TYPE_CHECKING:
    Options = dict[str, Any]
else:
    # Not TrainConfig itself: a recipe fills in the options that are not given, then all are checked.
    _fields = {name: field.annotation for name, field in TrainConfig.model_fields.items()}
    for _name in ("network", "dataset", *DERIVED):
        del _fields[_name]
    Options = TypedDict("Options", _fields, total=False)


def train(
    network: str,
    dataset: str,
    *,
    options: Flat[Options] = None,
    out: Path | None = None,
    resume: bool = False,
    figures: bool = True,
    data: Flat[DataOptions] = None,
) -> None:
    """Train a network, and measure it folded and layer by layer.

    Args:
        network: Class of conformallayers.networks, such as LeNetCL, or one of your own: FILE.py:NAME.
        dataset: mnist, fashion-mnist, cifar10, digits, shapes, or a folder with a sub-folder a class.
        options.size: Height and width to which pictures of a folder are scaled, N or HxW; 32 if not
            given. Networks of other input than 32 are StageNet, StageReLUNet and your own.
        options.preset: Size of StageNet and StageReLUNet: nano, micro (if not given), small,
            base, compact or large.
        options.depth: Number of convolutions of DkNet and DkNetCL, or of a stage of StageNet and
            StageReLUNet (2 if not given).
        options.recipe: modern: defaults of other options by network and data set (docs/training.md).
        options.hidden: Width of an additional layer in the head, linear in DkNet and DkNetCL, with
            ReLU in BaseReLUNet and BaseReSProNet; 0 for none. In LeNet and LeNetCL, width of the
            first layer of the head; 0 for the paper's 120.
        options.pool_stride: Stride of the pooling in the Base networks; 2 if not given.
        options.alpha: young (the paper's), spectral, learned or a number; for conformal networks.
        options.projective: Use the projective form of ReSPro.
        options.gain: Initial value of a learned factor behind the conformal part; 0 for none.
        options.dropout: Dropout probability in the head of LeNet and LeNetCL.
        options.rectifier: Pooling of StageNet: norm (if not given), relu, abs or max.
        options.respro: Whether the stages of StageNet have a ReSPro; they have one if not given.
        options.offset: Of the embedding of StageNet: learned (if not given), none or a number.
        options.pool: Pooling of StageReLUNet: average (if not given) or max.
        options.flips: Mirror a random half of the training images in every epoch.
        options.shift: Shift the training images by up to this many pixels of the network's input.
        options.centre: Subtract the mean training image from every image.
        options.optimizer: adam if not given.
        options.learning_rate: Learning rate, or its largest value by schedule; 0.001 if not given.
        options.batch_size: Batch size over all processes; 256 if not given.
        options.epochs: Passes over the training images; 10 if not given.
        options.weight_decay: Weight decay of the optimizer.
        options.momentum: Momentum of rmsprop and sgd.
        options.schedule: Schedule of the learning rate; constant if not given.
        options.teacher: A trained network to learn from beside the labels: a run, a file or a name of the zoo.
        options.validation: Training images to hold out, as a fraction below 1 or a count.
        options.seed: Seed of the weights and the order of the images.
        options.threads: Threads of torch; its own default if not given.
        options.device: Device to train on; cpu if not given.
        out: Folder of the run; runs/NETWORK-DATASET-seedN if not given.
        resume: Continue the run in that folder.
        figures: Draw curves, confusion matrix and worst mistakes of the test images into the folder.
    """
    from ..lab.training.train import train as run_training
    from ..utils.memory import keep_freed_memory

    keep_freed_memory()
    places = {"out": out, "resume": resume, "figures": figures, "warn": True, **given(data)}
    result = run_training(network=network, dataset=dataset, **places, **(options or {}))
    if os.environ.get("RANK", "0") == "0":  # one of several processes prints
        print_accuracies(result.row["accuracy_layers"], result.row["accuracy_folded"])
        print(f"Wrote {result.folder}/")
        if not {"recipe", "learning_rate", "optimizer"} & set(options or {}):
            print(_advice(result.row["network"], result.row["dataset"]), end="")


def _advice(network: str, dataset: str) -> str:
    """Return a line about the recipe of a network on a data set, if there is one."""
    try:
        found = recipe("modern", network, dataset)
    except ConformalError:
        return ""
    return f"--recipe modern has tested options for this: {found['epochs']} epochs, {found['optimizer']}, …\n"
