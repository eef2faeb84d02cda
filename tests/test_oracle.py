"""The oracle against explicit matrices and numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import conformallayers as cl
from oracle import Run, bound_of, oracle, run_conformal


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


@torch.no_grad()
def test_no_scale_leaves_the_range() -> None:
    layers = [m for _ in range(40) for m in (cl.Linear(1, 1, bias=True), cl.ReSPro(0.01))]
    model = cl.ConformalLayers(*layers, cl.Linear(1, 1, bias=True)).double()
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0.5)
    x = torch.tensor([[1e-300], [1e-3], [1e3], [1e300], [0.0]], dtype=torch.float64)
    y = oracle(model, x)
    assert y.isfinite().all()
    assert float(y[3]) == 0.5  # the coordinate is huge: only the last bias is left
    assert float(y[4]) == 0.0


@torch.no_grad()
def test_samples_are_lost_whose_coordinate_was_cut_before_a_published_activation() -> None:
    pair = cl.Linear(1, 1, bias=True), cl.ReSPro(1.0)
    x = torch.tensor([[1e90], [1.0]], dtype=torch.float64)
    for repeats, lost in ((2, False), (3, True)):
        model = cl.ConformalLayers(*pair * repeats).double()
        for parameter in model.parameters():
            nn.init.constant_(parameter, 0.5)
        run = Run()
        run_conformal(model, x, run)
        assert torch.stack(run.lost).any(0).tolist() == [lost, False]


def test_a_small_sample_does_not_vanish_beside_a_bias() -> None:
    model = cl.ConformalLayers(cl.Linear(1, 1, bias=True), cl.ReSPro(1.0)).double()
    for parameter, value in zip(model.parameters(), (3.0, 0.5), strict=True):
        nn.init.constant_(parameter, value)
    x = torch.tensor([[1e-100], [-1e-100], [0.0]], dtype=torch.float64)
    # The point of 1e-100 is 1: t = 1e-100 and x = 3e-100 + 0.5e-100, whose square is next to nothing.
    assert oracle(model, x).flatten().tolist() == pytest.approx([7.0, -5.0, 0.0], rel=1e-14)


@pytest.mark.parametrize(
    "module",
    [
        cl.Conv1d(2, 4, 3, groups=2, padding=2, padding_mode="reflect"),
        cl.ConvTranspose1d(2, 3, 2, stride=2),
        cl.AvgPool1d(3, 1, 1, count_include_pad=False),
        cl.AdaptiveAvgPool1d(4),
        nn.Upsample(scale_factor=1.5),
        nn.ReplicationPad1d((2, -1)),
        nn.ZeroPad1d((2, -6)),
        cl.RepeatChannels(3),
        cl.Parallel(cl.Conv1d(2, 2, 1), cl.Identity(), join="concatenate"),
    ],
    ids=lambda module: type(module).__name__,
)
@torch.no_grad()
def test_bounds_are_bounds(module: nn.Module) -> None:
    norm = float(torch.linalg.matrix_norm(matrix(module, (2, 6)), 2))
    bound = float(bound_of(module, (2, 6)))
    assert norm <= bound * (1 + 1e-12)
    (step,) = cl.trace(cl.ConformalLayers(module, cl.ReSPro()), (2, 6)).alphas
    assert step == pytest.approx(bound, rel=1e-12)


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
