"""Random networks and samples: every layer, option, activation, branch, bias, head and size."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import ConformalError
from ...nn import extra_layers, layers
from ...nn.activations import Gnomonic, RadialActivation, RadialTanh, ReSPro
from ...nn.branches import Parallel, Residual
from ...nn.container import ConformalLayers
from ...nn.traced import Traced

Shape = tuple[int, ...]
LIMIT = 1500  # values of a map in most cases; explicit matrices of the oracle stay small


class Quartic(RadialActivation):
    """An activation as a user writes one."""

    slope = 1.5

    def growth(self, q: Tensor) -> Tensor:
        """Return √(1 + q + q²/4)."""
        return (1 + q + q**2 / 4).sqrt()


class TwoWays(nn.Module):
    """An ordinary module with two branches, for cl.Traced."""

    def __init__(self, a: nn.Module, b: nn.Module, cat: bool) -> None:
        super().__init__()
        self.a, self.b, self.cat = a, b, cat

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum or the concatenation of both branches."""
        a, b = self.a(x), self.b(x)
        joined: Tensor = torch.cat([a, b], 1) if self.cat else a + b
        return joined


class Generator:
    """Draw models from a random number generator.

    Args:
        rng: of every choice; torch's own generator is seeded from it.
        portable: leave out what only torch runs: an activation of the user.
    """

    def __init__(self, rng: Random, portable: bool = False) -> None:
        self.rng, self.portable = rng, portable
        self.refused = 0
        torch.manual_seed(rng.getrandbits(60))

    def network(self) -> tuple[nn.Module, Shape]:
        """Return a model in float64 with random weights, and the shape of a sample."""
        shape = self._shape()
        features, out = self._conformal(shape)
        model: nn.Module = features
        kind = self.rng.random()
        if kind < 0.35:
            model = nn.Sequential(*self._prefix(shape), features, *self._head(out))
        elif kind < 0.4:
            model = nn.Sequential(*self._prefix(shape), features)
        model = model.double()
        self._randomise(model)
        return model, shape

    def large_network(self) -> tuple[nn.Module, Shape]:
        """Return a shallow model whose feature maps have more than a million values."""
        rng = self.rng
        side, channels = rng.randint(180, 420), rng.choice((8, 16, 24))
        channels = max(channels, 1 + 1_100_000 // side**2)
        shape = (rng.choice((1, 3)), side, side + rng.randint(0, 9))
        parts: list[nn.Module] = [
            layers.Conv2d(
                shape[0], channels, rng.choice((1, 3)), padding=1, bias=rng.random() < 0.2
            ),
            self._activation(),
        ]
        if rng.random() < 0.5:
            more = (
                layers.Conv2d(channels, channels, 3, padding=1, groups=channels),
                self._activation(),
            )
            parts += more
        parts += rng.choice(
            ([], [layers.AvgPool2d(rng.randint(2, 5))], [layers.AdaptiveAvgPool2d(1)])
        )
        model = ConformalLayers(*parts).double()
        self._randomise(model)
        return model, shape

    # -- parts ----------------------------------------------------------------------------------

    def _shape(self) -> Shape:
        n = self.rng.choice((0, 0, 1, 1, 2, 2, 2, 3))
        if n == 0:
            return (self.rng.randint(1, 24),)
        most = (0, 24, 12, 6)[n]
        return (self.rng.randint(1, 4), *(self.rng.randint(1, most) for _ in range(n)))

    def _conformal(self, shape: Shape, depth: int | None = None) -> tuple[ConformalLayers, Shape]:
        """Return a ConformalLayers; choices that torch or the library refuses are drawn again."""
        depth = self.rng.randint(1, 6) if depth is None else depth
        parts: list[nn.Module] = []
        bend = self.rng.random()  # how often an activation follows
        for _ in range(depth):
            part = self._branch(shape) if self.rng.random() < 0.12 else self._layer(shape)
            parts.append(part)
            shape = output_shape(part, shape)
            if self.rng.random() < 0.3 + bend:
                parts.append(self._activation())
        return ConformalLayers(*parts), shape

    def _layer(self, shape: Shape) -> nn.Module:
        """Return a layer that takes the shape; torch and the library decide what fits."""
        while True:
            try:
                proposed = self._proposal(shape)
                ConformalLayers(proposed)
                out = output_shape(proposed, shape)
                if 0 < math.prod(out) <= LIMIT and not _is_tie(proposed, shape):
                    ConformalLayers(proposed).trace(shape)
                    return proposed
            except (ConformalError, *_TORCH_REFUSALS):
                self.refused += 1

    def _proposal(self, shape: Shape) -> nn.Module:
        rng, n = self.rng, len(shape) - 1
        owner: Any = rng.choice((nn, layers))
        kinds: list[Callable[[], nn.Module]] = [
            lambda: owner.Linear(shape[-1], rng.randint(1, 12), bias=self._bias()),
            lambda: extra_layers.Scale(rng.choice((-0.5, 0.2, 2.0, 30.0))),
            lambda: owner.Flatten(rng.randint(1, max(1, n))),
            lambda: nn.Dropout(0.3),
            lambda: owner.Identity(),
            lambda: extra_layers.RepeatChannels(rng.randint(1, 3)),
        ]
        if n == 0:
            kinds += [kinds[0]] * 4
            size = rng.choice([d for d in range(1, shape[0] + 1) if shape[0] % d == 0])
            kinds += [
                lambda: nn.Unflatten(1, (size, -1)),
                lambda: nn.Unflatten(1, (size, -1, 1)),
                lambda: nn.BatchNorm1d(shape[0]),
            ]
        if 1 <= n <= 3:
            kinds += [lambda: self._convolution(owner, shape, n)] * 10
            kinds += [lambda: self._pool(owner, n)] * 3
            kinds += [lambda: self._transposed(owner, shape, n)] * 3
            kinds += [lambda: self._padding(n)] * 3
            kinds += [lambda: self._upsample(n)] * 2
            kinds += [
                lambda: getattr(owner, f"AdaptiveAvgPool{n}d")(self._per_axis(n, 1, 6)),
                lambda: getattr(nn, f"BatchNorm{n}d")(
                    shape[0], eps=rng.choice((1e-5, 0.1)), affine=rng.random() < 0.8
                ),
                lambda: getattr(nn, f"Dropout{n}d")(),
            ]
        if n == 2:
            kinds += [lambda: nn.PixelShuffle(2), lambda: nn.PixelUnshuffle(2)]
            kinds += [lambda: nn.ChannelShuffle(rng.randint(1, 3))]
        return rng.choice(kinds)()

    def _per_axis(self, n: int, low: int, high: int) -> Any:
        if self.rng.random() < 0.5:
            return self.rng.randint(low, high)
        return tuple(self.rng.randint(low, high) for _ in range(n))

    def _bias(self) -> bool:
        return self.rng.random() < 0.25

    def _convolution(self, owner: Any, shape: Shape, n: int) -> nn.Module:
        rng = self.rng
        groups = rng.choice((1, 1, 1, shape[0]))
        mode = rng.choice(("zeros", "zeros", "reflect", "replicate", "circular"))
        same = rng.random() < 0.2
        return getattr(owner, f"Conv{n}d")(  # type: ignore[no-any-return]
            shape[0],
            groups * rng.randint(1, 4),
            self._per_axis(n, 1, 4),
            stride=1 if same else self._per_axis(n, 1, rng.randint(1, 3)),
            padding=rng.choice(("same", "valid")) if same else self._per_axis(n, 0, 3),
            dilation=self._per_axis(n, 1, rng.randint(1, 2)),
            groups=groups,
            bias=self._bias(),
            padding_mode=mode,
        )

    def _transposed(self, owner: Any, shape: Shape, n: int) -> nn.Module:
        rng = self.rng
        groups = rng.choice((1, 1, shape[0]))
        return getattr(owner, f"ConvTranspose{n}d")(  # type: ignore[no-any-return]
            shape[0],
            groups * rng.randint(1, 3),
            self._per_axis(n, 1, 3),
            stride=self._per_axis(n, 1, 3),
            padding=self._per_axis(n, 0, 2),
            output_padding=self._per_axis(n, 0, 1),
            groups=groups,
            bias=self._bias(),
            dilation=self._per_axis(n, 1, 2),
        )

    def _pool(self, owner: Any, n: int) -> nn.Module:
        rng = self.rng
        options: dict[str, Any] = {
            "stride": rng.choice((None, self._per_axis(n, 1, 3))),
            "padding": self._per_axis(n, 0, 1),
            "ceil_mode": rng.random() < 0.4,
            "count_include_pad": rng.random() < 0.5,
        }
        if n > 1 and rng.random() < 0.3:
            options["divisor_override"] = rng.randint(1, 7)
        return getattr(owner, f"AvgPool{n}d")(self._per_axis(n, 1, 4), **options)  # type: ignore[no-any-return]

    def _padding(self, n: int) -> nn.Module:
        kind = self.rng.choice(("Zero", "Constant", "Reflection", "Replication", "Circular"))
        low = -2 if self.rng.random() < 0.4 else 0
        pads = tuple(self.rng.randint(low, 3) for _ in range(2 * n))
        value = {"value": 0.0} if kind == "Constant" else {}
        return getattr(nn, f"{kind}Pad{n}d")(pads, **value)  # type: ignore[no-any-return]

    def _upsample(self, n: int) -> nn.Module:
        rng = self.rng
        linear = ("linear", "bilinear", "trilinear")[n - 1]
        modes = ["nearest", "nearest-exact", linear, "area"] + ["bicubic"] * (n == 2)
        options: dict[str, Any] = {"mode": rng.choice(modes)}
        if rng.random() < 0.3:
            options["size"] = self._per_axis(n, 1, 9)
        else:
            scales = [rng.choice((0.6, 1.0, 1.1, 1.5, 2.0, 2.7)) for _ in range(n)]
            options["scale_factor"] = rng.choice((scales[0], tuple(scales)))
            options["recompute_scale_factor"] = rng.choice((None, True, False))
        if options["mode"] in (linear, "bicubic"):
            options["align_corners"] = rng.choice((None, True, False))
        return nn.Upsample(**options)

    def _activation(self) -> nn.Module:
        rng = self.rng
        number = round(10 ** rng.uniform(-2, 1), 3)
        alpha = rng.choice((None, "young", "spectral", "learned", number, number))
        kinds: list[Callable[[], nn.Module]] = [
            lambda: ReSPro(alpha),
            lambda: ReSPro(alpha),
            lambda: ReSPro(alpha, projective=True),
            lambda: Gnomonic(alpha),
            lambda: RadialTanh(alpha),
        ]
        if not self.portable:
            kinds.append(lambda: Quartic(alpha))
        return rng.choice(kinds)()

    def _branch(self, shape: Shape) -> nn.Module:
        """Return a composite whose branches keep the shape."""
        rng = self.rng
        a, b = self._same_shape(shape), self._same_shape(shape)
        kind = rng.randrange(5)
        if kind == 0:
            return Residual(*a)
        if kind == 1:
            return Residual(*a, shortcut=b)
        if kind == 2:
            return Parallel(a, b, nn.Identity())
        cat = rng.random() < 0.5 and 2 * math.prod(shape) <= LIMIT
        if kind == 3:
            return (
                Parallel(a, b, join="concatenate", dim=rng.randint(1, len(shape)))
                if cat
                else Parallel(a, b)
            )
        return Traced(TwoWays(a, b, cat))

    def _same_shape(self, shape: Shape) -> nn.Sequential:
        """Return a few layers and activations that keep the shape."""
        rng, n = self.rng, len(shape) - 1
        found: list[nn.Module] = []
        for _ in range(rng.randint(1, 3)):
            if 1 <= n <= 3 and rng.random() < 0.7:
                mode = rng.choice(("zeros", "circular", "replicate"))
                conv = getattr(layers, f"Conv{n}d")
                found.append(
                    conv(
                        shape[0],
                        shape[0],
                        rng.choice((1, 3)),
                        padding="same",
                        bias=self._bias(),
                        padding_mode=mode,
                    )
                )
                if output_shape(found[-1], shape) != shape:
                    found.pop()
            elif rng.random() < 0.7:
                found.append(layers.Linear(shape[-1], shape[-1], bias=self._bias()))
            else:
                found.append(extra_layers.Scale(0.7))
            if rng.random() < 0.5:
                found.append(self._activation())
        return nn.Sequential(*(found or [nn.Identity()]))

    def _prefix(self, shape: Shape) -> Iterator[nn.Module]:
        if self.rng.random() < 0.3:
            centre = extra_layers.Centre(shape)
            centre.fit(torch.randn(4, *shape, dtype=torch.float64) / 4)
            yield centre
        if self.rng.random() < 0.2:
            yield nn.ReLU()

    def _head(self, shape: Shape) -> Iterator[nn.Module]:
        """Yield what stands behind a ConformalLayers: layers that are absorbed, and others."""
        rng = self.rng
        if len(shape) > 1:
            yield nn.Flatten()
        size, hidden = math.prod(shape), rng.randint(1, 6)
        yield nn.Linear(size, hidden, bias=rng.random() < 0.7)
        if rng.random() < 0.3:
            return
        kinds = (nn.ReLU, nn.Tanh, nn.GELU, nn.Sigmoid, nn.LeakyReLU, nn.Softplus, nn.SiLU)
        yield rng.choice(kinds)()
        if rng.random() < 0.4:
            yield self._conformal((hidden,), 2)[0]
        else:
            yield nn.Linear(hidden, 3)

    def _randomise(self, model: nn.Module) -> None:
        """Give every parameter and statistic a random value, small and large ones among them."""
        rng = self.rng
        scale = rng.choice((1.0, 1.0, 1.0, 0.01, 30.0))
        with torch.no_grad():
            for module in model.modules():
                if isinstance(module, RadialActivation) and module.alpha == "spectral":
                    module.norm.fill_(rng.choice((0.0, 0.3, 2.0)))
                if isinstance(module, RadialActivation) and module.alpha == "learned":
                    module.log_factor.fill_(rng.uniform(-2, 1))
            for name, buffer in model.named_buffers():
                if name.endswith("running_mean"):
                    buffer.normal_().mul_(0.3)
                if name.endswith("running_var"):
                    buffer.uniform_(0.05, 3)
            for name, parameter in model.named_parameters():
                if name.endswith(("weight", "bias")):
                    parameter.copy_(torch.randn_like(parameter) * 0.5 + 0.05)
                    if parameter.dim() > 1 and rng.random() < 0.5:
                        parameter.mul_(scale)
                    if rng.random() < 0.1:
                        parameter.view(-1)[: parameter.numel() // 2] = 0


_TORCH_REFUSALS = (RuntimeError, ValueError, ArithmeticError, AssertionError)


def output_shape(module: nn.Module, shape: Shape) -> Shape:
    """Return the shape of an output sample, by torch."""
    with torch.no_grad():
        if any(isinstance(part, RadialActivation) for part in module.modules()):
            return tuple(ConformalLayers(module).trace(shape).output_shape)
        was, _ = module.training, module.eval()
        out = module(torch.zeros(1, *shape, dtype=_dtype_of(module)))
        module.train(was)
    return tuple(out.shape[1:])


def _is_tie(module: nn.Module, shape: Shape) -> bool:
    """Check for a position between two pixels, which torch rounds by dtype: docs/promises.md."""
    if not isinstance(module, nn.Upsample) or not module.mode.startswith("nearest"):
        return False
    pixels = torch.arange(math.prod(shape), dtype=torch.float64).view(1, *shape)
    return not torch.equal(module(pixels), module(pixels.float()).double())


def _dtype_of(module: nn.Module) -> torch.dtype:
    return next((p.dtype for p in module.parameters()), torch.float32)


def samples(rng: Random, shape: Shape, dtype: torch.dtype, batch: int = 7) -> Tensor:
    """Return a batch of samples of several kinds: noise, zeros, sparse, constant, tiny and huge."""
    x = torch.randn(batch, *shape, dtype=torch.float64)
    most = 100 if dtype == torch.float64 else 25
    for index in range(batch):
        kind = rng.randrange(8)
        if index == 1:
            x[index] = 0
        elif kind == 0:
            x[index] *= torch.rand(shape, dtype=torch.float64) < 0.2
        elif kind == 1:
            x[index] = rng.choice((1.0, -3.0, 0.1))
        elif kind == 2:
            x[index] = x[index].abs().clamp_max(1)
        elif kind == 3:
            x[index] *= 10.0 ** rng.uniform(-most, most)
        elif kind == 4:
            x[index] *= 10.0 ** rng.uniform(-3, 3)
    return x.to(dtype)
