"""Quantise a trained network with training images, and measure it on test images."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...errors import refusal
from ...folding.folded import Folded
from ...folding.quantize import quantize
from ..data.batches import as_input
from ..data.datasets import Dataset
from ..data.sources import load_test
from .evaluate import check_shape, fold_accuracy
from .saved_models import Loaded

CALIBRATION = 512  # images


def quantize_fold(
    model: Loaded,
    folded: Folded,
    images: str | None = None,
    *,
    count: int = CALIBRATION,
    data_root: str | os.PathLike[str] | None = None,
    verify: bool = True,
) -> tuple[Folded, dict[str, Any]]:
    """Return a fold in int8, and the accuracies of both folds.

    Args:
        model: the network and its notes.
        folded: its fold.
        images: a data set, or a folder of pictures; None: those of the training. Training images calibrate, test
            images measure.
        count: of the images to calibrate with, a random choice that is the same at each call.
        data_root, verify: as in :func:`conformallayers.lab.data.datasets.load`.

    Returns:
        The fold; and dataset, images, calibration, and the accuracies ``float`` and ``int8`` on test images.
    """
    how: Any = {"verify": verify, "where": "quantize", "option": "--images", "only_test": False}
    trained = replace(model.training, shape=folded.input_shape)
    data = load_test(images, trained, data_root, **how)
    x = calibration_images(data, folded, model.white, count)
    quantized = quantize(folded, x)
    found: dict[str, Any] = {"dataset": data.name, "images": len(data.test_labels)}
    found["calibration"] = len(x)
    for label, fold in (("float", folded), ("int8", quantized)):
        found[label] = fold_accuracy(fold, model.white, data, "quantize --images")
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
