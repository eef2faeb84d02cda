"""Operations on features, in torch: one function each, of (operation, module, *input values)."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...functional import autocasts, block_size, transformed, wide_dtype
from ...nn.pooling import norm_pool
from .. import layer_operations as layer
from ..operation import Runtime

RUN = Runtime("torch")


class Context(Protocol):
    """The parts of a :class:`RecipeModule` that operations read."""

    calls: nn.ModuleDict

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of inputs, constants and outputs."""
        ...

    def constant(self, name: str) -> Tensor:
        """Return a constant."""
        ...

    def optional(self, name: str | None) -> Tensor | None:
        """Return a constant, or None where an operation has none."""
        ...


_LONG_WINDOW = 1024  # entries; torch adds them one by one, and a longer sum loses digits
_FEW_BLOCKS = 16  # a sum of so few numbers loses no digits
# torch's functions for one to three spatial axes.
_BY_AXES: dict[str, dict[int, Any]] = {
    name: {axes: getattr(F, f"{name}{axes}d") for axes in (1, 2, 3)}
    for name in ("conv", "conv_transpose", "max_pool", "adaptive_avg_pool", "adaptive_max_pool")
}
_ELEMENTWISE: dict[str, Callable[..., Tensor]] = {
    "abs": torch.abs,
    "relu": F.relu,
    "relu6": F.relu6,
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
    return convolved(op, x, module.constant(op.weight), module.optional(op.bias))


def convolved(op: layer.Conv, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
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
    return averages(op, _for_sums(x, prod(op.kernel))).to(x.dtype)


def averages(op: layer.AvgPool, x: Tensor) -> Tensor:
    """Average windows in the dtype of x."""
    windows, options = (op.kernel, op.stride, op.padding), (op.ceil_mode, op.count_include_pad)
    if len(op.kernel) > 1:
        pool = F.avg_pool2d if len(op.kernel) == 2 else F.avg_pool3d
        return pool(x, *windows, *options, op.divisor)
    if op.divisor is None:
        return F.avg_pool1d(x, *windows, *options)
    # avg_pool1d has no divisor: pool maps of one row.
    kernel, stride, padding = (1, *op.kernel), (1, *op.stride), (0, *op.padding)
    pooled = F.avg_pool2d(x.unsqueeze(2), kernel, stride, padding, *options, op.divisor)
    return pooled.squeeze(2)


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
    x = x.contiguous()  # torch copies other entries where a map is channels-last
    corners = None if op.mode.startswith("nearest") else op.align_corners
    if op.scales is None:
        return F.interpolate(x, op.size, mode=op.mode, align_corners=corners)
    return F.interpolate(x, scale_factor=op.scales, mode=op.mode, align_corners=corners)


RUN[layer.Multiply] = lambda op, module, x: x * module.constant(op.factor)
RUN[layer.AddConstant] = lambda op, module, x: x + module.constant(op.value)
RUN[layer.Add] = lambda _op, _module, *values: reduce(torch.add, values)
RUN[layer.Concatenate] = lambda op, _, *values: torch.cat(values, op.axis + 1)
RUN[layer.Slice] = lambda op, _, x: x.narrow(op.axis + 1, op.start, op.stop - op.start)
RUN[layer.Reshape] = lambda op, _, x: x.reshape(x.shape[0], *op.shape)
RUN[layer.Permute] = lambda op, _, x: x.permute(0, *(axis + 1 for axis in op.order))


@RUN.runs(layer.Cast)
def _cast(op: layer.Cast, module: Context, x: Tensor) -> Tensor:
    if op.to == layer.WIDE:
        return x.to(wide_dtype(x.device))
    if autocasts(x):
        return x.to(torch.get_autocast_dtype(x.device.type))
    return x.to(module.dtype)


RUN[layer.Elementwise] = lambda op, _, x: _ELEMENTWISE[op.function](x, *op.parameters)
RUN[layer.PRelu] = lambda op, module, x: torch.where(x > 0, x, x * module.constant(op.slope))
RUN[layer.Softmax] = lambda op, _, x: (F.log_softmax if op.log else F.softmax)(x, op.axis + 1)


@RUN.runs(layer.Call)
def _call(op: layer.Call, module: Context, *values: Any) -> Any:
    # A user's module may call view, which fails on a channels-last map.
    plain = [v.contiguous() if isinstance(v, Tensor) and not transformed() else v for v in values]
    return module.calls[op.module](*plain)
