"""The demonstrations beside the classifier: time against depth, templates and eigenimages, example digits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import conformallayers as cl

from ...recipe.javascript.document import javascript_document
from ..data.catalogue import CLASSES, DIGITS, SHAPES
from ..data.datasets import digits
from ..settings import torch_settings
from ..training.saved_models import load_model

SHAPE = SHAPES[DIGITS]
DEPTHS = range(1, 10)
_CHANNELS = 16
_EIGENIMAGES = 10
Json = dict[str, Any]


def stack(depth: int) -> nn.Module:
    """Return an untrained DkNetCL for digits: 3×3 convolutions and ReSPro, a pool and a linear layer."""
    layers: list[nn.Module] = []
    for index in range(depth):
        layers.append(cl.Conv2d(_CHANNELS if index else SHAPE[0], _CHANNELS, 3, padding=1))
        layers.append(cl.ReSPro())
    features = cl.ConformalLayers(*layers, cl.AvgPool2d(4), cl.Scale(100.0), cl.Flatten())
    return nn.Sequential(features, nn.Linear(4 * _CHANNELS, CLASSES, bias=False)).eval()


def depth_documents() -> list[Json]:
    """Return stacks of all depths, each layer by layer and folded."""
    with torch_settings(seed=0):
        models = [stack(depth) for depth in DEPTHS]
    return [
        {"layers": _document(model, "layers"), "folded": _document(model, "dense")}
        for model in models
    ]


def insight(path: Path) -> Json:
    """Return the rows of M, the first eigenvectors of Q and both folds of a network of one stage."""
    loaded = load_model(path, "playground")
    folded = cl.fold(loaded.module, SHAPE, strategy="dense")
    (form,) = folded.forms()
    values, vectors = torch.linalg.eigh(form)
    images = vectors.flip(1)[:, :_EIGENIMAGES].T
    images = torch.where(images.sum(1, keepdim=True) < 0, -images, images)
    return {
        "name": f"{loaded.about['network']} on {loaded.about['dataset']}",
        "labels": list(loaded.labels or map(str, range(CLASSES))),
        "shape": SHAPE,
        "templates": _short(folded.matrix()),
        "eigenimages": _short(images),
        "eigenvalues": _short(values.flip(0)[:_EIGENIMAGES]),
        "trace": float(form.trace()),
        "folded": javascript_document(folded.recipe, "float32"),
        "layers": _document(loaded.module, "layers"),
    }


def examples() -> list[Json]:
    """Return one test image of every digit, as whole numbers from 0 to 16."""
    data = digits()
    rows = [int((data.test_labels == label).nonzero()[0]) for label in range(CLASSES)]
    return [
        {"label": str(label), "pixels": (data.test_images[row].flatten() * 16).int().tolist()}
        for label, row in enumerate(rows)
    ]


def _document(model: nn.Module, strategy: str) -> Json:
    """Fold a network for digits and return its recipe for JavaScript."""
    return javascript_document(cl.fold(model, SHAPE, strategy=strategy).recipe, "float32")


def _short(values: Tensor) -> Any:
    """Return nested lists of numbers with five digits, which pictures need."""
    if values.dim() > 1:
        return [_short(row) for row in values]
    return [float(f"{value:.5g}") for value in values.tolist()]
