"""The networks of the paper: each conformal network beside its ReLU counterpart.

All take images of shape 3×32×32. The convolutions of the ReLU networks have biases, those of the
conformal networks have none. Every class takes ``num_classes``, ``device`` and ``dtype``. The
conformal networks also take ``alpha`` and ``projective``, the options of every :class:`ReSPro`, and
``gain``, the initial value of a learned factor after the conformal part, whose output is small
(of norm 1 at most in the projective form). ``save_pretrained`` and ``from_pretrained`` save to and
load from a folder or the Hub, see ``docs/deploy.md``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

from torch import nn

from ..container import ConformalLayers
from ..errors import check_count
from ..nn import layers as cl
from ..nn.activations import ReSPro
from ..nn.layers import Scale
from .base import Network, check_share, make_head


def _layers(
    channels: Sequence[int],
    kernel: int,
    conv: Callable[..., nn.Module],
    *following: Callable[[], nn.Module],
    **options: Any,
) -> list[nn.Module]:
    """Return convolutions from each number of channels to the next, each followed by the given layers."""
    layers = []
    for before, after in pairwise(channels):
        layers += [conv(before, after, kernel, **options), *(build() for build in following)]
    return layers


def _conformal(
    layers: Sequence[nn.Module], gain: float | None, factory: dict[str, Any]
) -> ConformalLayers:
    """Chain layers, with a learned factor after them if there is a gain."""
    return ConformalLayers(*layers, *([] if gain is None else [Scale(gain, **factory)]))


def _base_head(
    pool_stride: int, hidden: int | None, num_classes: int, factory: dict[str, Any]
) -> nn.Module:
    check_count("pool_stride", pool_stride, "The default is 2.")
    features = 32 * ((30 - 2) // pool_stride + 1) ** 2
    return make_head((features, hidden, num_classes), factory, nn.ReLU)


class BaseLinearNet(Network):
    """Convolution 3→32 of 3×3 with bias, average pooling 2×2, one linear layer; no activation.

    Args:
        pool_stride: stride of the pooling; 2 gives the 7200 features of the paper's figure, whose
            text says 1.
    """

    def __init__(self, pool_stride: int = 2, *, num_classes: int = 10, **factory: Any) -> None:
        head = _base_head(pool_stride, None, num_classes, factory)
        layers = _layers((3, 32), 3, nn.Conv2d, partial(nn.AvgPool2d, 2, pool_stride), **factory)
        super().__init__(nn.Sequential(*layers), head)


class BaseReLUNet(Network):
    """BaseLinearNet with a ReLU after the convolution.

    Args:
        pool_stride: as in BaseLinearNet.
        hidden: width of a hidden layer with ReLU in the head; None, as in the paper, means no
            such layer.
    """

    def __init__(
        self,
        pool_stride: int = 2,
        hidden: int | None = None,
        *,
        num_classes: int = 10,
        **factory: Any,
    ) -> None:
        head = _base_head(pool_stride, hidden, num_classes, factory)
        pool = partial(nn.AvgPool2d, 2, pool_stride)
        layers = _layers((3, 32), 3, nn.Conv2d, nn.ReLU, pool, **factory)
        super().__init__(nn.Sequential(*layers), head)


class BaseReSProNet(Network):
    """BaseLinearNet with a ReSPro after the convolution, which has no bias.

    Args:
        pool_stride: as in BaseLinearNet.
        hidden: as in BaseReLUNet.
        alpha, projective: options of the activation.
        gain: initial value of a learned factor after it; None means no factor.
    """

    def __init__(
        self,
        pool_stride: int = 2,
        hidden: int | None = None,
        *,
        alpha: str | float | None = None,
        projective: bool = False,
        gain: float | None = None,
        num_classes: int = 10,
        **factory: Any,
    ) -> None:
        head = _base_head(pool_stride, hidden, num_classes, factory)
        respro = partial(ReSPro, alpha, projective=projective, **factory)
        pool = partial(cl.AvgPool2d, 2, pool_stride)
        layers = _layers((3, 32), 3, cl.Conv2d, respro, pool, **factory)
        super().__init__(_conformal(layers, gain, factory), head)


def _lenet_head(
    hidden: int | None, dropout: float, num_classes: int, factory: dict[str, Any]
) -> nn.Module:
    width = 120 if hidden is None else hidden
    check_count("hidden", width, "None means the paper's 120.")
    check_share("dropout", dropout, "0 means none.")

    def relu() -> nn.Module:  # one module, so that dropout does not change the layers' names
        return nn.Sequential(nn.ReLU(), nn.Dropout(dropout)) if dropout else nn.ReLU()

    return make_head((400, width, 84, num_classes), factory, relu)


class LeNet(Network):
    """LeNet-5 with ReLU and max pooling.

    Args:
        hidden: width of the first layer of the head; None means the paper's 120.
        dropout: probability of zeroing a hidden unit of the head in training.
    """

    def __init__(
        self,
        *,
        hidden: int | None = None,
        dropout: float = 0.0,
        num_classes: int = 10,
        **factory: Any,
    ) -> None:
        pool = partial(nn.MaxPool2d, 2)
        layers = _layers((3, 6, 16), 5, nn.Conv2d, nn.ReLU, pool, **factory)
        head = _lenet_head(hidden, dropout, num_classes, factory)
        super().__init__(nn.Sequential(*layers), head)


class LeNetCL(Network):
    """LeNet-5 with its two convolutional stages as ConformalLayers, and average pooling.

    Args:
        alpha, projective: options of the activations.
        gain: initial value of a learned factor after them; None means no factor.
        hidden, dropout: as in LeNet.
    """

    def __init__(
        self,
        *,
        alpha: str | float | None = None,
        projective: bool = False,
        gain: float | None = None,
        hidden: int | None = None,
        dropout: float = 0.0,
        num_classes: int = 10,
        **factory: Any,
    ) -> None:
        respro = partial(ReSPro, alpha, projective=projective, **factory)
        pool = partial(cl.AvgPool2d, 2)
        layers = _layers((3, 6, 16), 5, cl.Conv2d, respro, pool, **factory)
        head = _lenet_head(hidden, dropout, num_classes, factory)
        super().__init__(_conformal(layers, gain, factory), head)


class DkNet(Network):
    """``depth`` convolutions of 3×3 to 32 channels with padding 1, each followed by a ReLU.

    Args:
        depth: number of convolutions, k in the paper.
        hidden: width of a linear layer before the last one; None means no such layer.
    """

    def __init__(
        self, depth: int, hidden: int | None = None, *, num_classes: int = 10, **factory: Any
    ) -> None:
        check_count("depth", depth, "It is the number of convolutions.")
        layers = _layers((3, *[32] * depth), 3, nn.Conv2d, nn.ReLU, padding=1, **factory)
        head = make_head((32 * 32 * 32, hidden, num_classes), factory)
        super().__init__(nn.Sequential(*layers), head)


class DkNetCL(Network):
    """``depth`` convolutions of 3×3 to 32 channels with padding 1, each followed by a ReSPro.

    Args:
        depth: number of convolutions, k in the paper.
        hidden: width of a linear layer before the last one; None means no such layer.
        alpha, projective: options of the activations.
        gain: initial value of a learned factor after them; None means no factor.

    Examples:
        >>> import torch
        >>> DkNetCL(3)(torch.rand(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """

    def __init__(
        self,
        depth: int,
        hidden: int | None = None,
        *,
        alpha: str | float | None = None,
        projective: bool = False,
        gain: float | None = None,
        num_classes: int = 10,
        **factory: Any,
    ) -> None:
        check_count("depth", depth, "It is the number of convolutions.")
        respro = partial(ReSPro, alpha, projective=projective, **factory)
        layers = _layers((3, *[32] * depth), 3, cl.Conv2d, respro, padding=1, **factory)
        head = make_head((32 * 32 * 32, hidden, num_classes), factory)
        super().__init__(_conformal(layers, gain, factory), head)


class D3ModNet(Network):
    """Three times: convolution of 3×3 to 32 channels, ReLU, average pooling 2×2."""

    def __init__(self, *, num_classes: int = 10, **factory: Any) -> None:
        pool = partial(nn.AvgPool2d, 2)
        layers = _layers((3, 32, 32, 32), 3, nn.Conv2d, nn.ReLU, pool, **factory)
        super().__init__(nn.Sequential(*layers), nn.Linear(128, num_classes, **factory))


class D3ModNetCL(Network):
    """Three times: convolution of 3×3 to 32 channels, ReSPro, average pooling 2×2.

    Args:
        alpha, projective: options of the activations.
        gain: initial value of a learned factor after them; None means no factor.
    """

    def __init__(
        self,
        *,
        alpha: str | float | None = None,
        projective: bool = False,
        gain: float | None = None,
        num_classes: int = 10,
        **factory: Any,
    ) -> None:
        respro = partial(ReSPro, alpha, projective=projective, **factory)
        pool = partial(cl.AvgPool2d, 2)
        layers = _layers((3, 32, 32, 32), 3, cl.Conv2d, respro, pool, **factory)
        head = nn.Linear(128, num_classes, **factory)
        super().__init__(_conformal(layers, gain, factory), head)
