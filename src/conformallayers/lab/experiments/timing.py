"""Which engines are ours, and layers run one by one for a timing."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ...nn.container import layer_by_layer

CONFORMAL = ("layers", "folded", "tolerance")  # engines of the conformal network


def fastest_other(times: Mapping[str, float]) -> str | None:
    """Return the fastest engine of the ReLU counterpart, None if there is none.

    Examples:
        >>> fastest_other({"eager": 2.0, "onnx": 1.0, "folded": 0.5})
        'onnx'
    """
    others = [name for name in times if name not in CONFORMAL]
    return min(others, key=lambda name: times[name], default=None)


def run_layers(model: nn.Module, x: Tensor) -> Tensor:
    """Run a model for a timing; a ConformalLayers that is not folded runs layer by layer."""
    with torch.inference_mode(), layer_by_layer():
        y: Tensor = model(x)
    return y
