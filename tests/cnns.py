"""Plain CNNs as people write them, for the tests of cl.convert, and what their twins must compute."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import blocks

Function = Callable[[Tensor], Tensor]


def vgg(channels: int = 4, *, norm: bool = True) -> nn.Sequential:
    """Build convolutions in pairs with max pooling, and an MLP as its head, for 3×8×8."""

    def block(before: int, after: int) -> nn.Sequential:
        layers: list[nn.Module] = []
        for inputs in (before, after):
            layers.append(nn.Conv2d(inputs, after, 3, padding=1))
            layers += [nn.BatchNorm2d(after)] if norm else []
            layers.append(nn.ReLU(inplace=True))
        return nn.Sequential(*layers, nn.MaxPool2d(2))

    features = nn.Sequential(block(3, channels), block(channels, 2 * channels))
    head = nn.Sequential(
        nn.Flatten(), nn.Linear(8 * channels, 6), nn.ReLU(True), nn.Dropout(0.5), nn.Linear(6, 5)
    )
    return nn.Sequential(features, head)


class ResNet(nn.Module):
    """A ResNet of functions: additions in place, strided blocks with a convolution in the skip."""

    functions: tuple[Function, ...] = (F.relu, torch.relu, lambda x: x.relu()) * 3

    def __init__(self, channels: int = 4) -> None:
        super().__init__()
        self.stem, self.norm = (
            nn.Conv2d(3, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )
        sizes = [(channels, channels, 1), (channels, channels, 1), (channels, 2 * channels, 2)]
        self.blocks = nn.ModuleList(_Block(*size) for size in sizes)
        self.fc = nn.Linear(2 * channels, 5)

    def forward(self, x: Tensor, features: bool = False) -> Tensor:
        x = self.functions[0](self.norm(self.stem(x)))
        for index, block in enumerate(self.blocks):
            x = block(x, *self.functions[2 * index + 1 : 2 * index + 3])
        x = F.avg_pool2d(x, x.size()[3])
        if features:
            return x
        x = F.dropout(x.view(x.size(0), -1), 0.3, self.training)
        return F.log_softmax(self.fc(x), dim=1)


class _Block(nn.Module):
    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(after), nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.downsample = None
        if stride > 1:
            skip = nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after)
            self.downsample = nn.Sequential(*skip)

    def forward(self, x: Tensor, first: Function, second: Function) -> Tensor:
        y = self.bn2(self.conv2(first(self.bn1(self.conv1(x)))))
        y += x if self.downsample is None else self.downsample(x)
        return second(y)


class Mobile(nn.Module):
    """Inverted residuals with depthwise convolutions and one rectifier that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.widen, self.norm = nn.Conv2d(3, 6, 1), nn.BatchNorm2d(6)
        self.depthwise = nn.Conv2d(6, 6, 3, padding=1, groups=6)
        self.narrow, self.relu = nn.Conv2d(6, 3, 1), nn.ReLU(inplace=True)
        self.grouped = nn.Conv2d(3, 6, 3, stride=2, groups=3)
        self.prelu, self.classify = nn.PReLU(6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.norm(self.widen(x)))
        y = self.narrow(self.relu(self.depthwise(y)))
        y = self.prelu(self.grouped(x + y))
        return self.classify(y.mean([2, 3]))


def signal_net() -> nn.Sequential:
    """Build a CNN of signals, for 2×24."""
    return nn.Sequential(
        nn.Conv1d(2, 4, 5, bias=False),
        nn.BatchNorm1d(4),
        nn.LeakyReLU(0.2),
        nn.Conv1d(4, 4, 3),
        nn.ReLU(),
        nn.LPPool1d(2, 2),
        nn.Dropout1d(0.2),
        nn.Conv1d(4, 6, 3),
        nn.ReLU(),
        nn.AdaptiveAvgPool1d(2),
        nn.Flatten(),
        nn.BatchNorm1d(12),
        nn.Linear(12, 3),
    )


CNNS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "vgg": (vgg, (3, 8, 8)),
    "vgg without norm": (lambda: vgg(norm=False), (3, 8, 8)),
    "resnet": (ResNet, (3, 8, 8)),
    "mobile": (Mobile, (3, 7, 7)),
    "dense": (lambda: nn.Sequential(blocks.Dense(3), blocks.Dense(7)), (3, 6, 6)),
    "unet": (lambda: nn.Sequential(blocks.UNet(3), nn.Sigmoid()), (3, 8, 8)),
    "signal": (signal_net, (2, 24)),
}


class OnPoints(nn.Module):
    """The projective ReSPro of radius 1 in root mean squares, of points."""

    def forward(self, p: Tensor) -> Tensor:
        square = p.square().flatten(1).mean(1)
        return 2 * p / (1 + square).view(-1, *[1] * (p.dim() - 1))


def replaced(twin: nn.Module) -> list[str]:
    """Return the labels of the rectifiers that a conversion has replaced."""
    return [one.path for one in twin.conversion.changes if one.action == "replaced by ReSPro"]


def expected_of(model: nn.Module, twin: nn.Module, x: Tensor) -> Tensor:
    """Return what a twin must give: the model on points, with rectifiers replaced as its table says.

    Neither the twin's layers nor (x, t) take part in it, the offset and the table alone do.
    """
    points = copy.deepcopy(model).double().eval()
    for path in replaced(twin):
        points.set_submodule(path, OnPoints())
    with torch.no_grad():
        result: Tensor = points(embedded(twin, x))
    return result


def embedded(twin: nn.Module, x: Tensor) -> Tensor:
    """Return the points of samples, x/t."""
    offset = twin.features.log_offset.detach().double().exp()
    t = (x.double().square().flatten(1).mean(1) + offset**2).sqrt()
    return x.double() / t.view(-1, *[1] * (x.dim() - 1))
