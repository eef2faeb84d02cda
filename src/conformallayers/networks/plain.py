"""Plain networks to compare with: an MLP on pixels, depthwise convolutions, the ResNet-8 of MLPerf Tiny."""

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
        layers: list[nn.Module] = [*_convolution(IMAGE_SHAPE[0], 16, factory), nn.ReLU()]
        for before, channels in ((16, 16), (16, 32), (32, 64)):
            stride = channels // before
            shortcut = None
            if stride > 1:
                shortcut = nn.Conv2d(before, channels, 1, stride, **factory)
            block = Residual(
                *_convolution(before, channels, factory, stride=stride),
                nn.ReLU(),
                *_convolution(channels, channels, factory),
                shortcut=shortcut,
            )
            layers += [block, nn.ReLU()]
        features = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1))
        super().__init__(features, nn.Linear(64, num_classes, **factory))


class DepthwiseNet(Network):
    """A convolution and five depthwise separable ones in the manner of MobileNet: 0.94 M multiply-adds an image."""

    def __init__(self, *, num_classes: int = 10, **factory: Any) -> None:
        layers: list[nn.Module] = [*_convolution(IMAGE_SHAPE[0], 16, factory, stride=2), nn.ReLU()]
        for before, channels, stride in _SEPARABLE:
            layers += _convolution(before, before, factory, stride=stride, groups=before)
            layers += [nn.ReLU(), *_convolution(before, channels, factory, kernel=1), nn.ReLU()]
        features = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1))
        super().__init__(features, nn.Linear(channels, num_classes, **factory))


_SEPARABLE = ((16, 32, 1), (32, 48, 2), (48, 64, 1), (64, 96, 2), (96, 128, 1))


def _convolution(
    before: int, channels: int, factory: dict[str, Any], kernel: int = 3, **options: Any
) -> tuple[nn.Module, nn.Module]:
    """Return a convolution that keeps the size, but for its stride, and its BatchNorm."""
    layer = nn.Conv2d(before, channels, kernel, padding=kernel // 2, **options, **factory)
    return layer, nn.BatchNorm2d(channels, **factory)
