"""Random plain networks of the parts that folds merge: branches, chains, joins, pools and heads."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor, nn

from blocks import randomised


class Scale(nn.Module):
    """Multiply each channel by a number and add another one, as layer scales do."""

    def __init__(self, channels: int, axes: int, shift: bool) -> None:
        super().__init__()
        self.gamma = nn.Parameter(0.5 + torch.rand(channels, *[1] * axes))
        self.beta = nn.Parameter(torch.randn(channels, *[1] * axes)) if shift else None

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma if self.beta is None else x * self.gamma + self.beta


class Sum(nn.Module):
    def __init__(self, branches: list[nn.Module]) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        total: Any = 0
        for branch in self.branches:
            total = total + branch(x)
        return total


class Cat(Sum):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], 1)


class Shared(nn.Module):
    """Values that several layers read: y = first(x), then second(y) − y/2 and, rectified, third(y)."""

    def __init__(self, first: nn.Module, second: nn.Module, third: nn.Module) -> None:
        super().__init__()
        self.first, self.second, self.third = first, second, third

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        z = self.second(y) - y / 2
        return torch.cat([z + 2 * x.relu().mean(1, keepdim=True), self.third(z), y], 1) + 1


class PlainDraw:
    """Draw a network of one to three spatial axes."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        torch.manual_seed(seed)
        self.axes = self.draw.choice((1, 2, 2, 3))
        self.shape = (
            self.draw.choice((2, 4)),
            *(self.draw.randint(5, 9) for _ in range(self.axes)),
        )

    def network(self) -> nn.Module:
        layers: list[nn.Module] = []
        x = torch.zeros(2, *self.shape)
        for _ in range(self.draw.randint(2, 5)):
            added = self.block(x.shape[1], min(x.shape[2:]))
            x = added(x)
            layers.append(added)
            if self.draw.random() < 0.4:
                layers.append(self.draw.choice((nn.ReLU(), nn.SiLU(), nn.Sigmoid())))
        layers += self.head(tuple(x.shape[1:]))
        return randomised(nn.Sequential(*layers), self.draw.randint(0, 99))

    def layer(self, name: str, *args: Any, **options: Any) -> nn.Module:
        made: nn.Module = getattr(nn, f"{name}{self.axes}d")(*args, **options)
        return made

    def conv(self, before: int, after: int, kernel: Any, **options: Any) -> nn.Module:
        groups = options.pop("groups", 1)
        if before % groups or after % groups:
            groups = 1
        bias = self.draw.random() < 0.5
        return self.layer("Conv", before, after, kernel, groups=groups, bias=bias, **options)

    def norm(self, channels: int) -> nn.Module:
        kind = self.draw.choice(("norm", "norm", "scale", "shift", "none"))
        if kind == "norm":
            return self.layer("BatchNorm", channels)
        return nn.Identity() if kind == "none" else Scale(channels, self.axes, kind == "shift")

    def block(self, channels: int, size: int) -> nn.Module:
        after = self.draw.choice((channels, channels, 2, 4, 6))
        kinds = ["chain", "branches", "branches", "residual", "stack", "shared"]
        kinds += ["pool", "transposed", "up"] if size >= 4 else []
        kind = self.draw.choice(kinds)
        if kind == "branches":
            stride = self.draw.choice((1, 1, 2))
            count = self.draw.randint(2, 4)
            branches = [self.branch(channels, after, stride, size) for _ in range(count)]
            return nn.Sequential(Sum(branches), self.norm(after))
        if kind == "residual":
            inner = nn.Sequential(self.branch(channels, channels, 1, size), nn.ReLU())
            return Sum([inner, nn.Identity(), self.branch(channels, channels, 1, size)])
        if kind == "shared":
            sizes = (channels, after), (after, after), (after, 2)
            return Shared(*(self.branch(*pair, 1, size) for pair in sizes))
        if kind == "stack":
            parts = [self.branch(channels, after, 1, size) for _ in range(2)]
            return nn.Sequential(Cat(parts), self.norm(2 * after))
        if kind == "pool":
            pool = self.layer("AvgPool", 2, **self.draw.choice(({}, {"padding": 1})))
            return nn.Sequential(self.conv(channels, after, 1), pool, self.norm(after))
        if kind == "transposed":
            up = self.layer("ConvTranspose", channels, after, 2, 2, bias=self.draw.random() < 0.5)
            return nn.Sequential(self.norm(channels), up, self.norm(after), self.conv(after, 2, 1))
        if kind == "up":
            return nn.Sequential(nn.Upsample(scale_factor=2), self.conv(channels, after, 1))
        return self.chain(channels, after, size)

    def branch(self, channels: int, after: int, stride: int, size: int) -> nn.Module:
        """Return layers that keep the size divided by the stride, with centred windows."""
        kernel = [self.draw.choice((1, 3, 3)) for _ in range(self.axes)]
        dilation = self.draw.choice((1, 1, 2)) if size > 4 else 1
        options = {
            "stride": stride,
            "padding": tuple(dilation * (k - 1) // 2 for k in kernel),
            "dilation": dilation,
            "groups": self.draw.choice((1, 1, 2, channels)),
        }
        if size > 4 and self.draw.random() < 0.15:
            options["padding_mode"] = self.draw.choice(("reflect", "replicate", "circular"))
        kinds = ["conv", "conv", "chain", "identity"] + ["average"] * (size > 2)
        kind = self.draw.choice(kinds)
        if kind == "identity" and channels == after and stride == 1:
            return self.norm(channels)
        if kind == "chain":
            first, second = self.conv(channels, 4, 1), self.conv(4, after, kernel, **options)
            return nn.Sequential(first, self.norm(4), second, self.norm(after))
        if kind == "average":
            average = self.layer("AvgPool", 3, stride, 1)
            return nn.Sequential(self.conv(channels, after, 1), self.norm(after), average)
        return nn.Sequential(self.conv(channels, after, kernel, **options), self.norm(after))

    def chain(self, channels: int, after: int, size: int) -> nn.Module:
        kernel = self.draw.choice((1, 2, 3)) if size > 3 else 1
        padding = self.draw.choice((0, 0, 1)) if kernel > 1 else 0
        first = self.conv(channels, after, kernel, padding=padding)
        layers = [self.norm(channels), first, self.norm(after), self.conv(after, after, 1)]
        if size > 5 and self.draw.random() < 0.5:
            options = {"stride": self.draw.choice((1, 2)), "padding": self.draw.choice((0, 1))}
            layers.append(self.conv(after, after, 3, **options))
        return nn.Sequential(*layers)

    def head(self, shape: tuple[int, ...]) -> list[nn.Module]:
        kind = self.draw.choice(("none", "pool", "flatten", "norm"))
        features = shape[0]
        layers: list[nn.Module] = [] if kind == "none" else [nn.Flatten()]
        if kind == "pool":
            layers.insert(0, self.layer("AdaptiveAvgPool", 1))
        elif kind != "none":
            features = torch.Size(shape).numel()
        if kind == "norm":
            layers.append(nn.BatchNorm1d(features))
        if kind != "none":
            layers += [nn.Linear(features, 3), nn.BatchNorm1d(3), nn.Linear(3, 5)]
        return layers
