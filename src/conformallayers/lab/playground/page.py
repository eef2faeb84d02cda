"""Write the playground as one static HTML page: no server, and nothing from outside."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor, nn

import conformallayers as cl

from ... import __version__
from ...errors import refusal, shape_text
from ...graph.capture import capture
from ...recipe.javascript.document import javascript_document, javascript_source
from ...utils.files import replace_file
from ..checks import torch_settings
from ..data.batches import from_images
from ..data.catalogue import CLASSES, DIGITS, LABELS, SHAPES
from ..data.datasets import load as load_images
from ..training.saved_models import load_model

NETWORK = "mnist-micro"  # of the zoo, where no other is named
SHAPE = SHAPES[DIGITS]
_WEB = Path(__file__).with_name("web")
TRAINED = Path(__file__).with_name("data") / "d3modnet-digits.safetensors"  # a state_dict
DEPTHS = range(1, 10)
_CHANNELS = 16
_EIGENIMAGES = 10
# In JSON, so that no HTML parser sees the end of a script or a comment in it.
_ESCAPED = {ord(character): f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"}
Json = dict[str, Any]
_SCRIPTS = "drawing", "picture", "classify", "depth", "expand", "respro", "insight"
# How the images of a data set are framed: the share of the side that is filled, and what is centred.
_FITS: dict[str, tuple[float, str]] = {DIGITS: (1.0, "box"), "mnist": (20 / 28, "mass")}


def write_playground(out: Path, folds: Sequence[str | Path] = ()) -> Path:
    """Write the page and return its path."""
    data = {
        "version": __version__,
        "networks": [network_entry(fold) for fold in folds or [NETWORK]],
        "examples": examples(),
        "graph": folded_graph(),
        "depth": depth_documents(),
        "insight": insight(),
    }
    parts = {
        "STYLE": (_WEB / "style.css").read_text("utf-8"),
        "DATA": json.dumps(data, separators=(",", ":")).translate(_ESCAPED),
        "RUNTIME": javascript_source(),
        "SCRIPTS": "\n".join((_WEB / f"{name}.js").read_text("utf-8") for name in _SCRIPTS),
    }
    page = (_WEB / "page.html").read_text("utf-8")
    # One pass, so that text like @DATA@ inside a part is not replaced.
    replace_file(out, [re.sub(r"@([A-Z]+)@", lambda found: parts[found[1]], page).encode()])
    return out


def network_entry(model: str | Path) -> Json:
    """Return the fold of a model for the page: its recipe, its labels, and how its images look."""
    loaded = load_model(model, "playground")
    net = loaded.fold("playground")
    shape, outputs = net.input_shape, net.output_shape
    if len(shape) != 3 or shape[0] not in (1, 3) or len(outputs) != 1:
        expected = "a fold from images (1 or 3, H, W) to one score for each class"
        got = f"{shape_text(shape)} → {shape_text(outputs)}"
        raise refusal(f"playground {model}", expected, got, "Give another file.")
    about = net.about or {}
    return {
        "name": loaded.path.parent.name if loaded.config else loaded.path.stem,
        "labels": list(net.labels or map(str, range(outputs[0]))),
        "white": float(about.get("white", 1.0)),
        "fit": _FITS.get(str(about.get("dataset"))),
        "document": javascript_document(net.recipe, str(net.dtype).removeprefix("torch.")),
    }


# -- demonstrations beside the classifier: time against depth, templates and eigenimages, example digits --


def folded_graph() -> Json:
    """Return the nodes of a small network and those of its fold: name, label, and names that a node reads."""
    branches = (
        nn.Sequential(nn.Conv2d(8, 8, side, padding=side // 2, bias=False), nn.BatchNorm2d(8))
        for side in (3, 1)
    )
    block = cl.Parallel(*branches, nn.BatchNorm2d(8)), nn.ReLU()  # as RepVGG trains it
    chain = nn.Conv2d(8, 16, 1), nn.Conv2d(16, 8, 3), nn.BatchNorm2d(8), nn.ReLU()
    model = nn.Sequential(*block, *chain).eval()
    nodes = capture(model, (8, 8, 8)).nodes
    before = [{"name": "x", "label": "input", "reads": []}]
    after = list(before)
    for node in nodes:
        sides = "×".join(map(str, getattr(node.module, "kernel_size", ())))
        reads = [nodes[source].name if source >= 0 else "x" for source in node.sources]
        label = f"{node.call} {sides}".rstrip()
        before.append({"name": node.name, "label": label, "reads": reads})
    folded = cl.fold(model, (8, 8, 8))
    document = javascript_document(folded.recipe, "float32")
    for step in document["operations"]:
        sizes = document["constants"].get(step["constants"].get("weight"), {}).get("shape", ())
        label = f"{step['operation']} {'×'.join(map(str, sizes[2:]))}"
        label = step["settings"].get("function", label)
        after.append({"name": step["writes"][0], "label": label, "reads": step["reads"]})
    costs = [(one.cost_before.work, one.cost_after.work) for one in folded.explain().regions]
    multiply_adds = [sum(column) for column in zip(*costs, strict=True)]
    return {"before": before, "after": after, "multiply_adds": multiply_adds}


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
    network.load_state_dict(load_file(TRAINED))
    return from_images(network.eval(), SHAPE)


def insight() -> Json:
    """Return the rows of M, the first eigenvectors of Q and both folds of the trained network."""
    model = trained_network()
    (part,) = cl.inspect(model, SHAPE, top=_EIGENIMAGES).parts
    (form,) = part.forms
    return {
        "name": f"D3ModNetCL on {DIGITS}",
        "labels": LABELS[DIGITS],
        "shape": SHAPE,
        "templates": _short(part.templates.flatten(1)),
        "eigenimages": _short(form.eigenimages.flatten(1)),
        "eigenvalues": _short(form.eigenvalues[:_EIGENIMAGES]),
        "trace": form.trace,
        "folded": _document(model, "dense"),
        "layers": _document(model, "layers"),
    }


def examples() -> list[Json]:
    """Return one test image of every digit, as integers from 0 to 16."""
    data = load_images(DIGITS)
    rows = [int((data.test_labels == label).nonzero()[0]) for label in range(CLASSES)]
    return [
        {
            "label": str(label),
            "pixels": (data.test_images[row].flatten() / 255 * 16).round().int().tolist(),
        }
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
