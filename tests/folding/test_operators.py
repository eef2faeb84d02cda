"""Linear operators and their norms."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import conformallayers as cl
from conformallayers.folding.operators import Operator, adjoint

pytestmark = pytest.mark.usefixtures("seeded")


@pytest.mark.parametrize("kernel", [3, (3,), (3, 3)])
def test_multiply_adds_of_windows_count_every_axis(kernel: int | tuple[int, ...]) -> None:
    operator = Operator(nn.AvgPool2d(kernel), (2, 6, 6), (2, 2, 2))
    assert operator.multiply_adds() == 2 * 2 * 2 * 9


def test_the_operator_norm_is_a_bound_and_a_close_one() -> None:
    for weight_shape in ((5, 3, 3, 3), (3, 6, 5, 1), (4, 4, 2, 3)):
        conv = (
            cl.Conv2d(weight_shape[1], weight_shape[0], weight_shape[2:], padding=1)
            .double()
            .requires_grad_(False)
        )
        nn.init.normal_(conv.weight)
        shape = (weight_shape[1], 9, 9)
        size = math.prod(shape)
        columns = conv(torch.eye(size, dtype=torch.float64).view(size, *shape)).flatten(1).detach()
        out = tuple(conv(torch.zeros(1, *shape).double()).shape[1:])
        bound = Operator(conv, shape, out).norm
        true = float(torch.linalg.matrix_norm(columns, 2))
        assert true <= bound <= 1.5 * true


def written_out(module: nn.Module, shape: tuple[int, ...]) -> torch.Tensor:
    """Return the matrix of a linear module, (d_out, d_in), by its columns."""
    size = math.prod(shape)
    with torch.no_grad():
        return module(torch.eye(size, dtype=torch.float64).view(size, *shape)).flatten(1).T


# torch's gradient of these is not the adjoint: it copies each axis whose size stays the same.
COPIED_BACKWARDS = [
    *((1, "nearest", scale) for scale in (1.01, 1.1, 1.19)),
    *((2, "bicubic", scale) for scale in (1.1, (1.05, 1.2))),
    *((3, "nearest", scale) for scale in (1.2, (1.1, 2.0, 1.5), (0.7, 1.05, 1.1))),
]


@pytest.mark.parametrize(("axes", "mode", "scale"), COPIED_BACKWARDS)
def test_interpolation_that_keeps_a_size_has_its_true_adjoint(
    axes: int, mode: str, scale: float | tuple[float, ...]
) -> None:
    module, shape = nn.Upsample(scale_factor=scale, mode=mode), (2, *(5, 4, 4)[:axes])
    matrix = written_out(module, shape)
    out = tuple(module(torch.zeros(1, *shape)).shape[1:])
    g = torch.randn(3, *out, dtype=torch.float64)
    found = adjoint([Operator(module, shape, out)], g).flatten(1)
    torch.testing.assert_close(found, g.flatten(1) @ matrix, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("axes", "mode", "scale"), COPIED_BACKWARDS)
def test_interpolation_that_keeps_a_size_folds(
    axes: int, mode: str, scale: float | tuple[float, ...]
) -> None:
    shape = (2, *(5, 4, 4)[:axes])
    conv = (cl.Conv1d, cl.Conv2d, cl.Conv3d)[axes - 1]
    model = cl.ConformalLayers(
        nn.Upsample(scale_factor=scale, mode=mode),
        cl.ReSPro(0.5),
        conv(2, 2, 2, bias=True),
        cl.ReSPro(projective=True),
        nn.Upsample(scale_factor=scale, mode=mode),
        cl.ReSPro(),
    )
    for dtype in (torch.float64, torch.float32):
        cl.testing.assert_folds(model.to(dtype), shape, strategy="dense")


class _Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g / 2


class _WrongGradient(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Halved.apply(x)


def test_a_wrong_gradient_of_a_registered_module_does_not_reach_the_fold() -> None:
    cl.register_linear(_WrongGradient, lambda module, shape: 1.0)
    model = cl.ConformalLayers(cl.Linear(5, 4), _WrongGradient(), cl.ReSPro(), cl.Linear(4, 2))
    cl.testing.assert_folds(model, (5,), strategy="dense")
