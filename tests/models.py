"""The generator of random models: every layer, option, branch and size, in conformal stacks and in plain CNNs."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import conformallayers as cl
from blocks import randomised
from cases import HOMOGENEOUS_CASES, LINEAR_CASES, Case
from oracle import randomise

Shape = tuple[int, ...]
Model = tuple[nn.Module, Shape]
LIMIT = 1500  # values of a map; explicit matrices of the oracle stay small
_RANGES = {  # of sizes that are drawn anew, one for all axes or one each
    "kernel_size": (1, 4),
    "stride": (1, 3),
    "padding": (0, 3),
    "dilation": (1, 2),
    "output_padding": (0, 1),
    "output_size": (1, 6),
    "size": (1, 9),
}
# Layers that branches share: those that a fold merges with a convolution, and one that fits every shape.
_SHARED = tuple(case for case in LINEAR_CASES if re.search("ZeroPad|Repeat|cl.Scale", case.name))
_SCALES = (0.6, 1.0, 1.1, 1.5, 2.0, 2.7)
_TORCH_REFUSALS = (RuntimeError, ValueError, ArithmeticError, AssertionError, IndexError)


class Quartic(cl.RadialActivation):
    """An activation as a user writes one."""

    slope = 1.5

    def growth(self, q: Tensor) -> Tensor:
        return (1 + q + q**2 / 4).sqrt()


class Scale(nn.Module):
    """Multiply each channel by a number and add another one, as layer scales do."""

    def __init__(self, channels: int, axes: int, shift: bool) -> None:
        super().__init__()
        self.gamma = nn.Parameter(0.5 + torch.rand(channels, *[1] * axes))
        self.beta = nn.Parameter(torch.randn(channels, *[1] * axes)) if shift else None

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma if self.beta is None else x * self.gamma + self.beta


class Join(nn.Module):
    """Add or concatenate branches."""

    def __init__(self, branches: list[nn.Module], cat: bool = False) -> None:
        super().__init__()
        self.branches, self.cat = nn.ModuleList(branches), cat

    def forward(self, x: Tensor) -> Tensor:
        values = [branch(x) for branch in self.branches]
        return torch.cat(values, 1) if self.cat else sum(values[1:], values[0])


class Calls(nn.Module):
    """Functions and methods on values that several of them read, and a layer that is called twice."""

    def __init__(self, first: nn.Module, second: nn.Module, third: nn.Module) -> None:
        super().__init__()
        self.first, self.second, self.third = first, second, third

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        z = self.second(y) - y / 2
        z = z + 2 * x.relu().mean(1, keepdim=True)
        u, v = torch.split(z, [1, z.shape[1] - 1], 1)
        return torch.cat([self.third(self.second(z)), F.leaky_relu(u, 0.2), v.abs(), y], 1) + 1


# Functions of maps (B, C, ...) as people write them; the sizes of the result are as large as theirs, or smaller.
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "shift": lambda x: 2 * x - 1,
    "one channel": lambda x: x[:, -1:],
    "every other channel": lambda x: x[:, ::2],
    "swap": lambda x: x.transpose(1, -1),
    "gate": lambda x: x * torch.sigmoid(x.mean(-1, keepdim=True)),
    "centre": lambda x: x - x.mean(1, keepdim=True),
    "roll": lambda x: x.roll(1, 1),
    "halve": lambda x: F.interpolate(x, scale_factor=0.5),
    "edge": lambda x: F.pad(x[..., 1:], (0, 1), value=0.5),
    "normalise": lambda x: F.group_norm(x, 1),
}


class Function(nn.Module):
    """Call a function by its name, so that models can be pickled."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        return FUNCTIONS[self.name](x)

    def extra_repr(self) -> str:
        return self.name


class Generator:
    """Draw models from a random number generator, which seeds torch's own."""

    def __init__(self, rng: Random | int) -> None:
        self.rng = Random(rng) if isinstance(rng, int) else rng
        torch.manual_seed(self.rng.getrandbits(60))

    def some(self, share: float, *modules: nn.Module) -> list[nn.Module]:
        return list(modules) if self.rng.random() < share else []

    # -- models -----------------------------------------------------------------------------------

    def any(self) -> Model:
        return self.conformal() if self.rng.random() < 0.6 else self.plain()

    def conformal(self) -> Model:
        """Return a model with a ConformalLayers, in float64 with random weights, and the shape of a sample."""
        shape = self.shape()
        model, out = self._stack(shape)
        if self.rng.random() < 0.4:
            head = self._head(out) if self.rng.random() < 0.9 else ()
            model = nn.Sequential(*self._prefix(shape), model, *head)
        self._randomise(model.double())
        return model, shape

    def staged(self, **options: Any) -> tuple[cl.ConformalLayers, Shape]:
        """Return stages between maps, with weights of which float32 keeps the digits."""
        n, width = self.rng.randint(1, 3), self.rng.randint(2, 4)
        shape = (2, *(self.rng.randint(4, 7) for _ in range(n)))
        parts: list[nn.Module] = [self._conv(2, width, n)]
        for _ in range(self.rng.randint(2, 4)):
            image = (width, *shape[1:])
            kind = self.rng.random()
            block = (
                self._keeping(image, 0.5) if kind < 0.5 else [self.branch(image, 0.5, cat=False)]
            )
            parts += [*block, *self.some(0.5, self.rectifier(width))]
        parts += [self.pool(n), self._conv(width, 3, n), self.activation(), nn.Flatten()]
        model = randomise(cl.ConformalLayers(*parts, **options), self.rng.randint(0, 999))
        with torch.no_grad():
            for module in model.modules():
                if isinstance(module, nn.modules.conv._ConvNd):
                    module.weight.mul_(0.4)
        return model, shape  # type: ignore[return-value]

    def plain(self, *, rectifiers: bool = False) -> Model:
        """Return a plain CNN in float64; with ``rectifiers`` all that is not linear are modules that convert replaces."""
        rng, self.calls = self.rng, not rectifiers
        n = rng.choice((1, 2, 2, 3))
        shape = (rng.choice((2, 4)), *(rng.randint(5, 9) for _ in range(n)))
        parts: list[nn.Module] = []
        image = shape
        for _ in range(rng.randint(2, 5)):
            parts.append(self._block(image))
            image = output_shape(parts[-1], image)
            if self.calls and min(image[1:]) > 1 and rng.random() < 0.4:
                parts.append(Function(rng.choice(list(FUNCTIONS))))
                image = output_shape(parts[-1], image)
            others = nn.SiLU(), nn.Sigmoid(), nn.Hardswish(), nn.GELU()
            bend = self.rectifier(image[0]) if rectifiers else rng.choice((nn.ReLU(), *others))
            parts += self.some(1.0 if rectifiers else 0.4, bend)
        if rng.random() < 0.75:
            pooled = self.some(0.4, _class("AdaptiveAvgPool", n)(1))
            features = image[0] if pooled else math.prod(image)
            parts += [*pooled, nn.Flatten(), *self.some(0.3, nn.BatchNorm1d(features))]
            hidden = rng.choice((1, 3))
            parts += [nn.Linear(features, hidden), nn.BatchNorm1d(hidden)]
            parts.append(nn.Linear(hidden, 5, bias=rng.random() < 0.5))
        return randomised(nn.Sequential(*parts), rng.randint(0, 99)).double(), shape

    # -- parts of both ----------------------------------------------------------------------------

    def shape(self) -> Shape:
        n = self.rng.choice((0, 0, 1, 1, 2, 2, 2, 3))
        if n == 0:
            return (self.rng.randint(1, 24),)
        most = (0, 24, 12, 6)[n]
        return (self.rng.randint(1, 4), *(self.rng.randint(1, most) for _ in range(n)))

    def layer(
        self, shape: Shape, cases: tuple[Case, ...] = LINEAR_CASES, plain: bool = False
    ) -> nn.Module:
        """Return a layer that takes the shape; torch and the library decide what fits."""
        while True:
            with suppress(cl.ConformalError, *_TORCH_REFUSALS):
                proposed = self._proposal(shape, _options_by_class(cases, len(shape) - 1))
                out = output_shape(proposed, shape)
                if 0 < math.prod(out) <= LIMIT and not _is_tie(proposed, shape):
                    if not plain:
                        cl.trace(cl.ConformalLayers(proposed), shape)
                    return proposed

    def _proposal(self, shape: Shape, classes: dict[Any, list[dict[str, Any]]]) -> nn.Module:
        """Mix the options of two conformance cases of one class, and draw some sizes anew."""
        rng = self.rng
        weights = [1 + len(rows) / 5 for rows in classes.values()]
        (kind,) = rng.choices(list(classes), weights)
        options = {**rng.choice(classes[kind]), **rng.choice(classes[kind])}
        for key, (low, high) in _RANGES.items():
            if key in options and options[key] != "same" and rng.random() < 0.5:
                each = tuple(rng.randint(low, high) for _ in shape[1:])
                alone = kind is nn.LPPool1d or rng.random() < 0.5  # the first takes no tuples
                options[key] = rng.randint(low, high) if alone else each
        fitted = {"in_channels": shape[0], "num_features": shape[0], "in_features": shape[-1]}
        options |= {key: size for key, size in fitted.items() if key in options}
        if "out_channels" in options:
            options["groups"] = rng.choice((1, 1, 1, shape[0]))
            options |= {"out_channels": options["groups"] * rng.randint(1, 4)}
            options["bias"] = rng.random() < 0.25
        if "Pad" in kind.__name__:
            # torch leaves values unset where a circular pad also crops.
            low = -2 if rng.random() < 0.4 and "Circular" not in kind.__name__ else 0
            ends = tuple(rng.randint(low, 3) for _ in shape[1:] * 2)
            options["padding"] = rng.choice((ends[0], ends))
        if "scale_factor" in options and "size" in options:
            del options[rng.choice(("scale_factor", "size"))]
        if "scale_factor" in options:
            scales = tuple(rng.choice(_SCALES) for _ in shape[1:])
            options["scale_factor"] = rng.choice((scales[0], scales))
        return kind(**options)  # type: ignore[no-any-return]

    def _conv(self, before: int, after: int, n: int, stride: int = 1, wide: bool = False) -> Any:
        """Return a convolution whose windows are centred, so that it keeps the size divided by the stride."""
        rng = self.rng
        kernel = [rng.choice((1, 3, 3)) for _ in range(n)]
        dilation = rng.choice((1, 1, 2)) if wide else 1
        groups = rng.choice((1, 1, 2, before))
        groups = groups if before % groups == after % groups == 0 else 1
        modes = "zeros", "reflect", "replicate", "circular"
        return _class("Conv", n)(
            before,
            after,
            kernel,
            stride,
            tuple(dilation * (size - 1) // 2 for size in kernel),
            dilation,
            groups,
            rng.random() < 0.5,
            rng.choice(modes) if wide and rng.random() < 0.2 else "zeros",
        )

    def rectifier(self, channels: int) -> nn.Module:
        """Return a homogeneous map that keeps the shape."""
        leaky = nn.LeakyReLU(self.rng.choice((0.1, -0.5, 1.4)))
        return self.rng.choice(
            (nn.ReLU(), leaky, nn.PReLU(self.rng.choice((1, channels))), cl.Abs())
        )

    # -- parts of plain models --------------------------------------------------------------------

    def _block(self, shape: Shape) -> nn.Module:
        rng, channels, n = self.rng, shape[0], len(shape) - 1
        after = rng.choice((channels, 2, 4, 6))
        kind = rng.choice(("layers", "layers", "sum", "residual", "cat", *["calls"] * self.calls))
        if kind == "sum":
            stride = rng.choice((1, 1, 2))
            branches = [self._aligned(shape, after, stride) for _ in range(rng.randint(2, 4))]
            return nn.Sequential(Join(branches), *self._norm(after, n))
        if kind == "residual":
            rectified = self._aligned(shape, channels).append(self.rectifier(channels))
            return Join([rectified, nn.Identity(), self._aligned(shape, channels)])
        if kind == "cat":
            parts = [self._aligned(shape, after) for _ in range(2)]
            return nn.Sequential(Join(parts, cat=True), *self._norm(2 * after, n))
        if kind == "calls":
            image = (after, *shape[1:])
            pairs = (shape, after), (image, after), (image, 2)
            return Calls(*(self._aligned(*pair) for pair in pairs))
        parts, image = [*self._norm(channels, n)], shape
        for _ in range(rng.randint(1, 3)):
            kinds = _IMAGES if rng.random() < 0.7 else _CONVOLUTIONS
            parts.append(self.layer(image, kinds[n], plain=self.calls))
            image = output_shape(parts[-1], image)
            parts += self._norm(image[0], n)
        return nn.Sequential(*parts)

    def _norm(self, channels: int, n: int) -> list[nn.Module]:
        norm = _class("BatchNorm", n)(channels)
        scales = [Scale(channels, n, shift) for shift in (True, False)] if self.calls else []
        return self.some(0.8, self.rng.choice((norm, norm, *scales)))

    def _aligned(self, shape: Shape, after: int, stride: int = 1) -> nn.Sequential:
        """Return layers that keep the size divided by the stride, with centred windows."""
        channels, n, size = shape[0], len(shape) - 1, min(shape[1:])
        kind = self.rng.choice(("conv", "conv", "chain", "identity", *["average"] * (size > 2)))
        if kind == "identity" and channels == after and stride == 1:
            return nn.Sequential(*self._norm(channels, n))
        if kind == "chain":
            first, second = _class("Conv", n)(channels, 4, 1), self._conv(4, after, n, stride)
            return nn.Sequential(first, *self._norm(4, n), second, *self._norm(after, n))
        if kind == "average":
            average = _class("AvgPool", n)(3, stride, 1)
            return nn.Sequential(
                _class("Conv", n)(channels, after, 1), *self._norm(after, n), average
            )
        conv = self._conv(channels, after, n, stride, wide=size > 4)
        return nn.Sequential(conv, *self._norm(after, n))

    # -- parts of conformal models ----------------------------------------------------------------

    def _stack(self, shape: Shape, depth: int = 0) -> tuple[nn.Module, Shape]:
        """Return a ConformalLayers and the shape of its output."""
        rng = self.rng
        parts: list[nn.Module] = []
        bend, maps = rng.random(), rng.choice((0.0, 0.0, 0.3))  # how often one follows
        for _ in range(depth or rng.randint(1, 6)):
            parts.append(self.branch(shape, maps) if rng.random() < 0.2 else self.layer(shape))
            shape = output_shape(parts[-1], shape)
            if rng.random() < maps:
                parts.append(self.layer(shape, HOMOGENEOUS_CASES))
                shape = output_shape(parts[-1], shape)
            parts += self.some(0.3 + bend, self.activation())
        offset = rng.choice((None, None, None, "learned", 0.5))
        return cl.ConformalLayers(*parts, offset=offset, unit=rng.choice(("norm", "rms"))), shape

    def activation(self) -> nn.Module:
        rng = self.rng
        number = round(10 ** rng.uniform(-2, 1), 3)
        alpha = rng.choice((None, "young", "spectral", "learned", number, number))
        kinds: tuple[Any, ...] = cl.ReSPro, cl.ReSPro, cl.ReSPro, cl.Gnomonic, Quartic
        kind = rng.choice(kinds)
        projective = {"projective": rng.random() < 0.4} if kind is cl.ReSPro else {}
        return kind(alpha, **projective)  # type: ignore[no-any-return]

    def pool(self, n: int) -> nn.Module:
        """Return a map that halves the image."""
        last = _class("LPPool", n)(2, 2, ceil_mode=True), _class("MaxPool", n)(3, 2, 1)
        return self.rng.choice((_class("MaxPool", n)(2, ceil_mode=True), *last))

    def branch(self, shape: Shape, maps: float, cat: bool | None = None) -> nn.Module:
        """Return a composite whose branches keep the shape, or one behind a layer that all of them read."""
        rng = self.rng
        if cat is None and rng.random() < 0.5:
            before = self.layer(shape, _SHARED)
            return nn.Sequential(before, self.branch(output_shape(before, shape), maps))
        a, b = (nn.Sequential(*self._keeping(shape, maps)) for _ in range(2))
        if cat is None:
            cat = rng.random() < 0.5 and 2 * math.prod(shape) <= LIMIT
        if rng.random() < maps and shape[0] > 1:
            sizes = [(first := rng.randint(1, shape[0] - 1)), shape[0] - first]
            groups = [self._keeping((size, *shape[1:]), maps) for size in sizes]
            return cl.Split(sizes, [nn.Sequential(*group) for group in groups])
        join: Any = {"join": "concatenate", "dim": rng.randint(1, len(shape))} if cat else {}
        kinds: list[Callable[[], nn.Module]] = [
            lambda: cl.Residual(*a),
            lambda: cl.Residual(*a, shortcut=b),
            lambda: cl.Parallel(a, b, nn.Identity()),
            lambda: cl.Parallel(a, b, **join),
            lambda: cl.Traced(Join([a, b], cat)),
        ]
        return rng.choice(kinds)()

    def _keeping(self, shape: Shape, maps: float) -> list[nn.Module]:
        """Return a few layers, maps and activations that keep the shape."""
        rng, n = self.rng, len(shape) - 1
        found: list[nn.Module] = []
        for _ in range(rng.randint(1, 3)):
            if 1 <= n <= 3 and rng.random() < 0.7:
                found.append(self._conv(shape[0], shape[0], n, wide=min(shape[1:]) > 2))
                if rng.random() < 0.4:
                    found[-1].register_parameter("bias", None)  # its gradient would be rounding
                    found.append(_class("BatchNorm", n)(shape[0]))
            elif rng.random() < 0.7:
                found.append(cl.Linear(shape[-1], shape[-1], bias=rng.random() < 0.25))
            else:
                found.append(cl.Scale(0.7))
            found += self.some(maps, self.rectifier(shape[0] if n else 1))
            found += self.some(0.5, self.activation())
        return found

    def _prefix(self, shape: Shape) -> list[nn.Module]:
        centre = cl.Centre(shape)
        centre.fit(torch.randn(4, *shape, dtype=torch.float64) / 4)
        return [*self.some(0.3, centre), *self.some(0.2, nn.ReLU())]

    def _head(self, shape: Shape) -> Iterator[nn.Module]:
        """Yield layers behind a ConformalLayers: some that a fold absorbs, and others."""
        rng, hidden = self.rng, self.rng.randint(1, 6)
        yield from [nn.Flatten()] if len(shape) > 1 else []
        yield nn.Linear(math.prod(shape), hidden, bias=rng.random() < 0.7)
        if rng.random() < 0.7:
            yield rng.choice((nn.ReLU, nn.Tanh, nn.Sigmoid, nn.LeakyReLU, nn.SiLU))()
            yield self._stack((hidden,), 2)[0] if rng.random() < 0.4 else nn.Linear(hidden, 3)

    def _randomise(self, model: nn.Module) -> None:
        """Give every parameter and statistic a random value, small and large ones among them."""
        rng = self.rng
        scale = rng.choice((1.0, 1.0, 1.0, 0.01, 30.0))
        with torch.no_grad():
            for name, value in [*model.named_buffers(), *model.named_parameters()]:
                if name.endswith(".norm"):  # of a spectral activation
                    value.fill_(rng.choice((0.0, 0.3, 2.0)))
                elif name.endswith("log_factor"):
                    value.fill_(rng.uniform(-2, 1))
                elif name.endswith("running_mean"):
                    value.normal_().mul_(0.3)
                elif name.endswith("running_var"):
                    value.uniform_(0.05, 3)
                elif name.endswith(("weight", "bias")):
                    value.normal_().mul_(0.5).add_(0.05)
                    if value.dim() > 1 and rng.random() < 0.5:
                        value.mul_(scale)
                    if rng.random() < 0.1:
                        value.view(-1)[: value.numel() // 2] = 0


def _class(name: str, n: int) -> Any:
    return getattr(nn, f"{name}{n}d")


@cache
def _options_by_class(cases: tuple[Case, ...], n: int) -> dict[Any, list[dict[str, Any]]]:
    """Return the options of conformance cases, without layers of another number of axes and composites."""
    found: dict[Any, list[dict[str, Any]]] = {}
    for case in cases:
        build: Any = case.build
        foreign = any(f"{axes}d" in case.name for axes in (1, 2, 3) if axes != n)
        if hasattr(build, "keywords") and not foreign:
            found.setdefault(build.func, []).append(build.keywords)
    return found


def _images(pattern: str) -> dict[int, tuple[Case, ...]]:
    """Return the cases of torch.nn that map images of n axes to such images."""
    every = [case for case in (*LINEAR_CASES, *HOMOGENEOUS_CASES) if re.match(pattern, case.name)]
    return {n: tuple(c for c in every if re.search(f"{n}d|in {n} dim", c.name)) for n in (1, 2, 3)}


_IMAGES = _images(r"nn\.(?!Dropout)")
_CONVOLUTIONS = _images(r"nn\.Conv")


def output_shape(module: nn.Module, shape: Shape) -> Shape:
    """Return the shape of an output sample, by torch."""
    with torch.no_grad():
        if any(isinstance(part, cl.RadialActivation) for part in module.modules()):
            return tuple(cl.trace(cl.ConformalLayers(module), shape).output_shape)
        was, _ = module.training, module.eval()
        dtype = next((parameter.dtype for parameter in module.parameters()), torch.float32)
        out = module(torch.zeros(1, *shape, dtype=dtype))
        module.train(was)
    return tuple(out.shape[1:])


def _is_tie(module: nn.Module, shape: Shape) -> bool:
    """Check for a position between two pixels, which torch rounds by dtype: docs/promises.md."""
    if not isinstance(module, nn.Upsample) or not module.mode.startswith("nearest"):
        return False
    pixels = torch.arange(math.prod(shape), dtype=torch.float64).view(1, *shape)
    return not torch.equal(module(pixels), module(pixels.float()).double())


def odd_samples(rng: Random, shape: Shape, dtype: torch.dtype, batch: int = 7) -> Tensor:
    """Return a batch of samples of several kinds: noise, zeros, sparse, constant, tiny and huge."""
    x = torch.randn(batch, *shape, dtype=torch.float64)
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
            x[index] *= 10.0 ** rng.uniform(-12, 12)
        elif kind == 4:
            x[index] *= 10.0 ** rng.uniform(-3, 3)
    return x.to(dtype)


EMBEDDINGS = ({}, {"offset": 0.7}, {"unit": "rms"}, {"offset": "learned", "unit": "rms"})
