"""Random networks and samples: every layer, option, activation, branch, bias, head and size."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache, partial
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

from cases import HOMOGENEOUS_CASES, LINEAR_CASES, Case
from conformallayers.container import ConformalLayers
from conformallayers.errors import ConformalError
from conformallayers.folding.fold import fold
from conformallayers.graph.trace import trace
from conformallayers.nn import extra_layers, layers
from conformallayers.nn.activations import Gnomonic, RadialActivation, ReSPro
from conformallayers.nn.branches import How, Parallel, Residual
from conformallayers.nn.homogeneous import Abs, Split
from conformallayers.nn.traced import Traced

Shape = tuple[int, ...]
LIMIT = 1500  # values of a map in most cases; explicit matrices of the oracle stay small
_LARGE = 0.01  # the share of networks with maps of more than a million values
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
    """Draw models from a random number generator, which seeds torch's own; ``portable`` ones run in every runtime."""

    def __init__(self, rng: Random, portable: bool = False) -> None:
        self.rng, self.portable = rng, portable
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

    def any_network(self) -> tuple[nn.Module, Shape, bool]:
        """Return a network, seldom a large one, and whether it is large."""
        large = self.rng.random() < _LARGE
        return *(self._large_network() if large else self.network()), large

    def _large_network(self) -> tuple[nn.Module, Shape]:
        """Return a shallow model whose feature maps have more than a million values."""
        rng = self.rng
        side, channels = rng.randint(180, 420), rng.choice((8, 16, 24))
        channels = max(channels, 1 + 1_100_000 // side**2)
        shape = (rng.choice((1, 3)), side, side + rng.randint(0, 9))
        kernel, bias = rng.choice((1, 3)), rng.random() < 0.2
        conv = layers.Conv2d(shape[0], channels, kernel, padding=1, bias=bias)
        parts: list[nn.Module] = [conv, self._activation()]
        if rng.random() < 0.5:
            depthwise = layers.Conv2d(channels, channels, 3, padding=1, groups=channels)
            parts += [depthwise, self._activation()]
        pools = [layers.AvgPool2d(rng.randint(2, 5))], [layers.AdaptiveAvgPool2d(1)]
        parts += rng.choice(([], *pools))
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
        rng = self.rng
        depth = rng.randint(1, 6) if depth is None else depth
        parts: list[nn.Module] = []
        bend, maps = rng.random(), rng.choice((0.0, 0.0, 0.3))  # how often one follows
        for _ in range(depth):
            part = self._branch(shape, maps) if rng.random() < 0.2 else self._layer(shape)
            parts.append(part)
            shape = output_shape(part, shape)
            if rng.random() < maps:
                parts.append(self._layer(shape, HOMOGENEOUS_CASES))
                shape = output_shape(parts[-1], shape)
            if rng.random() < 0.3 + bend:
                parts.append(self._activation())
        offset = rng.choice((None, None, None, "learned", 0.5))
        unit = rng.choice(("norm", "rms"))
        return ConformalLayers(*parts, offset=offset, unit=unit), shape

    def _layer(self, shape: Shape, cases: tuple[Case, ...] = LINEAR_CASES) -> nn.Module:
        """Return a layer that takes the shape; torch and the library decide what fits."""
        while True:
            with suppress(ConformalError, *_TORCH_REFUSALS):
                proposed = self._proposal(shape, _options_by_class(cases, len(shape) - 1))
                ConformalLayers(proposed)
                out = output_shape(proposed, shape)
                fits = 0 < math.prod(out) <= LIMIT and not _is_tie(proposed, shape)
                if fits and not (self.portable and _is_call(proposed, shape)):
                    trace(ConformalLayers(proposed), shape)
                    return proposed

    def _proposal(self, shape: Shape, classes: dict[Any, list[dict[str, Any]]]) -> nn.Module:
        """Mix the options of two conformance cases of one class, and draw some sizes anew."""
        rng = self.rng
        weights = [1 + len(rows) / 5 for rows in classes.values()]
        (kind,) = rng.choices(list(classes), weights)
        options = {**rng.choice(classes[kind]), **rng.choice(classes[kind])}
        for key, (low, high) in _RANGES.items():
            if key in options and options[key] != "same" and rng.random() < 0.5:
                alone = kind is nn.LPPool1d  # it takes no tuples
                size = rng.randint(low, high)
                options[key] = size if alone else self._per_axis(len(shape) - 1, low, high)
        fitted = {"in_channels": shape[0], "num_features": shape[0], "in_features": shape[-1]}
        options |= {key: size for key, size in fitted.items() if key in options}
        if "out_channels" in options:
            options["groups"] = rng.choice((1, 1, 1, shape[0]))
            options |= {"out_channels": options["groups"] * rng.randint(1, 4)}
            options["bias"] = self._bias()
        if "Pad" in kind.__name__:
            low = -2 if rng.random() < 0.4 else 0
            ends = tuple(rng.randint(low, 3) for _ in shape[1:] * 2)
            options["padding"] = rng.choice((ends[0], ends))
        if "scale_factor" in options and "size" in options:
            del options[rng.choice(("scale_factor", "size"))]
        if "scale_factor" in options:
            scales = tuple(rng.choice(_SCALES) for _ in shape[1:])
            options["scale_factor"] = rng.choice((scales[0], scales))
        return kind(**options)  # type: ignore[no-any-return]

    def _per_axis(self, n: int, low: int, high: int) -> Any:
        if self.rng.random() < 0.5:
            return self.rng.randint(low, high)
        return tuple(self.rng.randint(low, high) for _ in range(n))

    def _bias(self) -> bool:
        return self.rng.random() < 0.25

    def _activation(self) -> nn.Module:
        rng = self.rng
        number = round(10 ** rng.uniform(-2, 1), 3)
        alpha = rng.choice((None, "young", "spectral", "learned", number, number))
        projective = partial(ReSPro, projective=True)
        kinds: list[Any] = [ReSPro, ReSPro, projective, Gnomonic]
        activation: nn.Module = rng.choice(kinds if self.portable else [*kinds, Quartic])(alpha)
        return activation

    def _branch(self, shape: Shape, maps: float) -> nn.Module:
        """Return a composite whose branches keep the shape, or one behind a layer that all of them read."""
        rng = self.rng
        if rng.random() < 0.5:
            before = self._layer(shape, _SHARED)
            return nn.Sequential(before, self._branch(output_shape(before, shape), maps))
        a, b = self._same_shape(shape, maps), self._same_shape(shape, maps)
        cat = rng.random() < 0.5 and 2 * math.prod(shape) <= LIMIT
        join: How = "concatenate" if cat else "sum"
        if rng.random() < maps and shape[0] > 1:
            sizes = [(first := rng.randint(1, shape[0] - 1)), shape[0] - first]
            groups = [self._same_shape((size, *shape[1:]), maps) for size in sizes]
            return Split(sizes, groups)
        kinds: list[Callable[[], nn.Module]] = [
            lambda: Residual(*a),
            lambda: Residual(*a, shortcut=b),
            lambda: Parallel(a, b, nn.Identity()),
            lambda: Parallel(a, b, join=join, dim=rng.randint(1, len(shape))),
            lambda: Traced(TwoWays(a, b, cat)),
        ]
        return rng.choice(kinds)()

    def _same_shape(self, shape: Shape, maps: float) -> nn.Sequential:
        """Return a few layers, maps and activations that keep the shape."""
        rng, n = self.rng, len(shape) - 1
        found: list[nn.Module] = []
        for _ in range(rng.randint(1, 3)):
            if 1 <= n <= 3 and rng.random() < 0.7:
                mode, kernel = rng.choice(("zeros", "circular", "replicate")), rng.choice((1, 3))
                conv = partial(getattr(layers, f"Conv{n}d"), padding=kernel // 2, padding_mode=mode)
                found.append(conv(shape[0], shape[0], kernel, bias=self._bias()))
                if rng.random() < 0.4:
                    found.append(getattr(nn, f"BatchNorm{n}d")(shape[0]))
            elif rng.random() < 0.7:
                found.append(layers.Linear(shape[-1], shape[-1], bias=self._bias()))
            else:
                found.append(extra_layers.Scale(0.7))
            if rng.random() < maps:
                found.append(rng.choice((nn.ReLU(), nn.LeakyReLU(0.3), Abs())))
            if rng.random() < 0.5:
                found.append(self._activation())
        return nn.Sequential(*found)

    def _prefix(self, shape: Shape) -> Iterator[nn.Module]:
        if self.rng.random() < 0.3:
            centre = extra_layers.Centre(shape)
            centre.fit(torch.randn(4, *shape, dtype=torch.float64) / 4)
            yield centre
        if self.rng.random() < 0.2:
            yield nn.ReLU()

    def _head(self, shape: Shape) -> Iterator[nn.Module]:
        """Yield layers behind a ConformalLayers: some that a fold absorbs, and others."""
        rng = self.rng
        if len(shape) > 1:
            yield nn.Flatten()
        size, hidden = math.prod(shape), rng.randint(1, 6)
        yield nn.Linear(size, hidden, bias=rng.random() < 0.7)
        if rng.random() < 0.3:
            return
        kinds = (nn.ReLU, nn.Tanh, nn.Sigmoid, nn.LeakyReLU, nn.SiLU)
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


_TORCH_REFUSALS = (RuntimeError, ValueError, ArithmeticError, AssertionError, IndexError)


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


def output_shape(module: nn.Module, shape: Shape) -> Shape:
    """Return the shape of an output sample, by torch."""
    with torch.no_grad():
        if any(isinstance(part, RadialActivation) for part in module.modules()):
            return tuple(trace(ConformalLayers(module), shape).output_shape)
        was, _ = module.training, module.eval()
        dtype = next((parameter.dtype for parameter in module.parameters()), torch.float32)
        out = module(torch.zeros(1, *shape, dtype=dtype))
        module.train(was)
    return tuple(out.shape[1:])


def _is_call(module: nn.Module, shape: Shape) -> bool:
    """Check for a layer that only torch runs, such as a linear interpolation."""
    operations = fold(ConformalLayers(module), shape, strategy="layers").recipe.operations
    return any(op.kind == "call" for op in operations)


def _is_tie(module: nn.Module, shape: Shape) -> bool:
    """Check for a position between two pixels, which torch rounds by dtype: docs/promises.md."""
    if not isinstance(module, nn.Upsample) or not module.mode.startswith("nearest"):
        return False
    pixels = torch.arange(math.prod(shape), dtype=torch.float64).view(1, *shape)
    return not torch.equal(module(pixels), module(pixels.float()).double())


def samples(rng: Random, shape: Shape, dtype: torch.dtype, batch: int = 7) -> Tensor:
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
