"""Traces with torch.fx: sizes as numbers, and random numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import conformallayers as cl
from blocks import Written

pytestmark = pytest.mark.usefixtures("seeded")


SHAPE = (3, 8, 8)


def model_of(function: Callable[[Tensor], Tensor]) -> Written:
    return Written(lambda m, x: function(m.conv(x)), conv=nn.Conv2d(3, 4, 3, padding=1))


def small(y: Tensor) -> Tensor:
    return F.pad(y, (4, 4, 4, 4)) if y.shape[-2] < 12 else y


def heads(y: Tensor) -> Tensor:
    assert y.ndim == y.dim() == 4
    if y.relu().shape == y.shape and y.size(1) == 4:
        b, c, h, w = y.shape
        return y.reshape(b, c, h * w).transpose(1, 2).reshape([b, h, w * c])
    return y


def channels(y: Tensor) -> Tensor:
    assert y.ndim == 4
    assert y.permute(0, 2, 3, 1).shape[-1] == 4
    return y.relu()


def halves(y: Tensor) -> Tensor:
    b, c, h, w = y.shape
    assert c == 4
    first, second = y.reshape(b, c, h * w).chunk(2, dim=1)
    return torch.cat([second, first], 1)


def placed(y: Tensor) -> Tensor:
    return y.relu() if y.ndim == 4 and y.device.type == "cpu" else y


FUNCTIONS = [(small, True), (heads, True), (channels, False), (halves, True), (placed, False)]


@pytest.mark.parametrize(("function", "fixed"), FUNCTIONS)
def test_sizes_in_control_flow_are_numbers(function: Any, fixed: bool) -> None:
    model, x = model_of(function).eval(), torch.randn(5, *SHAPE)
    folded = cl.fold(model, SHAPE)
    torch.testing.assert_close(folded(x), model(x))
    assert "call" not in {operation.kind for operation in folded.recipe.operations}
    large = torch.randn(2, 3, 16, 16)
    assert ("(3, 8, 8) only" in folded.explain().sizes) is fixed
    if not fixed:
        torch.testing.assert_close(folded(large), model(large))
        return
    with pytest.raises(cl.ConformalError, match="forward reads the size, or a constant map has it"):
        folded(large)


READS = [
    (lambda y: F.avg_pool2d(y, y.shape[-1]), True),
    (lambda y: F.interpolate(y, size=y.shape[-1] * 2), True),
    (lambda y: F.interpolate(F.max_pool2d(y, 2), size=y.shape[-2:]), True),
    (lambda y: y.view(y.size(0), 4, y.size(3), y.size(2)), True),
    (lambda y: y * (1.0 / y.size(2)), True),
    (lambda y: F.interpolate(y, size=y.shape[-2:], mode="bilinear"), False),  # a call
    (lambda y: y[:, : y.size(1) // 2] + y.mean((2, 3), keepdim=True)[:, 2:], False),
]


@pytest.mark.parametrize(("function", "fixed"), READS)
def test_a_fold_that_holds_a_size_refuses_others(function: Any, fixed: bool) -> None:
    model = model_of(function).eval()
    folded = cl.fold(model, SHAPE)
    for sides in ((8, 8), (12, 10), (11, 11), (16, 16)):
        x = torch.randn(2, 3, *sides)
        if fixed and sides != (8, 8):
            with pytest.raises(cl.ConformalError, match="forward reads the size"):
                folded(x)
        else:
            torch.testing.assert_close(folded(x), model(x))


class Token(nn.Module):
    """Put a learned vector before those of the pixels, as vision transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(2).transpose(1, 2)
        return torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) * self.token


def test_methods_of_parameters_are_traced() -> None:
    model, x = nn.Sequential(nn.Conv2d(3, 4, 3), Token()).eval(), torch.randn(5, *SHAPE)
    torch.testing.assert_close(cl.fold(model, SHAPE)(x), model(x))


RANDOM: list[Callable[[Tensor], Tensor]] = [
    lambda y: y + torch.randn(4, 1, 1),  # drawn by the trace
    lambda y: y + torch.randn_like(y),
    lambda y: F.dropout(y, 0.5),
    lambda y: y * torch.bernoulli(y.sigmoid()),
]


@pytest.mark.parametrize("function", RANDOM)
def test_random_numbers_in_evaluation_are_refused(function: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(cl.ConformalError, match="got random numbers drawn in forward"):
        cl.fold(model_of(function), SHAPE)


def test_functions_that_are_random_in_training_alone_fold() -> None:
    layers = nn.RReLU(), nn.Flatten(2), nn.TransformerEncoderLayer(64, 4), nn.Dropout()
    model, x = nn.Sequential(*layers).eval(), torch.randn(2, *SHAPE)
    torch.testing.assert_close(cl.fold(model, SHAPE)(x), model(x))
