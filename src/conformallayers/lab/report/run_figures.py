"""Figures of a training run: curves, the confusion matrix, and the worst mistakes on the test images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from torch import Tensor

from .figures import BLUE, GREEN, ORANGE, styled

_DECADE = 10.0  # a rate that changes by this factor is drawn on a logarithmic axis
_WRITTEN = 20  # classes up to which the cells of a confusion matrix have numbers
_NAMED = 60  # classes up to which its axes have names
_MISTAKES, _COLUMNS = 24, 6
_LONGEST = 18  # letters of a name in a figure


def training_figure(history: Sequence[dict[str, Any]], title: str) -> Figure:
    """Draw loss, known accuracies and learning rate of each epoch; legends are beside the curves."""
    epochs = [row["epoch"] for row in history]
    rates = [row["learning_rate"] for row in history]
    with styled(7.2, 6.0, rows=3) as (figure, (above, middle, below)):
        style: Any = {"marker": "o", "markersize": 3}
        above.plot(epochs, [row["loss"] for row in history], color=BLUE, label="training", **style)
        above.set(ylabel="loss")
        curves = {
            "training": ("train_accuracy", BLUE),
            "validation": ("validation_accuracy", ORANGE),
            "test": ("test_accuracy", ORANGE),
        }
        for label, (key, colour) in curves.items():
            values = [100 * row[key] for row in history if key in row]
            if values:
                middle.plot(epochs[-len(values) :], values, color=colour, label=label, **style)
        middle.set(ylabel="accuracy (%)")
        below.plot(epochs, rates, color=GREEN, label="last batch", **style)
        below.set(ylabel="learning rate", xlabel="epoch")
        if min(rates) > 0 and max(rates) >= _DECADE * min(rates):
            below.set_yscale("log")
        else:
            below.set_ylim(0, 1.2 * max(rates) or 1.0)
        for axes in (above, middle, below):
            axes.grid(alpha=0.3)
            axes.xaxis.get_major_locator().set_params(integer=True)
            axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
        figure.suptitle(_plain(title))
    return figure


def confusion_figure(counts: Tensor, labels: Sequence[str], title: str) -> Figure:
    """Draw the confusion matrix, (true class, predicted class); colours are shares of the true class."""
    values = counts.double().numpy()
    shares = values / values.sum(1, keepdims=True).clip(1)
    side = min(14.0, 3.0 + 0.38 * len(labels))
    with styled(side + 1.2, side) as (figure, axes):
        image = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
        if len(labels) <= _WRITTEN:
            for row, column in np.ndindex(*values.shape):
                colour = "white" if shares[row, column] > 0.5 else "black"
                text = f"{int(values[row, column])}" if values[row, column] else ""
                axes.text(column, row, text, ha="center", va="center", color=colour, fontsize=8)
        if len(labels) <= _NAMED:
            names = [_short(label) for label in labels]
            axes.set_xticks(range(len(names)), names, rotation=90, fontsize=8)
            axes.set_yticks(range(len(names)), names, fontsize=8)
        axes.set(xlabel="predicted class", ylabel="true class", title=_plain(title))
        figure.colorbar(image, ax=axes, shrink=0.8, label="share of the true class")
    return figure


def mistakes_figure(
    images: Tensor, labels: Tensor, probabilities: Tensor, names: Sequence[str], title: str
) -> Figure | None:
    """Draw the misclassified images of largest probability; None if there is none.

    Args:
        images: (N, C, H, W), unsigned bytes.
        labels: (N,).
        probabilities: (N, classes).
    """
    likeliest = probabilities.max(1)
    sure = likeliest.values.where(likeliest.indices != labels, -1.0)
    order = sure.argsort(descending=True, stable=True)[:_MISTAKES]
    chosen = [index for index in order.tolist() if sure[index] >= 0]
    if not chosen:
        return None
    rows = -(-len(chosen) // _COLUMNS)
    with styled(1.7 * _COLUMNS, 2.1 * rows + 0.5, rows, _COLUMNS) as (figure, grid):
        for axes in grid.ravel():
            axes.axis("off")
        for index, axes in zip(chosen, grid.ravel(), strict=False):
            true, found = (_short(names[int(n)]) for n in (labels[index], likeliest.indices[index]))
            pixels = images[index].expand(3, -1, -1).permute(1, 2, 0).numpy()
            axes.imshow(pixels, vmin=0, vmax=255, interpolation="nearest")
            about = f"true: {true}\n{found} {100 * float(sure[index]):.0f} %"
            axes.set_title(about, fontsize=8)
        figure.suptitle(_plain(title))
    return figure


def _plain(text: str) -> str:
    """Escape text that matplotlib would read as a formula."""
    return text.replace("$", r"\$")


def _short(name: str) -> str:
    return _plain(name if len(name) <= _LONGEST else f"{name[: _LONGEST - 1]}…")
