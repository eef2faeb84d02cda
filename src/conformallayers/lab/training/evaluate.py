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
from ..checks import require_device
from ..data.batches import Batches
from ..data.datasets import Dataset
from ..data.sources import load_test
from .distributed import Ranks
from .saved_models import CHECKPOINT as CHECKPOINT
from .saved_models import WHITE, Loaded, load_model

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
        dataset = load_test(dataset, model.training, data_root, verify=verify, where="evaluate")
    return {
        "network": model.about.get("network", type(model.module).__name__),
        "dataset": dataset.name,
        "epoch": model.about.get("epoch"),
        "images": len(dataset.test_labels),
        **_measured(model, dataset, device),
    }


def _measured(model: Loaded, dataset: Dataset, device: str) -> dict[str, Any]:
    """Return the accuracies and the strategy."""
    images, module, where = dataset.test_images, model.module, f"evaluate {model.path}"
    if isinstance(module, Folded):
        share = fold_accuracy(module, model.white, dataset, where, device)
        return {"layers": None, "folded": share, "strategy": module.strategy}
    native = model.native_shape
    if native is None or model.white != WHITE:
        got, remedy = f"{type(module).__name__}", "Measure its fold: conformallayers fold."
        expected = f"a network whose input shape is known and whose white is {WHITE:g}"
        raise refusal(where, expected, got, remedy)
    check_shape(native, images, where)
    return accuracy_by_path(module, images, dataset.test_labels, device, shape=native)


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
