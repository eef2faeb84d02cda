"""Random staged networks: stages of linear layers and activations between homogeneous maps."""

from __future__ import annotations

import random

import torch
from torch import nn

import conformallayers as cl
from oracle import randomise

ACTIVATIONS = (
    lambda alpha: cl.ReSPro(alpha),
    lambda alpha: cl.ReSPro(alpha, projective=True),
    lambda alpha: cl.Gnomonic(alpha),
)


class Draw:
    """Random staged networks; shapes are followed so that every layer fits."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.axes = self.random.randint(1, 3)

    def __getattr__(self, name: str) -> object:
        return getattr(self.random, name)

    def of(self, name: str) -> type[nn.Module]:
        """Return the class of torch.nn for the number of axes."""
        return getattr(nn, f"{name}{self.axes}d")

    def conv(self, inputs: int, outputs: int) -> nn.Module:
        kernel = self.choice([1, 3])
        padding = 1 if kernel == 3 else 0
        return self.of("Conv")(inputs, outputs, kernel, 1, padding, bias=self.random.random() < 0.5)

    def activation(self) -> nn.Module:
        alphas = None, "learned", "spectral", 1.5
        return self.choice(ACTIVATIONS)(self.choice(alphas))

    def rectifier(self, channels: int) -> nn.Module:
        """Return a map that keeps the shape."""
        return self.choice(
            [
                nn.ReLU(),
                nn.LeakyReLU(self.choice([0.1, -0.5, 1.4])),
                nn.PReLU(self.choice([1, channels])),
                cl.Abs(),
                self.of("MaxPool")(3, 1, 1),
            ]
        )

    def pool(self) -> nn.Module:
        """Return a map that halves the image."""
        kinds = self.of("MaxPool")(2, ceil_mode=True), self.of("LPPool")(2, 2, ceil_mode=True)
        return self.choice([*kinds, self.of("MaxPool")(3, 2, 1)])

    def block(self, channels: int) -> list[nn.Module]:
        """Return layers that keep the number of channels and the size of the image."""
        kind = self.randrange(5)
        conv, rectifier = self.conv(channels, channels), self.rectifier(channels)
        if kind == 0:
            return [cl.Residual(conv, rectifier, *self.some([self.activation()]))]
        if kind == 1:
            second = nn.Sequential(self.conv(channels, 2), self.rectifier(2))
            both = cl.Parallel(conv, second, join="concatenate")
            return [both, *self.some([self.activation()]), self.conv(channels + 2, channels)]
        if kind == 2:
            groups = (
                nn.Sequential(self.conv(1, 1), *self.some([self.activation()])),
                self.rectifier(channels - 1),
            )
            return [cl.Split([1, channels - 1], groups)]
        if kind == 3:
            norm = self.some([self.of("BatchNorm")(channels)])
            if norm:  # which removes the bias: its gradient would be rounding alone
                conv.register_parameter("bias", None)
            return [conv, *norm, rectifier]
        return [conv, self.activation(), rectifier]

    def some(self, modules: list[nn.Module]) -> list[nn.Module]:
        return modules if self.random.random() < 0.5 else []

    def network(self, **options: object) -> tuple[cl.ConformalLayers, tuple[int, ...]]:
        channels = self.randint(2, 4)
        shape = (2, *(self.randint(4, 7) for _ in range(self.axes)))
        modules = [self.conv(2, channels)]
        for _ in range(self.randint(2, 4)):
            modules += self.block(channels)
        modules += [self.pool(), self.conv(channels, 3), self.activation(), nn.Flatten()]
        return randomise(cl.ConformalLayers(*modules, **options), self.randint(0, 999)), shape


EMBEDDINGS = ({}, {"offset": 0.7}, {"unit": "rms"}, {"offset": "learned", "unit": "rms"})


def scaled_down(model: nn.Module) -> nn.Module:
    """Divide the weights, so that published coordinates stay where float32 has digits to compare."""
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.modules.conv._ConvNd):
                module.weight.mul_(0.4)
    return model
