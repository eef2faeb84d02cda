"""Measure the accuracy of trained networks, layer by layer and folded."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ...container import ConformalLayers, layer_by_layer
from ...errors import refusal, shape_text
from ...folding.fold import fold
from ...folding.folded import Folded
from ...networks import IMAGE_SHAPE
from ...quantization.quantize import quantize
from ..checks import require_device
from ..data.batches import Batches, as_input
from ..data.datasets import Dataset, load_test
from .distributed import Ranks
from .saved_models import load_model, white_of

CALIBRATION = 512  # images that set the scales of int8
_BATCH = 1000


def accuracy(
    model: Callable[[Tensor], Tensor],
    images: Tensor,
    labels: Tensor,
    device: str = "cpu",
    ranks: Ranks | None = None,
    shape: tuple[int, ...] = IMAGE_SHAPE,
    keep: list[Tensor] | None = None,
) -> float:
    """Return the share of correctly classified images, of all ranks together.

    Args:
        model: (B, *shape) → (B, classes).
        images: (N, C, H, W), unsigned bytes.
        labels: (N,).
        device: of the model.
        ranks: the processes that share the images.
        shape: of the model's input; see :func:`conformallayers.lab.data.batches.as_input`.
        keep: receives the scores of every batch of this process.
    """
    ranks = ranks or Ranks()
    where: Any = {"device": device, "rank": ranks.rank, "world_size": ranks.world_size}
    right = 0
    with torch.inference_mode():
        for x, y in Batches(images, labels, _BATCH, shape=shape, **where):
            scores = model(x)
            if len(y) and int(y.max()) >= scores.shape[1]:
                expected = f"labels below {scores.shape[1]}, the number of the network's outputs"
                remedy = "Name the data set that the network was trained on."
                raise refusal("evaluate --dataset", expected, str(int(y.max())), remedy)
            right += int((scores.argmax(1) == y).sum())
            if keep is not None:
                keep.append(scores.float().cpu())
    return ranks.sum(right, device=device)[0] / len(labels)


def accuracy_by_path(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    device: str = "cpu",
    ranks: Ranks | None = None,
    shape: tuple[int, ...] = IMAGE_SHAPE,
    keep: list[Tensor] | None = None,
) -> dict[str, Any]:
    """Return the accuracy layer by layer (``layers``) and ``folded``, and the fold's ``strategy``.

    A network without ConformalLayers does not fold: ``folded`` and ``strategy`` are None.

    Args:
        model, images, labels, device, ranks, shape: as in :func:`accuracy`.
        keep: receives the scores, (B, classes), of every batch: folded if the network folds.
    """
    model = model.eval()
    how: Any = {"device": device, "ranks": ranks, "shape": shape}
    folds = any(isinstance(module, ConformalLayers) for module in model.modules())
    with layer_by_layer():
        layers = accuracy(model, images, labels, **how, keep=None if folds else keep)
    found: dict[str, Any] = {"layers": layers, "folded": None, "strategy": None}
    if folds:
        folded = fold(model, shape)
        found["folded"] = accuracy(folded, images, labels, **how, keep=keep)
        found["strategy"] = folded.strategy
    return found


def evaluate(
    run: str | os.PathLike[str],
    dataset: str | Dataset | None = None,
    *,
    data_root: str | os.PathLike[str] | None = None,
    verify: bool = True,
    device: str = "cpu",
) -> dict[str, Any]:
    """Measure a trained network, or a fold, on the test images of a data set.

    Args:
        run: the folder of a run, a checkpoint, a file of :func:`conformallayers.save`, or a name of the zoo.
        dataset: its name, or a folder of pictures; None takes the one that the network was trained on. The
            folder of the training is recognised by its files; of another folder all pictures are measured, or
            those below ``test`` if it has ``train`` and ``test``.
        data_root, verify: as in :func:`conformallayers.lab.data.datasets.load`.
        device: where to run.

    Returns:
        network, dataset, epoch, images, strategy, and the accuracies ``layers`` and ``folded``,
        each None where it does not apply.
    """
    require_device("evaluate --device", device)
    model = load_model(run, "evaluate", device)
    if not isinstance(dataset, Dataset):
        shape = model.shape if model.config is None else model.config.input_shape
        notes = model.about, model.labels, shape
        dataset = load_test(dataset, *notes, data_root, verify=verify, where="evaluate")
    images, labels = dataset.test_images, dataset.test_labels
    if model.config is None:
        folded = model.fold("evaluate")
        share = fold_accuracy(folded, model.white, dataset, f"evaluate {model.path}", device)
        found = {"layers": None, "folded": share, "strategy": folded.strategy}
    else:
        shape = model.config.input_shape
        check_shape(shape, images, f"evaluate {model.path}")
        found = accuracy_by_path(model.module, images, labels, device, shape=shape)
    return {
        "network": model.about.get("network", type(model.module).__name__),
        "dataset": dataset.name,
        "epoch": model.about.get("epoch"),
        "images": len(labels),
        **found,
    }


def fold_accuracy(
    folded: Folded, white: float, dataset: Dataset, where: str, device: str = "cpu"
) -> float:
    """Return the share of test images that a fold classifies correctly; ``white`` is its value of white pixels."""
    images, labels = dataset.test_images, dataset.test_labels
    shape = folded.input_shape
    check_shape(shape, images, where)
    run = lambda x: folded((white * x).to(folded.dtype))  # noqa: E731
    return accuracy(run, images, labels, device, shape=shape)


def check_shape(shape: tuple[int, ...], images: Tensor, where: str) -> None:
    """Refuse images, (N, C, H, W), for a network that takes neither this shape nor 3×32×32."""
    found = tuple(images.shape[1:])
    if shape not in (IMAGE_SHAPE, found):
        remedy = (
            "Name a set of such images, or a folder of pictures, which are scaled; "
            "or fold the network for these."
        )
        raise refusal(where, f"images of {shape_text(shape)}", shape_text(found), remedy)


def quantize_fold(
    folded: Folded,
    images: str | None = None,
    *,
    count: int = CALIBRATION,
    data_root: str | os.PathLike[str] | None = None,
    verify: bool = True,
) -> tuple[Folded, dict[str, Any]]:
    """Return a fold in int8, and the accuracies of both folds.

    Args:
        folded: its notes name the data set of the training.
        images: a data set, or a folder of pictures; None: those of the training. Training images calibrate, test
            images measure.
        count: of the images to calibrate with, a random choice that is the same at each call.
        data_root, verify: as in :func:`conformallayers.lab.data.datasets.load`.

    Returns:
        The fold; and dataset, images, calibration, and the accuracies ``float`` and ``int8`` on test images.
    """
    how: Any = {"verify": verify, "where": "quantize", "option": "--images", "only_test": False}
    notes = folded.about or {}, folded.labels, folded.input_shape
    data = load_test(images, *notes, data_root, **how)
    white = white_of(folded.about, "quantize")
    x = calibration_images(data, folded, white, count)
    quantized = quantize(folded, x)
    found: dict[str, Any] = {"dataset": data.name, "images": len(data.test_labels)}
    found["calibration"] = len(x)
    for label, one in (("float", folded), ("int8", quantized)):
        found[label] = fold_accuracy(one, white, data, "quantize --images")
    return quantized, found


def calibration_images(data: Dataset, folded: Folded, white: float, count: int) -> Tensor:
    """Return some training images as a fold takes them, the same at each call."""
    total = len(data.train_labels)
    if not total:
        remedy = "Name a data set or a folder with training images."
        raise refusal("quantize --images", "training images to calibrate with", "none", remedy)
    order = torch.randperm(total, generator=torch.Generator().manual_seed(0))[:count]
    chosen = data.train_images[order]
    check_shape(folded.input_shape, chosen, "quantize --images")
    return (white * as_input(chosen, shape=folded.input_shape)).to(folded.dtype)
