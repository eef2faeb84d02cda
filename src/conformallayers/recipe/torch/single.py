"""Run a single sample in torch: scalars are Python numbers, convolutions of few channels matrix products.

A single image takes more time for calls than for arithmetic. This is for plain inference on the CPU, and for
samples whose norms need no normalising; others raise :class:`OutsideLimits` and run as a batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ... import functional
from .. import layer_operations as layer
from .. import point_operations as point
from ..operation import Runtime, Shape
from ..recipe import Recipe
from .points import RUN

if TYPE_CHECKING:
    from .module import RecipeModule

SINGLE = Runtime(RUN.name)
SINGLE.update(RUN)
_ENTRIES = (
    2**16
)  # elements of all windows of a convolution; more take longer to copy than to convolve
_FEW = 8  # channels; torch's convolutions of so many and more are fast
_READS_SCALARS = point.Advance, point.Divide, point.Rebase


class OutsideLimits(Exception):
    """Raised where a sample must be normalised."""


def runs_single(recipe: Recipe, shapes: Mapping[str, Shape] | None = None) -> bool:
    """Check that all operations that read scalars of a recipe, whose shapes may be given, take Python numbers."""
    scalars = {name for name, shape in (shapes or recipe.shapes()).items() if shape == ()}
    return recipe.output not in scalars and all(
        _runs_single(op) and (isinstance(op, _READS_SCALARS) or scalars.isdisjoint(op.inputs))
        for op in recipe.operations
    )


def _runs_single(op: object) -> bool:
    if isinstance(op, point.Advance):
        return op.module is None and op.rule in ("published", "projective")
    return not isinstance(op, point.Normalize) or op.limits is not None


@SINGLE.runs(point.Normalize)
def _normalize(op: point.Normalize, module: RecipeModule, x: Tensor) -> tuple[Tensor, float, float]:
    t = math.sqrt(_energy(x))
    if op.limits is None or not op.limits[0] < t < op.limits[1]:  # NaN is outside as well
        raise OutsideLimits
    return x, 1.0, math.hypot(t, op.offset) if op.offset else t


@SINGLE.runs(point.SumSquares)
def _sum_squares(op: point.SumSquares, module: RecipeModule, z: Tensor) -> float:
    return _energy(z) * op.weight


@SINGLE.runs(point.Dot, point.QuadraticForm, point.BandedForm, point.SpectralForm)
def _number(op: point.Dot, module: RecipeModule, *values: Tensor) -> float:
    return float(RUN[type(op)](op, module, *values))


@SINGLE.runs(point.Advance)
def _advance(
    op: point.Advance, module: RecipeModule, tau: float, m: float, *energies: float
) -> float:
    n = sum(energies)
    return tau + (m * n if op.rule == "published" else n / tau)


@SINGLE.runs(point.Divide)
def _divide(op: point.Divide, module: RecipeModule, v: Tensor, tau: float, m: float) -> Tensor:
    return v * (op.scale / tau)


@SINGLE.runs(point.Rebase)
def _rebase(
    op: point.Rebase, module: RecipeModule, z: Tensor, m: float, tau: float
) -> tuple[Tensor, float, float]:
    alive = 1.0 if tau == tau else tau
    return z * (op.scale / tau), min(m * op.coordinate * tau, point.LARGEST_COORDINATE), alive


@SINGLE.runs(layer.Conv)
def _conv(op: layer.Conv, module: RecipeModule, x: Tensor) -> Tensor:
    weight, bias = module.constant(op.weight), module.optional(op.bias)
    windows = None
    if weight.is_contiguous(memory_format=torch.channels_last):
        windows = _windows(x.shape, x.stride(), weight.shape, op.stride, op.dilation)
    if windows is None or op.groups > 1 or any(op.padding):
        result: Tensor = RUN[layer.Conv](op, module, x)
        return result
    columns = x.as_strided(windows.size, windows.stride).reshape(windows.matrix)
    rows = windows.matrix[0]
    # A view of the memory of the kernel: its entries are in channels-last order, as those of windows.
    matrix = weight.as_strided((weight.shape[0], rows), (rows, 1))
    if bias is None:
        return matrix.mm(columns).view(windows.result)
    return torch.addmm(bias.unsqueeze(1), matrix, columns).view(windows.result)


class _Windows(NamedTuple):
    """The windows of a convolution as a view of its input, as a matrix, and the shape of the result."""

    size: Shape
    stride: Shape
    matrix: tuple[int, int]
    result: Shape


@lru_cache(maxsize=1024)
def _windows(
    shape: Shape, strides: Shape, weight: Shape, step: Shape, dilation: Shape
) -> _Windows | None:
    """Return the windows of an image without padding, (kernel, channels, positions); None if torch is faster."""
    out, channels, *kernel = weight
    axes = zip(shape[2:], kernel, step, dilation, strict=True)
    positions = [(n - d * (k - 1) - 1) // s + 1 for n, k, s, d in axes]
    rows, count = channels * math.prod(kernel), math.prod(positions)
    if channels >= _FEW or rows * count > _ENTRIES:
        return None
    inner = [d * stride for d, stride in zip(dilation, strides[2:], strict=True)]
    outer = [s * stride for s, stride in zip(step, strides[2:], strict=True)]
    size, stride = (*kernel, channels, *positions), (*inner, strides[1], *outer)
    return _Windows(size, stride, (rows, count), (1, out, *positions))


def _energy(z: Tensor) -> float:
    """Return the sum of squares; no float32 sum in it is long."""
    count = z.numel()
    if z.dim() == 4 and not z.is_contiguous():
        z = z.permute(0, 2, 3, 1)  # rows of memory, if channels are last
    if count <= functional.SHORT:
        row = z.reshape(count)
        return float(row.dot(row))
    block = functional.block_size(count)
    if not block or not z.is_contiguous():
        norm = float(functional.norm(z))
        return norm * norm  # inf where ** would raise an error
    norms = torch.linalg.vector_norm(z.view(count // block, block), dim=1)
    return float(sum(norm * norm for norm in norms.tolist()))
