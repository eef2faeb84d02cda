"""The oracle against explicit matrices and numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import conformallayers as cl
from oracle import Run, oracle, run_conformal


def matrix(module: nn.Module, shape: tuple[int, ...]) -> Tensor:
    size = math.prod(shape)
    with torch.no_grad():
        return module.double()(torch.eye(size, dtype=torch.float64).view(size, *shape)).flatten(1).T


def test_two_published_layers_are_the_formula_of_the_paper() -> None:
    torch.manual_seed(0)
    first, second = cl.Conv1d(2, 3, 3, padding=1), cl.Conv1d(3, 2, 2, stride=2)
    model = cl.ConformalLayers(first, cl.ReSPro(0.7), second, cl.ReSPro(1.9)).double()
    a, b = matrix(first, (2, 6)), matrix(second, (3, 6))
    x = torch.randn(4, 2, 6, dtype=torch.float64)
    for sample, y in zip(x.flatten(1), oracle(model, x), strict=True):
        t = sample.norm()
        z = a @ sample
        t = 0.35 * t + z.square().sum() / 1.4
        z = b @ z
        t = 0.95 * t + z.square().sum() / 3.8
        assert (y.flatten() - z / t).norm() < 1e-14 * (z / t).norm()


def test_biases_branches_and_other_rules_by_hand() -> None:
    first = cl.Linear(1, 1, bias=True)
    block = cl.Residual(cl.Linear(1, 1), cl.Gnomonic(2.0))
    model = cl.ConformalLayers(first, cl.ReSPro(1.0, projective=True), block, cl.Gnomonic(0.5))
    for parameter, value in zip(model.parameters(), (3.0, 0.5, 4.0), strict=True):
        nn.init.constant_(parameter, value)
    p = 3.0 + 0.5  # the point of x = 2 is 1
    p = 2 * p / (1 + p * p)
    p = p + 4 * p / math.hypot(2.0, 4 * p)
    expected = p / math.hypot(0.5, p)
    found = oracle(model.double(), torch.tensor([[2.0]], dtype=torch.float64))
    assert found.item() == pytest.approx(expected, rel=1e-14)


def test_noise_shows_cancellation() -> None:
    model = cl.ConformalLayers(cl.Linear(2, 1), cl.ReSPro(1.0)).double()
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[1.0, -1.0]]))
    x = torch.tensor([[1.0, 1.0 - 1e-6], [1.0, -1.0]], dtype=torch.float64)

    def shake(z: Tensor) -> Tensor:
        return z * (1 + 1e-7 * torch.rand(z.shape, generator=generator, dtype=z.dtype))

    generator = torch.Generator().manual_seed(1)
    exact = oracle(model, x)
    shaken = run_conformal(model, shake(x), Run(shake=shake))
    error = ((shaken - exact) / exact).abs().flatten()
    assert error[0] > 1e-3 > 1e-6 > error[1]
