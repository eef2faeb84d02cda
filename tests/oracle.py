"""The oracle: the recurrence on (x, t), written out in float64, apart from the library.

Only the classes of modules come from the library. Layers run as the torch.nn modules that they are; activations,
biases and joins are the table of the mathematics, line by line; bounds come from explicit matrices.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from conformallayers.nn.activations import Gnomonic, RadialActivation, ReSPro
from conformallayers.nn.branches import Parallel, Residual, Split
from conformallayers.nn.layers import Abs, RepeatChannels, Scale
from conformallayers.nn.traced import Traced

Shape = tuple[int, ...]
Scalar = Tensor | float
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_POOLS = (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)
_ADAPTIVE = (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)
_COMPOSITES = (Residual, Parallel, Split, Traced)


@dataclass(frozen=True)
class Run:
    """The settings of one run of the oracle.

    Args:
        vectors: the unit vector that a spectral activation had before a training forward: its α is then ‖U v‖,
            differentiable in the weights. Otherwise it is the stored norm.
        shake: applied to the feature maps behind every layer; noise shows what rounding costs the layers.
    """

    vectors: Mapping[nn.Module, Tensor] = field(default_factory=dict)
    shake: Callable[[Tensor], Tensor] = lambda x: x


@dataclass(frozen=True)
class Value:
    """A batch between two layers: coefficients x, coordinate t, and the layers that give the next α."""

    x: Tensor
    t: Tensor
    base: Scalar = 1.0
    segment: tuple[tuple[nn.Module, Shape], ...] = ()
    rms: bool = False
    passed: object = None  # the same for values that have passed the same activations

    @property
    def size(self) -> float:
        """How many squares a norm averages: d in root mean squares, else 1."""
        return float(self.x[0].numel()) if self.rms else 1.0

    @property
    def bound(self) -> Scalar:
        """The product of the bounds since the last activation."""
        bound = self.base
        for layer, shape in self.segment:
            bound = bound_of(layer, shape) * bound
        return bound

    @property
    def shape(self) -> Shape:
        """The shape of one sample."""
        return tuple(self.x.shape[1:])

    @property
    def point(self) -> Tensor:
        """The point x / t, and 0 where t is 0."""
        return self.at(torch.ones_like(self.t))

    def at(self, t: Tensor) -> Tensor:
        """The coefficients at another coordinate."""
        x, own = self.x, per_sample(self.t, self.x)
        return torch.where(own == 0, 0.0, x / torch.where(own == 0, 1.0, own)) * per_sample(t, x)

    def energy(self, x: Tensor) -> Tensor:
        """The mean of the squares of coefficients or points, or their sum."""
        return x.flatten(1).square().sum(1) / self.size


def oracle(
    model: nn.Module, x: Tensor, vectors: Mapping[nn.Module, Tensor] | None = None
) -> Tensor:
    """Return the exact output of a float64 ConformalLayers (or nn.Sequential) for a batch; differentiable."""
    return run_conformal(model, x, Run(vectors or {}))


@torch.no_grad()
def pair(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return (x, t) behind the last layer of a float64 ConformalLayers, before the division."""
    value = _passed(model, x, Run())
    return value.x, value.t


def run_conformal(model: nn.Module, x: Tensor, run: Run) -> Tensor:
    """Embed a batch, pass the layers and divide."""
    return _passed(model, x, run).point


def _passed(model: nn.Module, x: Tensor, run: Run) -> Value:
    value = Value(x, x.new_ones(len(x)), rms=getattr(model, "unit", "norm") == "rms")
    offset: Any = getattr(model, "offset", None)
    t = (value.energy(x) + (0.0 if offset is None else offset**2)).sqrt()
    return _pass(model, replace(value, t=t, base=math.sqrt(value.size)), run)


def per_sample(scalar: Tensor, x: Tensor) -> Tensor:
    """Reshape one scalar per sample, (B,), to broadcast over x."""
    return scalar.reshape(-1, *[1] * (x.dim() - 1))


def _pass(module: Any, value: Value, run: Run) -> Value:
    if isinstance(module, (nn.Sequential, nn.ModuleList)) or type(module) is nn.Module:
        for child in module._modules.values():  # one that is there twice runs twice
            value = _pass(child, value, run)
        return value
    if isinstance(module, _COMPOSITES) and (_is_nonlinear(module) or _adds(module)):
        joined = _join([_pass(branch, value, run) for branch in _branches(module)], module)
        if not _is_nonlinear(module):  # for α it is one layer
            segment = (*value.segment, (module, value.shape))
            joined = replace(joined, base=value.base, segment=segment)
        return replace(joined, x=run.shake(joined.x))
    if isinstance(module, RadialActivation):
        alpha = _alpha(module, value, run)
        t, base = _coordinate(module, value, alpha), math.sqrt(value.size)
        return replace(value, t=t, base=base, segment=(), passed=object())
    if _is_map(module):
        bound = bound_of(module, value.shape) * value.bound
        return replace(value, x=run.shake(module(value.x)), base=bound, segment=())
    segment = (*value.segment, (module, value.shape))
    if isinstance(module, _Slice):
        return replace(value, x=module(value.x), segment=segment)  # which rounds nothing
    if isinstance(module, _NORMS) and module.training:
        x = module(value.point) * per_sample(value.t, value.x)
    else:
        x = linear_part(module, value.x)
        if _adds(module):
            x = x + per_sample(value.t, x) * module(torch.zeros_like(value.x[:1]))
    return replace(value, x=run.shake(x), segment=segment)


def linear_part(module: Any, x: Tensor) -> Tensor:
    """Apply a layer without its bias, beside which a small x would vanish."""
    if isinstance(module, _NORMS):
        variance: Any = module.running_var
        factor: Tensor = 1 / (variance + module.eps).sqrt()
        factor = factor if module.weight is None else factor * module.weight
        return x * factor.view(-1, *[1] * (x.dim() - 2))
    if getattr(module, "bias", None) is None:
        return module(x)  # type: ignore[no-any-return]
    twin = copy.copy(module)
    twin._parameters = {**module._parameters, "bias": None}
    return twin(x)  # type: ignore[no-any-return]


class _Slice(nn.Module):
    """Some of the channels."""

    def __init__(self, start: int, stop: int) -> None:
        super().__init__()
        self.start, self.stop = start, stop

    def forward(self, x: Tensor) -> Tensor:
        """Return the channels."""
        return x[:, self.start : self.stop]


def _branches(module: Any) -> list[nn.Module]:
    """Return the branches of a composite; a group of a Split begins with a slice."""
    if isinstance(module, Split):
        stops = list(accumulate(module.sizes))
        slices = [_Slice(stop - n, stop) for stop, n in zip(stops, module.sizes, strict=True)]
        return [nn.Sequential(*pair) for pair in zip(slices, module.groups, strict=True)]
    if isinstance(module, Traced):  # a models.Join
        return [*module.body.get_submodule("branches").children()]
    return [module.shortcut, module.body] if isinstance(module, Residual) else [*module.branches]


def _axis(module: Any) -> int | None:
    """Return the axis along which branches are concatenated; None for a sum."""
    if isinstance(module, Traced):
        return 1 if any(node.target is torch.cat for node in module.body.graph.nodes) else None
    return None if module.join.how == "sum" else int(module.join.dim)


def _join(values: list[Value], module: Any) -> Value:
    first, axis = values[0], _axis(module)
    parts = [value.at(first.t) for value in values]
    together = all(value.passed is first.passed for value in values)
    x = sum(parts[1:], parts[0]) if axis is None else torch.cat(parts, axis)
    bounds = [value.bound for value in values]
    # Groups share the energy of what they are part of.
    base = _joined_bound(bounds, axis, groups=isinstance(module, Split) and together)
    passed = first.passed if together else object()
    return replace(first, x=x, base=base, segment=(), passed=passed)


def _joined_bound(bounds: list[Scalar], axis: int | None, *, groups: bool = False) -> Tensor:
    every = torch.stack([torch.as_tensor(bound, dtype=torch.float64) for bound in bounds])
    if groups:
        return every.max()
    return every.sum() if axis is None else every.square().sum().sqrt()


def _coordinate(module: Any, value: Value, alpha: Scalar) -> Tensor:
    """Return the next t, from the table of the mathematics."""
    if isinstance(module, ReSPro) and not module.projective:
        return value.t * (alpha / 2) + value.energy(value.x) / (2 * alpha)
    t, q = value.t, value.energy(value.point) / alpha**2
    if isinstance(module, ReSPro):
        return t * (alpha / 2) * (1 + q)
    if isinstance(module, Gnomonic):
        return t * alpha * (1 + q).sqrt()
    growth: Tensor = module.growth(q) / module.slope  # a user's own
    return t * alpha * growth


def _adds(module: nn.Module) -> bool:
    """Tell whether a module adds a bias."""
    own = getattr(module, "bias", None) is not None or isinstance(module, _NORMS)
    return own or any(_adds(child) for child in module.children())


def _is_nonlinear(module: nn.Module) -> bool:
    children = list(module.modules())
    return any(isinstance(child, RadialActivation) or _is_map(child) for child in children)


def _is_map(module: nn.Module) -> bool:
    """Tell whether a module is a homogeneous map."""
    maps = nn.ReLU, nn.LeakyReLU, nn.PReLU, Abs
    windows = re.search("MaxPool|LPPool", type(module).__name__)
    return isinstance(module, maps) or windows is not None


# -- α and bounds -----------------------------------------------------------------------------------


def _alpha(module: Any, value: Value, run: Run) -> Scalar:
    if isinstance(module.alpha, float):
        return module.alpha
    if module in run.vectors:
        image = run.vectors[module]
        for layer, _ in value.segment:
            image = _for_alpha(layer, image)
        return image.square().sum().sqrt() * value.base / math.sqrt(value.size)
    if module.alpha == "spectral" and module.norm > 0:
        norm: Tensor = module.norm * value.base / math.sqrt(value.size)
        return norm
    bound = value.bound / math.sqrt(value.size)
    bound = bound if bound else 1.0  # zero weights: x is 0, and any α will do
    return bound * module.log_factor.exp() if module.alpha == "learned" else bound


def _for_alpha(layer: Any, x: Tensor) -> Tensor:
    """Apply the part of a layer that counts for α: no bias, and no division of a normalisation."""
    if "Dropout" in type(layer).__name__:
        return x
    if isinstance(layer, _NORMS):
        return x if layer.weight is None else x * layer.weight.view(-1, *[1] * (x.dim() - 2))
    if isinstance(layer, nn.Sequential):
        for child in layer:
            x = _for_alpha(child, x)
        return x
    if isinstance(layer, _COMPOSITES):
        parts, axis = [_for_alpha(branch, x) for branch in _branches(layer)], _axis(layer)
        return sum(parts[1:], parts[0]) if axis is None else torch.cat(parts, axis)
    return linear_part(layer, x)


def bound_of(module: Any, shape: Shape) -> Scalar:
    """Return the bound of one layer, as the table of the paper and its corrections have it."""
    if isinstance(module, (nn.Linear, *_CONVOLUTIONS, *_TRANSPOSED)):
        blocks = torch.block_diag(*_blocks(module))
        product: Tensor = blocks.sum(0).amax() * blocks.sum(1).amax()
        return (product * _conv_copies(module, shape)).sqrt()
    if isinstance(module, Scale):
        gain: Tensor = module.gain
        return gain.abs()
    if isinstance(module, _NORMS):
        return 1.0 if module.weight is None else module.weight.abs().max()
    if isinstance(module, _COMPOSITES):
        bounds = [_chain_bound(branch, shape) for branch in _branches(module)]
        return _joined_bound(bounds, _axis(module), groups=isinstance(module, Split))
    if isinstance(module, nn.PReLU):
        return module.weight.abs().max().clamp_min(1.0)
    if isinstance(module, nn.LeakyReLU):
        return max(1.0, abs(module.negative_slope))
    if _is_map(module):  # the energy that a single pixel brings
        return matrix_of(module, shape).square().sum(0).max().sqrt()
    included = getattr(module, "count_include_pad", True)
    if isinstance(module, _POOLS) and included and not getattr(module, "divisor_override", None):
        return 1.0
    if re.match("ZeroPad|ConstantPad", type(module).__name__):
        return 1.0  # even where a crop leaves nothing
    spreads = (*_POOLS, *_ADAPTIVE, nn.Upsample, RepeatChannels)
    if isinstance(module, spreads) or "Pad" in type(module).__name__:
        matrix = matrix_of(module, shape).abs()
        return math.sqrt(matrix.sum(0).max() * matrix.sum(1).max())
    return 1.0


def matrix_of(module: nn.Module, shape: Shape) -> Tensor:
    """Return the matrix of a linear module, one column for each coefficient of the input."""
    size = math.prod(shape)
    identity = torch.eye(size, dtype=torch.float64).view(size, *shape)
    twin = copy.deepcopy(module).double().eval()
    with torch.no_grad():
        matrix: Tensor = (twin(identity) - twin(torch.zeros_like(identity[:1]))).flatten(1).T
    return matrix


def leaves(module: nn.Module) -> Iterator[nn.Module]:
    """Walk through nested containers."""
    for child in module._modules.values():
        if isinstance(child, nn.Sequential) or type(child) is nn.Module:
            yield from leaves(child)
        elif child is not None:
            yield child


def _chain_bound(module: nn.Module, shape: Shape) -> Scalar:
    """Return the product of the bounds of a branch."""
    plain = isinstance(module, nn.Sequential) or type(module) is nn.Module
    bound: Scalar = 1.0
    x = torch.zeros(1, *shape, dtype=torch.float64)
    for layer in leaves(module) if plain else [module]:
        bound = bound_of(layer, tuple(x.shape[1:])) * bound
        with torch.no_grad():
            x = copy.deepcopy(layer).double().eval()(x)
    return bound


def _blocks(module: Any) -> list[Tensor]:
    """Return A[o, i] = ‖w[o, i]‖₁ of each group."""
    weight = module.weight.unsqueeze(2) if isinstance(module, nn.Linear) else module.weight
    return list(weight.abs().flatten(2).sum(2).chunk(getattr(module, "groups", 1)))


def _conv_copies(module: Any, shape: Shape) -> float:
    """Count how often the padding repeats a pixel, by padding an image of pixel numbers."""
    mode = getattr(module, "padding_mode", "zeros")
    if mode == "zeros":
        return 1.0
    copies = 1.0
    for axis, size in enumerate(shape[1:]):
        reach = module.dilation[axis] * (module.kernel_size[axis] - 1)
        before = after = 0
        if module.padding == "same":
            before, after = reach // 2, reach - reach // 2
        elif module.padding != "valid":
            before = after = int(module.padding[axis])
        line = torch.arange(size, dtype=torch.float64).view(1, 1, -1)
        padded = F.pad(line, (before, after), mode=mode).flatten().long()
        if mode == "circular":  # a kernel meets the same pixels again after one turn
            padded = padded[: len(padded) - reach]
        copies *= max(1.0, float(padded.bincount().max()))
    return copies


# -- comparisons ------------------------------------------------------------------------------------


def exact(model: nn.Module) -> nn.Module:
    """Return a float64 copy in the same mode."""
    return copy.deepcopy(model).double()


def exact_output(model: nn.Module, x: Tensor) -> Tensor:
    """Return what a model gives in evaluation mode, in float64."""
    return oracle(exact(model).eval(), x.double()).detach()


def randomise(model: nn.Module, seed: int = 0) -> nn.Module:
    """Give every parameter a random value, so that no special one hides an error."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(noise * 0.7 + 0.1)
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
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
