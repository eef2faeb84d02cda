"""Baselines: an MLP on pixels, and the ResNet-8 of MLPerf Tiny."""

from __future__ import annotations

import math
from typing import Any

from torch import nn

from ..errors import check_count
from ..nn.branches import Residual
from .base import IMAGE_SHAPE, Network, make_head


class MLP(Network):
    """One hidden layer with ReLU on the pixels.

    Args:
        hidden: its width; 200 gives about the multiply-adds of LeNet.
    """

    def __init__(self, hidden: int = 200, *, num_classes: int = 10, **factory: Any) -> None:
        check_count("hidden", hidden, "It is the width of the hidden layer.")
        widths = (math.prod(IMAGE_SHAPE), hidden, num_classes)
        super().__init__(nn.Identity(), make_head(widths, factory, nn.ReLU))


class ResNet8(Network):
    """A convolution, three residual blocks of 16, 32 and 64 channels, average pooling, a linear layer.

    The image classification network of MLPerf Tiny: 78 k weights, 12.5 M multiply-adds for an image.

    Examples:
        >>> import torch
        >>> ResNet8()(torch.rand(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """

    def __init__(self, *, num_classes: int = 10, **factory: Any) -> None:
        layers: list[nn.Module] = [*_convolution(IMAGE_SHAPE[0], 16, 1, factory), nn.ReLU()]
        for before, channels in ((16, 16), (16, 32), (32, 64)):
            stride = channels // before
            shortcut = None
            if stride > 1:
                shortcut = nn.Conv2d(before, channels, 1, stride, **factory)
            block = Residual(
                *_convolution(before, channels, stride, factory),
                nn.ReLU(),
                *_convolution(channels, channels, 1, factory),
                shortcut=shortcut,
            )
            layers += [block, nn.ReLU()]
        features = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1))
        super().__init__(features, nn.Linear(64, num_classes, **factory))


def _convolution(
    before: int, channels: int, stride: int, factory: dict[str, Any]
) -> tuple[nn.Module, nn.Module]:
    """Return a convolution of 3×3 and its BatchNorm."""
    layer = nn.Conv2d(before, channels, 3, stride, padding=1, **factory)
    return layer, nn.BatchNorm2d(channels, **factory)
