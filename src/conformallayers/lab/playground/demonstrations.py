"""The demonstrations beside the classifier: time against depth, templates and eigenimages, example digits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import conformallayers as cl

from ...recipe.javascript.document import javascript_document
from ..data.catalogue import CLASSES, DIGITS, LABELS, SHAPES
from ..data.datasets import digits
from ..data.image_adapter import from_images
from ..settings import torch_settings

SHAPE = SHAPES[DIGITS]
NETWORK = Path(__file__).with_name("data") / "d3modnet-digits.safetensors"  # a state_dict
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


def trained_network() -> nn.Module:
    """Return a D3ModNetCL trained on digits, (B, 1, 8, 8) → (B, 10)."""
    network = cl.networks.D3ModNetCL(alpha="spectral", gain=100.0)
    network.load_state_dict(load_file(NETWORK))
    return from_images(network.eval(), SHAPE)


def insight() -> Json:
    """Return the rows of M, the first eigenvectors of Q and both folds of the trained network."""
    model = trained_network()
    folded = cl.fold(model, SHAPE, strategy="dense")
    (form,) = folded.forms()
    values, vectors = torch.linalg.eigh(form)
    images = vectors.flip(1)[:, :_EIGENIMAGES].T
    images = torch.where(images.sum(1, keepdim=True) < 0, -images, images)
    return {
        "name": f"D3ModNetCL on {DIGITS}",
        "labels": LABELS[DIGITS],
        "shape": SHAPE,
        "templates": _short(folded.matrix()),
        "eigenimages": _short(images),
        "eigenvalues": _short(values.flip(0)[:_EIGENIMAGES]),
        "trace": float(form.trace()),
        "folded": javascript_document(folded.recipe, "float32"),
        "layers": _document(model, "layers"),
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
