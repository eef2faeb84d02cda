"""The algebra of convolutions: which compositions and sums of affine layers are one convolution.

A :class:`Convolution` stands for every affine layer of channels: batch norms, scales and identities are depthwise
kernels of size 1, average pools are depthwise, and a linear layer is a convolution without spatial axes. Its weight
may live on the meta device: then only shapes and costs are computed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

Shape = tuple[int, ...]  # of one sample
Sizes = tuple[int, ...]  # one number for each spatial axis


@dataclass(frozen=True, eq=False)
class Convolution:
    """Map (C, *spatial) to (O, *spatial): convolve with a kernel, then add a bias.

    Attributes:
        weight: (O, C/groups, *kernel).
        bias: (O, 1, …), or a constant map (O, *output) where padding meets the bias of an earlier layer.
        mode: how the border is padded, as ``nn.Conv2d(padding_mode=...)``.
    """

    weight: Tensor
    bias: Tensor | None
    stride: Sizes
    padding: Sizes
    dilation: Sizes
    groups: int = 1
    mode: str = "zeros"

    @property
    def kernel(self) -> Sizes:
        """The size of the kernel."""
        return tuple(self.weight.shape[2:])

    @property
    def spans(self) -> Sizes:
        """The distance between the first and the last pixel of a window, plus one."""
        return tuple((k - 1) * d + 1 for k, d in zip(self.kernel, self.dilation, strict=True))

    @property
    def channels(self) -> tuple[int, int]:
        """The numbers of input and output channels."""
        return self.weight.shape[1] * self.groups, self.weight.shape[0]

    @property
    def pointwise(self) -> bool:
        """Whether every output pixel reads the same input pixel only."""
        return set(self.kernel + self.stride) <= {1} and not any(self.padding)

    @property
    def is_diagonal(self) -> bool:
        """Whether it multiplies each channel by one number."""
        return self.pointwise and self.channels == (self.groups, self.groups)

    def output_shape(self, shape: Shape) -> Shape:
        """Return the shape of the output, given that of the input."""
        axes = zip(shape[1:], self.padding, self.spans, self.stride, strict=True)
        return (self.weight.shape[0], *((n + 2 * p - k) // s + 1 for n, p, k, s in axes))

    def multiply_adds(self, shape: Shape) -> int:
        """Count the multiply-adds of one sample."""
        return math.prod(self.output_shape(shape)) * math.prod(self.weight.shape[1:])

    def constant_map(self) -> bool:
        """Whether the bias differs from pixel to pixel, which fixes the input shape."""
        return self.bias is not None and math.prod(self.bias.shape[1:]) > 1

    def apply(self, x: Tensor) -> Tensor:
        """Convolve a batch (B, C, *spatial) without adding the bias."""
        axes = len(self.kernel)
        if axes == 0:
            return F.linear(x, regrouped(self.weight, self.groups, 1))
        padding: Any = self.padding
        if self.mode != "zeros" and any(padding):
            ends = [n for size in reversed(padding) for n in (size, size)]
            x, padding = F.pad(x, ends, mode=self.mode), 0
        convolve: Any = (F.conv1d, F.conv2d, F.conv3d)[axes - 1]
        y: Tensor = convolve(x, self.weight, None, self.stride, padding, self.dilation, self.groups)
        return y


def diagonal(factor: Tensor, bias: Tensor | None, axes: int) -> Convolution:
    """Return the multiplication of each channel by its factor (C,), plus a bias (C,)."""
    ones = (1,) * axes
    shifts = None if bias is None else bias.view(-1, *ones)
    weight = factor.view(-1, 1, *ones)
    return Convolution(weight, shifts, ones, (0,) * axes, ones, len(factor))


def compose(first: Convolution, second: Convolution, shape: Shape) -> Convolution | None:
    """Return ``second ∘ first`` on samples of a shape as one convolution; None where it is none.

    Along each axis the second must not pad, or the first must take single pixels: a chain of padded
    convolutions sees zeros around the map between them, one padded convolution does not.
    """
    if second.is_diagonal:
        return _scaled_outputs(first, second)
    if first.is_diagonal:
        return _scaled_inputs(first, second, shape)
    pads = any(second.padding)
    for axis, padding in enumerate(second.padding):
        alone = first.kernel[axis] == first.stride[axis] == 1 and first.padding[axis] == 0
        if padding and not alone:
            return None
    mode = second.mode if pads else first.mode
    if pads and any(first.padding) and first.mode != second.mode:
        return None
    groups = math.gcd(first.groups, second.groups)
    steps = [d * s for d, s in zip(second.dilation, first.stride, strict=True)]
    inner, dilation = _dilated(first.weight, first.dilation, second.kernel, steps)
    outer, _ = _dilated(second.weight, steps, first.kernel, first.dilation)
    weight = _product(
        regrouped(inner, first.groups, groups), regrouped(outer, second.groups, groups), groups
    )
    axes = range(len(first.stride))
    return Convolution(
        weight,
        _pushed(first, second, shape),
        tuple(first.stride[a] * second.stride[a] for a in axes),
        tuple(first.padding[a] + second.padding[a] * first.stride[a] for a in axes),
        dilation,
        groups,
        mode,
    )


def _scaled_outputs(first: Convolution, second: Convolution) -> Convolution:
    """Return a diagonal map behind a convolution: it multiplies the rows of the kernel."""
    factor = second.weight.flatten()
    bias = second.bias
    if first.bias is not None:
        own = first.bias * _rows(factor, first.bias.dim())
        bias = own if bias is None else own + bias
    weight = first.weight * _rows(factor, first.weight.dim())
    return replace(first, weight=weight, bias=bias)


def _scaled_inputs(first: Convolution, second: Convolution, shape: Shape) -> Convolution:
    """Return a diagonal map before a convolution: it multiplies the columns of the kernel."""
    grouped = second.weight.unflatten(0, (second.groups, -1))
    factor = first.weight.view(second.groups, 1, -1)
    weight = (grouped * factor.view(*factor.shape, *[1] * len(second.kernel))).flatten(0, 1)
    return replace(second, weight=weight, bias=_pushed(first, second, shape))


def _rows(factor: Tensor, rank: int) -> Tensor:
    """View factors (n,) so that they broadcast along the first of ``rank`` axes."""
    return factor.view(-1, *[1] * (rank - 1))


def add(terms: Sequence[Convolution], shape: Shape) -> Convolution | None:
    """Return the sum of convolutions of samples of a shape as one; None where it is none.

    Their strides must agree, and the union of their windows must lie as a symmetric padding puts it.
    """
    modes = {term.mode for term in terms if any(term.padding)}
    if len({term.stride for term in terms}) > 1 or len(modes) > 1:
        return None
    if len({term.channels for term in terms}) > 1:
        return None
    axes, groups = range(len(terms[0].stride)), math.gcd(*(term.groups for term in terms))
    before = [max(term.padding[a] for term in terms) for a in axes]
    after = [max(term.spans[a] - term.padding[a] for term in terms) for a in axes]
    dilation = tuple(_common_dilation(terms, a) for a in axes)
    kernel = [(before[a] + after[a] - 1) // dilation[a] + 1 for a in axes]
    kernels: list[Tensor] = []
    for term in terms:
        wide, _ = _dilated(
            regrouped(term.weight, term.groups, groups),
            [d // common for d, common in zip(term.dilation, dilation, strict=True)],
        )
        ends: list[int] = []
        for a in reversed(axes):
            start = (before[a] - term.padding[a]) // dilation[a]
            ends += [start, kernel[a] - start - wide.shape[2 + a]]
        kernels.append(F.pad(wide, ends))
    biases = [term.bias for term in terms if term.bias is not None]
    found = Convolution(
        sum(kernels[1:], kernels[0]),
        sum(biases[1:], biases[0]) if biases else None,
        terms[0].stride,
        tuple(before),
        dilation,
        groups,
        modes.pop() if modes else "zeros",
    )
    shapes = {term.output_shape(shape) for term in terms}
    return found if shapes == {found.output_shape(shape)} else None


def concatenate(parts: Sequence[Convolution]) -> Convolution | None:
    """Return convolutions of one input, concatenated along the channels, as one; None where they differ."""
    first = parts[0]
    for part in parts:
        same = (part.kernel, part.stride, part.padding, part.dilation, part.mode)
        if same != (first.kernel, first.stride, first.padding, first.dilation, first.mode):
            return None
        if part.groups != 1 or part.constant_map() or part.channels[0] != first.channels[0]:
            return None
    weight, bias = torch.cat([part.weight for part in parts]), None
    if any(part.bias is not None for part in parts):
        ones = (1,) * len(first.kernel)
        rows = [
            p.weight.new_zeros(len(p.weight), *ones) if p.bias is None else p.bias for p in parts
        ]
        bias = torch.cat(rows)
    return replace(first, weight=weight, bias=bias)


def cropped(form: Convolution, shape: Shape) -> Convolution:
    """Return a convolution with a single padded window without the part of its kernel that sees zeros."""
    single = set(form.output_shape(shape)[1:]) == {1} and set(form.dilation) == {1}
    if not single or not any(form.padding) or form.mode != "zeros":
        return form
    weight = form.weight
    for axis, (n, p) in enumerate(zip(shape[1:], form.padding, strict=True)):
        if weight.shape[2 + axis] < n + p:
            return form
        weight = weight.narrow(2 + axis, p, n)
    axes = len(form.padding)
    return replace(form, weight=weight, padding=(0,) * axes, stride=(1,) * axes)


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
    if axes == 0:
        left = outer.view(groups, -1, outer.shape[1])
        return (left @ inner.view(groups, -1, inner.shape[1])).flatten(0, 1)
    # A batch of C/g maps with M channels each: the groups of channels meet the groups of the outer kernel.
    maps, flipped = inner.transpose(0, 1), outer.flip(tuple(range(2, 2 + axes)))
    convolve: Any = (F.conv1d, F.conv2d, F.conv3d)[axes - 1]
    padding = tuple(n - 1 for n in outer.shape[2:])
    product: Tensor = convolve(maps, flipped, padding=padding, groups=groups)
    return product.transpose(0, 1)


def _dilated(
    weight: Tensor,
    dilation: Sequence[int],
    other: Sequence[int] | None = None,
    steps: Sequence[int] | None = None,
) -> tuple[Tensor, Sizes]:
    """Write a kernel with zeros between its entries, and return the dilation that is left.

    Along an axis where one of two kernels has a single entry, the dilation of the other one stays.
    """
    kept = []
    for axis, step in enumerate(dilation):
        single = weight.shape[2 + axis] == 1
        if other is not None and steps is not None and (single or other[axis] == 1):
            kept.append(steps[axis] if single and other[axis] != 1 else step)
            continue
        kept.append(1)
        if step > 1 and not single:
            shape = list(weight.shape)
            shape[2 + axis] = (shape[2 + axis] - 1) * step + 1
            wide = weight.new_zeros(shape)
            index = [slice(None)] * len(shape)
            index[2 + axis] = slice(None, None, step)
            wide[tuple(index)] = weight
            weight = wide
    return weight, tuple(kept)


def _common_dilation(terms: Sequence[Convolution], axis: int) -> int:
    """Return the largest step that all kernels and the distances between their windows are multiples of."""
    steps = [term.dilation[axis] for term in terms if term.kernel[axis] > 1]
    starts = [term.padding[axis] - terms[0].padding[axis] for term in terms]
    return math.gcd(*steps, *starts) or 1


def _pushed(first: Convolution, second: Convolution, shape: Shape) -> Tensor | None:
    """Return the bias of ``second ∘ first``: that of the first passes the second."""
    if first.bias is None:
        return second.bias
    middle = first.output_shape(shape)
    flat = not first.constant_map() and (second.mode != "zeros" or not any(second.padding))
    # A bias without padding is the same at every pixel: one window is enough.
    sizes = second.spans if flat else middle[1:]
    one = replace(second, padding=(0,) * len(sizes)) if flat else second
    pushed = one.apply(first.bias.expand(middle[0], *sizes).unsqueeze(0))[0]
    if flat and sizes:
        pushed = pushed[(slice(None), *[slice(0, 1)] * len(sizes))]
    pushed = pushed if second.bias is None else pushed + second.bias
    return _narrowed(pushed)


def _narrowed(bias: Tensor) -> Tensor:
    """Return (O, 1, …) for a map that is the same at every pixel."""
    if bias.dim() == 1 or bias.is_meta:
        return bias
    rows = bias.flatten(1)
    same = bool((rows == rows[:, :1]).all())
    return rows[:, :1].view(-1, *[1] * (bias.dim() - 1)) if same else bias
