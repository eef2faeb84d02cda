"""Small networks of every kind, for the tests of files and runtimes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

import conformallayers as cl
from conformallayers.folding.strategies import STRATEGIES
from oracle import randomise

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
SHAPE = (2, 6, 6)
POOLED_SHAPE = (1, 8, 8)  # of pooled_net


class Called(nn.Module):
    """A head that calls functions, as many models do."""

    def __init__(self, features: nn.Module) -> None:
        super().__init__()
        self.features, self.hidden, self.last = features, nn.Linear(36, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.flatten(self.features(x), 1)
        return self.last(nn.functional.relu(self.hidden(x)))


class Offset(nn.Module):
    """Take a constant away, as many models do with the mean of their images."""

    def __init__(self, *shape: int, add: bool = False) -> None:
        super().__init__()
        self.add = add
        self.register_buffer("mean", torch.rand(shape))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mean if self.add else x - self.mean


OFFSETS = {
    "image": lambda: Offset(*SHAPE),
    "channels": lambda: Offset(2, 1, 1),
    "with batch axis": lambda: Offset(1, 2, 1, 1),
    "number": Offset,
    "added": lambda: Offset(2, 1, 1, add=True),
}


def conv_stack(
    depth: int, channels: int = 6, *, inputs: int = 3, projective: bool = False, **options: object
) -> cl.ConformalLayers:
    """Build convolutions of 3 × 3 with an activation behind each; options are those of the convolutions."""
    layers: list[nn.Module] = []
    for index in range(depth):
        layers.append(cl.Conv2d(channels if index else inputs, channels, 3, **options))
        layers.append(cl.ReSPro(projective=projective))
    return cl.ConformalLayers(*layers)


def pooled_net(alpha: str | float | None = None, **factory: object) -> cl.ConformalLayers:
    """Build a convolution, a pool and a linear layer with published and projective activations."""
    model = cl.ConformalLayers(
        cl.Conv2d(1, 3, 3, **factory),
        cl.ReSPro(alpha, **factory),
        cl.AvgPool2d(2),
        cl.Flatten(),
        cl.Linear(27, 4, **factory),
        cl.ReSPro(alpha, projective=True, **factory),
    )
    return model if factory.get("device") == "meta" else randomise(model, 4)


def circular_net(alpha: str | float | None = None) -> cl.ConformalLayers:
    """Build a circular convolution, a plain one and a linear layer."""
    model = cl.ConformalLayers(
        cl.Conv2d(2, 4, 3, padding=1, padding_mode="circular"),
        cl.ReSPro(alpha),
        cl.Conv2d(4, 3, 3),
        cl.ReSPro(alpha, projective=True),
        cl.Flatten(),
        cl.Linear(48, 4),
    )
    return randomise(model, 4)


def features(*, bias: bool = False, **options: object) -> cl.ConformalLayers:
    activation = cl.ReSPro(**options)
    return cl.ConformalLayers(
        cl.Conv2d(2, 4, 3, padding=1, bias=bias),
        activation,
        cl.AvgPool2d(2),
        cl.Conv2d(4, 4, 3, padding=1, bias=bias),
        cl.ReSPro(**options),
    )


def unpadded() -> cl.ConformalLayers:
    stages = cl.Conv2d(2, 3, 3), cl.ReSPro(), cl.Conv2d(3, 2, (3, 2)), cl.ReSPro()
    return cl.ConformalLayers(*stages)


def rules() -> cl.ConformalLayers:
    stages: list[nn.Module] = []
    activations = cl.Gnomonic(), cl.Gnomonic(2.0), cl.ReSPro(projective=True)
    for activation in activations:
        stages += [cl.Conv2d(2, 2, 3, padding=1), activation]
    return cl.ConformalLayers(*stages)


def branches() -> cl.ConformalLayers:
    block = cl.Residual(cl.Conv2d(3, 3, 3, padding=1), cl.ReSPro(), cl.Conv2d(3, 3, 1, bias=True))
    wide = cl.Parallel(cl.Conv2d(3, 2, 1), cl.AvgPool2d(1), join="concatenate")
    return cl.ConformalLayers(cl.Conv2d(2, 3, 3, bias=True), cl.ReSPro(), block, wide, cl.ReSPro())


def stages() -> nn.Sequential:
    """Return three stages, two of them with biases, maps between them, and a head that joins the last."""
    layers = cl.ConformalLayers(
        cl.Conv2d(2, 4, 3),
        cl.ReSPro(projective=True),
        cl.Conv2d(4, 6, 3, padding=1),
        nn.BatchNorm2d(6),
        cl.ReSPro(alpha="learned", projective=True),
        cl.Split([2, 4], [cl.AvgPool2d(2), nn.LPPool2d(2, 2)]),
        nn.BatchNorm2d(6),
        cl.Conv2d(6, 4, 1),
        cl.Conv2d(4, 5, 2),
        cl.Gnomonic(),
        nn.PReLU(5),
        cl.Conv2d(5, 3, 1, bias=True),
        offset=0.5,
        unit="rms",
    )
    return nn.Sequential(layers, nn.Flatten(), nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3))


def rectified() -> cl.ConformalLayers:
    """Return the paper's activation between maps, with branches across them and no bias."""
    body = cl.Conv2d(3, 3, 3, padding=1), nn.ReLU(), cl.Conv2d(3, 3, 1), cl.ReSPro(2.0)
    return cl.ConformalLayers(
        cl.Conv2d(2, 3, 3),
        cl.ReSPro(),
        nn.MaxPool2d(3, 2, 1),
        cl.Residual(*body),
        cl.Abs(),
        cl.Parallel(cl.Conv2d(3, 2, 1), nn.LeakyReLU(0.3), join="concatenate"),
        nn.AdaptiveMaxPool2d(2),
        cl.Flatten(),
    )


def several() -> nn.Sequential:
    second = cl.ConformalLayers(cl.Linear(8, 8), cl.ReSPro(projective=True))
    head = nn.Linear(36, 8), nn.ReLU(), second, nn.Dropout(), nn.Linear(8, 3)
    return nn.Sequential(features(), nn.Flatten(), *head)


def centre() -> cl.Centre:
    module = cl.Centre(SHAPE)
    module.fit(torch.randn(4, *SHAPE, dtype=torch.float64))
    return module


NETS: dict[str, Callable[[], nn.Module]] = {
    "chain": features,
    "biases": lambda: features(bias=True),
    "rules": rules,
    "unpadded": unpadded,
    "circular": circular_net,
    "branches": branches,
    "torus head": lambda: nn.Sequential(unpadded(), nn.Flatten(), nn.Linear(12, 3)),
    "MLP head": lambda: nn.Sequential(features(), nn.Flatten(), nn.Linear(36, 4), nn.ReLU()),
    "centred": lambda: nn.Sequential(centre(), features(projective=True)),
    "calls": lambda: Called(features()),
    "several": several,
    "stages": stages,
    "rectified": rectified,
}


def net(name: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = NETS[name]()
    randomise(model)
    return model


def folds(name: str, dtype: torch.dtype) -> Iterator[cl.Folded]:
    """Yield the folds of a network by every strategy that applies."""
    model = net(name)
    for strategy in ("auto", *STRATEGIES):
        try:
            yield cl.fold(model, SHAPE, strategy=strategy, dtype=dtype)
        except cl.ConformalError:
            assert strategy not in ("auto", "layers")
