"""Averages and norms of windows, against torch.nn."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from conformallayers.nn import pooling

# The size of a map, kernel and stride: a small map, one that windows tile, and one with a rest at its end.
WINDOWS = [((5, 6), (3, 2), (2, 1)), ((16, 14), (2, 2), (2, 2)), ((17, 14), (2, 3), (2, 3))]


@pytest.mark.parametrize("ceil_mode", [False, True])
@pytest.mark.parametrize("axes", [1, 2, 3])
def test_norm_pool_is_that_of_torch(axes: int, ceil_mode: bool) -> None:
    x = torch.randn(2, 3, *(7, 6, 5)[:axes], dtype=torch.float64, requires_grad=True)
    kernel, stride = (3, 2, 2)[:axes], (2, 3, 1)[:axes]
    sizes = (kernel[0], stride[0]) if axes == 1 else (kernel, stride)
    pool = getattr(nn, f"LPPool{axes}d")(2, *sizes, ceil_mode)
    assert torch.allclose(pooling.norm_pool(x, kernel, stride, ceil_mode), pool(x), rtol=1e-14)
    assert torch.autograd.gradcheck(lambda x: pooling.norm_pool(x, kernel, stride, ceil_mode), x)


@pytest.mark.parametrize(("sizes", "kernel", "stride"), WINDOWS)
@pytest.mark.parametrize("pool", ["average", "norm"])
def test_training_pools_as_torch_does(
    pool: str, sizes: tuple[int, int], kernel: tuple[int, int], stride: tuple[int, int]
) -> None:
    def ours(x: Tensor) -> Tensor:
        part = x[:, 1:]  # some of the channels
        function = pooling.avg_pool if pool == "average" else pooling.norm_pool
        result = function(part, kernel, stride)
        assert result is not None
        assert "Pool" in type(result.grad_fn).__name__
        assert "AvgPool2D" not in type(result.grad_fn).__name__
        return result

    def theirs(x: Tensor) -> Tensor:
        if pool == "average":
            return F.avg_pool2d(x[:, 1:], kernel, stride)
        return (F.avg_pool2d(x[:, 1:].square(), kernel, stride) * math.prod(kernel)).sqrt()

    torch.manual_seed(0)
    x = torch.randn(2, 3, *sizes, dtype=torch.float64, requires_grad=True)
    y, wanted = ours(x), theirs(x)
    assert torch.allclose(y, wanted, rtol=1e-13)
    weights = torch.randn_like(y)
    first = [
        torch.autograd.grad((z * weights).sum(), x, create_graph=True) for z in (ours(x), theirs(x))
    ]
    assert torch.allclose(*(g for (g,) in first), rtol=1e-12)
    (plain,) = torch.autograd.grad((ours(x) * weights).sum(), x)
    assert torch.allclose(plain, first[0][0], rtol=1e-12)
    if pool == "norm":
        second = [torch.autograd.grad(g.square().sum(), x)[0] for (g,) in first]
        assert torch.allclose(*second, rtol=1e-10)
    batched = torch.stack([weights, 2 * weights])
    (rows,) = torch.autograd.grad(ours(x), x, batched, is_grads_batched=True)
    assert torch.allclose(rows, torch.stack([plain, 2 * plain]), rtol=1e-12)


def test_only_training_on_plain_maps_leaves_the_kernels_of_torch() -> None:
    x = torch.randn(2, 3, 8, 8, requires_grad=True)
    assert pooling.avg_pool(x, (2, 2), (2, 2)) is not None
    large = torch.randn(2, 3, 40, 40, requires_grad=True)
    others = [
        x.detach(),
        x.to(torch.bfloat16),
        x.to(memory_format=torch.channels_last),
        x[..., :7],
        x[:, 0],
        large,
    ]
    assert all(
        pooling.avg_pool(other, (3, 3)[: other.dim() - 2], (2, 2)) is None for other in others
    )
    with torch.no_grad():
        assert pooling.avg_pool(x, (2, 2), (2, 2)) is None
    with torch.autocast("cpu"):
        assert pooling.avg_pool(x, (2, 2), (2, 2)) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("sizes", "kernel", "stride"), WINDOWS)
def test_groups_of_channels_are_pooled_at_once(
    sizes: tuple[int, int], kernel: tuple[int, int], stride: tuple[int, int], dtype: torch.dtype
) -> None:
    groups = ((slice(0, 2), True), (slice(2, 3), False), (slice(3, 5), True))

    def ours(x: Tensor) -> Tensor:
        result = pooling.pool_groups(x, kernel, stride, groups)
        assert result is not None
        return result

    def theirs(x: Tensor) -> Tensor:
        squares = F.avg_pool2d(x.square(), kernel, stride) * math.prod(kernel)
        norms = torch.where(squares > 0, squares.clamp_min(1e-300).sqrt(), 0.0)
        return torch.cat([norms[:, :2], F.avg_pool2d(x[:, 2:3], kernel, stride), norms[:, 3:]], 1)

    torch.manual_seed(0)
    x = torch.randn(4, 5, *sizes, dtype=dtype)
    for black in (False, True):
        x[0, :, :4] *= not black  # windows of zeros
        x.requires_grad_()
        wide = x.detach().double().requires_grad_()
        y, wanted = ours(x), theirs(wide)
        rtol = 1e-12 if dtype == torch.float64 else 2e-6
        torch.testing.assert_close(y.double(), wanted, rtol=rtol, atol=rtol)
        weights = torch.randn_like(y)
        (g,) = torch.autograd.grad((y * weights).sum(), x)
        (expected,) = torch.autograd.grad((wanted * weights.double()).sum(), wide)
        torch.testing.assert_close(g.double(), expected, rtol=rtol, atol=rtol)
        (again,) = torch.autograd.grad((ours(x) * weights).sum(), x, create_graph=True)
        torch.testing.assert_close(again, g, rtol=rtol, atol=rtol)
        x = x.detach()
    if dtype == torch.float64:
        few = (min(size, 2 * step + k) for size, step, k in zip(sizes, stride, kernel, strict=True))
        small = torch.rand(1, 5, *few, dtype=dtype, requires_grad=True)  # three windows a side
        assert torch.autograd.gradcheck(ours, small)
        assert torch.autograd.gradgradcheck(ours, small)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_norms_of_small_and_large_windows(dtype: torch.dtype) -> None:
    eps = torch.finfo(dtype).eps
    for size in (1e-3, 300.0) if dtype == torch.float16 else (1e-12, 1e12):
        x = torch.tensor([[[0.6 * size, 0.8 * size, 0.0, 0.0, 1.0, 0.0]]], dtype=dtype)
        y = pooling.norm_pool(x.requires_grad_(), (2,), (2,))
        assert y.dtype == dtype
        assert y[0, 0].tolist() == pytest.approx([size, 0.0, 1.0], rel=8 * eps)
        (g,) = torch.autograd.grad(y.sum(), x)
        assert g[0, 0].tolist() == pytest.approx([0.6, 0.8, 0.0, 0.0, 1.0, 0.0], rel=16 * eps)
    strange = torch.tensor([[[math.nan, 1.0, math.inf, 1.0, 1.0, 0.0]]], dtype=dtype)
    assert pooling.norm_pool(strange, (2,), (2,))[0, 0].isfinite().tolist() == [False, False, True]
