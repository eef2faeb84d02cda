"""The oracle of the soak: the recurrence on (x, t), written apart from the library.

Only the classes of modules come from the library. A linear layer runs in float64 as the torch.nn module
that it is. Everything else is the table of the mathematics: x = m·z with ‖z‖ near 1, and m and t in
numpy's longdouble, so that no scale leaves the range.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from ...nn.activations import Gnomonic, RadialActivation, RadialTanh, ReSPro
from ...nn.branches import Parallel, Residual
from ...nn.container import ConformalLayers
from ...nn.extra_layers import RepeatChannels, Scale
from ...nn.traced import Traced

Scalars = NDArray[Any]  # longdouble, one for each sample, (B,)
LARGEST = np.longdouble("1e2000")  # of t: an activation has sent the point to 0 long before
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_POOLS = (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)
_ADAPTIVE = (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)


@dataclass(frozen=True)
class Points:
    """A batch on its way, with the layers since the last activation, which α needs."""

    z: Tensor  # (B, ...) in float64; x = m·z
    m: Scalars
    t: Scalars
    base: float = 1.0
    segment: tuple[tuple[nn.Module, tuple[int, ...]], ...] = ()


class Oracle:
    """Compute what a model must give.

    Args:
        eps: multiply every value of every feature map by 1 + eps·u, u uniform in [-1, 1]: the deviation
            of such runs is what rounding to eps costs the layers themselves.
        seed: of that noise.
    """

    def __init__(self, eps: float = 0.0, seed: int = 0) -> None:
        self.eps, self.generator = eps, torch.Generator().manual_seed(seed)
        self.norms: list[
            Scalars
        ] = []  # of the outputs of every ConformalLayers and layer around them

    def __call__(self, model: nn.Module, x: Tensor) -> Tensor:
        """Return the output for a batch (B, ...), in float64 and evaluation mode."""
        with torch.no_grad():
            return self._plain(copy.deepcopy(model).double().eval(), self._shaken(x.double()))

    def _plain(self, module: nn.Module, x: Tensor) -> Tensor:
        """Run what is not conformal as it is, and a ConformalLayers from embedding to division."""
        if isinstance(module, ConformalLayers):
            x = self._conformal(module, x)
        elif isinstance(module, nn.Sequential):
            for child in module.children():
                x = self._plain(child, x)
            return x
        else:
            x = self._shaken(module(x))
        self.norms.append(_norm(x))
        return x

    def _conformal(self, module: nn.Module, x: Tensor) -> Tensor:
        peak = x.abs().flatten(1).amax(1).numpy().astype(np.longdouble)
        z = _times(x, 1 / np.where(peak == 0, 1, peak))
        value = self._walk(module, Points(z, peak, peak * _norm(z)))
        return _times(value.z, value.m / np.where(value.t == 0, 1, value.t))

    def _walk(self, module: nn.Module, value: Points) -> Points:
        if isinstance(module, (Residual, Parallel, Traced)):
            return self._branch(module, value)
        if isinstance(module, RadialActivation):
            return _activated(module, value)
        if type(module) in (nn.Sequential, nn.Module, nn.ModuleList, ConformalLayers):
            for child in module.children():
                value = self._walk(child, value)
            return value
        segment = (*value.segment, (module, tuple(value.z.shape[1:])))
        z, m = _balanced(_linear(module, value.z), value.m)
        bias = _bias(module, z)
        if bias is not None:  # x ← x + t·b, with the larger of both as the new scale
            total = m + value.t * float(bias.abs().max())
            total = np.where(total == 0, 1, total)
            z = _times(z, m / total) + _times(bias.expand_as(z), value.t / total)
            z, m = _balanced(z, total)
        return replace(value, z=self._shaken(z), m=m, segment=segment)

    def _branch(self, module: nn.Module, value: Points) -> Points:
        parts, axis = branches_of(module)
        found = [self._walk(part, value) for part in parts]
        first = found[0]
        scales = [one.m * (first.t / np.where(one.t == 0, 1, one.t)) for one in found]
        largest = np.max(scales, axis=0)
        m = np.where(largest == 0, 1, largest)
        z = joined(
            [_times(one.z, scale / m) for one, scale in zip(found, scales, strict=True)], axis
        )
        z, m = _balanced(z, m)
        if not has_activation(module):  # for α it is one layer
            segment = (*value.segment, (module, tuple(value.z.shape[1:])))
            return Points(self._shaken(z), m, first.t, value.base, segment)
        bounds = [one.base * chain_bound(one.segment) for one in found]
        return Points(self._shaken(z), m, first.t, joined_bound(bounds, axis))

    def _shaken(self, z: Tensor) -> Tensor:
        if not self.eps:
            return z
        noise = torch.rand(z.shape, generator=self.generator, dtype=torch.float64)
        return z * (1 + self.eps * (2 * noise - 1))


def _activated(module: RadialActivation, value: Points) -> Points:
    """Advance t by the table of the mathematics, and keep it below its limit."""
    alpha = np.longdouble(_alpha(module, value))
    t = value.t
    alive = np.where(t == 0, 1, t)
    length = value.m * _norm(value.z) / alive  # of the point
    r = length / alpha
    if isinstance(module, ReSPro):
        factor = alpha / 2 * (1 + r * r * (1 if module.projective else t))
    elif isinstance(module, Gnomonic):
        factor = alpha * np.sqrt(1 + r * r)
    elif isinstance(module, RadialTanh):
        small = r < 1e-6
        safe = np.where(small, 1, r)
        factor = alpha * np.where(small, 1 + r * r / 3, safe / np.tanh(safe))
    else:
        growth = module.growth(torch.from_numpy((r * r).astype(np.float64)))
        factor = alpha / module.slope * growth.numpy()
    m = value.m
    over = np.maximum(t / LARGEST * factor, 1)  # x and t are divided by what t is too large
    return Points(value.z, m / over, np.where(over > 1, LARGEST, t * np.minimum(factor, LARGEST)))


def _alpha(module: RadialActivation, value: Points) -> float:
    if isinstance(module.alpha, float):
        return module.alpha
    if module.alpha == "spectral" and float(module.norm) > 0:
        return float(module.norm) * value.base
    bound = value.base * chain_bound(value.segment)
    bound = bound or 1.0  # zero weights: x is 0, and any α will do
    return bound * math.exp(float(module.log_factor)) if module.alpha == "learned" else bound


def branches_of(module: Any) -> tuple[list[nn.Module], int | None]:
    """Return the branches of a composite, and the axis that joins them (None: a sum)."""
    if isinstance(module, Traced):  # of the generator: a(x) + b(x) or torch.cat([a(x), b(x)], 1)
        cat = any(node.target is torch.cat for node in module.body.graph.nodes)
        parts = [module.body.get_submodule(name) for name in "ab"]
        return parts, 1 if cat else None
    if isinstance(module, Residual):
        return [module.shortcut, module.body], None
    return list(module.branches), None if module.join.how == "sum" else module.join.dim


def joined(parts: list[Tensor], axis: int | None) -> Tensor:
    """Return the sum or the concatenation of maps."""
    return sum(parts[1:], parts[0]) if axis is None else torch.cat(parts, axis)


def joined_bound(bounds: list[float], axis: int | None) -> float:
    """Return the bound of a sum or a concatenation."""
    return sum(bounds) if axis is None else math.hypot(*bounds)


def has_activation(module: nn.Module) -> bool:
    """Check whether a module has an activation inside."""
    return any(isinstance(child, RadialActivation) for child in module.modules())


def _norm(z: Tensor) -> Scalars:
    """Return ‖z‖ of each sample; a map is scaled by its peak first, so that no square underflows."""
    flat = z.flatten(1).numpy()
    peak = np.abs(flat).max(1, initial=0)
    safe = np.where(peak == 0, 1, peak)
    # Pairwise sums in float64 err by 1e-15 at any size.
    squares = np.square(flat / safe[:, None]).sum(1, dtype=np.float64)
    norm: Scalars = np.sqrt(squares.astype(np.longdouble)) * peak.astype(np.longdouble)
    return norm


def _balanced(z: Tensor, m: Scalars) -> tuple[Tensor, Scalars]:
    """Divide z by its norm and multiply m with it."""
    norm = _norm(z)
    norm = np.where(norm == 0, 1, norm)
    return _times(z, 1 / norm), m * norm


def _times(z: Tensor, factor: Scalars) -> Tensor:
    """Multiply each sample by its factor, in two steps where one would leave the range of float64."""
    root = np.sqrt(np.clip(factor, np.longdouble("1e-600"), np.longdouble("1e600")))
    half = torch.from_numpy(root.astype(np.float64)).view(-1, *[1] * (z.dim() - 1))
    product = z * half * half
    zero = torch.from_numpy(np.asarray(factor == 0)).view(-1, *[1] * (z.dim() - 1))
    return torch.where(zero, 0.0, product)


def _linear(module: Any, z: Tensor) -> Tensor:
    """Apply a layer without its bias."""
    if isinstance(module, _NORMS):
        return z * _channels(_norm_factor(module), z)
    if getattr(module, "bias", None) is None:
        return module(z)  # type: ignore[no-any-return]
    twin = copy.copy(module)
    twin._parameters = {**module._parameters, "bias": None}
    return twin(z)  # type: ignore[no-any-return]


def _bias(module: Any, z: Tensor) -> Tensor | None:
    """Return the bias of a layer in the shape of its output, or None."""
    bias: Tensor | None = getattr(module, "bias", None)
    if isinstance(module, _NORMS):
        mean: Any = module.running_mean
        shift = -mean * _norm_factor(module)
        return _channels(shift if bias is None else shift + bias, z)
    if bias is None:
        return None
    return bias if isinstance(module, nn.Linear) else _channels(bias, z)


def _norm_factor(module: Any) -> Tensor:
    factor: Tensor = 1 / (module.running_var + module.eps).sqrt()
    return factor if module.weight is None else module.weight * factor


def _channels(values: Tensor, z: Tensor) -> Tensor:
    return values.view(-1, *[1] * (z.dim() - 2))


def chain_bound(segment: tuple[tuple[nn.Module, tuple[int, ...]], ...]) -> float:
    """Return the product of the bounds of layers."""
    return math.prod(bound_of(module, shape) for module, shape in segment)


def bound_of(module: Any, shape: tuple[int, ...]) -> float:
    """Return the bound of one layer on a sample of that shape, as docs/mathematics.md has it."""
    if isinstance(module, (nn.Linear, *_CONVOLUTIONS, *_TRANSPOSED)):
        weight = module.weight[..., None] if isinstance(module, nn.Linear) else module.weight
        kernels = weight.abs().flatten(2).sum(2).chunk(getattr(module, "groups", 1))
        rows = max(float(block.sum(1).max()) for block in kernels)
        columns = max(float(block.sum(0).max()) for block in kernels)
        return math.sqrt(rows * columns * _copies(module, shape))
    if isinstance(module, Scale):
        return abs(float(module.gain))
    if isinstance(module, _NORMS):
        return 1.0 if module.weight is None else float(module.weight.abs().max())
    if isinstance(module, (Residual, Parallel, Traced)):
        parts, axis = branches_of(module)
        return joined_bound([chain_bound(_segment(part, shape)) for part in parts], axis)
    if isinstance(module, RepeatChannels):
        return math.sqrt(module.times)
    plain_pool = getattr(module, "count_include_pad", True)
    if isinstance(module, _POOLS) and plain_pool and not getattr(module, "divisor_override", None):
        return 1.0
    spreads = isinstance(module, (*_POOLS, *_ADAPTIVE, nn.Upsample))
    if spreads or "Pad" in type(module).__name__:
        matrix = channel_matrix(module, shape).abs()
        return math.sqrt(float(matrix.sum(0).max() * matrix.sum(1).max()))
    return 1.0


def channel_matrix(module: nn.Module, shape: tuple[int, ...]) -> Tensor:
    """Return the matrix of a layer that treats all channels alike, for one of them."""
    size = math.prod(shape[1:])
    identity = torch.eye(size, dtype=torch.float64).view(size, 1, *shape[1:])
    return module(identity).flatten(1).T  # type: ignore[no-any-return]


def _segment(
    module: nn.Module, shape: tuple[int, ...]
) -> tuple[tuple[nn.Module, tuple[int, ...]], ...]:
    """Return the layers of a linear branch, each with the shape of its input."""
    x, found = torch.zeros(1, *shape, dtype=torch.float64), []
    for layer in _leaves(module):
        found.append((layer, tuple(x.shape[1:])))
        x = layer(x)
    return tuple(found)


def _leaves(module: nn.Module) -> Iterator[nn.Module]:
    if type(module) in (nn.Sequential, nn.Module):
        for child in module.children():
            yield from _leaves(child)
    else:
        yield module


def _copies(module: Any, shape: tuple[int, ...]) -> float:
    """Count how often the padding of a convolution repeats a pixel, by padding pixel numbers."""
    mode = getattr(module, "padding_mode", "zeros")
    if mode == "zeros" or not isinstance(module, _CONVOLUTIONS):
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
