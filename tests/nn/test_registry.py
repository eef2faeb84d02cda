"""The registry: look-up and registration."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import conformallayers as cl
from conformallayers.nn.registry import _SPECS, branches, find_spec, is_homogeneous
from oracle import relative_error
from support import assert_says, samples


def test_a_second_registration_reaches_the_namesake() -> None:
    before = _SPECS[nn.Linear]
    try:
        cl.register_linear(nn.Linear, bound=lambda module, shape: 7.0)
        spec = find_spec(cl.Linear(2, 2))
        assert spec is not None
        assert spec.bound(cl.Linear(2, 2), (2,)) == 7.0
    finally:
        _SPECS[nn.Linear] = before


def test_a_registered_class_may_stand_in_a_stack() -> None:
    class Negated(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return -super().forward(input)

    layer = Negated(3, 2, bias=False)
    assert_says(lambda: cl.ConformalLayers(layer), "Negated", "overrides forward")
    cl.register_linear(Negated, bound=lambda module, shape: 2.0)
    model = cl.ConformalLayers(layer, cl.ReSPro())
    assert cl.trace(model, (3,)).steps[1].alpha == 2.0
    cl.testing.assert_folds(model, (3,))


class Sorted(nn.Module):
    """A homogeneous map that nobody has registered."""

    def forward(self, input: Tensor) -> Tensor:
        return input.sort(dim=1).values


def test_a_registered_map_may_stand_in_a_stack() -> None:
    assert_says(lambda: cl.ConformalLayers(Sorted()), "Sorted", "cl.register_homogeneous")
    cl.register_homogeneous(Sorted, bound=lambda module, shape: 4.0)
    try:
        model = cl.ConformalLayers(cl.Scale(0.5), Sorted(), cl.ReSPro())
        assert cl.trace(model, (3,)).alphas == (2.0,)
        x = samples((3,), torch.float64)
        assert relative_error(model.double()(x), ordered(x)) <= 1e-13
        assert is_homogeneous(Sorted())
    finally:
        del _SPECS[Sorted]
    assert not is_homogeneous(Sorted())


def ordered(x: Tensor) -> Tensor:
    """Return what Scale(0.5), Sorted and a published ReSPro of radius 2 give."""
    y = 0.5 * x.sort(dim=1).values
    return y / (x.norm(dim=1) + y.square().sum(1) / 4).unsqueeze(1)


def test_subclasses_of_maps_are_maps_unless_they_override_forward() -> None:
    class Named(nn.ReLU):
        pass

    class Other(nn.ReLU):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) + 1

    cl.ConformalLayers(Named())
    assert_says(lambda: cl.ConformalLayers(Other()), "Other", "overrides forward")


def test_composites_with_maps_are_no_linear_layers() -> None:
    assert not branches(cl.Residual(cl.Linear(2, 2)))
    assert not branches(cl.Split([1, 1], [cl.Scale(), cl.Identity()]))
    assert branches(cl.Residual(cl.Linear(2, 2), nn.ReLU()))
    assert branches(cl.Parallel(nn.Sequential(cl.Residual(cl.Abs())), cl.Identity()))
    assert branches(cl.Residual(cl.Linear(2, 2), cl.ReSPro()))


def test_circular_padding_that_crops_is_refused() -> None:
    with pytest.raises(cl.ConformalError, match="circular padding without cropping"):
        cl.ConformalLayers(nn.CircularPad1d((-1, 2)))


@pytest.mark.parametrize("register", [cl.register_linear, cl.register_homogeneous])
def test_registration_wants_a_class(register: Callable[..., object]) -> None:
    where = f"{register.__name__}(module_type)"
    assert_says(lambda: register(nn.ReLU(), lambda *_: 1.0), where, "a subclass of nn.Module")
