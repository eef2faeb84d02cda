"""Measure the accuracy of trained networks, layer by layer and folded."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from ...container import ConformalLayers, layer_by_layer
from ...errors import ConformalError, cause_line, refusal, shape_text
from ...folding.fold import fold
from ...folding.folded import Folded
from ...networks import IMAGE_SHAPE
from ...quantization.quantize import quantize
from ..data.batches import Batches, as_input
from ..data.datasets import Dataset, load_test
from ..options import DataOptions
from .saved_models import load_model

_CALIBRATION = 512  # images that set the scales of int8
_BATCH = 1000
DATA = DataOptions()  # of the usual folder


def all_scores(
    model: Callable[[Tensor], Tensor],
    images: Tensor,
    device: str = "cpu",
    shape: tuple[int, ...] = IMAGE_SHAPE,
) -> Tensor:
    """Run a model, (B, *shape) → (B, classes), on images (N, C, H, W) of unsigned bytes; return (N, classes)."""
    batches = Batches(images, torch.zeros(len(images)), _BATCH, shape=shape, device=device)
    dtype = model.dtype if isinstance(model, Folded) else torch.float32
    with torch.inference_mode():
        return torch.cat([model(x.to(dtype)).float().cpu() for x, _ in batches])


def share_correct(scores: Tensor, labels: Tensor) -> float:
    """Return the share of correct classes, from scores (N, classes) and labels (N,)."""
    if int(labels.max()) >= scores.shape[1]:
        expected = f"labels below {scores.shape[1]}, the number of the network's outputs"
        remedy = "Name the data set that the network was trained on."
        raise refusal("evaluate --dataset", expected, str(int(labels.max())), remedy)
    return int((scores.argmax(1) == labels).sum()) / len(labels)


def accuracy(
    model: Callable[[Tensor], Tensor], data: Dataset, shape: tuple[int, ...], device: str = "cpu"
) -> float:
    """Return the share of test images that a model classifies correctly."""
    return share_correct(all_scores(model, data.test_images, device, shape), data.test_labels)


def has_conformal_layers(network: nn.Module) -> bool:
    """Tell whether a network has ConformalLayers to fold."""
    return any(isinstance(module, ConformalLayers) for module in network.modules())


def accuracy_by_path(
    model: nn.Module, data: Dataset, shape: tuple[int, ...], device: str = "cpu"
) -> tuple[dict[str, Any], Tensor]:
    """Return the accuracy ``layers`` and ``folded`` with the fold's ``strategy``, and the scores, (N, classes).

    Without a fold, ``folded`` and ``strategy`` are None.
    """
    model = model.eval()
    with layer_by_layer():
        scores = all_scores(model, data.test_images, device, shape)
    found: dict[str, Any] = {"layers": share_correct(scores, data.test_labels)}
    found |= {"folded": None, "strategy": None}
    with suppress(ConformalError):  # torch.fx cannot trace every network
        folded = fold(model, shape)
        scores = all_scores(folded, data.test_images, device, shape)
        found |= {"folded": share_correct(scores, data.test_labels), "strategy": folded.strategy}
    return found, scores


def check_outputs(model: nn.Module, shape: tuple[int, ...], classes: int) -> None:
    """Refuse a network that has no score for every class, or that cannot be folded, before it is trained."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        remedy = "Give it layers with weights; conformallayers fold takes one without."
        raise refusal("network", "parameters to train", "none", remedy)
    expected = f"scores of shape (2, {classes}) for images of {shape_text((2, *shape))}"
    remedy = "Let the network take num_classes and in_shape as arguments."
    device = next(model.parameters()).device
    try:
        with torch.no_grad(), layer_by_layer():
            scores = model.eval()(torch.zeros(2, *shape, device=device))
        found = getattr(scores, "shape", ())
        if tuple(found) != (2, classes):
            raise refusal("network", expected, shape_text(found), remedy)
        if has_conformal_layers(model):
            fold(model, shape)
    except ConformalError:
        raise
    except Exception as error:  # code of the user
        raise refusal("network", expected, cause_line(error), remedy) from error
    finally:
        model.train()


def evaluate(
    run: str | os.PathLike[str], dataset: str | Dataset | None = None, options: DataOptions = DATA
) -> dict[str, Any]:
    """Measure a trained network, or a fold, on the test images of a data set, by default that of its training.

    The accuracies ``layers`` and ``folded`` are None where they do not apply.
    """
    model = load_model(run, "evaluate")
    shape = model.shape if model.config is None else model.config.input_shape
    if not isinstance(dataset, Dataset):
        dataset = load_test(dataset, model, shape, options, "evaluate --dataset")
    if model.config is None:
        found = {"layers": None, "folded": accuracy(model.module, dataset, shape)}
    else:
        found, _ = accuracy_by_path(model.module, dataset, shape)
    return {
        "network": model.about.get("network", type(model.module).__name__),
        "dataset": dataset.name,
        "epoch": model.about.get("epoch"),
        "images": len(dataset.test_labels),
        **found,
    }


def quantize_fold(
    folded: Folded, images: str | None = None, options: DataOptions = DATA
) -> tuple[Folded, dict[str, Any]]:
    """Return a fold in int8, calibrated on training images of a data set, and the accuracies of both folds."""
    shape, where = folded.input_shape, "quantize --images"
    data = load_test(images, folded, shape, options, where, only_test=False)
    quantized = quantize(folded, calibration_images(data, folded))
    found = {"dataset": data.name, "images": len(data.test_labels)}
    found |= {"float": accuracy(folded, data, shape), "int8": accuracy(quantized, data, shape)}
    return quantized, found


def calibration_images(data: Dataset, folded: Folded) -> Tensor:
    """Return some training images as a fold takes them, the same at each call."""
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(len(data.train_labels), generator=generator)[:_CALIBRATION]
    return as_input(data.train_images[order], shape=folded.input_shape).to(folded.dtype)
