"""Convolutions in a row run as one while they train, on their composed kernel.

Composing costs as much as a few images. A batch then passes one convolution, and no feature map between the
layers is computed or kept for the backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from ..functional import autocasts
from ..registry.registry import has_global_hooks, has_hooks
from ..utils.axes import per_axis
from . import layers

Shape = tuple[int, ...]
_CONVOLUTIONS: dict[type[nn.Module], Any] = {
    nn.Conv1d: F.conv1d,
    nn.Conv2d: F.conv2d,
    nn.Conv3d: F.conv3d,
    layers.Conv1d: F.conv1d,
    layers.Conv2d: F.conv2d,
    layers.Conv3d: F.conv3d,
}


def may_collapse(module: nn.Module) -> bool:
    """Check whether a module is a convolution, before the closer look of :func:`collapsible`."""
    return type(module) in _CONVOLUTIONS


def collapsible(modules: Sequence[Any], x: Tensor) -> list[Shape]:
    """Return the shapes of samples in front of the leading convolutions that are cheaper as one; empty if none are."""
    batch, sample = x.shape[0], tuple(x.shape[1:])
    if not modules or not _may_start(modules[0]) or has_global_hooks():
        return []
    if autocasts(x):  # kernels would be rounded before they are composed
        return []
    shapes: list[Shape] = []
    best: list[Shape] = []
    apart = 0
    for index, module in enumerate(modules):
        if index and not _may_follow(module):
            break
        if len(sample) != module.weight.dim() - 1 or module.weight.shape[1] != sample[0]:
            break
        output = _output(module, sample)
        if min(output) < 1:
            break
        apart += batch * math.prod(output[1:]) * module.weight.numel()
        shapes.append(sample)
        if index and _composed_cost(modules[: index + 1], batch * math.prod(output[1:])) < apart:
            best = list(shapes)
        sample = output
        if set(_option(module, "stride")) != {1}:
            break
    return best


def run_collapsed(modules: Sequence[Any], x: Tensor, factor: Any = None) -> Tensor:
    """Return what the convolutions return one after the other, times a factor."""
    first, last = modules[0], modules[-1]
    kernels = [module.weight for module in modules]
    if factor is not None:  # before it composes: a product of kernels may leave the range
        kernels[0] = kernels[0] * factor
    weight = composed(kernels)
    convolve = _CONVOLUTIONS[type(first)]
    result: Tensor = convolve(x, weight, None, last.stride, first.padding)
    return result


def run_sequence(modules: Iterable[nn.Module], x: Tensor) -> Tensor:
    """Run modules one after the other, with convolutions in a row as one where that is cheaper."""
    rest = list(modules)
    while rest:
        many = len(collapsible(rest, x))
        x = run_collapsed(rest[:many], x) if many else rest[0](x)
        del rest[: max(many, 1)]
    return x


def composed(kernels: Sequence[Tensor]) -> Tensor:
    """Return the kernel of convolutions with stride 1 in a row; only the last may have another stride.

    Examples:
        >>> import torch
        >>> first, second = torch.rand(4, 3, 3, 3), torch.rand(5, 4, 3, 3)
        >>> composed([first, second]).shape
        torch.Size([5, 3, 5, 5])
    """
    whole = kernels[0]
    for kernel in kernels[1:]:
        axes = range(2, kernel.dim())
        convolve = (F.conv1d, F.conv2d, F.conv3d)[kernel.dim() - 3]
        reach = [size - 1 for size in kernel.shape[2:]]
        whole = convolve(whole.transpose(0, 1), kernel.flip(*axes), padding=reach).transpose(0, 1)
    return whole


def _may_start(module: Any) -> bool:
    """Tell whether a module is a convolution without bias whose call does nothing else."""
    return (
        type(module) in _CONVOLUTIONS
        and module.bias is None
        and module.groups == 1
        and set(_option(module, "dilation")) == {1}
        and module.padding_mode == "zeros"
        and not isinstance(module.padding, str)
        and not {"forward", "_conv_forward"} & set(vars(module))
        and not has_hooks(module)
    )


def _may_follow(module: Any) -> bool:
    return _may_start(module) and set(_option(module, "padding")) == {0}


def _option(module: Any, name: str) -> tuple[int, ...]:
    """Return a number for each axis."""
    return per_axis(getattr(module, name), module.weight.dim() - 2)


def _output(module: Any, sample: Shape) -> Shape:
    every = zip(
        sample[1:],
        _option(module, "padding"),
        module.weight.shape[2:],
        _option(module, "stride"),
        strict=True,
    )
    sides = [(size + 2 * padding - kernel) // stride + 1 for size, padding, kernel, stride in every]
    return (len(module.weight), *sides)


def _composed_cost(modules: Sequence[Any], places: int) -> int:
    """Return the multiply-adds of composing kernels and of their convolution at some places."""
    channels, total = modules[0].weight.shape[1], 0
    sides = list(modules[0].weight.shape[2:])
    for module in modules[1:]:
        sides = [a + b - 1 for a, b in zip(sides, module.weight.shape[2:], strict=True)]
        total += channels * math.prod(sides) * module.weight.numel()
    kernel: int = len(modules[-1].weight) * channels * math.prod(sides)
    return total + places * kernel
