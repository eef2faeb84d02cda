"""The algebra of affine layers: which compositions and sums of them are one convolution.

A :class:`Convolution` stands for every affine layer of channels: batch norms, scales and identities are depthwise
kernels of size 1, average pools are depthwise, and a linear layer is a convolution without spatial axes. Its numbers are
computed when they are asked for, so comparing many ways to merge layers costs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

Shape = tuple[int, ...]  # of one sample
Sizes = tuple[int, ...]  # one number for each spatial axis
# Weight (O, C/groups, *kernel) and bias (O, 1, …) or (O, *output), in float64.
Numbers = tuple[Tensor, Tensor | None]
_MOST_EFFORT = 10**10  # multiply-adds of composing two kernels: a few seconds


@dataclass(frozen=True, eq=False)
class Convolution:
    """Map (C, *spatial) to (O, *spatial): convolve with a kernel, then add a bias.

    Attributes:
        numbers: computes weight and bias.
        channels: C and O.
        bias: None, "channel", or "map" where padding meets the bias of an earlier layer.
        mode: how the border is padded, as ``nn.Conv2d(padding_mode=...)``.
        output_padding: of a transposed convolution; None for all others.
        fixed: whether it is exact for samples of one shape only.
    """

    numbers: Callable[[], Numbers]
    channels: tuple[int, int]
    kernel: Sizes
    stride: Sizes
    padding: Sizes
    dilation: Sizes
    groups: int = 1
    bias: str | None = None
    mode: str = "zeros"
    output_padding: Sizes | None = None
    fixed: bool = False

    @property
    def spans(self) -> Sizes:
        """The distance between the first and the last pixel of a window, plus one."""
        return tuple((k - 1) * d + 1 for k, d in zip(self.kernel, self.dilation, strict=True))

    @property
    def pointwise(self) -> bool:
        """Whether every output pixel reads the same input pixel only."""
        single = set(self.kernel + self.stride) <= {1} and not any(self.padding)
        return single and self.output_padding is None

    @property
    def is_diagonal(self) -> bool:
        """Whether it multiplies each channel by one number."""
        return self.pointwise and self.channels == (self.groups, self.groups)

    def output_shape(self, shape: Shape) -> Shape:
        """Return the shape of the output, given that of the input."""
        axes = zip(shape[1:], self.padding, self.spans, self.stride, strict=True)
        if self.output_padding is not None:
            sizes = [(n - 1) * s - 2 * p + k for n, p, k, s in axes]
            found = [n + more for n, more in zip(sizes, self.output_padding, strict=True)]
            return (self.channels[1], *found)
        return (self.channels[1], *((n + 2 * p - k) // s + 1 for n, p, k, s in axes))

    def weights(self) -> int:
        """Count the numbers of the kernel."""
        return math.prod(self.kernel) * math.prod(self.channels) // self.groups

    def multiply_adds(self, shape: Shape) -> int:
        """Count the multiply-adds of one sample."""
        places = shape if self.output_padding is not None else self.output_shape(shape)
        return math.prod(places[1:]) * self.weights()

    def apply(self, x: Tensor, weight: Tensor) -> Tensor:
        """Convolve a batch (B, C, *spatial) with the weight, without adding the bias."""
        axes = len(self.kernel)
        if axes == 0:
            return F.linear(x, regrouped(weight, self.groups, 1))
        padding: Any = self.padding
        if self.output_padding is not None:
            turn: Any = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[axes - 1]
            more, weight = self.output_padding, swapped_channels(weight, self.groups)
            found: Tensor = turn(
                x, weight, None, self.stride, padding, more, self.groups, self.dilation
            )
            return found
        if self.mode != "zeros" and any(padding):
            ends = [n for size in reversed(padding) for n in (size, size)]
            x, padding = F.pad(x, ends, mode=self.mode), 0
        convolve: Any = (F.conv1d, F.conv2d, F.conv3d)[axes - 1]
        y: Tensor = convolve(x, weight, None, self.stride, padding, self.dilation, self.groups)
        return y


def pointwise(
    numbers: Callable[[], Numbers],
    channels: tuple[int, int],
    axes: int,
    groups: int = 1,
    bias: str | None = None,
) -> Convolution:
    """Return a convolution of single pixels."""
    ones = (1,) * axes
    return Convolution(numbers, channels, ones, ones, (0,) * axes, ones, groups, bias)


def diagonal(factor: Tensor, shift: Tensor | None, axes: int) -> Convolution:
    """Return the multiplication of each channel by its factor (C,), plus a shift (C, 1, …) or (C, *spatial)."""
    count, weight = len(factor), factor.reshape(-1, *(1,) * (axes + 1))
    held = shift if shift is None or shift.dim() > 1 else _per_channel(shift, axes + 1)
    kind = None if held is None else "map" if math.prod(held.shape[1:]) > 1 else "channel"
    found = pointwise(lambda: (weight.double(), held), (count, count), axes, count, kind)
    return replace(found, fixed=kind == "map")


def compose(first: Convolution, second: Convolution, shape: Shape) -> Convolution | str:
    """Return ``second ∘ first`` on samples of a shape as one convolution, or the reason why it is none.

    Along each axis the second must not pad, or the first must take single pixels: a chain of padded
    convolutions sees zeros around the map between them, one padded convolution does not.
    """
    transposed = [c for c in (first, second) if c.output_padding is not None]
    if transposed and not (first.pointwise or second.pointwise):
        return "a transposed convolution only merges with single pixels"
    places = zip(first.kernel, first.stride, first.padding, second.padding, strict=True)
    for k, step, own, more in places:
        if more and not (k == step == 1 and own == 0):
            return "a padded window after another window: the border would differ"
    pads = any(second.padding)
    if pads and any(first.padding) and first.mode != second.mode:
        return "the axes are padded in different ways"
    steps = [d * s for d, s in zip(second.dilation, first.stride, strict=True)]
    groups = math.gcd(first.groups, second.groups)
    if first.is_diagonal or second.is_diagonal:
        groups = second.groups if first.is_diagonal else first.groups
    effort = first.weights() * second.weights() // first.channels[1]
    if effort > _MOST_EFFORT and not (first.is_diagonal or second.is_diagonal):
        return f"composing the kernels would take {effort:.0e} multiply-adds"
    dilation, kernel = [], []
    for k, d, other, step in zip(first.kernel, first.dilation, second.kernel, steps, strict=True):
        common = math.gcd(d if k > 1 else 0, step if other > 1 else 0) or 1
        dilation.append(common)
        kernel.append(((k - 1) * d + (other - 1) * step) // common + 1)
    frame = transposed[0] if transposed else None
    bias = _bias_after(first, second)
    padding = tuple(
        p + q * s for p, q, s in zip(first.padding, second.padding, first.stride, strict=True)
    )

    def numbers() -> Numbers:
        return _composed(first, second, shape, groups, dilation)

    return Convolution(
        numbers,
        (first.channels[0], second.channels[1]),
        tuple(kernel),
        frame.stride
        if frame
        else tuple(s * t for s, t in zip(first.stride, second.stride, strict=True)),
        padding,
        frame.dilation if frame else tuple(dilation),
        groups,
        bias,
        second.mode if pads else first.mode,
        frame.output_padding if frame else None,
        first.fixed or second.fixed or bias == "map",
    )


def _composed(
    first: Convolution, second: Convolution, shape: Shape, groups: int, dilation: Sequence[int]
) -> Numbers:
    """Compute weight and bias of ``second ∘ first``."""
    (inner, before), (outer, after) = first.numbers(), second.numbers()
    if before is not None:
        pushed = _pushed(before, first, second, outer, shape, _bias_after(first, second))
        after = pushed if after is None else pushed + after
    if second.is_diagonal:
        return inner * _per_channel(outer.flatten(), inner.dim()), after
    if first.is_diagonal:
        factor = inner.view(groups, 1, -1, *[1] * len(second.kernel))
        return (outer.unflatten(0, (groups, -1)) * factor).flatten(0, 1), after
    steps = [d * s for d, s in zip(second.dilation, first.stride, strict=True)]
    inner = dilated(inner, [d // g for d, g in zip(first.dilation, dilation, strict=True)])
    outer = dilated(outer, [d // g for d, g in zip(steps, dilation, strict=True)])
    inner = regrouped(inner, first.groups, groups)
    return _product(inner, regrouped(outer, second.groups, groups), groups), after


def _bias_after(first: Convolution, second: Convolution) -> str | None:
    """Return the kind of the bias of ``second ∘ first``."""
    border = second.output_padding is not None or (second.mode == "zeros" and any(second.padding))
    kinds = {"map" if border and first.bias else first.bias, second.bias}
    return "map" if "map" in kinds else "channel" if "channel" in kinds else None


def _pushed(
    bias: Tensor,
    first: Convolution,
    second: Convolution,
    weight: Tensor,
    shape: Shape,
    kind: str | None,
) -> Tensor:
    """Return the bias of the first convolution after passing the second, whose weight is given."""
    channels, *sizes = first.output_shape(shape)
    if second.is_diagonal:
        return bias * _per_channel(weight.flatten(), bias.dim())
    if kind != "map":  # the same at every pixel: one window is enough
        second, sizes = replace(second, padding=(0,) * len(sizes)), [*second.spans]
    return second.apply(bias.expand(channels, *sizes).unsqueeze(0), weight)[0]


def _per_channel(factor: Tensor, rank: int) -> Tensor:
    """View factors (n,) so that they broadcast along the first of ``rank`` axes."""
    return factor.view(-1, *[1] * (rank - 1))


def add(terms: Sequence[Convolution], shape: Shape) -> Convolution | str:
    """Return the sum of convolutions of samples of a shape as one, or the reason why it is none.

    Their strides must agree, and the union of their windows must lie as a symmetric padding puts it.
    """
    modes = {term.mode for term in terms if any(term.padding)}
    if len({term.stride for term in terms}) > 1:
        return "the branches have different strides"
    if len(modes) > 1:
        return "the branches pad in different ways"
    frames = {(t.output_padding, t.kernel, t.padding, t.dilation) for t in terms}
    if any(term.output_padding is not None for term in terms) and len(frames) > 1:
        return "transposed convolutions of different windows"
    if len({term.channels for term in terms}) > 1:
        return "the branches have different channels"
    axes, groups = range(len(terms[0].stride)), math.gcd(*(term.groups for term in terms))
    before = [max(term.padding[a] for term in terms) for a in axes]
    after = [max(term.spans[a] - term.padding[a] for term in terms) for a in axes]
    dilation = tuple(_common_dilation(terms, a) for a in axes)
    kernel = tuple((before[a] + after[a] - 1) // dilation[a] + 1 for a in axes)
    kinds = {term.bias for term in terms}

    def numbers() -> Numbers:
        (inputs, outputs), biases = terms[0].channels, list[Tensor]()
        total = torch.zeros(outputs, inputs // groups, *kernel, dtype=torch.float64)
        for term in terms:
            weight, bias = term.numbers()
            steps = [d // common for d, common in zip(term.dilation, dilation, strict=True)]
            part, wide = total, dilated(regrouped(weight, term.groups, groups), steps)
            for a in axes:
                start = (before[a] - term.padding[a]) // dilation[a]
                part = part.narrow(2 + a, start, wide.shape[2 + a])
            part += wide
            biases += [] if bias is None else [bias]
        return total, reduce(torch.add, biases) if biases else None

    found = Convolution(
        numbers,
        terms[0].channels,
        kernel,
        terms[0].stride,
        tuple(before),
        dilation,
        groups,
        "map" if "map" in kinds else "channel" if "channel" in kinds else None,
        modes.pop() if modes else "zeros",
        terms[0].output_padding,
        any(term.fixed for term in terms),
    )
    shapes = {term.output_shape(shape) for term in terms}
    same = shapes == {found.output_shape(shape)}
    return found if same else "the windows of the branches are not centred alike"


def concatenate(parts: Sequence[Convolution]) -> Convolution | str:
    """Return convolutions of one input, concatenated along the channels, as one, or the reason why it is none."""
    first = parts[0]
    for part in parts:
        same = (part.kernel, part.stride, part.padding, part.dilation, part.mode)
        if same != (first.kernel, first.stride, first.padding, first.dilation, first.mode):
            return "the concatenated branches have different windows"
        if part.groups != 1 or part.bias == "map" or part.output_padding is not None:
            return "the concatenated branches are grouped"

    def numbers() -> Numbers:
        weights, biases = zip(*(part.numbers() for part in parts), strict=True)
        if not any(part.bias for part in parts):
            return torch.cat(weights), None
        ones = (1,) * len(first.kernel)
        rows = [
            w.new_zeros(len(w), *ones) if b is None else b
            for w, b in zip(weights, biases, strict=True)
        ]
        return torch.cat(weights), torch.cat(rows)

    bias = "channel" if any(part.bias for part in parts) else None
    channels = first.channels[0], sum(part.channels[1] for part in parts)
    fixed = any(part.fixed for part in parts)
    return replace(first, numbers=numbers, channels=channels, bias=bias, fixed=fixed)


def cropped(form: Convolution, shape: Shape) -> Convolution:
    """Return a convolution with a single padded window without the part of its kernel that sees zeros."""
    single = set(form.output_shape(shape)[1:]) == {1} and set(form.dilation) == {1}
    if not single or not any(form.padding) or form.mode != "zeros" or form.output_padding:
        return form
    ends = zip(form.kernel, shape[1:], form.padding, strict=True)
    if any(k < n + p for k, n, p in ends):
        return form

    def numbers() -> Numbers:
        weight, bias = form.numbers()
        for axis, (n, p) in enumerate(zip(shape[1:], form.padding, strict=True)):
            weight = weight.narrow(2 + axis, p, n)
        return weight, bias

    none, ones = (0,) * len(form.kernel), (1,) * len(form.kernel)
    return replace(
        form, numbers=numbers, kernel=shape[1:], padding=none, stride=ones, dilation=ones
    )


def window(form: Convolution, shape: Shape) -> Convolution | None:
    """Return a product with a flattened map (C, ...) as a convolution with one window."""
    if form.kernel or form.groups != 1 or not 2 <= len(shape) <= 4:
        return None
    axes = len(shape) - 1

    def numbers() -> Numbers:
        weight, bias = form.numbers()
        return weight.view(-1, *shape), None if bias is None else _per_channel(bias, axes + 1)

    channels = shape[0], form.channels[1]
    found = pointwise(numbers, channels, axes, bias=form.bias)
    return replace(found, kernel=shape[1:], fixed=True)


def lifted(form: Convolution, axes: int) -> Convolution:
    """Return a product of vectors as a convolution of maps with one pixel."""
    if len(form.kernel) == axes:
        return form

    def numbers() -> Numbers:
        weight, bias = form.numbers()
        weight = weight.reshape(*weight.shape[:2], *(1,) * axes)
        return weight, None if bias is None else _per_channel(bias, axes + 1)

    return pointwise(numbers, form.channels, axes, form.groups, form.bias)


def swapped_channels(weight: Tensor, groups: int) -> Tensor:
    """Exchange the channels of a kernel: (O, C/groups, …) of a convolution, (C, O/groups, …) of a transposed one."""
    found: Tensor = weight.unflatten(0, (groups, -1))
    return found.transpose(1, 2).flatten(0, 1)


def regrouped(weight: Tensor, groups: int, fewer: int) -> Tensor:
    """Write a kernel (O, C/groups, *kernel) with fewer groups: blocks of zeros fill it up."""
    if groups == fewer:
        return weight
    merged, per_group = groups // fewer, weight.shape[1]
    blocks = weight.view(fewer, merged, -1, *weight.shape[1:])
    full = weight.new_zeros(*blocks.shape[:3], merged, per_group, *weight.shape[2:])
    full.diagonal(dim1=1, dim2=3).copy_(blocks.movedim(1, -1))
    return full.reshape(len(weight), merged * per_group, *weight.shape[2:])


def _product(inner: Tensor, outer: Tensor, groups: int) -> Tensor:
    """Convolve two kernels of the same groups, (M, C/g, *k) and (O, M/g, *l), to (O, C/g, *(k + l − 1))."""
    axes = inner.dim() - 2
    left, right = outer.unflatten(0, (groups, -1)), inner.unflatten(0, (groups, -1))
    if math.prod(inner.shape[2:]) == 1:
        return torch.einsum("gom...,gmc->goc...", left, right.flatten(2)).flatten(0, 1)
    if math.prod(outer.shape[2:]) == 1:
        return torch.einsum("gom,gmc...->goc...", left.flatten(2), right).flatten(0, 1)
    # A batch of O/g maps with M channels each, convolved with the inner kernel from the channels M to C.
    maps = left.transpose(0, 1).flatten(1, 2)
    kernel = swapped_channels(inner, groups).flip(tuple(range(2, 2 + axes)))
    convolve: Any = (F.conv1d, F.conv2d, F.conv3d)[axes - 1]
    padding = tuple(n - 1 for n in inner.shape[2:])
    product = convolve(maps, kernel, padding=padding, groups=groups).unflatten(1, (groups, -1))
    found: Tensor = product.transpose(0, 1).flatten(0, 1)
    return found


def dilated(weight: Tensor, dilation: Sequence[int]) -> Tensor:
    """Write a kernel with zeros between its entries."""
    for axis, step in enumerate(dilation, start=2):
        if step > 1 and weight.shape[axis] > 1:
            shape = list(weight.shape)
            shape[axis] = (shape[axis] - 1) * step + 1
            wide = weight.new_zeros(shape)
            wide.movedim(axis, 0)[::step] = weight.movedim(axis, 0)
            weight = wide
    return weight


def _common_dilation(terms: Sequence[Convolution], axis: int) -> int:
    """Return the largest step that all kernels and the distances between their windows are multiples of."""
    steps = [term.dilation[axis] for term in terms if term.kernel[axis] > 1]
    starts = [term.padding[axis] - terms[0].padding[axis] for term in terms]
    return math.gcd(*steps, *starts) or 1
