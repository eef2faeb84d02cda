"""The registry: look-up and registration."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import conformallayers as cl
from cases import HOMOGENEOUS_CASES, Case
from conformallayers.nn.branches import branches
from conformallayers.nn.registry import SPECS, find_spec, is_homogeneous
from oracle import bound_of, exact, oracle, randomise, relative_error
from support import DTYPES, TOLERANCES, assert_says, check_training, samples


def test_a_second_registration_reaches_the_namesake() -> None:
    before = SPECS[nn.Linear]
    try:
        cl.register_linear(nn.Linear, bound=lambda module, shape: 7.0)
        spec = find_spec(cl.Linear(2, 2))
        assert spec is not None
        assert spec.bound(cl.Linear(2, 2), (2,)) == 7.0
    finally:
        SPECS[nn.Linear] = before


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
        del SPECS[Sorted]
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


GRADIENTS = {torch.float64: 1e-10, torch.float32: 2e-4}
MAPS = [case for case in HOMOGENEOUS_CASES if "Split" not in case.name]


def check(model: cl.ConformalLayers, x: Tensor) -> None:
    """Compare a training step and evaluation with the oracle, gradients of the step included."""
    check_training(model, x, GRADIENTS[x.dtype])
    model.eval()
    with torch.no_grad():
        expected = oracle(exact(model), x.detach().double())
        assert relative_error(model(x), expected) <= TOLERANCES[x.dtype]
        with cl.layer_by_layer():
            assert relative_error(model(x), expected) <= TOLERANCES[x.dtype]


def stack(case: Case, turn: int) -> cl.ConformalLayers:
    """Build [layer, ReSPro, map, linear, ReSPro]: after the map the factor is still pending."""
    module = case.build()
    with torch.no_grad():
        size = module(torch.zeros(2, *case.input_shape))[0].numel()
    first, second = (cl.ReSPro(("learned", None, "spectral")[(turn + i) % 3]) for i in range(2))
    second.projective = turn % 2 == 0
    last = nn.Flatten(), cl.Linear(size, 3, bias=turn % 4 == 0)
    model = randomise(cl.ConformalLayers(cl.Scale(), first, module, *last, second), turn)
    with torch.no_grad():
        gain = model[0].gain  # the gradient of one near 0 is a difference of large terms
        gain.copy_(gain.sign() * gain.abs().clamp_min(0.1))
    return model


@pytest.mark.parametrize("case", HOMOGENEOUS_CASES, ids=lambda case: case.name)
def test_a_map_acts_on_x_and_leaves_t_alone(case: Case) -> None:
    turn = HOMOGENEOUS_CASES.index(case)
    dtype = DTYPES[turn // 2 % 2]
    check(stack(case, turn).to(dtype), samples(case.input_shape, dtype, 3, turn))


@pytest.mark.parametrize("case", MAPS, ids=lambda case: case.name)
def test_bounds_hold_and_are_those_of_the_oracle(case: Case) -> None:
    module = randomise(case.build(), 3).double().requires_grad_(False)
    (step,) = cl.trace(cl.ConformalLayers(module), case.input_shape).steps
    assert step.bound == pytest.approx(float(bound_of(module, case.input_shape)), rel=1e-12)
    cl.testing.assert_homogeneous(module, case.input_shape)


def test_split_checks_its_channels() -> None:
    split = cl.Split([2, 3], [nn.ReLU(), cl.Abs()])
    for size in (4, 6):
        model = cl.ConformalLayers(split)
        assert_says(lambda: model(torch.rand(1, size, 3)), "0.channels.0", "channels=5")  # noqa: B023
        assert_says(lambda: cl.trace(model, (size, 3)), "0.channels.0", "channels=5")  # noqa: B023
    assert_says(lambda: cl.Split([2, 0], [nn.ReLU()]), "Split(sizes=...)", "[2, 0]")
    assert_says(lambda: cl.Split([], []), "Split(sizes=...)", "[]")
    assert_says(lambda: cl.Split([2, True], [nn.ReLU()]), "Split(sizes=...)")
    assert_says(lambda: cl.Split([2, 2], [nn.ReLU()]), "Split(modules=...)", "2 modules")
    assert_says(lambda: cl.Split([2], ["relu"]), "Split", "modules")
    assert "sizes=[2, 3]" in repr(split)


def test_split_counts_the_largest_bound_of_its_groups() -> None:
    split = cl.Split([2, 3], [cl.Scale(3.0), nn.LeakyReLU(2.0)])
    model = cl.ConformalLayers(split, cl.ReSPro())
    assert cl.trace(model, (5, 4)).alphas == (3.0,)
    inside = cl.Split([2, 3], [nn.Sequential(cl.Scale(3.0), cl.ReSPro(1.0)), nn.LeakyReLU(2.0)])
    model = cl.ConformalLayers(inside, cl.ReSPro())
    assert cl.trace(model, (5, 4)).alphas == (1.0, pytest.approx(5**0.5))


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # by torch's forward mode
@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("zeros", [False, True])
def test_second_derivatives(zeros: bool) -> None:
    torch.manual_seed(0)
    model = cl.ConformalLayers(
        cl.Conv2d(1, 4, 3, bias=True),
        cl.ReSPro(),
        cl.Split([1, 3], [cl.AvgPool2d(2), nn.LPPool2d(2, 2)]),
        cl.Conv2d(4, 4, 2),
        cl.ReSPro(projective=True),
        offset="learned",
        unit="rms",
    ).double()
    x = samples((36,), torch.float64, 1)[0] * (0.0 if zeros else 1.0)

    def total(x: Tensor) -> Tensor:
        return model(x.view(1, 1, 6, 6)).sum()

    found = torch.func.hessian(total)(x)
    assert bool(found.isfinite().all())
    assert torch.allclose(found, torch.autograd.functional.hessian(total, x), atol=1e-12)
