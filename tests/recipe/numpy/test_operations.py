"""Random sizes and options of the operations in numpy against torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from conformallayers.recipe import layer_operations as layer
from conformallayers.recipe.numpy.operations import RUN
from conformallayers.recipe.recipe import Operation
from oracle import relative_error

LIMITS = {torch.float64: 1e-12, torch.float32: 5e-6}
DTYPES = st.sampled_from(list(LIMITS))
CONV = (F.conv1d, F.conv2d, F.conv3d)
CONV_TRANSPOSE = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
AVG_POOL = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)
MAX_POOL = (F.max_pool1d, F.max_pool2d, F.max_pool3d)
ADAPTIVE = (F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d)
ADAPTIVE_MAX = (F.adaptive_max_pool1d, F.adaptive_max_pool2d, F.adaptive_max_pool3d)
NORM_POOL = (F.lp_pool1d, F.lp_pool2d, F.lp_pool3d)


class Constants:
    """Hold constants the way a network does."""

    def __init__(self, **arrays: Tensor) -> None:
        self.dtype = np.dtype(np.float64)
        self._arrays = {name: array.numpy() for name, array in arrays.items()}

    def constant(self, name: str) -> Any:
        return self._arrays[name]


def check(
    kind: type[Operation],
    expected: Callable[[Tensor], Tensor],
    x: Tensor,
    arrays: dict[str, Tensor],
    **options: Any,
) -> None:
    """Compare an operation with torch, in values and in the shape that it foretells."""
    names = {name: name for name in arrays}
    op = kind(inputs=("x",), outputs=("y",), **names, **options)
    y = RUN[kind](op, Constants(**arrays), x.numpy())
    shapes = op.shapes([tuple(x.shape[1:])], lambda name: tuple(arrays[name].shape))
    assert y.dtype == x.numpy().dtype
    assert (y.shape[1:],) == shapes
    assert relative_error(torch.tensor(y), expected(x)) < LIMITS[x.dtype]


def positive(dtype: torch.dtype, *shape: int) -> Tensor:
    """Return random numbers whose sums lose no digits."""
    generator = torch.Generator().manual_seed(sum(shape))
    return (0.5 + torch.rand(shape, generator=generator, dtype=torch.float64)).to(dtype)


def each(axes: int, least: int, most: int) -> st.SearchStrategy[tuple[int, ...]]:
    """Return one whole number for each axis."""
    return st.tuples(*[st.integers(least, most)] * axes)


@settings(max_examples=150, deadline=None)
@given(st.data(), st.integers(1, 3), DTYPES)
def test_conv(data: st.DataObject, axes: int, dtype: torch.dtype) -> None:
    size, kernel, stride = (data.draw(each(axes, 1, most)) for most in (8, 4, 3))
    padding, dilation = data.draw(each(axes, 0, 3)), data.draw(each(axes, 1, 3))
    groups, ins, outs = (data.draw(st.integers(1, 3)) for _ in range(3))
    every = zip(size, kernel, padding, dilation, strict=True)
    assume(all(n + 2 * p > d * (k - 1) for n, k, p, d in every))
    weight = positive(dtype, groups * outs, ins, *kernel)
    bias = positive(dtype, groups * outs)
    check(
        layer.Conv,
        lambda x: CONV[axes - 1](x, weight, bias, stride, padding, dilation, groups),
        positive(dtype, 2, groups * ins, *size),
        {"weight": weight, "bias": bias},
        stride=stride,
        padding=padding,
        dilation=dilation,
        groups=groups,
    )


@settings(max_examples=150, deadline=None)
@given(st.data(), st.integers(1, 3), DTYPES)
def test_conv_transpose(data: st.DataObject, axes: int, dtype: torch.dtype) -> None:
    size, kernel, stride = (data.draw(each(axes, 1, most)) for most in (5, 4, 3))
    padding, dilation = data.draw(each(axes, 0, 3)), data.draw(each(axes, 1, 3))
    both = zip(stride, dilation, strict=True)
    more = tuple(data.draw(st.integers(0, max(s, d) - 1)) for s, d in both)
    groups, ins, outs = (data.draw(st.integers(1, 3)) for _ in range(3))
    every = zip(size, stride, padding, dilation, kernel, more, strict=True)
    assume(all((n - 1) * s - 2 * p + d * (k - 1) + o >= 0 for n, s, p, d, k, o in every))
    weight, bias = positive(dtype, groups * ins, outs, *kernel), positive(dtype, groups * outs)
    check(
        layer.ConvTranspose,
        lambda x: CONV_TRANSPOSE[axes - 1](
            x, weight, bias, stride, padding, more, groups, dilation
        ),
        positive(dtype, 2, groups * ins, *size),
        {"weight": weight, "bias": bias},
        stride=stride,
        padding=padding,
        output_padding=more,
        dilation=dilation,
        groups=groups,
    )


@settings(max_examples=200, deadline=None)
@given(st.data(), st.integers(1, 3), DTYPES, st.booleans(), st.booleans())
def test_pools(
    data: st.DataObject, axes: int, dtype: torch.dtype, ceil: bool, counted: bool
) -> None:
    size, kernel, stride = (data.draw(each(axes, 1, most)) for most in (9, 4, 4))
    dilation = data.draw(each(axes, 1, 2))
    padding = tuple(data.draw(st.integers(0, k // 2)) for k in kernel)
    every = zip(size, kernel, padding, dilation, strict=True)
    assume(all(n + 2 * p > d * (k - 1) for n, k, p, d in every))
    if axes == 3:  # torch averages no window that is larger than the volume without its padding
        assume(all(k <= n for n, k in zip(size, kernel, strict=True)))
    x = positive(dtype, 2, 2, *size)
    common = {"kernel": kernel, "stride": stride, "padding": padding, "ceil_mode": ceil}

    def average(x: Tensor) -> Tensor:
        return AVG_POOL[axes - 1](x, kernel, stride, padding, ceil, counted)

    def most(x: Tensor) -> Tensor:
        return MAX_POOL[axes - 1](x, kernel, stride, padding, dilation, ceil)

    check(layer.AvgPool, average, x, {}, count_include_pad=counted, **common)

    def norms(x: Tensor) -> Tensor:
        return NORM_POOL[axes - 1](x, 2, kernel[0] if axes == 1 else kernel, stride, ceil)

    check(layer.MaxPool, most, x - data.draw(st.integers(1, 2)), {}, dilation=dilation, **common)
    if all(k <= n for n, k in zip(size, kernel, strict=True)):
        windows = {"kernel": kernel, "stride": stride, "ceil_mode": ceil}
        check(layer.NormPool, norms, x - 1, {}, **windows)
    wanted = data.draw(each(axes, 1, 9))
    pooled, largest = ADAPTIVE[axes - 1], ADAPTIVE_MAX[axes - 1]
    check(layer.AdaptiveAvgPool, lambda x: pooled(x, wanted), x, {}, size=wanted)
    check(layer.AdaptiveMaxPool, lambda x: largest(x, wanted), x - 2, {}, size=wanted)


@settings(max_examples=200, deadline=None)
@given(st.data(), st.integers(1, 3), DTYPES)
def test_pads_of_both_signs(data: st.DataObject, axes: int, dtype: torch.dtype) -> None:
    size = data.draw(each(axes, 1, 6))
    mode = data.draw(st.sampled_from(["zeros", "reflect", "replicate", "circular"]))
    pads = []
    for n in size:
        least = 1 - n if mode == "zeros" else 0
        before = data.draw(st.integers(least, n))
        after = data.draw(st.integers(min(least - min(before, 0), 0), n))
        assume(max(before, after) <= n - (mode == "reflect"))
        pads.append((before, after))
    ends = [end for both in reversed(pads) for end in both]
    word, value = ("constant", 0.5) if mode == "zeros" else (mode, None)
    check(
        layer.Pad,
        lambda x: F.pad(x, ends, word, value),
        positive(dtype, 2, 3, *size),
        {},
        pads=tuple(pads),
        mode=mode,
        value=0.5 if mode == "zeros" else 0.0,
    )


@pytest.mark.parametrize("count", [layer.LONG_ROW, layer.LONG_ROW + 1, 100_001])
def test_long_products_lose_no_digits(count: int) -> None:
    torch.manual_seed(0)
    equal = torch.rand(24, 1).add(0.5).repeat(1, count)  # rounded to the same side
    operation = layer.Matmul(("x",), ("y",), weight="weight")
    for weight, rtol in ((torch.rand(2, count), 1e-6), (equal, 5e-6)):
        x = weight[:1] if weight is equal else torch.full((1, count), 0.3)
        y = RUN[layer.Matmul](operation, Constants(weight=weight), x.numpy())
        assert np.allclose(y, x.double() @ weight.double().T, rtol=rtol, atol=0)
