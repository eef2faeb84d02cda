"""All operations in torch: one function each, of (operation, module, *input values).

Scalars of samples are float64 where the device has it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ... import functional
from ...functional import block_size, full_precision, norm_pool, transformed, wide_dtype
from ...nn.formula import FUNCTIONS
from .. import layer_operations as layer
from .. import places
from .. import point_operations as point
from ..integer_arithmetic import IntegerArithmetic, flat
from ..integer_operations import IntegerConv, IntegerMatmul, IntegerPool
from ..recipe import Runtime

RUN = Runtime("torch")


Context = Any  # a RecipeModule
_LONG_WINDOW = 1024  # entries; torch adds them one by one, and a longer sum loses digits
_FEW_BLOCKS = 16  # a sum of so few numbers loses no digits
_CONVOLUTIONS = "conv", "conv_transpose"
_POOLS = "avg_pool", "max_pool", "adaptive_avg_pool", "adaptive_max_pool"
# torch's functions for one to three spatial axes.
_BY_AXES: dict[str, dict[int, Any]] = {
    name: {axes: getattr(F, f"{name}{axes}d") for axes in (1, 2, 3)}
    for name in (*_CONVOLUTIONS, *_POOLS)
}
_ELEMENTWISE: dict[str, Callable[..., Tensor]] = {
    "abs": torch.abs,
    "relu": F.relu,
    "clip": torch.clamp,
    "leaky_relu": F.leaky_relu,
    "gelu": F.gelu,
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
}


@RUN.runs(layer.Matmul)
def _matmul(op: layer.Matmul, module: Context, x: Tensor) -> Tensor:
    weight, bias = module.constant(op.weight), module.optional(op.bias)
    if weight.shape[1] <= layer.LONG_ROW:
        return F.linear(x, weight, bias)
    y = _long_product(x.reshape(-1, weight.shape[1]), weight).reshape(*x.shape[:-1], len(weight))
    return y if bias is None else y + bias.to(y.dtype)


def _long_product(x: Tensor, weight: Tensor) -> Tensor:
    """Return x Wᵀ of long rows, (B, n) and (m, n), in one batched product of blocks and one of the rest."""
    block = block_size(weight.shape[1], layer.BLOCK) or layer.BLOCK
    count, rest = divmod(weight.shape[1], block)
    cut = count * block
    head, columns = (x[:, :cut], weight[:, :cut]) if rest else (x, weight)
    blocks = head.reshape(x.shape[0], count, block)
    columns = columns.reshape(len(weight), count, block)
    if torch.compiler.is_compiling() or x.shape[0] == 1:
        sums = torch.bmm(blocks.transpose(0, 1), columns.permute(1, 2, 0))
    else:  # the transposed product of a batch takes two thirds of the time
        sums = torch.bmm(columns.transpose(0, 1), blocks.permute(1, 2, 0)).mT
    if count <= _FEW_BLOCKS:
        y = sums.sum(0)
    else:
        y = sums.sum(0, dtype=wide_dtype(x.device)).to(sums.dtype)
    return y + F.linear(x[:, cut:], weight[:, cut:]) if rest else y


@RUN.runs(layer.Conv)
def _conv(op: layer.Conv, module: Context, x: Tensor) -> Tensor:
    return _convolved(op, x, module.constant(op.weight), module.optional(op.bias))


def _convolved(op: layer.Conv, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Convolve with the settings of an operation; weight and bias have the dtype of x."""
    options = op.stride, op.padding, op.dilation, op.groups
    y: Tensor = _BY_AXES["conv"][len(op.stride)](x, weight, bias, *options)
    return y


@RUN.runs(layer.ConvTranspose)
def _conv_transpose(op: layer.ConvTranspose, module: Context, x: Tensor) -> Tensor:
    constants = module.constant(op.weight), module.optional(op.bias)
    options = op.stride, op.padding, op.output_padding, op.groups, op.dilation
    y: Tensor = _BY_AXES["conv_transpose"][len(op.stride)](x, *constants, *options)
    return y


def _for_sums(x: Tensor, entries: int) -> Tensor:
    """Widen x for sums over long windows."""
    return x.to(wide_dtype(x.device)) if entries > _LONG_WINDOW else x


@RUN.runs(layer.AvgPool)
def _avg_pool(op: layer.AvgPool, module: Context, x: Tensor) -> Tensor:
    options = op.kernel, op.stride, op.padding, op.ceil_mode, op.count_include_pad
    wide = _for_sums(x, prod(op.kernel))
    pooled: Tensor = _BY_AXES["avg_pool"][len(op.kernel)](wide, *options)
    return pooled.to(x.dtype)


@RUN.runs(layer.MaxPool)
def _max_pool(op: layer.MaxPool, module: Context, x: Tensor) -> Tensor:
    options = op.kernel, op.stride, op.padding, op.dilation, op.ceil_mode
    pooled: Tensor = _BY_AXES["max_pool"][len(op.kernel)](x, *options)
    return pooled


@RUN.runs(layer.AdaptiveAvgPool)
def _adaptive_avg_pool(op: layer.AdaptiveAvgPool, module: Context, x: Tensor) -> Tensor:
    wide = _for_sums(x, prod(x.shape[2:]) // prod(op.size))
    pooled: Tensor = _BY_AXES["adaptive_avg_pool"][len(op.size)](wide, op.size)
    return pooled.to(x.dtype)


RUN[layer.AdaptiveMaxPool] = lambda op, _, x: _BY_AXES["adaptive_max_pool"][len(op.size)](
    x, op.size
)


@RUN.runs(layer.NormPool)
def _norm_pool(op: layer.NormPool, module: Context, x: Tensor) -> Tensor:
    wide = _for_sums(x, prod(op.kernel))
    return norm_pool(wide, op.kernel, op.stride, op.ceil_mode).to(x.dtype)


@RUN.runs(layer.Pad)
def _pad(op: layer.Pad, module: Context, x: Tensor) -> Tensor:
    pads = [end for ends in reversed(op.pads) for end in ends]
    if op.mode == "zeros":
        return F.pad(x, pads, value=op.value)
    return F.pad(x, pads, mode=op.mode)


@RUN.runs(layer.Upsample)
def _upsample(op: layer.Upsample, module: Context, x: Tensor) -> Tensor:
    # torch copies other entries where a map is channels-last.
    return F.interpolate(x.contiguous(), scale_factor=op.scales, mode="nearest")


RUN[layer.Multiply] = lambda op, module, x: x * module.constant(op.factor)
RUN[layer.AddConstant] = lambda op, module, x: x + module.constant(op.value)
RUN[layer.Add] = lambda _op, _module, *values: reduce(torch.add, values)
RUN[layer.Product] = lambda _op, _module, x, y: x * y
RUN[layer.Concatenate] = lambda op, _, *values: torch.cat(values, op.axis + 1)
RUN[layer.Slice] = lambda op, _, x: x.narrow(op.axis + 1, op.start, op.stop - op.start)
RUN[layer.Reshape] = lambda op, _, x: x.reshape(x.shape[0], *op.shape)
RUN[layer.Permute] = lambda op, _, x: x.permute(0, *(axis + 1 for axis in op.order))


RUN[layer.Elementwise] = lambda op, _, x: _ELEMENTWISE[op.function](x, *op.parameters)
RUN[layer.PRelu] = lambda op, module, x: torch.where(x > 0, x, x * module.constant(op.slope))
RUN[layer.Softmax] = lambda op, _, x: (F.log_softmax if op.log else F.softmax)(x, op.axis + 1)


def row_major(x: Tensor) -> Tensor:
    """Return x in row-major order, the strides of axes of size 1 too: (9, 1, 3, 1) of (C, 1, 3, 3) become (9, 9, 3, 1).

    With the former torch convolves wrongly, and normalizes groups with few digits.
    """
    return x.flatten().view(x.shape)


@RUN.runs(layer.Call)
def _call(op: layer.Call, module: Context, *values: Any) -> Any:
    # A user's module may call view, which fails on a channels-last map.
    plain = [row_major(v) if isinstance(v, Tensor) and not transformed() else v for v in values]
    return module.calls[op.module](*plain)


# -- points ------------------------------------------------------------------------------------------

_FORMULA = {name: getattr(torch, name) for name in FUNCTIONS}


@RUN.runs(point.Normalize)
def _normalize(op: point.Normalize, module: Context, x: Tensor) -> tuple[Tensor, float, Tensor]:
    return x, 1.0, functional.length(x, op.offset)


@RUN.runs(point.SumSquares)
def _sum_squares(op: point.SumSquares, module: Context, z: Tensor) -> Tensor:
    energy = functional.squared_norm(z)
    return energy if op.weight == 1.0 else energy * op.weight


@RUN.runs(point.BandedForm)
def _banded_form(op: point.BandedForm, module: Context, x: Tensor) -> Tensor:
    with full_precision(x):
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        band, last = (module.constant(name).to(x.dtype) for name in (op.band, op.last))
        size, width = op.size, op.width
        windows = x.unfold(1, (width + 1) * size, size).transpose(0, 1)  # (blocks - width, B, …)
        images = torch.bmm(windows, band)
        total = images.square().sum((0, 2))
        if width:
            total = total + (x[:, -width * size :] @ last).square().sum(1)
        return total.to(wide_dtype(x.device)) * op.weight


def _as_tensor(tau: Tensor | float, like: Tensor) -> Tensor:
    """Return a coordinate; a file may name the peak, which is a float, in its place."""
    return tau if isinstance(tau, Tensor) else like.new_tensor(tau)


@RUN.runs(point.Advance)
def _advance(
    op: point.Advance, module: Context, tau: Tensor, m: Tensor | float, *energies: Tensor
) -> Tensor:
    n, formula = reduce(torch.add, energies), op.parsed
    tau = _as_tensor(tau, n)

    def step(tau: Tensor, m: Tensor | float, n: Tensor) -> Tensor:
        found: Tensor = formula.evaluate({"tau": tau, "m": m, "n": n}, _FORMULA)
        return found

    return functional.advance(step, tau, m, n) if op.divides else step(tau, m, n)


@RUN.runs(point.Divide)
def _divide(op: point.Divide, module: Context, v: Tensor, tau: Tensor, m: Tensor | float) -> Tensor:
    return functional.scale_samples(v, functional.guarded_ratio(op.scale, _as_tensor(tau, v)))


@RUN.runs(point.Rebase)
def _rebase(
    op: point.Rebase, module: Context, z: Tensor, m: Tensor, tau: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    tau = _as_tensor(tau, z)
    coordinate = (m * op.coordinate * tau).clamp_max(point.LARGEST_COORDINATE)
    fixed = tau.detach()
    alive = torch.where(fixed.isnan(), fixed, (fixed != 0).to(tau.dtype))
    return functional.scale_samples(z, functional.guarded_ratio(op.scale, tau)), coordinate, alive


# -- integers ----------------------------------------------------------------------------------------

_SPLIT = 2.0**27 + 1  # splits a number of 53 bits into two of 26 (Dekker)


def _root(x: Tensor) -> Tensor:
    """Return √x as IEEE 754 rounds it; torch's own misses the last bit of one number in a hundred."""
    r = x.sqrt()
    # One step of Newton with an exact remainder x - r²: products of the halves of r have no rounding.
    high = r * _SPLIT - (r * _SPLIT - r)
    low, square = r - high, r * r
    lost = ((high * high - square) + 2 * high * low) + low * low
    found = r + ((x - square) - lost) / (2 * r)
    return torch.where(found.isfinite(), found, r)


def _products(op: IntegerMatmul | IntegerConv, module: Context, q: Tensor) -> Tensor:
    weight, bias = module.constant(op.weight), module.optional(op.bias)
    single = op.sums_fit_single(lambda _: tuple(weight.shape))
    weight, q = (x.to(torch.float32 if single else torch.float64) for x in (weight, q))
    with full_precision(q):
        if isinstance(op, layer.Matmul):
            sums = F.linear(q, weight)
        else:
            sums = _convolved(op, q, weight, None)
    sums = sums.round().double()  # a fast convolution is not exact
    return sums if bias is None else sums + bias.view(-1, *[1] * (weight.dim() - 2))


def _windows(op: IntegerPool, module: Context, q: Tensor, factor: float) -> Tensor:
    ends = places.margins(op, tuple(q.shape[1:]))
    whole = F.pad(q.double(), [end for both in reversed(ends) for end in both])
    means: Tensor = _BY_AXES["avg_pool"][len(op.kernel)](whole, op.kernel, op.stride)
    return (means * prod(op.kernel)).round() * factor


_ARITHMETIC = IntegerArithmetic(
    single=lambda x: x.detach().float(),  # rounding has no gradient
    wide=lambda x: x.double(),
    cast=lambda x, dtype: x.to(dtype),
    without_nan=lambda x: torch.where(x.isnan(), 0.0, x),
    peak=lambda x: flat(x).abs().amax(1),
    squares=lambda q: flat(q).double().square().sum(1),
    scalar=lambda x: x.double(),
    root=_root,
    products=_products,
    windows=_windows,
    # Rounded once: torch would multiply the number by the inverse of the tensor.
    ratio=lambda number, by: by.new_tensor(number) / by,
)
RUN.update(_ARITHMETIC.functions)
