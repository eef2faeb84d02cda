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
from .saved_models import load_model

CALIBRATION = 512  # images that set the scales of int8
_BATCH = 1000


def all_scores(
    model: Callable[[Tensor], Tensor],
    images: Tensor,
    device: str = "cpu",
    shape: tuple[int, ...] = IMAGE_SHAPE,
) -> Tensor:
    """Run a model, (B, *shape) → (B, classes), on images (N, C, H, W) of unsigned bytes; return (N, classes)."""
    batches = Batches(images, torch.zeros(len(images)), _BATCH, shape=shape, device=device)
    with torch.inference_mode():
        return torch.cat([model(x).float().cpu() for x, _ in batches])


def share_correct(scores: Tensor, labels: Tensor) -> float:
    """Return the share of correct classes, from scores (N, classes) and labels (N,)."""
    if int(labels.max()) >= scores.shape[1]:
        expected = f"labels below {scores.shape[1]}, the number of the network's outputs"
        remedy = "Name the data set that the network was trained on."
        raise refusal("evaluate --dataset", expected, str(int(labels.max())), remedy)
    return int((scores.argmax(1) == labels).sum()) / len(labels)


def accuracy(
    model: Callable[[Tensor], Tensor],
    images: Tensor,
    labels: Tensor,
    device: str = "cpu",
    shape: tuple[int, ...] = IMAGE_SHAPE,
) -> float:
    """Return the share of correctly classified images; arguments as in :func:`all_scores`."""
    return share_correct(all_scores(model, images, device, shape), labels)


def accuracy_by_path(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    device: str = "cpu",
    shape: tuple[int, ...] = IMAGE_SHAPE,
) -> tuple[dict[str, Any], Tensor]:
    """Return the accuracy ``layers`` and ``folded`` with the fold's ``strategy``, and the scores, (N, classes).

    A network without ConformalLayers does not fold: ``folded`` and ``strategy`` are None.
    """
    model = model.eval()
    with layer_by_layer():
        scores = all_scores(model, images, device, shape)
    found: dict[str, Any] = {"layers": share_correct(scores, labels)}
    found |= {"folded": None, "strategy": None}
    if any(isinstance(module, ConformalLayers) for module in model.modules()):
        folded = fold(model, shape)
        scores = all_scores(folded, images, device, shape)
        found |= {"folded": share_correct(scores, labels), "strategy": folded.strategy}
    return found, scores


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
    shape = model.shape if model.config is None else model.config.input_shape
    if not isinstance(dataset, Dataset):
        how: Any = {"verify": verify, "where": "evaluate --dataset"}
        dataset = load_test(dataset, model.about, model.labels, shape, data_root, **how)
    images, labels = dataset.test_images, dataset.test_labels
    check_shape(shape, images, f"evaluate {model.path}")
    if model.config is None:
        folded = model.fold("evaluate")
        share = fold_accuracy(folded, dataset, device)
        found = {"layers": None, "folded": share, "strategy": folded.strategy}
    else:
        found, _ = accuracy_by_path(model.module, images, labels, device, shape)
    return {
        "network": model.about.get("network", type(model.module).__name__),
        "dataset": dataset.name,
        "epoch": model.about.get("epoch"),
        "images": len(labels),
        **found,
    }


def fold_accuracy(folded: Folded, dataset: Dataset, device: str = "cpu") -> float:
    """Return the share of test images that a fold classifies correctly."""
    run = lambda x: folded(x.to(folded.dtype))  # noqa: E731
    return accuracy(run, dataset.test_images, dataset.test_labels, device, folded.input_shape)


def check_shape(shape: tuple[int, ...], images: Tensor, where: str) -> None:
    """Refuse images, (N, C, H, W), for a network that takes neither this shape nor 3×32×32."""
    found = tuple(images.shape[1:])
    if shape not in (IMAGE_SHAPE, found):
        remedy = "Name a set of such images or a folder of pictures, or fold for these."
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
        The fold; and dataset, images, and the accuracies ``float`` and ``int8`` on test images.
    """
    how: Any = {"verify": verify, "where": "quantize --images", "only_test": False}
    notes = folded.about or {}, folded.labels, folded.input_shape
    data = load_test(images, *notes, data_root, **how)
    check_shape(folded.input_shape, data.test_images, "quantize --images")
    quantized = quantize(folded, calibration_images(data, folded, count))
    found = {"float": fold_accuracy(folded, data), "int8": fold_accuracy(quantized, data)}
    return quantized, {"dataset": data.name, "images": len(data.test_labels), **found}


def calibration_images(data: Dataset, folded: Folded, count: int) -> Tensor:
    """Return some training images as a fold takes them, the same at each call."""
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(len(data.train_labels), generator=generator)[:count]
    return as_input(data.train_images[order], shape=folded.input_shape).to(folded.dtype)
