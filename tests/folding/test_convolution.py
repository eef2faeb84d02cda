"""Compositions and sums of convolutions against the layers themselves."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from conformallayers.folding.convolution import Convolution, add, compose, concatenate, diagonal

MODES = ("zeros", "zeros", "reflect", "replicate", "circular")


def convolution(weight: Tensor, bias: Tensor | None, *settings: Any, **options: Any) -> Convolution:
    """Return a convolution of numbers; settings are stride, padding, dilation and groups."""
    groups = settings[3] if len(settings) > 3 else 1
    kind = None if bias is None else "channel"
    channels, kernel = (weight.shape[1] * groups, weight.shape[0]), tuple(weight.shape[2:])
    return Convolution(
        lambda: (weight, bias), channels, kernel, *settings[:3], groups, kind, **options
    )


def drawn(rng: random.Random, axes: int, sizes: tuple[int, int], **options: Any) -> Convolution:
    """Draw a convolution; with ``stride`` among the options most draws have centred windows."""
    c_in, c_out = sizes
    groups = rng.choice([g for g in (1, 2, c_in) if c_in % g == 0 and c_out % g == 0])
    kernel = [rng.choice((1, 3, 3) if options else (1, 1, 2, 3)) for _ in range(axes)]
    dilation = tuple(rng.choice((1, 1, 2)) for _ in range(axes))
    padding = tuple(rng.choice((0, 0, 1, 2)) for _ in range(axes))
    if options and rng.random() < 0.8:
        padding = tuple((k - 1) * d // 2 for k, d in zip(kernel, dilation, strict=True))
    stride = options.get("stride", tuple(rng.choice((1, 1, 2)) for _ in range(axes)))
    weight = torch.randn(c_out, c_in // groups, *kernel, dtype=torch.float64)
    bias = torch.randn(c_out, *[1] * axes, dtype=torch.float64) if rng.random() < 0.7 else None
    mode = options.get("mode", rng.choice(MODES))
    return convolution(weight, bias, stride, padding, dilation, groups, mode=mode)


def run(conv: Convolution, x: torch.Tensor) -> torch.Tensor:
    weight, bias = conv.numbers()
    y = conv.apply(x, weight)
    return y if bias is None else y + bias


@pytest.mark.parametrize("axes", [0, 1, 2, 3])
def test_compositions_equal_the_two_convolutions(axes: int) -> None:
    rng, found = random.Random(axes), 0
    torch.manual_seed(axes)
    for _ in range(200):
        shape = (4, *(rng.choice((9, 10, 11)) for _ in range(axes)))
        first, second = drawn(rng, axes, (4, 8)), drawn(rng, axes, (8, 4))
        if min(second.output_shape(first.output_shape(shape))) < 1:
            continue
        both = compose(first, second, shape)
        x = torch.randn(2, *shape, dtype=torch.float64)
        expected = run(second, run(first, x))
        if isinstance(both, str):
            assert any(second.padding)
            continue
        found += 1
        weight, bias = both.numbers()
        assert tuple(weight.shape[2:]) == both.kernel
        assert weight.numel() == both.weights()
        assert (bias is None) == (both.bias is None)
        assert both.output_shape(shape) == tuple(expected.shape[1:])
        torch.testing.assert_close(run(both, x), expected, rtol=1e-12, atol=1e-12)
    assert found > 15


@pytest.mark.parametrize("axes", [0, 1, 2, 3])
def test_sums_equal_the_sum_of_the_convolutions(axes: int) -> None:
    rng, found = random.Random(axes), 0
    torch.manual_seed(axes)
    for _ in range(150):
        shape = (4, *(rng.choice((9, 10)) for _ in range(axes)))
        mode, stride = rng.choice(MODES), tuple(rng.choice((1, 1, 2)) for _ in range(axes))
        geometry = {"stride": stride, "mode": mode}
        terms = [drawn(rng, axes, (4, 4), **geometry) for _ in range(rng.choice((2, 3)))]
        if len({term.output_shape(shape) for term in terms}) > 1:
            continue
        total = add(terms, shape)
        if isinstance(total, str):
            continue
        found += 1
        x = torch.randn(2, *shape, dtype=torch.float64)
        expected = sum(run(term, x) for term in terms)
        torch.testing.assert_close(run(total, x), expected, rtol=1e-12, atol=1e-12)
    assert found > 20


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_single_pixels_merge_with_transposed_convolutions(axes: int) -> None:
    rng = random.Random(axes)
    torch.manual_seed(axes)
    for _ in range(40):
        groups = rng.choice((1, 2))
        weight = torch.randn(4, 4 // groups, *[rng.choice((2, 3))] * axes, dtype=torch.float64)
        settings = (2,) * axes, (rng.choice((0, 1)),) * axes, (1,) * axes, groups
        bias = torch.randn(4, *[1] * axes, dtype=torch.float64)
        turned = convolution(weight, bias, *settings, output_padding=(1,) * axes)
        ones = torch.randn(4, 4, *[1] * axes, dtype=torch.float64)
        pixels = convolution(ones, bias, (1,) * axes, (0,) * axes, (1,) * axes)
        norm = diagonal(torch.rand(4, dtype=torch.float64), bias, axes)
        shape = (4, *[5] * axes)
        x = torch.randn(2, *shape, dtype=torch.float64)
        for first, second in ((pixels, turned), (turned, pixels), (norm, turned), (turned, norm)):
            both = compose(first, second, shape)
            assert not isinstance(both, str)
            assert both.output_shape(shape) == tuple(run(turned, x).shape[1:])
            expected = run(second, run(first, x))
            torch.testing.assert_close(run(both, x), expected, rtol=1e-12, atol=1e-12)


def test_reasons_say_why_two_are_not_one() -> None:
    weight, ones = torch.ones(1, 1, 3, 3, dtype=torch.float64), (1, 1)
    padded = convolution(weight, None, ones, ones, ones)
    strided = convolution(weight, None, (2, 2), ones, ones)
    assert "border" in str(compose(padded, padded, (1, 8, 8)))
    assert "strides" in str(add([padded, strided], (1, 8, 8)))
    reflected = convolution(weight, None, ones, ones, ones, mode="reflect")
    assert "pad" in str(add([padded, reflected], (1, 8, 8)))


def test_concatenation_stacks_kernels_of_one_geometry() -> None:
    torch.manual_seed(0)
    ones = (1, 1)
    a = convolution(torch.randn(2, 3, 3, 3).double(), None, ones, ones, ones)
    bias = torch.randn(4, 1, 1).double()
    b = convolution(torch.randn(4, 3, 3, 3).double(), bias, ones, ones, ones)
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    both = concatenate([a, b])
    assert not isinstance(both, str)
    torch.testing.assert_close(run(both, x), torch.cat([run(a, x), run(b, x)], 1))
    c = convolution(torch.randn(4, 3, 1, 1).double(), None, ones, (0, 0), ones)
    assert "windows" in str(concatenate([a, c]))
