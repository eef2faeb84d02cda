"""StageNet, a family of networks by cost, and its ReLU twin.

A stage is a chain of linear layers that folds into one convolution, a ReSPro, and a pooling that rectifies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..container import ConformalLayers
from ..errors import check_count, refusal, shape_text
from ..nn import layers as cl
from ..nn.activations import ReSPro
from ..nn.collapse import run_sequence
from ..nn.homogeneous import Abs, Split
from ..nn.registry import has_global_hooks, has_hooks
from ..utils.text import suggest
from .base import IMAGE_SHAPE, Network, check_share, make_head

Rectifier = Literal["norm", "relu", "abs", "max"]


@dataclass(frozen=True)
class Stage:
    """The shape of a stage when folded: one convolution and one pooling; ``inner`` channels between layers."""

    channels: int
    kernel: int
    inner: int
    stride: int = 1
    padding: int = 0
    pool: int = 2
    pool_stride: int = 2

    def kernels(self, depth: int) -> list[int]:
        """Return the kernel sizes of ``depth`` convolutions that fold into one.

        The last ones are 3×3 while the size of the whole allows it, the first ones 1×1.
        """
        sizes = [1] * depth
        for index in range(self.kernel - 1):
            sizes[-1 - index // 2 % depth] += 1
        return sizes

    def side(self, size: int) -> int:
        """Return the output size along an axis; 0 or less if the input is too small."""
        convolved = (size + 2 * self.padding - self.kernel) // self.stride + 1
        return (convolved - self.pool) // self.pool_stride + 1


# By multiply-adds when folded, on 3×32×32 images: at most 0.3 M (6,300 weights, for small devices), 0.45 M,
# 0.66 M (LeNet's), 2.5 M, 5.6 M (90 thousand weights, for devices), and 8.5 M, which take the time of ResNet-8.
# Small maps are not padded: padding behind a BatchNorm's bias folds into a dense matrix, with more
# multiply-adds than a convolution.
PRESETS: dict[str, tuple[Stage, ...]] = {
    "nano": (
        Stage(12, kernel=5, inner=12, stride=2),
        Stage(36, kernel=3, inner=40, pool=3),
    ),
    "micro": (
        Stage(16, kernel=5, inner=16, stride=2),
        Stage(48, kernel=3, inner=64, pool=3),
    ),
    "small": (
        Stage(16, kernel=5, inner=16, stride=2),
        Stage(96, kernel=3, inner=96, pool=3),
    ),
    "base": (
        Stage(32, kernel=5, inner=32, stride=2, padding=2),
        Stage(80, kernel=3, inner=96, pool_stride=1),
        Stage(144, kernel=3, inner=128, pool_stride=1),
    ),
    "compact": (
        Stage(32, kernel=5, inner=24),
        Stage(64, kernel=3, inner=64),
        Stage(112, kernel=3, inner=96),
    ),
    "large": (
        Stage(24, kernel=5, inner=24),
        Stage(64, kernel=3, inner=64, padding=1),
        Stage(128, kernel=3, inner=96, padding=1),
        Stage(256, kernel=2, inner=128),
    ),
}
_HIDDEN = {"micro": 84, "small": 84}  # widths of the hidden layers of heads; others have none


class StageNet(Network):
    """A chain of stages: convolutions, ReSPro, pooling that rectifies, BatchNorm; then a small head.

    Folded, every stage is one convolution, so the presets have the same cost at every depth.

    Args:
        preset: ``"nano"``, ``"micro"``, ``"small"``, ``"base"``, ``"compact"`` or ``"large"``, by multiply-adds
            when folded.
        num_classes: the number of outputs.
        in_shape: of one image, (C, H, W).
        depth: the number of convolutions of a stage.
        rectifier: of the channels that are not signed: ``"norm"`` (Euclidean norm of windows), ``"max"``
            pooling, or ``"relu"`` or ``"abs"`` followed by average pooling.
        signed: the share of channels that are averaged without a rectifier, from 0 to below 1.
        respro: whether a projective ReSPro ends the linear part of every stage. Its α is 1, as the kernels learn
            their scale, which the BatchNorm behind it removes again.
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
        depth: int = 2,
        rectifier: Rectifier = "norm",
        signed: float = 0.25,
        respro: bool = True,
        offset: float | str | None = "learned",
        unit: str = "rms",
        **factory: Any,
    ) -> None:
        features = _features(preset, depth, in_shape)
        pooling = _RECTIFIED.get(rectifier)
        if pooling is None:
            expected = f"one of {', '.join(_RECTIFIED)}"
            raise refusal("rectifier", expected, repr(rectifier), 'The default is "norm".')
        remedy = "It is the share of channels without a rectifier; the default is 0.25."
        check_share("signed", signed, remedy)
        layers: list[nn.Module] = []
        for stage, convolutions in _convolutions(preset, depth, in_shape, factory):
            layers += convolutions
            if respro:
                layers.append(ReSPro(1.0, projective=True, **factory))
            averaged = int(signed * stage.channels)
            rectified = pooling(stage)
            if averaged:
                sizes = [averaged, stage.channels - averaged]
                rectified = Split(sizes, [_average(stage), rectified])
            layers += [rectified, nn.BatchNorm2d(stage.channels, **factory)]
        head = make_head((features, _HIDDEN.get(preset), num_classes), factory, nn.ReLU)
        super().__init__(ConformalLayers(*layers, offset=offset, unit=unit), head)


class StageReLUNet(Network):
    """The ReLU twin of StageNet: the same convolutions, with BatchNorm, ReLU and pooling.

    Args:
        preset, num_classes, in_shape, depth: as in StageNet.
        pool: ``"max"`` or ``"average"``.
    """

    def __init__(
        self,
        preset: str = "micro",
        *,
        num_classes: int = 10,
        in_shape: Sequence[int] = IMAGE_SHAPE,
        depth: int = 2,
        pool: Literal["max", "average"] = "average",
        **factory: Any,
    ) -> None:
        features = _features(preset, depth, in_shape)
        if pool not in ("max", "average"):
            raise refusal("pool", '"max" or "average"', repr(pool), 'The default is "average".')
        layers: list[nn.Module] = []
        for stage, convolutions in _convolutions(preset, depth, in_shape, factory):
            layers += [*convolutions, nn.BatchNorm2d(stage.channels, **factory), nn.ReLU()]
            layers.append(_maximum(stage) if pool == "max" else _average(stage))
        head = make_head((features, _HIDDEN.get(preset), num_classes), factory, nn.ReLU)
        super().__init__(nn.Sequential(*layers), head)

    def forward(self, input: Tensor) -> Tensor:
        """Return the scores of the classes; convolutions in a row train as one, as those of StageNet."""
        features: Any = self.features
        hooks = has_hooks(features) or has_global_hooks()
        plain = type(features) is nn.Sequential and not hooks
        if not self.training or not plain or torch.compiler.is_compiling():
            return super().forward(input)
        scores: Tensor = self.head(torch.flatten(run_sequence(features, input), 1))
        return scores


def _average(stage: Stage) -> nn.Module:
    return cl.AvgPool2d(stage.pool, stage.pool_stride)


def _maximum(stage: Stage) -> nn.Module:
    return nn.MaxPool2d(stage.pool, stage.pool_stride)


_RECTIFIED: dict[str, Callable[[Stage], nn.Module]] = {
    "norm": lambda stage: nn.LPPool2d(2, stage.pool, stage.pool_stride),
    "relu": lambda stage: nn.Sequential(nn.ReLU(), _average(stage)),
    "abs": lambda stage: nn.Sequential(Abs(), _average(stage)),
    "max": _maximum,
}


def _features(preset: str, depth: int, in_shape: Sequence[int]) -> int:
    """Return the number of features behind the last stage; refuse arguments that build no network."""
    if preset not in PRESETS:
        expected = f"one of {', '.join(PRESETS)}"
        remedy = f"Leave it out for micro.{suggest(str(preset), PRESETS)}"
        raise refusal("preset", expected, repr(preset), remedy)
    check_count("depth", depth, "It is the number of convolutions of a stage.")
    if len(in_shape) != 3:
        raise refusal("in_shape", "(C, H, W)", repr(in_shape), "Leave out the batch axis.")
    for size in in_shape:
        check_count("in_shape", size, "Give the shape of one image, (C, H, W).")
    sides = list(in_shape[1:])
    for stage in PRESETS[preset]:
        sides = [stage.side(side) for side in sides]
    if min(sides) < 1:
        expected, got = "images large enough for all stages", shape_text(in_shape)
        raise refusal("in_shape", expected, got, "Enlarge the images, or use a smaller preset.")
    return stage.channels * sides[0] * sides[1]


def _convolutions(
    preset: str, depth: int, in_shape: Sequence[int], factory: dict[str, Any]
) -> Iterator[tuple[Stage, list[nn.Module]]]:
    """Yield each stage with its convolutions; the first one pads and the last one has the stride."""
    channels = in_shape[0]
    for stage in PRESETS[preset]:
        layers: list[nn.Module] = []
        widths = [channels, *[stage.inner] * (depth - 1), stage.channels]
        for index, kernel in enumerate(stage.kernels(depth)):
            stride = stage.stride if index == depth - 1 else 1
            padding = 0 if index else stage.padding
            layer = cl.Conv2d(widths[index], widths[index + 1], kernel, stride, padding, **factory)
            # Keeps the mean square, at any depth: points stay of the size of α.
            nn.init.normal_(layer.weight, std=layer.weight[0].numel() ** -0.5)
            layers.append(layer)
        yield stage, layers
        channels = stage.channels
