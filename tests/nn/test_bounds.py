"""Bounds of operator norms and the radii made from them, against explicit matrices and their SVD."""

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import conformallayers as cl
from cases import HOMOGENEOUS_CASES, LINEAR_CASES
from conformallayers.nn import bounds
from conformallayers.nn.supported import BATCH_NORMS
from models import Generator
from oracle import bound_of as oracle_bound
from oracle import matrix_of

WIDE = [torch.float64, torch.float32]
RTOL = {torch.float64: 1e-12, torch.float32: 5e-6}


def bound_of(module, shape):
    return cl.trace(cl.ConformalLayers(module), shape).steps[0].bound


def norm_of(matrix):
    return np.linalg.svd(matrix, compute_uv=False)[0]


def schur(matrix):
    return math.sqrt(np.abs(matrix).sum(0).max() * np.abs(matrix).sum(1).max())


def checked(module, shape):
    """Check that the bound is one; return it and the matrix."""
    matrix, bound = matrix_of(module, shape).numpy(), bound_of(module, shape)
    assert isinstance(bound, float)
    assert norm_of(matrix) <= bound * (1 + 1e-12)
    return bound, matrix


@pytest.mark.parametrize("seed", range(60))
def test_random_layers_are_bounded_as_by_the_oracle(seed):
    generator = Generator(seed)
    shape = generator.shape()
    maps = seed % 3 == 0 and len(shape) in (2, 3, 4)
    layer = generator.layer(shape, HOMOGENEOUS_CASES if maps else LINEAR_CASES).double()
    layer.requires_grad_(False)
    bound = bound_of(layer, shape)
    assert bound == pytest.approx(float(oracle_bound(layer, shape)), rel=1e-12)
    x = torch.from_numpy(np.random.default_rng(seed).normal(size=(16, *shape)))
    if maps:
        images, sizes = layer(x).flatten(1).norm(dim=1), x.flatten(1).norm(dim=1)
        assert (images <= bound * sizes * (1 + 1e-12)).all()
    elif not isinstance(layer, BATCH_NORMS):
        assert np.linalg.norm(matrix_of(layer, shape), 2) <= bound * (1 + 1e-12)


def test_largest_column_sum_is_no_bound():
    conv = cl.Conv2d(3, 1, 1)
    nn.init.ones_(conv.weight)
    bound, matrix = checked(conv, (3, 4, 4))
    assert np.abs(matrix).sum(0).max() == 1
    assert norm_of(matrix) == pytest.approx(math.sqrt(3), rel=1e-12)
    assert bound == pytest.approx(math.sqrt(3), rel=1e-12)


def test_circular_padding_counts_outputs_that_wrap_round():
    conv = nn.Conv1d(1, 1, 1, padding=3, padding_mode="circular", bias=False)
    nn.init.ones_(conv.weight)
    bound, matrix = checked(conv, (1, 3))
    assert norm_of(matrix) == pytest.approx(math.sqrt(3), rel=1e-12)
    assert bound == pytest.approx(math.sqrt(3), rel=1e-12)


def plain_output(weight, x, alpha):
    """Run Conv1d(padding=1) and the published ReSPro as plain tensor operations."""
    image = F.conv1d(x, weight, padding=1)
    t = alpha / 2 * x.square().sum((1, 2)).sqrt() + image.square().sum((1, 2)) / (2 * alpha)
    return image / t[:, None, None]


@pytest.mark.parametrize("dtype", WIDE)
def test_gradient_flows_through_young(dtype):
    torch.manual_seed(0)
    model = cl.ConformalLayers(cl.Conv1d(2, 3, 3, padding=1, dtype=dtype), cl.ReSPro())
    x, direction = torch.randn(4, 2, 6, dtype=dtype), torch.randn(4, 3, 6, dtype=dtype)
    (model(x) * direction).sum().backward()
    gradients = []
    for through in (True, False):
        weight = model[0].weight.detach().double().requires_grad_()
        A = weight.abs().sum(2)
        alpha = (A.sum(0).max() * A.sum(1).max()).sqrt()
        y = plain_output(weight, x.double(), alpha if through else alpha.detach())
        gradients += torch.autograd.grad((y * direction.double()).sum(), weight)
    gap = [float((model[0].weight.grad - g).norm() / g.norm()) for g in gradients]
    assert gap[0] <= 2 * RTOL[dtype]
    assert gap[1] > 1e-2


@pytest.mark.parametrize(
    ("sizes", "mode", "scale"),
    [
        ((4, 4, 4), "nearest", 2),
        ((5, 3), "nearest-exact", (3, 1)),
        ((5, 4), "bilinear", 1.15),
        ((8,), "linear", 2.5),
    ],
)
def test_interpolation_is_bounded_by_its_matrix(sizes, mode, scale) -> None:
    layer = nn.Upsample(scale_factor=scale, mode=mode)
    bound, matrix = checked(layer, (1, *sizes))
    assert bound == pytest.approx(schur(matrix), rel=1e-12)


@pytest.mark.parametrize(
    "options", [{"scale_factor": 1.5}, {"size": 4}, {"scale_factor": 2, "mode": "bicubic"}]
)
def test_interpolation_without_a_simple_bound_is_refused(options) -> None:
    with pytest.raises(cl.ConformalError, match="whole scale_factor, got mode="):
        cl.ConformalLayers(nn.Upsample(**options))


def test_interpolation_of_a_long_signal_needs_no_matrix() -> None:
    """A matrix of this one would take 20 TB."""
    layer = nn.Upsample(scale_factor=1.5, mode="linear")
    assert 1 <= bounds.upsample_bound(layer, (1, 1_300_000)) ** 2 < 2


def test_subclasses_have_the_bounds_of_their_bases():
    pools = nn.MaxPool2d(3, 1), nn.AvgPool2d(3, 1, 1, count_include_pad=False)
    for module in (*pools, nn.ReflectionPad2d(2)):
        own = copy.copy(module)
        own.__class__ = type("ZeroPadded", (type(module),), {"output_size": 1})
        assert bound_of(own, (1, 7, 7)) == bound_of(module, (1, 7, 7))


def test_slopes_count_and_train():
    assert bound_of(nn.LeakyReLU(0.2), (3,)) == 1
    assert bound_of(nn.LeakyReLU(-1.5), (3,)) == 1.5
    prelu = nn.PReLU(3)
    with torch.no_grad():
        prelu.weight.copy_(torch.tensor([0.1, -2.5, 1.0]))
    assert bound_of(prelu, (3,)) == 2.5
    bounds.prelu_bound(prelu, (3,)).backward()
    assert prelu.weight.grad.tolist() == [0.0, -1.0, 0.0]
