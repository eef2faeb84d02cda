"""Convolutions in a row run as one while they train, on their composed kernel.

Composing costs as much as a few images. A batch then passes one convolution, and no feature map between the
layers is computed or kept for the backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from ..functional import autocasts
from ..utils.axes import per_axis, windows
from . import layers
from .registry import has_global_hooks, has_hooks

Shape = tuple[int, ...]
_Convolution = tuple[Shape, int | Shape, int | Shape]  # shape of the kernel, stride, padding
_ONES = 1, (1,), (1, 1), (1, 1, 1)
_ZEROS = 0, (0,), (0, 0), (0, 0, 0)
_CONVOLUTIONS = {
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(layers.Conv1d, layers.Conv2d, layers.Conv3d),
}
_CONVOLVE: tuple[Any, ...] = F.conv1d, F.conv2d, F.conv3d


def collapsible(modules: Sequence[Any], x: Tensor) -> list[Shape]:
    """Return the input shapes (C, ...) of the leading convolutions that are cheaper as one; empty if none are."""
    if len(modules) < 2 or type(modules[1]) not in _CONVOLUTIONS:
        return []
    chain: list[_Convolution] = []
    for module in modules:
        # Zeros that are padded between two layers have no counterpart in one convolution.
        if not _is_plain(module) or (chain and module.padding not in _ZEROS):
            break
        chain.append((tuple(module.weight.shape), module.stride, module.padding))
        if module.stride not in _ONES:
            break
    if len(chain) < 2 or has_global_hooks():
        return []
    if autocasts(x):  # kernels would be rounded before they are composed
        return []
    return list(_cheapest(tuple(chain), tuple(x.shape)))


@lru_cache(maxsize=256)
def _cheapest(chain: tuple[_Convolution, ...], batch: Shape) -> tuple[Shape, ...]:
    """Return the input shapes of the leading convolutions that take fewer multiply-adds as one."""
    sample, shapes, best = batch[1:], list[Shape](), 0
    apart = 0
    for index, (kernel, stride, padding) in enumerate(chain):
        if len(sample) != len(kernel) - 1 or kernel[1] != sample[0]:
            break
        axes = len(sample) - 1
        every = zip(
            sample[1:], kernel[2:], per_axis(stride, axes), per_axis(padding, axes), strict=True
        )
        output = (kernel[0], *(windows(*axis, ceil_mode=False) for axis in every))
        if min(output) < 1:
            break
        places = batch[0] * math.prod(output[1:])
        apart += places * math.prod(kernel)
        shapes.append(sample)
        if index and _composed_cost([kernel for kernel, *_ in chain[: index + 1]], places) < apart:
            best = index + 1
        sample = output
    return tuple(shapes[:best])


def run_collapsed(modules: Sequence[Any], x: Tensor) -> Tensor:
    """Apply convolutions in a row as one, (B, C, ...) → (B, C', ...)."""
    first, last = modules[0], modules[-1]
    weight = composed([module.weight for module in modules])
    result: Tensor = _CONVOLVE[x.dim() - 3](x, weight, None, last.stride, first.padding)
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
    # The kernel of the first layers is convolved as an image, with its input channels as the batch. torch
    # correlates, hence the flip; padding by the whole reach keeps every overlap.
    for kernel in kernels[1:]:
        axes = range(2, kernel.dim())
        convolve, reach = _CONVOLVE[kernel.dim() - 3], [size - 1 for size in kernel.shape[2:]]
        whole = convolve(whole.transpose(0, 1), kernel.flip(*axes), padding=reach).transpose(0, 1)
    return whole


def _is_plain(module: Any) -> bool:
    """Check for a convolution without bias, groups or dilation whose call runs nothing else."""
    return (
        type(module) in _CONVOLUTIONS
        and module.bias is None
        and module.groups == 1
        and module.dilation in _ONES
        and module.padding_mode == "zeros"
        and isinstance(module.padding, (int, tuple))
        and isinstance(module.stride, (int, tuple))
        and "forward" not in vars(module)
        and "_conv_forward" not in vars(module)
        and not has_hooks(module)
    )


def _composed_cost(kernels: Sequence[Shape], places: int) -> int:
    """Return the multiply-adds of composing kernels and of applying the result at some places."""
    channels, total, sides = kernels[0][1], 0, list(kernels[0][2:])
    for kernel in kernels[1:]:
        sides = [a + b - 1 for a, b in zip(sides, kernel[2:], strict=True)]
        total += channels * math.prod(sides) * math.prod(kernel)
    return total + places * kernels[-1][0] * channels * math.prod(sides)
