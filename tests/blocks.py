"""Blocks of well-known re-parameterised and plain networks, with random statistics, for tests of folds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def conv_bn(c_in: int, c_out: int, k: Any, s: int = 1, p: Any = 0, g: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(c_in, c_out, k, s, p, groups=g, bias=False), nn.BatchNorm2d(c_out)
    )


class RepVGG(nn.Module):
    def __init__(self, c_in: int, c_out: int, stride: int = 1, groups: int = 1) -> None:
        super().__init__()
        self.dense = conv_bn(c_in, c_out, 3, stride, 1, groups)
        self.one = conv_bn(c_in, c_out, 1, stride, 0, groups)
        self.identity = nn.BatchNorm2d(c_in) if c_in == c_out and stride == 1 else None

    def forward(self, x: Tensor) -> Tensor:
        identity = 0 if self.identity is None else self.identity(x)
        return F.relu(self.dense(x) + self.one(x) + identity)


class MobileOne(nn.Module):
    def __init__(self, c_in: int, c_out: int, k: int, stride: int = 1, groups: int = 1) -> None:
        super().__init__()
        self.kernels = nn.ModuleList(
            conv_bn(c_in, c_out, k, stride, k // 2, groups) for _ in range(3)
        )
        self.scale = conv_bn(c_in, c_out, 1, stride, 0, groups)
        self.identity = nn.BatchNorm2d(c_in) if c_in == c_out and stride == 1 else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.scale(x)
        if self.identity is not None:
            y = y + self.identity(x)
        for kernel in self.kernels:
            y += kernel(x)
        return torch.relu(y)


class ACNet(nn.Module):
    def __init__(self, c_in: int, c_out: int) -> None:
        super().__init__()
        self.square = conv_bn(c_in, c_out, 3, 1, 1)
        self.tall = conv_bn(c_in, c_out, (3, 1), 1, (1, 0))
        self.wide = conv_bn(c_in, c_out, (1, 3), 1, (0, 1))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(sum([self.square(x), self.tall(x), self.wide(x)]))


class DBB(nn.Module):
    def __init__(self, c_in: int, c_out: int) -> None:
        super().__init__()
        self.origin = conv_bn(c_in, c_out, 3, 1, 1)
        self.one = conv_bn(c_in, c_out, 1)
        self.chain = nn.Sequential(*conv_bn(c_in, c_in, 1), *conv_bn(c_in, c_out, 3, 1, 1))
        self.average = nn.Sequential(
            *conv_bn(c_in, c_out, 1), nn.AvgPool2d(3, 1, 1), nn.BatchNorm2d(c_out)
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.origin(x) + self.one(x) + self.chain(x) + self.average(x))


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.second = (conv_bn(channels, channels, 3, 1, 1) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.second(F.relu(self.first(x))))


class InvertedResidual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        wide = 4 * channels
        self.body = nn.Sequential(
            *conv_bn(channels, wide, 1),
            nn.ReLU6(),
            *conv_bn(wide, wide, 3, 1, 1, wide),
            nn.ReLU6(),
            *conv_bn(wide, channels, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


class SESR(nn.Module):
    """A linear block of super-resolution: 3×3 to many channels and 1×1 back, beside the identity."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.expand = nn.Conv2d(channels, 32, 3, padding=1)
        self.project = nn.Conv2d(32, channels, 1)
        self.act = nn.PReLU(channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.project(self.expand(x)) + x)


class Dense(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm, self.conv = nn.BatchNorm2d(channels), nn.Conv2d(channels, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.conv(F.relu(self.norm(x)))], 1)


class Inception(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.a, self.b = conv_bn(channels, 4, 1), conv_bn(channels, 4, 1)
        self.c = conv_bn(channels, 8, 3, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(torch.cat([self.a(x), self.b(x), self.c(x)], 1))


class UNet(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.down = nn.Sequential(conv_bn(channels, 8, 3, 2, 1), nn.ReLU())
        self.up = nn.Sequential(nn.ConvTranspose2d(8, channels, 2, 2), nn.BatchNorm2d(channels))
        self.out = conv_bn(2 * channels, channels, 3, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.cat([x, F.relu(self.up(self.down(x)))], dim=1))


class Written(nn.Module):
    """Modules and tensors by name, and a function of them and of the input, as people write models."""

    def __init__(self, function: Callable[[Any, Tensor], Any], **parts: Any) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def randomised(model: nn.Module, seed: int = 0) -> nn.Module:
    """Give every batch norm statistics and factors of its own; return the model in evaluation mode."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.running_mean.normal_(0, 0.5, generator=generator)
                module.running_var.uniform_(0.3, 2, generator=generator)
                if module.weight is not None:
                    module.weight.uniform_(0.5, 1.5, generator=generator)
                if module.bias is not None:
                    module.bias.normal_(0, 0.5, generator=generator)
    return model.eval()
