"""Operations of a recipe as links of chains: which of them are affine, and as which convolution."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..recipe import layer_operations as layer
from ..recipe.operation import Operation, Shape
from ..recipe.recipe import Recipe
from .chains import Cost, Link, cost_of
from .convolution import Convolution, Numbers, diagonal, pointwise, turned


class AffineOperations:
    """Read the operations of a recipe as links."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe

    def link(self, op: Operation, position: int, shape: Shape, after: Shape) -> Link | None:
        """Return an operation on samples of a shape as a link; None for one that is not affine."""
        if len(op.inputs) != 1 or len(op.outputs) != 1 or not shape:
            return None
        if any(name in self.recipe.wide for _, name in op.constants()):
            return None
        rows, form = self._by_row(op, shape), None
        if rows is None:
            rows, form = (), self._form(op, shape, after)
        elif isinstance(op, layer.Matmul):
            form = self._matmul(op)
        else:
            form = self._by_channel(op, shape[-1:])
        moves = isinstance(op, (layer.Reshape, layer.Permute, layer.Upsample))
        if form is None and not moves:
            return None
        cost = Cost() if form is None else cost_of(form, shape[len(rows) :], rows)
        if isinstance(op, layer.Upsample):
            cost = Cost(math.prod(after))
        if isinstance(op, layer.AddConstant):  # a single pass
            cost = cost._replace(work=math.prod(shape))
        stored = sum(math.prod(self.recipe.constant_shape(name)) for _, name in op.constants())
        origin = frozenset((position,))
        cost, uniform = cost._replace(weights=stored - cost.maps), self._uniform(op)
        return Link(op.outputs[0], shape, after, form, cost, (op,), origin, rows, uniform)

    def _by_row(self, op: Operation, shape: Shape) -> Shape | None:
        """Return the leading axes if the channels of the operation are the last of several axes."""
        if len(shape) == 1:
            return None
        if isinstance(op, layer.Matmul):
            return shape[:-1]
        if isinstance(op, (layer.Multiply, layer.AddConstant)):
            ((_, name),) = op.constants()
            size = self.recipe.constant_shape(name)
            if size and size[-1] > 1 and math.prod(size[:-1]) == 1:
                return shape[:-1]
        return None

    @staticmethod
    def _uniform(op: Operation) -> bool:
        if isinstance(op, layer.AvgPool):
            return not (any(op.padding) or op.ceil_mode)
        return isinstance(op, (layer.AdaptiveAvgPool, layer.Upsample))

    def _form(self, op: Operation, shape: Shape, after: Shape) -> Convolution | None:
        axes, ones = len(shape) - 1, (1,) * (len(shape) - 1)
        if isinstance(op, (layer.Conv, layer.ConvTranspose)):
            return self._convolution(op)
        if isinstance(op, layer.Matmul):
            return self._matmul(op)
        if isinstance(op, (layer.Multiply, layer.AddConstant)):
            return self._by_channel(op, shape)
        if isinstance(op, layer.AvgPool) and not op.ceil_mode:
            if any(op.padding) and not op.count_include_pad:
                return None
            share = 1 / math.prod(op.kernel)
            return _depthwise(shape[0], share, op.kernel, op.stride, op.padding)
        if isinstance(op, layer.AdaptiveAvgPool):
            kernel = tuple(n // m for n, m in zip(shape[1:], after[1:], strict=True))
            if any(n % m for n, m in zip(shape[1:], after[1:], strict=True)):
                return None
            share = 1 / math.prod(kernel)
            found = _depthwise(shape[0], share, kernel, kernel, (0,) * axes)
            return replace(found, fixed=True)
        if isinstance(op, layer.Pad) and op.value == 0 and len(op.pads) == axes:
            if any(a != b or a < 0 for a, b in op.pads):
                return None
            found = _depthwise(shape[0], 1.0, ones, ones, tuple(a for a, _ in op.pads))
            return replace(found, mode=op.mode)
        return None

    def _convolution(self, op: Any) -> Convolution:
        shape, transposed = self.recipe.constant_shape(op.weight), hasattr(op, "output_padding")
        channels = shape[1] * op.groups, shape[0]
        channels = (channels[1], channels[0]) if transposed else channels

        def weight(array: Tensor) -> Tensor:
            return turned(array, op.groups) if transposed else array

        return Convolution(
            self._numbers(op, len(shape) - 2, weight),
            channels,
            shape[2:],
            op.stride,
            op.padding,
            op.dilation,
            op.groups,
            None if op.bias is None else "channel",
            output_padding=op.output_padding if transposed else None,
        )

    def _matmul(self, op: layer.Matmul) -> Convolution:
        out, into = self.recipe.constant_shape(op.weight)
        bias = None if op.bias is None else "channel"
        return pointwise(self._numbers(op, 0), (into, out), 0, bias=bias)

    def _numbers(
        self, op: Any, axes: int, weight: Callable[[Tensor], Tensor] = lambda array: array
    ) -> Callable[[], Numbers]:
        def numbers() -> Numbers:
            bias = None if op.bias is None else self.array(op.bias).view(-1, *(1,) * axes)
            return weight(self.array(op.weight)), bias

        return numbers

    def _by_channel(self, op: Operation, shape: Shape) -> Convolution | None:
        """Return a factor or a summand that broadcasts to a sample, or None if factors differ by pixel."""
        ((_, name),) = op.constants()
        array = self.array(name)
        while array.dim() > len(shape):
            array = array[0]
        array = array.view(*[1] * (len(shape) - array.dim()), *array.shape)
        by_pixel = math.prod(array.shape[1:]) > 1
        if isinstance(op, layer.AddConstant):
            full = array.expand(shape if by_pixel else (shape[0], *(1,) * (len(shape) - 1)))
            return diagonal(torch.ones(shape[0], dtype=array.dtype), full, len(shape) - 1)
        return (
            None if by_pixel else diagonal(array.flatten().expand(shape[0]), None, len(shape) - 1)
        )

    def array(self, name: str) -> Tensor:
        """Return a constant in float64."""
        return torch.as_tensor(self.recipe.constants[name]).to("cpu", torch.float64)


def _depthwise(
    channels: int, share: float, kernel: Shape, stride: Shape, padding: Shape
) -> Convolution:
    def numbers() -> Numbers:
        return torch.full((channels, 1, *kernel), share, dtype=torch.float64), None

    ones = (1,) * len(kernel)
    return Convolution(
        numbers, (channels, channels), kernel, stride, padding, ones, groups=channels
    )
