"""The oracle of the tests: the recurrence on (x, t), written out by hand in float64.

Nothing here comes from the library but the classes of its modules. Linear layers run as torch.nn
modules; ReSPro is the table of the mathematics, line by line; bounds come from explicit matrices.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import conformallayers as cl

Vectors = Mapping[nn.Module, Tensor]


def oracle(model: nn.Module, x: Tensor, vectors: Vectors | None = None) -> Tensor:
    """Return what a float64 ConformalLayers (or nn.Sequential) must give for a batch.

    ``vectors`` holds the unit vector that a spectral activation had before a training forward:
    its α is then ‖U v‖, differentiable in the weights; otherwise it is the stored norm.
    """
    t = x.flatten(1).square().sum(1).sqrt()
    segment: list[tuple[nn.Module, Tensor]] = []
    for module in leaves(model):
        if not isinstance(module, cl.ReSPro):
            segment.append((module, x))
            x = module(x)
            continue
        alpha = _alpha(module, segment, vectors or {})
        energy = x.flatten(1).square().sum(1)
        if module.projective:
            energy = torch.where(t == 0, 0.0, energy / torch.where(t == 0, 1.0, t))
        t = alpha / 2 * t + energy / (2 * alpha)
        segment = []
    t = t.reshape(-1, *[1] * (x.dim() - 1))
    return torch.where(t == 0, 0.0, x / torch.where(t == 0, 1.0, t))


def exact(model: nn.Module) -> nn.Module:
    """Return a float64 copy in the same mode."""
    return copy.deepcopy(model).double()


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
    with torch.no_grad():
        return exact(module).eval()(identity).flatten(1).T


def bound_of(module: nn.Module, shape: tuple[int, ...]) -> Tensor | float:
    """Return the bound of one layer, as the table of the paper and its corrections have it."""
    if isinstance(module, (nn.Linear, *_CONVOLUTIONS, *_TRANSPOSED)):
        blocks = torch.block_diag(*_blocks(module))
        product = blocks.sum(0).amax() * blocks.sum(1).amax()
        return (product * _conv_copies(module, shape)).sqrt()
    if isinstance(module, cl.Scale):
        return module.gain.abs()
    included = getattr(module, "count_include_pad", True)
    if isinstance(module, _POOLS) and included and not getattr(module, "divisor_override", None):
        return 1.0
    if isinstance(module, (*_POOLS, *_ADAPTIVE)) or "Pad" in type(module).__name__:
        matrix = matrix_of(module, shape).abs()
        return math.sqrt(matrix.sum(0).max() * matrix.sum(1).max())
    return 1.0


_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_POOLS = (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)
_ADAPTIVE = (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)


def _alpha(
    module: cl.ReSPro, segment: list[tuple[nn.Module, Tensor]], vectors: Vectors
) -> Tensor | float:
    if isinstance(module.alpha, float):
        return module.alpha
    if module in vectors:
        image = vectors[module]
        for layer, _ in segment:
            image = image if "Dropout" in type(layer).__name__ else layer(image)
        return image.square().sum().sqrt()
    if module.alpha == "spectral" and module.norm > 0:
        return module.norm
    bound: Tensor | float = 1.0
    for layer, x in segment:
        bound = bound_of(layer, tuple(x.shape[1:])) * bound
    bound = bound if bound else 1.0  # zero weights: x is 0, and any α will do
    return bound * module.log_factor.exp() if module.alpha == "learned" else bound


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
