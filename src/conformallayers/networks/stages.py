"""StageNet, a family of networks by cost, and its ReLU twin.

A stage is a convolution, a ReSPro, and a pooling that rectifies. ``cl.expand`` lets its convolution train as a chain.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import nn

from ..container import ConformalLayers
from ..errors import check_count, is_real, refusal, shape_text
from ..nn import layers as cl
from ..nn.activations import ReSPro
from ..nn.branches import Split
from ..nn.layers import Abs
from ..utils.text import suggest
from .base import IMAGE_SHAPE, Network, check_share, make_head

Rectifier = Literal["norm", "relu", "abs", "max"]


@dataclass(frozen=True)
class StageOptions:
    """The shape of a stage: one convolution and one pooling."""

    channels: int
    kernel: int
    stride: int = 1
    padding: int = 0
    pool: int = 2
    pool_stride: int = 2

    def side(self, size: int) -> int:
        """Return the output size along an axis; 0 or less if the input is too small."""
        convolved = (size + 2 * self.padding - self.kernel) // self.stride + 1
        return (convolved - self.pool) // self.pool_stride + 1


# By multiply-adds when folded, on 3×32×32 images: at most 0.3 M (6,300 weights, for small devices), 0.45 M,
# 0.66 M (LeNet's), 2.5 M, 5.6 M (90 thousand weights, for devices), and 8.5 M, which take the time of ResNet-8.
# Small maps are not padded: padding after a BatchNorm's bias folds into a dense matrix, with more
# multiply-adds than a convolution.
PRESETS: dict[str, tuple[StageOptions, ...]] = {
    "nano": (
        StageOptions(12, kernel=5, stride=2),
        StageOptions(36, kernel=3, pool=3),
    ),
    "micro": (
        StageOptions(16, kernel=5, stride=2),
        StageOptions(48, kernel=3, pool=3),
    ),
    "small": (
        StageOptions(16, kernel=5, stride=2),
        StageOptions(96, kernel=3, pool=3),
    ),
    "base": (
        StageOptions(32, kernel=5, stride=2, padding=2),
        StageOptions(80, kernel=3, pool_stride=1),
        StageOptions(144, kernel=3, pool_stride=1),
    ),
    "compact": (
        StageOptions(32, kernel=5),
        StageOptions(64, kernel=3),
        StageOptions(112, kernel=3),
    ),
    "large": (
        StageOptions(24, kernel=5),
        StageOptions(64, kernel=3, padding=1),
        StageOptions(128, kernel=3, padding=1),
        StageOptions(256, kernel=2),
    ),
}
_SIGNED = 0.25  # the share of channels without a rectifier
_WIDEST = 16  # a larger factor is a mistake, such as a number of channels
_HIDDEN = {"micro": 84, "small": 84}  # widths of the hidden layers of heads; others have none


class StageNet(Network):
    """A chain of stages: convolution, ReSPro, pooling that rectifies, BatchNorm; then a small head.

    Args:
        preset: ``"nano"``, ``"micro"``, ``"small"``, ``"base"``, ``"compact"`` or ``"large"``, by multiply-adds
            when folded.
        num_classes: the number of outputs.
        in_shape: of one image, (C, H, W).
        rectifier: of the channels that are not signed: ``"norm"`` (Euclidean norm of windows), ``"max"``
            pooling, or ``"relu"`` or ``"abs"`` followed by average pooling.
        signed: the share of channels that are averaged without a rectifier, from 0 to below 1.
        respro: whether a projective ReSPro ends the linear part of every stage. Its α is 1, because the kernels learn
            their scale, which the following BatchNorm removes again.
        offset, unit: those of :class:`conformallayers.ConformalLayers`.

    Examples:
        >>> import torch
        >>> StageNet("micro")(torch.rand(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """

    def __init__(
        self,
        preset: str = "micro",
        *,
        num_classes: int = 10,
        in_shape: Sequence[int] = IMAGE_SHAPE,
        rectifier: Rectifier = "norm",
        signed: float = _SIGNED,
        respro: bool = True,
        offset: float | str | None = "learned",
        unit: str = "rms",
        **factory: Any,
    ) -> None:
        if rectifier not in _RECTIFIED:
            expected = f"one of {', '.join(_RECTIFIED)}"
            raise refusal("rectifier", expected, repr(rectifier), 'The default is "norm".')
        remedy = "It is the share of channels without a rectifier; the default is 0.25."
        check_share("signed", signed, remedy)
        stages, features = _stages(preset, in_shape)
        layers: list[nn.Module] = []
        for stage, convolution in _convolutions(stages, in_shape, factory):
            layers.append(convolution)
            if respro:
                layers.append(ReSPro(1.0, projective=True, **factory))
            pooling = _pooling(stage, rectifier, signed)
            layers += [pooling, nn.BatchNorm2d(stage.channels, **factory)]
        head = make_head((features, _HIDDEN.get(preset), num_classes), factory, nn.ReLU)
        super().__init__(ConformalLayers(*layers, offset=offset, unit=unit), head)


class StageReLUNet(Network):
    """The ReLU twin of StageNet: the same convolutions with BatchNorm, ReLU and pooling.

    Args:
        preset, num_classes, in_shape: as in StageNet.
        pool: ``"average"`` or ``"max"`` after a ReLU; or ``"norm"``, the pooling of StageNet instead of a ReLU.
        width: a factor of the channels of every stage.
    """

    def __init__(
        self,
        preset: str = "micro",
        *,
        num_classes: int = 10,
        in_shape: Sequence[int] = IMAGE_SHAPE,
        pool: Literal["average", "max", "norm"] = "average",
        width: float = 1.0,
        **factory: Any,
    ) -> None:
        if pool not in ("average", "max", "norm"):
            expected = '"average", "max" or "norm"'
            raise refusal("pool", expected, repr(pool), 'The default is "average".')
        if not is_real(width) or not 0 < width <= _WIDEST:
            expected = f"a number above 0, at most {_WIDEST}"
            raise refusal("width", expected, repr(width), "The default is 1.")
        stages, features = _stages(preset, in_shape, width)
        layers: list[nn.Module] = []
        for stage, convolution in _convolutions(stages, in_shape, factory):
            norm = nn.BatchNorm2d(stage.channels, **factory)
            if pool == "norm":
                layers += [convolution, _pooling(stage, "norm", _SIGNED), norm]
            else:
                pooling = _maximum(stage) if pool == "max" else _average(stage)
                layers += [convolution, norm, nn.ReLU(), pooling]
        head = make_head((features, _HIDDEN.get(preset), num_classes), factory, nn.ReLU)
        super().__init__(nn.Sequential(*layers), head)


def _average(stage: StageOptions) -> nn.Module:
    return cl.AvgPool2d(stage.pool, stage.pool_stride)


def _maximum(stage: StageOptions) -> nn.Module:
    return nn.MaxPool2d(stage.pool, stage.pool_stride)


_RECTIFIED: dict[str, Callable[[StageOptions], nn.Module]] = {
    "norm": lambda stage: nn.LPPool2d(2, stage.pool, stage.pool_stride),
    "relu": lambda stage: nn.Sequential(nn.ReLU(), _average(stage)),
    "abs": lambda stage: nn.Sequential(Abs(), _average(stage)),
    "max": _maximum,
}


def _pooling(stage: StageOptions, rectifier: str, signed: float) -> nn.Module:
    """Return the pooling of a stage; a share of its channels is averaged without a rectifier."""
    rectified, averaged = _RECTIFIED[rectifier](stage), int(signed * stage.channels)
    if not averaged:
        return rectified
    return Split([averaged, stage.channels - averaged], [_average(stage), rectified])


def _stages(
    preset: str, in_shape: Sequence[int], width: float = 1.0
) -> tuple[list[StageOptions], int]:
    """Return the stages and the number of features after them; refuse arguments that build no network."""
    if preset not in PRESETS:
        expected = f"one of {', '.join(PRESETS)}"
        remedy = f"Leave it out for micro.{suggest(str(preset), PRESETS)}"
        raise refusal("preset", expected, repr(preset), remedy)
    if len(in_shape) != 3:
        raise refusal("in_shape", "(C, H, W)", repr(in_shape), "Leave out the batch axis.")
    for size in in_shape:
        check_count("in_shape", size, "Give the shape of one image, (C, H, W).")
    stages = [replace(s, channels=max(1, round(width * s.channels))) for s in PRESETS[preset]]

    def last(side: int) -> int:
        return functools.reduce(lambda side, stage: stage.side(side), stages, side)

    sides = [last(side) for side in in_shape[1:]]
    if min(sides) < 1:
        least = next(side for side in itertools.count(1) if last(side) > 0)
        expected, got = f"images of at least {least} × {least} pixels", shape_text(in_shape)
        raise refusal("in_shape", expected, got, "Enlarge the images, or use a smaller preset.")
    return stages, stages[-1].channels * math.prod(sides)


def _convolutions(
    stages: Sequence[StageOptions], in_shape: Sequence[int], factory: dict[str, Any]
) -> Iterator[tuple[StageOptions, nn.Module]]:
    """Yield each stage with its convolution."""
    channels = in_shape[0]
    for stage in stages:
        options = {"stride": stage.stride, "padding": stage.padding, **factory}
        layer = cl.Conv2d(channels, stage.channels, stage.kernel, **options)
        # Keeps the mean square: points stay of the size of α.
        nn.init.normal_(layer.weight, std=layer.weight[0].numel() ** -0.5)
        yield stage, layer
        channels = stage.channels
