"""Compositions and sums of convolutions against the layers themselves."""

import random

import pytest
import torch

from conformallayers.folding.convolution import Convolution, add, compose, concatenate, diagonal

MODES = ("zeros", "zeros", "reflect", "replicate", "circular")


def drawn(rng: random.Random, axes: int, c_in: int, c_out: int) -> Convolution:
    groups = rng.choice([g for g in (1, 2, c_in) if c_in % g == 0 and c_out % g == 0])
    kernel = [rng.choice((1, 1, 2, 3)) for _ in range(axes)]
    dilation = tuple(rng.choice((1, 1, 2)) for _ in range(axes))
    padding = tuple(rng.choice((0, 0, 1, 2)) for _ in range(axes))
    ones = (1,) * axes
    return Convolution(
        torch.randn(c_out, c_in // groups, *kernel, dtype=torch.float64),
        torch.randn(c_out, *ones, dtype=torch.float64) if rng.random() < 0.7 else None,
        tuple(rng.choice((1, 1, 2)) for _ in range(axes)),
        padding,
        dilation,
        groups,
        rng.choice(MODES),
    )


def drawn_term(rng: random.Random, axes: int, stride: tuple[int, ...], mode: str) -> Convolution:
    """Draw a convolution of four channels; in most draws its windows are centred."""
    kernel = [rng.choice((1, 3, 3)) for _ in range(axes)]
    dilation = tuple(rng.choice((1, 1, 2)) for _ in range(axes))
    padding = tuple((k - 1) * d // 2 for k, d in zip(kernel, dilation, strict=True))
    if rng.random() < 0.2:
        padding = tuple(rng.choice((0, 1)) for _ in range(axes))
    groups = rng.choice((1, 2, 4))
    weight = torch.randn(4, 4 // groups, *kernel, dtype=torch.float64)
    bias = torch.randn(4, *[1] * axes, dtype=torch.float64) if rng.random() < 0.7 else None
    return Convolution(weight, bias, stride, padding, dilation, groups, mode)


def run(conv: Convolution, x: torch.Tensor) -> torch.Tensor:
    y = conv.apply(x)
    return y if conv.bias is None else y + conv.bias


@pytest.mark.parametrize("axes", [0, 1, 2, 3])
def test_compositions_equal_the_two_convolutions(axes: int) -> None:
    rng, found = random.Random(axes), 0
    torch.manual_seed(axes)
    for _ in range(200):
        shape = (4, *(rng.choice((9, 10, 11)) for _ in range(axes)))
        first, second = drawn(rng, axes, 4, 8), drawn(rng, axes, 8, 4)
        both = compose(first, second, shape)
        x = torch.randn(2, *shape, dtype=torch.float64)
        expected = run(second, run(first, x))
        if both is None:
            assert any(second.padding)
            continue
        found += 1
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
        terms = [drawn_term(rng, axes, stride, mode) for _ in range(rng.choice((2, 3)))]
        if len({term.output_shape(shape) for term in terms}) > 1:
            continue
        total = add(terms, shape)
        if total is None:
            continue
        found += 1
        x = torch.randn(2, *shape, dtype=torch.float64)
        expected = sum(run(term, x) for term in terms)
        torch.testing.assert_close(run(total, x), expected, rtol=1e-12, atol=1e-12)
    assert found > 20


def test_a_padded_chain_is_not_one_convolution() -> None:
    weight = torch.ones(1, 1, 3, 3, dtype=torch.float64)
    conv = Convolution(weight, None, (1, 1), (1, 1), (1, 1))
    assert compose(conv, conv, (1, 8, 8)) is None


def test_repvgg_sum_stays_one_kernel_of_size_three() -> None:
    def conv(k: int, groups: int = 1) -> Convolution:
        weight = torch.randn(4, 4 // groups, k, k, dtype=torch.float64)
        return Convolution(weight, None, (1, 1), (k // 2, k // 2), (1, 1), groups)

    identity = diagonal(torch.ones(4, dtype=torch.float64), None, 2)
    dense = add([conv(3), conv(1), identity], (4, 8, 8))
    depthwise = add([conv(3, 4), conv(1, 4), identity], (4, 8, 8))
    assert dense is not None
    assert depthwise is not None
    assert (dense.kernel, dense.groups) == ((3, 3), 1)
    assert (depthwise.kernel, depthwise.groups) == ((3, 3), 4)


def test_planning_on_the_meta_device_gives_the_same_shapes() -> None:
    rng = random.Random(0)
    for _ in range(50):
        shape = (4, 9, 9)
        first, second = drawn(rng, 2, 4, 8), drawn(rng, 2, 8, 4)
        real = compose(first, second, shape)
        planned = compose(on_meta(first), on_meta(second), shape)
        assert (real is None) == (planned is None)
        if real is not None and planned is not None:
            assert real.weight.shape == planned.weight.shape
            assert real.multiply_adds(shape) == planned.multiply_adds(shape)


def on_meta(conv: Convolution) -> Convolution:
    bias = None if conv.bias is None else conv.bias.to("meta")
    rest = (conv.stride, conv.padding, conv.dilation, conv.groups, conv.mode)
    return Convolution(conv.weight.to("meta"), bias, *rest)


def test_concatenation_stacks_kernels_of_one_geometry() -> None:
    torch.manual_seed(0)
    ones = (1, 1)
    a = Convolution(torch.randn(2, 3, 3, 3).double(), None, ones, ones, ones)
    b = Convolution(
        torch.randn(4, 3, 3, 3).double(), torch.randn(4, 1, 1).double(), ones, ones, ones
    )
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    both = concatenate([a, b])
    assert both is not None
    torch.testing.assert_close(run(both, x), torch.cat([run(a, x), run(b, x)], 1))
    c = Convolution(torch.randn(4, 3, 1, 1).double(), None, ones, (0, 0), ones)
    assert concatenate([a, c]) is None
