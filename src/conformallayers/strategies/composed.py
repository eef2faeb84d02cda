"""Strategy "conv": the layers up to each activation as one convolution, for stacks without padding.

Layers that do not pad treat every position alike, so a chain of them is one convolution with the
response of the chain to an impulse as its kernel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..fold import Program
from ..operators import Operator, apply_all
from .base import Core, Cost, Request, exact_certificate, normalised, refused_layer, wide
from .dense import matrix_cost

_CONVOLUTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


class ComposedCore(Core):
    """Convolve with the composed kernel of each stage and take the norm."""

    name = "conv"
    matrix: Tensor | None

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        program = request.program
        self.axes = len(program.input_shape) - 1
        self.groups = program.groups
        weights, strides = [], []
        operators: list[Operator] = []
        factor = 1.0
        for index, stage in enumerate(program.stages):
            operators += stage.operators
            factor *= stage.factor
            kernel, stride = _compose(operators, program.input_shape)
            scaled, peak = normalised(kernel * factor)
            self.register_buffer(f"kernel{index}", scaled.to(request.device, request.dtype))
            weights.append(stage.weight * peak**2)
            strides.append(stride)
        self.weights, self.strides = tuple(weights), tuple(strides)
        self.last = peak if program.segments else 1.0
        if program.trailing:
            matrix, self.gain = normalised(request.matrix)
            self.register_buffer("matrix", matrix.to(request.device, request.dtype))
        else:
            self.gain = self.last
            self.register_buffer("matrix", None)
        self.certificate = exact_certificate(request)
        self.largest = max(math.prod(op.output_shape) for op in program.operators)

    @classmethod
    def refuses(cls, program: Program) -> str | None:
        """Refuse layers that pad, and samples without spatial axes."""
        if not 2 <= len(program.input_shape) <= 4 or not program.segments:
            return "a sample has no spatial axes"
        if not program.segments[0].operators:
            return "the first activation has no layer before it"
        return refused_layer(program, _unpadded, "pads, or does not slide a window")

    @classmethod
    def cost(cls, request: Request, *, built: bool) -> Cost:
        """Count C_l · C_in · kernel for each output of each stage."""
        program = request.program
        total = Cost() if not program.trailing else matrix_cost(request)
        operators: list[Operator] = []
        for stage in program.stages:
            operators += stage.operators
            size, _ = _window(operators)
            window = program.input_shape[0] * math.prod(size)
            shape = operators[-1].output_shape
            total += Cost(
                conv=window * math.prod(shape),
                stream=2 * math.prod(shape),
                calls=3,
                bytes=window * shape[0] * request.dtype.itemsize,
            )
        return total

    def scratch(self) -> int:
        """Count the result of the largest stage."""
        return 2 * self.largest

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return M x̂ / gain, and the value of each form."""
        energies = []
        v = x
        for index, (weight, stride) in enumerate(zip(self.weights, self.strides, strict=True)):
            v = _CONVOLUTIONS[self.axes](x, getattr(self, f"kernel{index}"), stride=stride)
            norm = torch.linalg.vector_norm(
                v, dim=tuple(range(1, v.dim())), dtype=torch.promote_types(v.dtype, torch.float32)
            )
            energies.append(wide(norm).square() * weight)
        values = tuple(
            sum(energies[i] for i in group[1:]) + energies[group[0]] for group in self.groups
        )
        if self.matrix is not None:
            v = (x.flatten(1) @ self.matrix.T).view(-1, *self.output_shape)
        return v, values


def _window(operators: Sequence[Operator]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the receptive field and the stride of a chain, per axis."""
    axes = len(operators[0].input_shape) - 1
    size, stride = [1] * axes, [1] * axes
    for operator in operators:
        module: Any = operator.module
        if not hasattr(module, "kernel_size"):
            continue
        kernel = _each(module.kernel_size, axes)
        dilation = _each(getattr(module, "dilation", 1), axes)
        step = _each(module.stride, axes)
        for axis in range(axes):
            size[axis] += (kernel[axis] - 1) * dilation[axis] * stride[axis]
            stride[axis] *= step[axis]
    return tuple(size), tuple(stride)


def _compose(
    operators: Sequence[Operator], input_shape: tuple[int, ...]
) -> tuple[Tensor, tuple[int, ...]]:
    """Return the kernel, (C_l, C_in, *window), and the stride of a chain."""
    size, stride = _window(operators)
    shape = (input_shape[0], *size)
    device = next((t.device for op in operators for t in op.module.buffers()), None)
    identity = torch.eye(math.prod(shape), dtype=torch.float64, device=device)
    columns = [apply_all(operators, part.view(-1, *shape)) for part in identity.split(256)]
    response = torch.cat(columns).flatten(1)  # (C_in · window, C_l)
    return response.T.reshape(-1, *shape).contiguous(), stride


def _unpadded(operator: Operator) -> bool:
    module: Any = operator.module
    if isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        return module.padding == "valid" or not any(_numbers(module.padding))
    if isinstance(module, (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)):
        return not any(_numbers(module.padding)) and not module.ceil_mode
    return operator.multiple


def _numbers(padding: Any) -> tuple[int, ...]:
    if isinstance(padding, str):
        return (1,)
    return tuple(padding) if isinstance(padding, (tuple, list)) else (padding,)


def _each(value: Any, axes: int) -> tuple[int, ...]:
    values = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    return values * axes if len(values) == 1 else values
