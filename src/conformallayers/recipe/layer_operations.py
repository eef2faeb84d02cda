"""Operations on features: products, convolutions, windows, shapes, and functions of single numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from .recipe import (
    Operation,
    Positive,
    Shape,
    ShapeOf,
    Size,
    constant,
    expect,
    expect_shape,
    operation,
)

FUNCTIONS = {  # name → number of parameters
    "abs": 0,
    "relu": 0,
    "clip": 2,  # lowest, highest
    "leaky_relu": 1,  # slope
    "gelu": 0,
    "silu": 0,
    "sigmoid": 0,
    "tanh": 0,
    "hardswish": 0,
    "hardsigmoid": 0,
}
PAD_MODES = ("zeros", "reflect", "replicate", "circular")
# Longer rows are multiplied in blocks, whose sums are added in float64: the rounding errors of a long sum of
# equal products have one sign, so that n entries in float32 lose up to 2.4e-9·n. 5e-6 is promised.
LONG_ROW, BLOCK = 2**11, 768


@operation("matmul")
class Matmul(Operation):
    """``y = x Wᵀ + b`` along the last axis: (..., n) → (..., m), weight (m, n), bias (m,)."""

    weight: str = constant()
    bias: str | None = constant(optional=True)

    def shape_of(self, x: Shape, constant: ShapeOf) -> Shape:
        weight = constant(self.weight)
        expect(len(weight) == 2 and x and x[-1] == weight[1], f"matmul of {x} with {weight}")
        if self.bias is not None:
            expect_shape(constant(self.bias), weight[:1], "the bias")
        return (*x[:-1], weight[0])


@dataclass(frozen=True, kw_only=True)
class _Convolution(Operation):
    weight: str = constant()
    bias: str | None = constant(optional=True)
    stride: tuple[Positive, ...]
    padding: tuple[Size, ...]
    dilation: tuple[Positive, ...]
    groups: Positive = 1

    def _shape(self, channels: int, spatial: list[int], what: str, constant: ShapeOf) -> Shape:
        """Return the shape of the result; refuse empty axes and a bias of other channels."""
        if self.bias is not None:
            expect_shape(constant(self.bias), (channels,), "the bias")
        expect(all(n > 0 for n in spatial), what)
        return (channels, *spatial)


@operation("conv")
class Conv(_Convolution):
    """Convolve (C, ...) with a kernel (C_out, C/groups, ...), zeros around the input."""

    def shape_of(self, x: Shape, constant: ShapeOf) -> Shape:
        weight = constant(self.weight)
        what = f"conv of {x} with a kernel {weight}"
        _expect_axes(x, self.stride, self.padding, self.dilation)
        fits = len(weight) == len(x) + 1 and weight[0] % self.groups == 0 and 0 not in weight
        expect(fits and x[0] == weight[1] * self.groups, what)
        axes = zip(x[1:], weight[2:], self.stride, self.padding, self.dilation, strict=True)
        spatial = [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in axes]
        return self._shape(weight[0], spatial, what, constant)


@operation("conv_transpose")
class ConvTranspose(_Convolution):
    """Convolve transposed: (C, ...) with a kernel (C, C_out/groups, ...)."""

    output_padding: tuple[Size, ...]

    def shape_of(self, x: Shape, constant: ShapeOf) -> Shape:
        weight = constant(self.weight)
        what = f"transposed conv of {x} with a kernel {weight}"
        settings = self.stride, self.padding, self.dilation, self.output_padding
        _expect_axes(x, *settings)
        fits = len(weight) == len(x) + 1 and 0 not in weight and x[0] % self.groups == 0
        expect(fits and x[0] == weight[0], what)
        spatial = []
        for n, k, s, p, d, o in zip(x[1:], weight[2:], *settings, strict=True):
            expect(o < max(s, d), "an output padding as large as stride and dilation")
            spatial.append((n - 1) * s - 2 * p + d * (k - 1) + o + 1)
        return self._shape(weight[1] * self.groups, spatial, what, constant)


@dataclass(frozen=True, kw_only=True)
class Pool(Operation):
    """Sliding windows of (C, ...)."""

    kernel: tuple[Positive, ...]
    stride: tuple[Positive, ...]
    ceil_mode: bool = False

    def axes(self, x: Shape) -> list[tuple[int, int, int, int, int, int]]:
        """Return the sizes before and after, kernel, stride, padding and dilation of each axis."""
        padding = getattr(self, "padding", (0,) * len(self.kernel))
        dilation = getattr(self, "dilation", (1,) * len(self.kernel))
        settings = self.kernel, self.stride, padding, dilation
        _expect_axes(x, *settings)
        found = []
        for n, k, s, p, d in zip(x[1:], *settings, strict=True):
            expect(2 * p <= k, "a padding of more than half the window")
            last = n + 2 * p - d * (k - 1) - 1  # where a window that ends inside may start
            count = last // s + 1
            if self.ceil_mode and last % s and count * s < n + p:  # one more ends outside
                count += 1
            found.append((n, count, k, s, p, d))
        return found

    def shape_of(self, x: Shape, constant: ShapeOf) -> Shape:
        found = [m for _, m, *_ in self.axes(x)]
        expect(all(n > 0 for n in found), f"windows of {self.kernel} in {x}")
        return (x[0], *found)


@operation("avg_pool")
class AvgPool(Pool):
    """Average windows."""

    padding: tuple[Size, ...]
    count_include_pad: bool = True


@operation("max_pool")
class MaxPool(Pool):
    """Take the largest entry of each window."""

    moves = True
    padding: tuple[Size, ...]
    dilation: tuple[Positive, ...]


@operation("norm_pool")
class NormPool(Pool):
    """Take the Euclidean norm of each window, as ``torch.nn.LPPool`` does with p = 2.

    That is the root of the mean square times the size of the kernel, also where a window is cut off at
    the end. In ONNX the squares must fit into the dtype.
    """

    @property
    def averages(self) -> AvgPool:
        """The operation that averages the same windows."""
        windows: dict[str, Any] = dict(self.settings(defaults=True))
        return AvgPool(self.inputs, self.outputs, padding=(0,) * len(self.kernel), **windows)


@dataclass(frozen=True, kw_only=True)
class _AdaptivePool(Operation):
    size: tuple[Positive, ...]

    def shape_of(self, x: Shape, constant: ShapeOf) -> Shape:
        _expect_axes(x, self.size)
        return (x[0], *self.size)

    def regular(self, x: Shape) -> AvgPool | MaxPool | None:
        """Return the pooling of the same windows if all are equal and do not overlap, else None."""
        if any(n % m for n, m in zip(x[1:], self.size, strict=True)):
            return None
        kernel = tuple(n // m for n, m in zip(x[1:], self.size, strict=True))
        options: dict[str, Any] = {
            "kernel": kernel,
            "stride": kernel,
            "padding": (0,) * len(kernel),
        }
        if isinstance(self, AdaptiveMaxPool):
            return MaxPool(self.inputs, self.outputs, dilation=(1,) * len(kernel), **options)
        return AvgPool(self.inputs, self.outputs, **options)


@operation("adaptive_avg_pool")
class AdaptiveAvgPool(_AdaptivePool):
    """Average the i-th of ``size`` ranges that cover an axis: from ⌊i·n/size⌋ to ⌈(i+1)·n/size⌉."""


@operation("adaptive_max_pool")
class AdaptiveMaxPool(_AdaptivePool):
    """Take the largest entry of the i-th of ``size`` ranges; see :class:`AdaptiveAvgPool`."""


@operation("pad")
class Pad(Operation):
    """Pad the last axes by (before, after), first axis first; with zeros a negative number crops."""

    pads: tuple[tuple[int, int], ...]
    mode: str = "zeros"
    value: float = 0.0

    @property
    def keeps_integers(self) -> bool:
        return self.mode == "zeros" and self.value == 0

    def shape_of(self, x: Shape, constant: ShapeOf) -> Shape:
        expect(self.mode in PAD_MODES, f"no mode {self.mode!r:.60}")
        expect(0 < len(self.pads) <= len(x), f"pads {self.pads} of {x}")
        kept = len(x) - len(self.pads)
        expect(self.mode == "zeros" or kept < 2, f"{self.mode} pads {self.pads} of {x}")
        found = tuple(n + a + b for n, (a, b) in zip(x[kept:], self.pads, strict=True))
        expect(all(n > 0 for n in found), f"pads {self.pads} of {x}")
        for n, ends in zip(x[kept:], self.pads, strict=True):
            longest = {"reflect": n - 1, "circular": n}.get(self.mode, max(ends))
            fits = self.mode == "zeros" or min(ends) >= 0
            expect(fits and max(ends) <= longest, f"{self.mode} pads {ends} of {n}")
        return (*x[:kept], *found)


@operation("upsample")
class Upsample(Operation):
    """Repeat the entries of each spatial axis a number of times."""

    scales: tuple[Positive, ...]

    def shape_of(self, x: Shape, constant: ShapeOf) -> Shape:
        _expect_axes(x, self.scales)
        return (x[0], *(n * s for n, s in zip(x[1:], self.scales, strict=True)))


@dataclass(frozen=True, kw_only=True)
class _Broadcast(Operation):
    def shape_of(self, x: Shape, constant: ShapeOf) -> Shape:
        for _, held in self.constants():
            expect_broadcast(constant(held), x)
        return x


@operation("multiply")
class Multiply(_Broadcast):
    """Multiply by a constant that broadcasts to the sample."""

    factor: str = constant()


@operation("add_constant")
class AddConstant(_Broadcast):
    """Add a constant that broadcasts to the sample."""

    value: str = constant()


@operation("prelu")
class PRelu(_Broadcast):
    """``max(x, 0) + slope·min(x, 0)`` with a slope that broadcasts to the sample."""

    slope: str = constant()


@operation("add")
class Add(Operation):
    """Add values of one shape."""

    def shapes(self, inputs: Sequence[Shape], constant: ShapeOf) -> tuple[Shape, ...]:
        expect(len(set(inputs)) == 1, f"a sum of {list(inputs)}")
        return (inputs[0],)


@operation("product")
class Product(Operation):
    """Multiply two values entry by entry; axes of length 1 are repeated."""

    def shapes(self, inputs: Sequence[Shape], constant: ShapeOf) -> tuple[Shape, ...]:
        fits = len(inputs) == 2 and len(inputs[0]) == len(inputs[1])
        axes = list(zip(*inputs, strict=True)) if fits else []
        same = all(len({*axis} - {1}) <= 1 for axis in axes)
        expect(fits and same, f"a product of {list(inputs)}")
        return (tuple(max(axis) for axis in axes),)


@operation("concatenate")
class Concatenate(Operation):
    """Concatenate values along an axis of the sample."""

    moves = True
    axis: Size

    def shapes(self, inputs: Sequence[Shape], constant: ShapeOf) -> tuple[Shape, ...]:
        expect(inputs and self.axis < len(inputs[0]), f"axis {self.axis} of {list(inputs)}")
        others = {(*shape[: self.axis], 0, *shape[self.axis + 1 :]) for shape in inputs}
        expect(len(others) == 1, f"a concatenation of {list(inputs)}")
        total = sum(shape[self.axis] for shape in inputs)
        return ((*inputs[0][: self.axis], total, *inputs[0][self.axis + 1 :]),)


@operation("slice")
class Slice(Operation):
    """Take the entries from ``start`` to before ``stop`` along an axis of the sample."""

    moves = True
    axis: Size
    start: Size
    stop: Positive

    def shape_of(self, x: Shape, constant: ShapeOf) -> Shape:
        fits = self.axis < len(x) and self.start < self.stop <= x[self.axis]
        expect(fits, f"entries {self.start} to {self.stop} along axis {self.axis} of {x}")
        return (*x[: self.axis], self.stop - self.start, *x[self.axis + 1 :])


@operation("reshape")
class Reshape(Operation):
    """Give each sample another shape; entries keep their order."""

    moves = True
    shape: tuple[Positive, ...]

    def shape_of(self, x: Shape, constant: ShapeOf) -> Shape:
        expect(prod(x) == prod(self.shape), f"{x} as {self.shape}")
        return self.shape


@operation("permute")
class Permute(Operation):
    """Reorder the axes of the sample: axis i of the result is axis ``order[i]`` of the input."""

    moves = True
    order: tuple[Size, ...]

    def shape_of(self, x: Shape, constant: ShapeOf) -> Shape:
        expect(sorted(self.order) == list(range(len(x))), f"order {self.order} of {x}")
        return tuple(x[axis] for axis in self.order)


@operation("elementwise")
class Elementwise(Operation):
    """Apply a function to every number; NaN stays NaN."""

    function: str
    parameters: tuple[float, ...] = ()

    @property
    def keeps_integers(self) -> bool:
        return self.function in ("relu", "abs")

    def shape_of(self, x: Shape, constant: ShapeOf) -> Shape:
        given = len(self.parameters)
        expect(self.function in FUNCTIONS, f"no function {self.function!r:.60}")
        expect(given == FUNCTIONS[self.function], f"{self.function} with {given} numbers")
        return x


@operation("softmax")
class Softmax(Operation):
    """Softmax along an axis of the sample, or its logarithm."""

    axis: Size
    log: bool = False

    def shape_of(self, x: Shape, constant: ShapeOf) -> Shape:
        expect(self.axis < len(x), f"axis {self.axis} of {x}")
        return x


@operation("call")
class Call(Operation):
    """Call a torch module for which there is no operation; only the torch runtime can.

    ``what`` names the module in errors; ``result`` is the shape of the output, or None where the batch
    axis does not come first; ``by_sample`` tells whether the module treats every sample by itself.
    """

    module: str
    what: str
    result: Shape | None = None
    by_sample: bool = False

    def shapes(self, inputs: Sequence[Shape], constant: ShapeOf) -> tuple[Shape, ...]:
        return (() if self.result is None else self.result,)


def expect_broadcast(array: Shape, x: Shape) -> None:
    """Refuse a constant that does not broadcast to the sample."""
    pairs = zip(reversed(array), reversed(x), strict=False)
    fits = len(array) <= len(x) and all(a in (1, n) for a, n in pairs)
    expect(fits, f"a constant {array} for {x}")


def _expect_axes(x: Shape, *settings: tuple[int, ...]) -> None:
    """Refuse settings that are not one for each spatial axis of (C, ...)."""
    expect(1 <= len(x) - 1 <= 3, f"one to three spatial axes, not {x}")
    for values in settings:
        expect(len(values) == len(x) - 1, f"{values} for the axes of {x}")
