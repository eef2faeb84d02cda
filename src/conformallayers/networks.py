"""The networks of the paper: each conformal one beside its ReLU counterpart.

All take 3×32×32 images. The ReLU networks have biases in their convolutions, the others none.
Every class takes ``num_classes``, ``device`` and ``dtype``; the conformal ones also ``alpha`` and
``projective``, which go to each :class:`ReSPro`, and ``gain``, a learned factor at the end of the
conformal part, whose output is small (of norm 1 at most in the projective form).
``save_pretrained`` and ``from_pretrained`` keep them in a folder or on the Hub, see ``docs/hub.md``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .errors import refusal
from .hub.mixin import Published
from .nn import layers as cl
from .nn.activations import ReSPro
from .nn.container import ConformalLayers
from .nn.extra_layers import Scale

__all__ = [
    "IMAGE_SHAPE",
    "BaseLinearNet",
    "BaseReLUNet",
    "BaseReSProNet",
    "D3ModNet",
    "D3ModNetCL",
    "DkNet",
    "DkNetCL",
    "LeNet",
    "LeNetCL",
]

IMAGE_SHAPE = (3, 32, 32)


class Network(nn.Module, Published):
    """Features, flattened, into a head: the shape of all networks here."""

    def __init__(self, features: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.features = features
        self.head = head

    def forward(self, input: Tensor) -> Tensor:
        """Return class scores, (B, 3, 32, 32) → (B, num_classes)."""
        result: Tensor = self.head(torch.flatten(self.features(input), 1))
        return result


def _conformal(
    stages: Sequence[nn.Module], gain: float | None, factory: dict[str, Any]
) -> ConformalLayers:
    return ConformalLayers(*stages, *([] if gain is None else [Scale(gain, **factory)]))


def _base_head(
    pool_stride: int, hidden: int | None, num_classes: int, factory: dict[str, Any]
) -> nn.Module:
    if isinstance(pool_stride, bool) or not isinstance(pool_stride, int) or pool_stride < 1:
        raise refusal("pool_stride", "a whole number > 0", repr(pool_stride), "The default is 2.")
    side = (30 - 2) // pool_stride + 1
    if hidden is None:
        return nn.Linear(32 * side**2, num_classes, **factory)
    return nn.Sequential(
        nn.Linear(32 * side**2, hidden, **factory),
        nn.ReLU(),
        nn.Linear(hidden, num_classes, **factory),
    )


class BaseLinearNet(Network):
    """Convolution 3→32 of 3×3 with bias, average pooling 2×2, one linear layer; no activation.

    Args:
        pool_stride: 2 gives the 7200 features of the paper's figure; its text says 1.
    """

    def __init__(self, pool_stride: int = 2, *, num_classes: int = 10, **factory: Any) -> None:
        head = _base_head(pool_stride, None, num_classes, factory)
        stages = nn.Conv2d(3, 32, 3, **factory), nn.AvgPool2d(2, pool_stride)
        super().__init__(nn.Sequential(*stages), head)


class BaseReLUNet(Network):
    """BaseLinearNet with a ReLU after the convolution.

    Args:
        pool_stride: as in BaseLinearNet.
        hidden: width of a layer with ReLU in the head; None, as in the paper, has none.
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
        stages = nn.Conv2d(3, 32, 3, **factory), nn.ReLU(), nn.AvgPool2d(2, pool_stride)
        super().__init__(nn.Sequential(*stages), head)


class BaseReSProNet(Network):
    """BaseLinearNet with a ReSPro after the convolution, which has no bias.

    Args:
        pool_stride: as in BaseLinearNet.
        hidden: as in BaseReLUNet.
        alpha, projective: of the activation.
        gain: where a learned factor behind it starts; None has none.

    Examples:
        >>> BaseReSProNet()(torch.rand(2, 3, 32, 32)).shape
        torch.Size([2, 10])
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
        stages = [
            cl.Conv2d(3, 32, 3, **factory),
            ReSPro(alpha, projective=projective, **factory),
            cl.AvgPool2d(2, pool_stride),
        ]
        super().__init__(_conformal(stages, gain, factory), head)


def _lenet_head(
    hidden: int | None, dropout: float, num_classes: int, factory: dict[str, Any]
) -> nn.Sequential:
    width = 120 if hidden is None else hidden
    if isinstance(width, bool) or not isinstance(width, int) or width < 1:
        remedy = "None has the paper's 120."
        raise refusal("hidden", "a whole number > 0", repr(hidden), remedy)
    number = isinstance(dropout, (int, float)) and not isinstance(dropout, bool)
    if not number or not 0 <= dropout < 1:
        raise refusal("dropout", "a number from 0 to below 1", repr(dropout), "0 has none.")

    def relu() -> nn.Module:  # as one module, so that the layers have the same names either way
        return nn.Sequential(nn.ReLU(), nn.Dropout(dropout)) if dropout else nn.ReLU()

    return nn.Sequential(
        nn.Linear(400, width, **factory),
        relu(),
        nn.Linear(width, 84, **factory),
        relu(),
        nn.Linear(84, num_classes, **factory),
    )


class LeNet(Network):
    """LeNet-5 with ReLU and max pooling.

    Args:
        hidden: width of the first layer of the head; None has the paper's 120.
        dropout: share of the hidden units of the head that a training step leaves out.
    """

    def __init__(
        self,
        *,
        hidden: int | None = None,
        dropout: float = 0.0,
        num_classes: int = 10,
        **factory: Any,
    ) -> None:
        features = nn.Sequential(
            nn.Conv2d(3, 6, 5, **factory),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(6, 16, 5, **factory),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        super().__init__(features, _lenet_head(hidden, dropout, num_classes, factory))


class LeNetCL(Network):
    """LeNet-5 with its two convolutional stages as ConformalLayers, and average pooling.

    Args:
        alpha, projective: of the activations.
        gain: where a learned factor behind them starts; None has none.
        hidden, dropout: as in LeNet.

    Examples:
        >>> LeNetCL(alpha="spectral")(torch.rand(2, 3, 32, 32)).shape
        torch.Size([2, 10])
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
        stages = [
            cl.Conv2d(3, 6, 5, **factory),
            ReSPro(alpha, projective=projective, **factory),
            cl.AvgPool2d(2),
            cl.Conv2d(6, 16, 5, **factory),
            ReSPro(alpha, projective=projective, **factory),
            cl.AvgPool2d(2),
        ]
        head = _lenet_head(hidden, dropout, num_classes, factory)
        super().__init__(_conformal(stages, gain, factory), head)


def _dk_head(hidden: int | None, num_classes: int, factory: dict[str, Any]) -> nn.Module:
    if hidden is None:
        return nn.Linear(32 * 32 * 32, num_classes, **factory)
    return nn.Sequential(
        nn.Linear(32 * 32 * 32, hidden, **factory), nn.Linear(hidden, num_classes, **factory)
    )


def _checked_depth(depth: int) -> int:
    if isinstance(depth, bool) or not isinstance(depth, int) or depth < 1:
        raise refusal("depth", "a whole number > 0", repr(depth), "It counts the convolutions.")
    return depth


class DkNet(Network):
    """``depth`` convolutions of 3×3 to 32 channels with padding 1, each followed by a ReLU.

    Args:
        depth: the number of layers, k in the paper.
        hidden: width of a fully connected layer before the last one; None has none.
    """

    def __init__(
        self, depth: int, hidden: int | None = None, *, num_classes: int = 10, **factory: Any
    ) -> None:
        stages: list[nn.Module] = []
        for index in range(_checked_depth(depth)):
            stages.append(nn.Conv2d(32 if index else 3, 32, 3, padding=1, **factory))
            stages.append(nn.ReLU())
        super().__init__(nn.Sequential(*stages), _dk_head(hidden, num_classes, factory))


class DkNetCL(Network):
    """``depth`` convolutions of 3×3 to 32 channels with padding 1, each followed by a ReSPro.

    Args:
        depth: the number of layers, k in the paper.
        hidden: width of a fully connected layer before the last one; None has none.
        alpha, projective: of the activations.
        gain: where a learned factor behind them starts; None has none.

    Examples:
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
        padding_mode: cl.PaddingMode = "zeros",
        num_classes: int = 10,
        **factory: Any,
    ) -> None:
        stages: list[nn.Module] = []
        for index in range(_checked_depth(depth)):
            channels = 32 if index else 3
            stages.append(
                cl.Conv2d(channels, 32, 3, padding=1, padding_mode=padding_mode, **factory)
            )
            stages.append(ReSPro(alpha, projective=projective, **factory))
        super().__init__(_conformal(stages, gain, factory), _dk_head(hidden, num_classes, factory))


class D3ModNet(Network):
    """Three times: convolution of 3×3 to 32 channels, ReLU, average pooling 2×2."""

    def __init__(self, *, num_classes: int = 10, **factory: Any) -> None:
        stages: list[nn.Module] = []
        for index in range(3):
            stages.append(nn.Conv2d(32 if index else 3, 32, 3, **factory))
            stages += [nn.ReLU(), nn.AvgPool2d(2)]
        super().__init__(nn.Sequential(*stages), nn.Linear(128, num_classes, **factory))


class D3ModNetCL(Network):
    """Three times: convolution of 3×3 to 32 channels, ReSPro, average pooling 2×2.

    Args:
        alpha, projective: of the activations.
        gain: where a learned factor behind them starts; None has none.

    Examples:
        >>> D3ModNetCL()(torch.rand(2, 3, 32, 32)).shape
        torch.Size([2, 10])
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
        stages: list[nn.Module] = []
        for index in range(3):
            stages.append(cl.Conv2d(32 if index else 3, 32, 3, **factory))
            stages += [ReSPro(alpha, projective=projective, **factory), cl.AvgPool2d(2)]
        head = nn.Linear(128, num_classes, **factory)
        super().__init__(_conformal(stages, gain, factory), head)
