"""What the playground shows beside a classifier: depth against time, templates, eigenimages, examples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import conformallayers as cl

from ...folding.folded import Folded
from ...recipe import layer_operations as layer
from ...recipe import point_operations as point
from ...recipe.javascript.document import javascript_document
from ...recipe.recipe import Recipe
from ..data.catalogue import CLASSES, DIGITS, SHAPES
from ..data.datasets import digits
from ..training.saved_models import load_model

SHAPE = SHAPES[DIGITS]
DEPTHS = range(1, 10)
_CHANNELS = 16
_EIGENIMAGES = 10
Json = dict[str, Any]


def document_of(folded: Folded) -> Json:
    """Return what a fold in float32 runs, for JavaScript."""
    recipe: Recipe = folded.recipe.with_constants(lambda _, array: array.detach().cpu().numpy())
    return javascript_document(recipe, "float32")


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
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        models = [stack(depth) for depth in DEPTHS]
    return [
        {
            "layers": document_of(cl.fold(model, SHAPE, strategy="layers")),
            "folded": document_of(cl.fold(model, SHAPE, strategy="dense")),
        }
        for model in models
    ]


def insight(path: Path) -> Json:
    """Return M's rows and Q's first eigenvectors of a network without stages, and its layers for the terms."""
    loaded = load_model(path, "playground")
    folded, layers = (cl.fold(loaded.module, SHAPE, strategy=s) for s in ("dense", "layers"))
    matrix, form = matrix_and_form(folded.recipe)
    values, vectors = np.linalg.eigh(form)
    images = vectors.T[::-1][:_EIGENIMAGES]
    images = np.where(images.sum(1, keepdims=True) < 0, -images, images)
    return {
        "name": f"{loaded.about['network']} on {loaded.about['dataset']}",
        "labels": list(loaded.labels or map(str, range(CLASSES))),
        "shape": SHAPE,
        "templates": _short(matrix),
        "eigenimages": _short(images),
        "eigenvalues": _short(values[::-1][:_EIGENIMAGES]),
        "trace": float(np.trace(form)),
        "folded": document_of(folded),
        "layers": document_of(layers),
    }


def matrix_and_form(recipe: Recipe) -> tuple[Any, Any]:
    """Return M (outputs, n) and Q (n, n) of a dense fold with one published part, from its constants."""
    constants = {name: np.asarray(array, np.float64) for name, array in recipe.constants.items()}
    written = {name: op for op in recipe.operations for name in op.outputs}
    (division,) = (op for op in recipe.operations if isinstance(op, point.Divide))
    image = written[division.inputs[0]]
    (energy,) = (op for op in recipe.operations if isinstance(op, point.SumSquares))
    factor = written[energy.inputs[0]]
    if not isinstance(image, layer.Matmul) or not isinstance(factor, layer.Matmul):
        raise TypeError("a dense fold has one matrix and the factor of one form")
    root = constants[factor.weight]
    return division.scale * constants[image.weight], energy.weight * root.T @ root


def examples() -> list[Json]:
    """Return one test image of every digit, as whole numbers from 0 to 16."""
    data = digits()
    rows = [int((data.test_labels == label).nonzero()[0]) for label in range(CLASSES)]
    return [
        {"label": str(label), "pixels": (data.test_images[row].flatten() * 16).int().tolist()}
        for label, row in enumerate(rows)
    ]


def _short(array: Any) -> Any:
    """Return nested lists of numbers with five digits, which pictures need."""
    if array.ndim > 1:
        return [_short(row) for row in array]
    return [float(f"{value:.5g}") for value in array.tolist()]
