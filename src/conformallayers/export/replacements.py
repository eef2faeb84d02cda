"""Operators that ONNX Runtime lacks, or rounds too coarsely, made of others.

It has convolutions and poolings in float32 alone on the CPU. Folds need them in float64 too, where biases are inside
or a difference is taken: they become gathered windows and one product. And it adds the squares of a norm one by one,
which costs an image of 224×224 pixels five digits of float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Node
from torch.nn import functional as F

Sizes = Sequence[int]
LONG = 2**14  # squares in a norm that one float32 may hold
aten = torch.ops.aten


def convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sizes = (1,),
    padding: Sizes | str = (0,),
    dilation: Sizes = (1,),
    groups: int = 1,
) -> Tensor:
    """Return what ``torch.nn.functional.conv1d`` and its siblings return."""
    if x.dtype != torch.float64:
        return NotImplemented  # type: ignore[no-any-return]
    kernel = tuple(weight.shape[2:])
    stride, dilation = _spread(stride, kernel), _spread(dilation, kernel)
    if isinstance(padding, str):
        totals = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
        pads = [(t // 2, t - t // 2) if padding == "same" else (0, 0) for t in totals]
    else:
        pads = [(p, p) for p in _spread(padding, kernel)]
    windows, shape = _windows(x, kernel, stride, pads, dilation)
    rows = windows.reshape(-1, groups, x.shape[1] // groups * prod(kernel), prod(shape))
    y = weight.reshape(groups, weight.shape[0] // groups, -1) @ rows
    y = y.reshape(-1, weight.shape[0], *shape)
    return y if bias is None else y + bias.view(-1, *[1] * len(kernel))


def average(
    x: Tensor,
    kernel: Sizes,
    stride: Sizes = (),
    padding: Sizes = (0,),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Tensor:
    """Return what ``torch.nn.functional.avg_pool1d`` and its siblings return."""
    if x.dtype != torch.float64:
        return NotImplemented  # type: ignore[no-any-return]
    spatial = tuple(x.shape[2:])
    kernel = _spread(kernel, spatial)
    steps, margins = _spread(stride or kernel, spatial), _spread(padding, spatial)
    pads, divisor = [], torch.ones((), dtype=x.dtype)
    for axis, (n, k, s, p) in enumerate(zip(spatial, kernel, steps, margins, strict=True)):
        outputs = _outputs(n, k, s, p, ceil_mode)
        pads.append((p, max(p, (outputs - 1) * s + k - n - p)))
        start = torch.arange(outputs) * s - p
        if count_include_pad:
            count = (start + k).clamp_max(n + p) - start
        else:
            count = (start + k).clamp_max(n) - start.clamp_min(0)
        divisor = divisor * count.to(x.dtype).view(-1, *[1] * (len(spatial) - 1 - axis))
    windows, shape = _windows(x, kernel, steps, pads, [1] * len(spatial))
    total = windows.sum(2).view(-1, x.shape[1], *shape)
    return total / (divisor if divisor_override is None else divisor_override)


def _outputs(n: int, k: int, s: int, p: int, ceil_mode: bool) -> int:
    """Count the windows as torch does: with ``ceil_mode`` the last one must start inside."""
    outputs = (n + 2 * p - k + (s - 1 if ceil_mode else 0)) // s + 1
    return outputs - 1 if ceil_mode and (outputs - 1) * s >= n + p else outputs


def _windows(
    x: Tensor, kernel: Sizes, stride: Sizes, pads: Sequence[tuple[int, int]], dilation: Sizes
) -> tuple[Tensor, tuple[int, ...]]:
    """Gather (B, C, *spatial) → (B, C, taps, positions); return the spatial shape of these too."""
    flat_pads = [p for pair in reversed(pads) for p in pair]
    x = F.pad(x, flat_pads) if any(flat_pads) else x
    # Indices are computed, not listed: torch.export keeps no constants that a replacement brings along.
    shape: list[int] = []
    taps, positions = torch.zeros(1, dtype=torch.long), torch.zeros(1, dtype=torch.long)
    for n, k, s, d in zip(x.shape[2:], kernel, stride, dilation, strict=True):
        shape.append((n - (k - 1) * d - 1) // s + 1)
        taps = (taps[:, None] * n + torch.arange(k) * d).flatten()
        positions = (positions[:, None] * n + torch.arange(shape[-1]) * s).flatten()
    places = (taps[:, None] + positions).flatten()
    windows = x.flatten(2).index_select(2, places)
    return windows.view(-1, x.shape[1], prod(kernel), prod(shape)), tuple(shape)


def _spread(sizes: Sizes, like: Sizes) -> tuple[int, ...]:
    """Repeat a single size for every axis."""
    return tuple(sizes) if len(sizes) == len(like) else (*sizes,) * len(like)


def norm(
    x: Tensor,
    ord: float = 2,
    dim: Sizes | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return ``torch.linalg.vector_norm`` of large images: squares of a row in float32, rows in float64."""
    if ord != 2 or not dim or len(dim) < 2 or not _is_long(x, dim):
        return NotImplemented  # type: ignore[no-any-return]
    rows = x.square().sum(dim[-1], keepdim=True)
    return rows.double().sum(tuple(dim), keepdim=keepdim).sqrt().to(dtype or x.dtype)


def _is_long(x: Tensor, dim: Sizes) -> bool:
    return x.dtype == torch.float32 and prod(x.shape[axis] for axis in dim) > LONG


# What torch.export makes of the layers → what they are replaced with.
_REPLACEMENTS: dict[Any, Callable[..., Tensor]] = {
    **{getattr(aten, f"conv{n}d").default: convolve for n in (1, 2, 3)},
    **{getattr(aten, f"conv{n}d").padding: convolve for n in (1, 2, 3)},
    **{getattr(aten, f"avg_pool{n}d").default: average for n in (1, 2, 3)},
    aten.linalg_vector_norm.default: norm,
}


def with_replacements(program: ExportedProgram) -> ExportedProgram:
    """Replace what needs it in a program; return it as it is if nothing does."""
    return (
        program.run_decompositions(_REPLACEMENTS)
        if any(map(_needs, program.graph.nodes))
        else program
    )


def _needs(node: Node) -> bool:
    if node.target is aten.linalg_vector_norm.default:
        value: Tensor = node.all_input_nodes[0].meta["val"]
        return _is_long(value, range(1, value.dim()))
    return node.target in _REPLACEMENTS and node.meta["val"].dtype == torch.float64
