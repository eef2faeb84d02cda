"""Derivatives, odd inputs and great depth, against the oracle."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck
from torch.func import functional_call

import conformallayers as cl
from oracle import exact, gradient_error, oracle, randomise, relative_error
from support import DTYPES, TOLERANCES, both_forms, folds, samples


def test_a_stack_of_nothing_gives_the_direction() -> None:
    x = samples((2, 3), torch.float64)
    expected = x / x.flatten(1).norm(dim=1).view(-1, 1, 1)
    for model in (cl.ConformalLayers(), cl.ConformalLayers(nn.Identity())):
        assert relative_error(model(x), expected) <= 1e-15
        assert relative_error(model.eval()(x), expected) <= 1e-15
        for folded in folds(model.double(), (2, 3)).values():
            assert relative_error(folded.double()(x.to(folded.dtype)), expected) <= 1e-6


def small(projective: bool, alpha: str | float | None = None) -> cl.ConformalLayers:
    """Return a stack of every kind of step, in float64 and randomised."""
    model = cl.ConformalLayers(
        cl.Conv2d(1, 2, 2, padding=1, padding_mode="replicate"),
        cl.ReSPro(alpha, projective=projective),
        nn.Sequential(cl.AvgPool2d(2), cl.Scale()),
        cl.ReSPro(1.5, projective=not projective),
        nn.Flatten(),
        cl.Linear(8, 3),
        cl.ReSPro(alpha, projective=projective),
    ).double()
    randomise(model, 1)
    return model


@pytest.mark.parametrize("alpha", [None, "learned", 2.0])
@both_forms
@pytest.mark.sampled(2)
def test_first_and_second_derivatives(projective: bool, alpha: str | float | None) -> None:
    model = small(projective, alpha)
    names = [name for name, _ in model.named_parameters()]
    values = [p.detach().clone().requires_grad_() for p in model.parameters()]
    x = samples((1, 3, 3), torch.float64, batch=2).requires_grad_()

    def run(x: Tensor, *parameters: Tensor) -> Tensor:
        return functional_call(model, dict(zip(names, parameters, strict=True)), (x,))

    assert gradcheck(run, (x, *values))
    assert gradgradcheck(run, (x, *values), atol=1e-4)


@both_forms
def test_derivatives_of_folds(projective: bool) -> None:
    model = small(projective)
    x = samples((1, 3, 3), torch.float64, batch=2).requires_grad_()
    for folded in folds(model, (1, 3, 3)).values():
        assert gradcheck(folded, x)
        assert gradgradcheck(folded, x, atol=1e-4)


SCALES = (1e-12, 1e-6, 1.0, 1e6, 1e11)


@pytest.mark.parametrize("dtype", DTYPES)
@both_forms
def test_odd_samples_are_defined_and_keep_to_themselves(
    projective: bool, dtype: torch.dtype
) -> None:
    model = cl.ConformalLayers(
        cl.Conv2d(2, 3, 3, padding="same", padding_mode="circular"),
        cl.ReSPro(projective=projective),
        cl.Conv2d(3, 2, 2),
        cl.ReSPro(projective=projective),
    ).to(dtype)
    randomise(model)
    x = samples((2, 4, 4), dtype, batch=len(SCALES) + 3)
    x[: len(SCALES)] *= torch.tensor(SCALES, dtype=dtype).view(-1, 1, 1, 1)
    x[-3], x[-2, 0, 1, 2], x[-1, 1, 0, 0] = 0, float("nan"), float("inf")
    good = slice(0, len(SCALES) + 1)
    wide = x[good].double().requires_grad_()
    expected = oracle(exact(model), wide)
    (wanted,) = torch.autograd.grad(expected[: len(SCALES)].sum(), wide)
    paths = {"train": model.train(), "eval": copy.deepcopy(model).requires_grad_(False).eval()}
    for name, path in {**paths, **folds(model, (2, 4, 4))}.items():
        leaf = x.clone().requires_grad_()
        y = path(leaf)
        assert relative_error(y[good], expected) <= TOLERANCES[dtype], name
        assert not y[len(SCALES)].any(), f"{name}: a zero sample must give zeros"
        assert y[-2:].isnan().all(), f"{name}: a sample that is not finite must give NaN"
        (gradient,) = torch.autograd.grad(y[good].sum(), leaf)
        assert not gradient[len(SCALES)].any(), f"{name}: nor may it pass a gradient"
        pairs = zip(gradient[: len(SCALES)], wanted, strict=False)
        assert all(gradient_error([a], [e]) <= 1e-4 for a, e in pairs), name


@pytest.mark.parametrize("dtype", DTYPES)
def test_empty_batch(dtype: torch.dtype) -> None:
    model = small(False).to(dtype)
    x = torch.empty(0, 1, 3, 3, dtype=dtype)
    for path in (
        model.train(),
        copy.deepcopy(model).requires_grad_(False).eval(),
        *folds(model, (1, 3, 3)).values(),
    ):
        leaf = x.clone().requires_grad_()
        y = path(leaf)
        assert y.shape == (0, 3)
        assert y.dtype == dtype
        (gradient,) = torch.autograd.grad(y.sum(), leaf)
        assert gradient.shape == x.shape


def deep(projective: bool, dtype: torch.dtype) -> cl.ConformalLayers:
    modules: list[nn.Module] = []
    for _ in range(100):
        modules += [cl.Conv1d(4, 4, 3, padding=1), cl.ReSPro(projective=projective)]
    return randomise(cl.ConformalLayers(*modules)).to(dtype)


@pytest.mark.sampled(3)
@both_forms
def test_a_hundred_layers_agree_in_float64(projective: bool) -> None:
    model = deep(projective, torch.float64)
    x = samples((4, 6), torch.float64).requires_grad_()
    twin = exact(model)
    y, expected = model(x), oracle(twin, x)
    assert relative_error(y, expected) <= 1e-12
    weights = torch.linspace(1, 2, y.numel(), dtype=torch.float64).view(y.shape) / y.detach().norm()
    actual = torch.autograd.grad((y * weights).sum(), [x, *model.parameters()])
    wanted = torch.autograd.grad((expected * weights).sum(), [x, *twin.parameters()])
    for mine, its in zip(actual, wanted, strict=True):
        assert gradient_error([mine], [its]) <= 1e-9
    with torch.no_grad():
        assert relative_error(model.eval()(x), expected) <= 1e-12
        for name, folded in folds(model, (4, 6)).items():
            assert relative_error(folded(x), expected) <= 1e-12, name
