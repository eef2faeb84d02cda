"""The oracle of the tests: the recurrence on (x, t), written out by hand in float64.

Nothing here comes from the library but the classes of its modules. Linear layers run as torch.nn
modules; activations, biases and sums of branches are the table of the mathematics, line by line;
bounds come from explicit matrices.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import conformallayers as cl

Vectors = Mapping[nn.Module, Tensor]


@dataclass
class Value:
    """A batch on its way: coefficients, coordinate, and what α of the next activation needs."""

    x: Tensor
    t: Tensor
    base: Tensor | float = 1.0
    segment: tuple[tuple[nn.Module, Tensor], ...] = ()
    rms: bool = False
    passed: object = None  # the same for values that have passed the same activations

    @property
    def size(self) -> float:
        """How many squares a norm averages: d in root mean squares, else 1."""
        return float(self.x[0].numel()) if self.rms else 1.0

    @property
    def bound(self) -> Tensor | float:
        """The product of the bounds since the last activation."""
        bound = self.base
        for layer, x in self.segment:
            bound = bound_of(layer, tuple(x.shape[1:])) * bound
        return bound

    def per_sample(self, scalar: Tensor) -> Tensor:
        """Shape one scalar a sample for a product with x."""
        return scalar.reshape(-1, *[1] * (self.x.dim() - 1))

    @property
    def point(self) -> Tensor:
        """X / t, and 0 where t is 0."""
        t = self.per_sample(self.t)
        return torch.where(t == 0, 0.0, self.x / torch.where(t == 0, 1.0, t))


def oracle(model: nn.Module, x: Tensor, vectors: Vectors | None = None) -> Tensor:
    """Return what a float64 ConformalLayers (or nn.Sequential) must give for a batch.

    ``vectors`` holds the unit vector that a spectral activation had before a training forward:
    its α is then ‖U v‖, differentiable in the weights; otherwise it is the stored norm.
    """
    rms = getattr(model, "unit", "norm") == "rms"
    value = Value(x, x[:, :0].flatten(1).sum(1), rms=rms)
    offset = getattr(model, "offset", None)
    square = 0.0 if offset is None else offset**2
    value.t = (x.flatten(1).square().sum(1) / value.size + square).sqrt()
    value.base = math.sqrt(value.size)
    return _pass(model, value, vectors or {}).point


def _pass(module: nn.Module, value: Value, vectors: Vectors) -> Value:
    if isinstance(module, (nn.Sequential, nn.ModuleList)):
        for child in module.children():
            value = _pass(child, value, vectors)
        return value
    composite = isinstance(module, (cl.Residual, cl.Parallel, cl.Split))
    if composite and (_is_nonlinear(module) or _adds(module)):
        found = [_pass(part, start, vectors) for start, part in _parts(module, value)]
        joined = _join(found, module)
        if not _is_nonlinear(module):  # for α it is one layer
            joined.base, joined.segment = value.base, (*value.segment, (module, value.x))
        return joined
    if isinstance(module, cl.RadialActivation):
        alpha = _alpha(module, value, vectors)
        n = value.x.flatten(1).square().sum(1) / value.size
        t = _coordinate(module, value.t, n, alpha)
        return Value(value.x, t, math.sqrt(value.size), (), value.rms, object())
    if _is_map(module):
        bound = bound_of(module, tuple(value.x.shape[1:])) * value.bound
        return replace(value, x=module(value.x), base=bound, segment=())
    segment = (*value.segment, (module, value.x))
    if isinstance(module, _NORMS) and module.training:
        x = module(value.point) * value.per_sample(value.t)
    else:
        shift = module(torch.zeros_like(value.x[:1])) if _adds(module) else 0.0
        x = module(value.x) - shift
        if _adds(module):
            x = x + Value(x, value.t).per_sample(value.t) * shift
    return replace(value, x=x, segment=segment)


class _Slice(nn.Module):
    """Some of the channels."""

    def __init__(self, start: int, stop: int) -> None:
        super().__init__()
        self.start, self.stop = start, stop

    def forward(self, x: Tensor) -> Tensor:
        return x[:, self.start : self.stop]


def _parts(module: nn.Module, value: Value) -> list[tuple[Value, nn.Module]]:
    """Return the branches of a composite, each with the value that enters it."""
    if isinstance(module, cl.Split):
        assert sum(module.sizes) == value.x.shape[1]
        stops = list(accumulate(module.sizes))
        slices = [_Slice(stop - n, stop) for stop, n in zip(stops, module.sizes, strict=True)]
        starts = [
            replace(value, x=part(value.x), segment=(*value.segment, (part, value.x)))
            for part in slices
        ]
        return list(zip(starts, module.groups, strict=True))
    residual = isinstance(module, cl.Residual)
    return [(value, m) for m in ((module.shortcut, module.body) if residual else module.branches)]


def _join(values: list[Value], module: nn.Module) -> Value:
    first, join = values[0], module.join
    parts = [value.point * first.per_sample(first.t) for value in values]
    bounds = torch.stack([torch.as_tensor(value.bound, dtype=torch.float64) for value in values])
    together = all(value.passed is first.passed for value in values)
    if join.how == "sum":
        x, base = sum(parts[1:], parts[0]), bounds.sum()
    else:
        x, base = torch.cat(parts, join.dim), bounds.square().sum().sqrt()
    if (
        isinstance(module, cl.Split) and together
    ):  # groups share the energy of what they are part of
        base = bounds.max()
    return Value(x, first.t, base, (), first.rms, first.passed if together else object())


def _coordinate(module: nn.Module, t: Tensor, n: Tensor, alpha: Tensor | float) -> Tensor:
    """Return the next t, from the table of the mathematics."""
    alive = torch.where(t == 0, 1.0, t)
    n = torch.where(t == 0, 0.0, n)
    if isinstance(module, cl.Gnomonic):
        return torch.where(t == 0, 0.0, (alpha**2 * alive**2 + n).sqrt())
    if isinstance(module, cl.RadialTanh):
        r = n.sqrt() / (alpha * alive)
        grown = torch.where(r == 0, 1.0, r / torch.where(r == 0, 1.0, r).tanh())
        return alpha * t * grown
    return alpha / 2 * t + (n / alive if module.projective else n) / (2 * alpha)


def _adds(module: nn.Module) -> bool:
    """Tell whether a module adds a bias."""
    own = getattr(module, "bias", None) is not None or isinstance(module, _NORMS)
    return own or any(_adds(child) for child in module.children())


def _is_nonlinear(module: nn.Module) -> bool:
    children = list(module.modules())
    return any(isinstance(child, cl.RadialActivation) or _is_map(child) for child in children)


def _is_map(module: nn.Module) -> bool:
    """Tell whether a module is a homogeneous map."""
    maps = nn.ReLU, nn.LeakyReLU, nn.PReLU, cl.Abs
    return (
        isinstance(module, maps) or re.search("MaxPool|LPPool", type(module).__name__) is not None
    )


def exact(model: nn.Module) -> nn.Module:
    """Return a float64 copy in the same mode."""
    return copy.deepcopy(model).double()


def exact_output(model: nn.Module, x: Tensor) -> Tensor:
    """Return what a model gives in evaluation mode, in float64."""
    return oracle(exact(model).eval(), x.double()).detach()


def leaves(model: nn.Module) -> Iterator[nn.Module]:
    """Walk through nested containers."""
    for child in model.children():
        if isinstance(child, nn.Sequential):
            yield from leaves(child)
        else:
            yield child


def randomise(model: nn.Module, seed: int = 0) -> nn.Module:
    """Give every parameter a random value, so that no special one hides an error."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(noise * 0.7 + 0.1)
        for module in model.modules():
            if isinstance(module, _NORMS):
                noise = torch.rand(2, module.num_features, generator=generator)
                module.running_mean.copy_(noise[0] / 10)
                module.running_var.copy_(noise[1] + 0.5)
    return model


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Return the largest error of a sample relative to its norm; NaN must meet NaN."""
    assert actual.shape == expected.shape
    if not expected.numel():
        return 0.0
    actual, expected = actual.detach().double(), expected.detach().double()
    assert torch.equal(actual.isnan(), expected.isnan())
    difference = (actual - expected).nan_to_num().flatten(1).norm(dim=1)
    size = expected.nan_to_num().flatten(1).norm(dim=1)
    return float(torch.where(difference == 0, 0.0, difference / size).max())


def gradient_error(actual: list[Tensor], expected: list[Tensor]) -> float:
    """Return the largest relative error of a gradient.

    A gradient that should vanish is measured against a tenth of the largest one.
    """
    assert all(torch.isfinite(g).all() for g in actual)
    floor = 0.1 * max(float(g.norm()) for g in expected)
    return max(
        float((a.double() - e).norm()) / max(float(e.norm()), floor)
        for a, e in zip(actual, expected, strict=True)
    )


def matrix_of(module: nn.Module, shape: tuple[int, ...]) -> Tensor:
    """Return the matrix of a linear module, one column for each coefficient of the input."""
    size = math.prod(shape)
    identity = torch.eye(size, dtype=torch.float64).view(size, *shape)
    twin = exact(module).eval()
    with torch.no_grad():
        return (twin(identity) - twin(torch.zeros_like(identity[:1]))).flatten(1).T


def bound_of(module: nn.Module, shape: tuple[int, ...]) -> Tensor | float:
    """Return the bound of one layer, as the table of the paper and its corrections have it."""
    if isinstance(module, (nn.Linear, *_CONVOLUTIONS, *_TRANSPOSED)):
        blocks = torch.block_diag(*_blocks(module))
        product = blocks.sum(0).amax() * blocks.sum(1).amax()
        return (product * _conv_copies(module, shape)).sqrt()
    if isinstance(module, cl.Scale):
        return module.gain.abs()
    if isinstance(module, _NORMS):
        return 1.0 if module.weight is None else module.weight.abs().max()
    if isinstance(module, cl.Residual):
        return _chain_bound(module.shortcut, shape) + _chain_bound(module.body, shape)
    if isinstance(module, cl.Split):
        groups = zip(module.groups, module.sizes, strict=True)
        bounds = [torch.as_tensor(_chain_bound(m, (n, *shape[1:]))).double() for m, n in groups]
        return torch.stack(bounds).max()
    if isinstance(module, nn.PReLU):
        return module.weight.abs().max().clamp_min(1.0)
    if isinstance(module, nn.LeakyReLU):
        return max(1.0, abs(module.negative_slope))
    if _is_map(module):  # the energy that a single pixel brings
        return matrix_of(module, shape).square().sum(0).max().sqrt()
    if isinstance(module, cl.Parallel):
        bounds = [torch.as_tensor(_chain_bound(b, shape)).double() for b in module.branches]
        every = torch.stack(bounds)
        return every.sum() if module.join.how == "sum" else every.square().sum().sqrt()
    included = getattr(module, "count_include_pad", True)
    if isinstance(module, _POOLS) and included and not getattr(module, "divisor_override", None):
        return 1.0
    spreads = (*_POOLS, *_ADAPTIVE, nn.Upsample, cl.RepeatChannels)
    if isinstance(module, spreads) or "Pad" in type(module).__name__:
        matrix = matrix_of(module, shape).abs()
        return math.sqrt(matrix.sum(0).max() * matrix.sum(1).max())
    return 1.0


def _chain_bound(module: nn.Module, shape: tuple[int, ...]) -> Tensor | float:
    """Return the product of the bounds of a branch."""
    layers = list(leaves(module)) if isinstance(module, nn.Sequential) else [module]
    bound: Tensor | float = 1.0
    x = torch.zeros(1, *shape, dtype=torch.float64)
    for layer in layers:
        bound = bound_of(layer, tuple(x.shape[1:])) * bound
        with torch.no_grad():
            x = exact(layer).eval()(x)
    return bound


_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_POOLS = (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)
_ADAPTIVE = (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)


def _alpha(module: cl.RadialActivation, value: Value, vectors: Vectors) -> Tensor | float:
    if isinstance(module.alpha, float):
        return module.alpha
    if module in vectors:
        image = vectors[module]
        for layer, _ in value.segment:
            image = _linear(layer, image)
        return image.square().sum().sqrt() * value.base / math.sqrt(value.size)
    if module.alpha == "spectral" and module.norm > 0:
        return module.norm * value.base / math.sqrt(value.size)
    bound = value.bound / math.sqrt(value.size)
    bound = bound if bound else 1.0  # zero weights: x is 0, and any α will do
    return bound * module.log_factor.exp() if module.alpha == "learned" else bound


def _linear(layer: nn.Module, x: Tensor) -> Tensor:
    """Return what counts of a layer for α: without biases, and without what a normalisation divides by."""
    if "Dropout" in type(layer).__name__:
        return x
    if isinstance(layer, _NORMS):
        return x if layer.weight is None else x * layer.weight.view(-1, *[1] * (x.dim() - 2))
    if isinstance(layer, nn.Sequential):
        for child in layer:
            x = _linear(child, x)
        return x
    if isinstance(layer, cl.Residual):
        return _linear(layer.shortcut, x) + _linear(layer.body, x)
    if isinstance(layer, cl.Split):
        slices = zip(layer.groups, x.split(list(layer.sizes), 1), strict=True)
        return torch.cat([_linear(group, part) for group, part in slices], 1)
    if isinstance(layer, cl.Parallel):
        parts = [_linear(branch, x) for branch in layer.branches]
        return layer.join.merge(parts)
    return layer(x) - layer(torch.zeros_like(x)) if _adds(layer) else layer(x)


def _blocks(module: nn.Module) -> list[Tensor]:
    """Return A[o, i] = ‖w[o, i]‖₁ of each group."""
    weight = module.weight.unsqueeze(2) if isinstance(module, nn.Linear) else module.weight
    return list(weight.abs().flatten(2).sum(2).chunk(getattr(module, "groups", 1)))


def _conv_copies(module: nn.Module, shape: tuple[int, ...]) -> float:
    """Count how often the padding repeats a pixel, by padding an image of pixel numbers."""
    mode = getattr(module, "padding_mode", "zeros")
    if mode == "zeros":
        return 1.0
    copies = 1.0
    for size, before, after, reach in _axes(module, shape):
        line = torch.arange(size, dtype=torch.float64).view(1, 1, -1)
        padded = _pad(line, before, after, mode).long()
        if mode == "circular":  # a kernel meets the same pixels again after one turn
            padded = padded[: len(padded) - reach]
        copies *= float(padded.bincount().max())
    return copies


def _pad(line: Tensor, before: int, after: int, mode: str) -> Tensor:
    return F.pad(line, (before, after), mode=mode).flatten()


def _axes(module: nn.Module, shape: tuple[int, ...]) -> Iterator[tuple[int, int, int, int]]:
    """Yield (size, padding before, padding after, reach of the kernel) of each axis."""
    for axis, size in enumerate(shape[1:]):
        reach = module.dilation[axis] * (module.kernel_size[axis] - 1)
        if module.padding == "same":
            yield size, reach // 2, reach - reach // 2, reach
        else:
            padding = 0 if module.padding == "valid" else module.padding[axis]
            yield size, padding, padding, reach
