"""Bounds of operator norms and the radii made from them, against explicit matrices and their SVD."""

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn

import conformallayers as cl
from conformallayers.nn import bounds
from oracle import matrix_of


def bound_of(module, shape):
    return cl.trace(cl.ConformalLayers(module), shape).steps[0].bound


def norm_of(matrix):
    return np.linalg.svd(matrix, compute_uv=False)[0]


def checked(module, shape):
    """Check that the bound is one; return it and the matrix."""
    matrix, bound = matrix_of(module, shape).numpy(), bound_of(module, shape)
    assert isinstance(bound, float)
    assert norm_of(matrix) <= bound * (1 + 1e-12)
    return bound, matrix


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


@pytest.mark.parametrize(
    "options", [{"scale_factor": 1.5}, {"size": 4}, {"scale_factor": 2, "mode": "bicubic"}]
)
def test_interpolation_without_a_simple_bound_is_refused(options) -> None:
    with pytest.raises(cl.ConformalError, match="integer scale_factor, got mode="):
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
    bounds.largest("weight", least=1.0)(prelu, (3,)).backward()
    assert prelu.weight.grad.tolist() == [0.0, -1.0, 0.0]
