"""The checks for users: what they accept, and what they name when they refuse."""

from __future__ import annotations

import pytest
from torch import Tensor, nn

import conformallayers as cl
from conformallayers.nn.registry import SPECS


class Sorted(nn.Module):
    """A homogeneous map of a user's own: sort the coefficients of the first axis."""

    def forward(self, input: Tensor) -> Tensor:
        return input.sort(dim=1).values


class Spread(nn.Module):
    """Add the largest absolute value of a row to each entry."""

    def forward(self, input: Tensor) -> Tensor:
        return input + input.abs().amax(-1, keepdim=True)


class Mixed(nn.Module):
    """Take the maximum over the batch."""

    def forward(self, input: Tensor) -> Tensor:
        return input.amax(0, keepdim=True).expand_as(input)


class Unit(nn.Module):
    """Drop the scale: h(λx) = h(x)."""

    def forward(self, input: Tensor) -> Tensor:
        return nn.functional.normalize(input, dim=-1)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (nn.Tanh(), "h(λx) = λ·h(x) does not hold for λ = 0.001"),
        (nn.ReLU6(), "h(λx) = λ·h(x) does not hold"),
        (nn.Linear(4, 4), "h(λx) = λ·h(x) does not hold for λ = 0"),
        (Unit(), "h(λx) = λ·h(x) does not hold"),
        (Mixed(), "samples are not independent"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_is_no_homogeneous_map_is_named(module: nn.Module, message: str) -> None:
    with pytest.raises(AssertionError) as caught:
        cl.testing.assert_homogeneous(module, (3, 4))
    assert message in str(caught.value)
    assert type(module).__name__ in str(caught.value)


def test_maps_that_are_not_registered_yet_are_accepted() -> None:
    for module in (Sorted(), Spread(), nn.Identity(), nn.Linear(4, 2, bias=False)):
        cl.testing.assert_homogeneous(module, (3, 4))


@pytest.mark.parametrize(("bound", "holds"), [(1 + 3**0.5, True), (2.732, False), (1.0, False)])
def test_a_bound_that_is_too_small_is_found(bound: float, holds: bool) -> None:
    """On four entries Spread is I + 1·e₁ᵀ where the first is the largest, with the norm 1 + √3."""
    module, shape = Spread(), (1, 4)
    cl.register_homogeneous(Spread, bound=lambda module, shape: bound)
    try:
        if holds:
            cl.testing.assert_homogeneous(module, shape)
        else:
            with pytest.raises(AssertionError, match=r"‖h\(x\)‖ = .*its bound is"):
                cl.testing.assert_homogeneous(module, shape)
    finally:
        del SPECS[Spread]
