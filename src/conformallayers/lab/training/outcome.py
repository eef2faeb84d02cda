"""Write the figures of a run and its confusion matrix, as CSV and as a figure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...utils.files import write_csv
from ...utils.quiet import ignored_warnings
from ...utils.text import csv_text
from ..data.catalogue import LABELS
from ..data.datasets import Dataset
from .config import TrainConfig

_CORNER = "true/predicted"  # the header of the first column; no class can have this name
TRAINING, CONFUSION, MISTAKES = "training", "confusion", "mistakes"


def class_names(config: TrainConfig) -> list[str]:
    """Return a name for every class of a run; its number if there is none."""
    known = config.labels or LABELS.get(config.dataset, ())
    numbers = [str(index) for index in range(config.classes)]
    return list(known) if len(known) == config.classes else numbers


def confusion(labels: Tensor, predicted: Tensor, classes: int) -> Tensor:
    """Count images by true and predicted class, (N,) and (N,) → (classes, classes).

    Examples:
        >>> confusion(torch.tensor([0, 0, 1]), torch.tensor([0, 1, 1]), 2).tolist()
        [[1, 1], [0, 1]]
    """
    pairs = torch.bincount(labels * classes + predicted, minlength=classes * classes)
    return pairs.view(classes, classes)


def write_outcome(
    folder: Path,
    config: TrainConfig,
    history: Sequence[dict[str, Any]],
    source: Dataset,
    scores: Tensor,
) -> str | None:
    """Write the files from the scores of the test images, (N, classes); return why figures are missing."""
    names, labels = class_names(config), source.test_labels.cpu()
    counts = confusion(labels, scores.argmax(1), config.classes)
    rows = [
        {_CORNER: csv_text(name), **dict(zip(map(csv_text, names), row, strict=True))}
        for name, row in zip(names, counts.tolist(), strict=True)
    ]
    write_csv(folder / f"{CONFUSION}.csv", rows)
    try:
        from ..report import figures, run_figures
    except ImportError as error:
        return f"No figures without {error.name}: pip install 'conformallayers[experiments]'"
    title = f"{config.network_name}, {config.dataset_name}"
    images, shares = source.test_images.cpu(), scores.softmax(1)
    drawn = {
        TRAINING: run_figures.training_figure(history, title),
        CONFUSION: run_figures.confusion_figure(counts, names, f"{title}, test images"),
        MISTAKES: run_figures.mistakes_figure(
            images, labels, shares, names, f"{title}: worst mistakes on the test images"
        ),
    }
    with ignored_warnings():  # of letters that the font does not have
        for name, figure in drawn.items():
            if figure is not None:
                figures.save(figure, folder, name)
    return None
