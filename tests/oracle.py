"""Comparisons of the tests with the oracle, and models whose parameters are random."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from conformallayers.testing.oracle import bound_of, leaves, matrix_of, oracle

__all__ = [
    "bound_of",
    "exact",
    "exact_output",
    "gradient_error",
    "leaves",
    "matrix_of",
    "oracle",
    "randomise",
    "relative_error",
]


def exact(model: nn.Module) -> nn.Module:
    """Return a float64 copy in the same mode."""
    return copy.deepcopy(model).double()


def exact_output(model: nn.Module, x: Tensor) -> Tensor:
    """Return what a model gives in evaluation mode, in float64."""
    return oracle(exact(model).eval(), x.double()).detach()


def randomise(model: nn.Module, seed: int = 0) -> nn.Module:
    """Give every parameter a random value, so that no special one hides an error."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(noise * 0.7 + 0.1)
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                noise = torch.rand(2, module.num_features, generator=generator)
                module.running_mean.copy_(noise[0] / 10)
                module.running_var.copy_(noise[1] + 0.5)
    return model


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Return the largest error of a sample relative to its norm; NaN must meet NaN."""
    assert actual.shape == expected.shape
    if not expected.numel():
        return 0.0
    actual, expected = actual.detach().double(), expected.detach().double()
    assert torch.equal(actual.isnan(), expected.isnan())
    difference = (actual - expected).nan_to_num().flatten(1).norm(dim=1)
    size = expected.nan_to_num().flatten(1).norm(dim=1)
    return float(torch.where(difference == 0, 0.0, difference / size).max())


def gradient_error(actual: list[Tensor], expected: list[Tensor]) -> float:
    """Return the largest relative error of a gradient.

    A gradient that should vanish is measured against a tenth of the largest one.
    """
    assert all(torch.isfinite(g).all() for g in actual)
    floor = 0.1 * max(float(g.norm()) for g in expected)
    return max(
        float((a.double() - e).norm()) / max(float(e.norm()), floor)
        for a, e in zip(actual, expected, strict=True)
    )
