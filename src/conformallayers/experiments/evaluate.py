"""Measure the accuracy of a trained network: layer by layer, and folded."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..container import ConformalLayers, layer_by_layer
from ..errors import refusal
from ..graph import fold
from ..networks import IMAGE_SHAPE
from . import checkpoint
from .batches import Batches
from .config import TrainConfig, make_config
from .data import Dataset, load
from .distributed import Ranks

CHECKPOINT = "checkpoint.safetensors"
_BATCH = 1000


def accuracy(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    device: str = "cpu",
    among: Ranks | None = None,
) -> float:
    """Return the share of images whose largest score is the label's, all ranks together.

    Args:
        model: in evaluation mode; what it does with its layers is up to the caller.
        images: (N, C, H, W), unsigned bytes.
        labels: (N,).
        device: of the model.
        among: the processes that share the work.
    """
    among = among or Ranks()
    batches = Batches(images, labels, _BATCH, device=device, rank=among.rank, world=among.world)
    right = 0
    with torch.inference_mode():
        for x, y in batches:
            right += int((model(x).argmax(1) == y).sum())
    return among.total(right, device=device)[0] / len(labels)


def both_ways(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    device: str = "cpu",
    among: Ranks | None = None,
) -> dict[str, Any]:
    """Return the accuracy layer by layer and folded, and the strategy of the fold.

    A network without ConformalLayers does not fold: its two last entries are None.
    """
    model = model.eval()
    with layer_by_layer():
        layers = accuracy(model, images, labels, device, among)
    found: dict[str, Any] = {"layers": layers, "folded": None, "strategy": None}
    if any(isinstance(module, ConformalLayers) for module in model.modules()):
        folded = fold(model, IMAGE_SHAPE)
        found["folded"] = accuracy(folded, images, labels, device, among)
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
    """Measure a checkpoint on the test images of a set.

    Args:
        run: the folder of a run, or a checkpoint.
        dataset: its name, or the set; None takes the one it was trained on.
        data_root, verify: as in :func:`conformallayers.experiments.data.load`.
        device: where to run.

    Returns:
        network, dataset, epoch, images, and the accuracies ``layers`` and ``folded``.
    """
    path = checkpoint_of(run, "evaluate")
    config, model, epoch = trained(path, device)
    if not isinstance(dataset, Dataset):
        dataset = load(dataset or config.dataset, data_root, verify=verify)
    return {
        "network": config.network,
        "dataset": dataset.name,
        "epoch": epoch,
        "images": len(dataset.test_labels),
        **both_ways(model, dataset.test_images, dataset.test_labels, device),
    }


def checkpoint_of(run: str | os.PathLike[str], command: str) -> Path:
    """Return the checkpoint of a run's folder, or the file itself; refuse what is not there."""
    path = Path(run)
    path = path / CHECKPOINT if path.is_dir() else path
    if not path.is_file():
        remedy = "Name a folder or checkpoint that conformallayers train has written."
        raise refusal(command, f"the checkpoint {path}", "no such file", remedy)
    return path


def trained(path: Path, device: str = "cpu") -> tuple[TrainConfig, nn.Module, int]:
    """Return the configuration, the network and the epoch of a checkpoint."""
    found = checkpoint.load(path)
    config = make_config(**{**found.state["config"], "device": device})
    model = config.build().to(device)
    checkpoint.restore(found, model, where=str(path))
    return config, model, found.state["epoch"]
