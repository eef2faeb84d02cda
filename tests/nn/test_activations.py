"""Radial activations: their table, what they collapse to, proofs, and a base for more."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

import conformallayers as cl
from cases import ALPHAS
from conformallayers.recipe.point_operations import Divide, SumSquares
from models import Quartic
from oracle import exact, oracle, randomise, relative_error
from support import DTYPES, TOLERANCES, folds, operations, samples, stage_of

SHAPE = (2, 8, 7)


KINDS = {"Gnomonic": cl.Gnomonic, "own": Quartic}


def stack(act: type, alpha: str | float | None = None, depth: int = 3) -> cl.ConformalLayers:
    layers = []
    for _ in range(depth):
        layers += [cl.Conv2d(2, 2, 3, padding=1), act(alpha)]
    return randomise(cl.ConformalLayers(*layers), 2)


@pytest.mark.parametrize("alpha", ALPHAS, ids=str)
@pytest.mark.parametrize("act", KINDS.values(), ids=KINDS)
def test_all_paths(act: type, alpha: str | float | None) -> None:
    for dtype in DTYPES:
        model = stack(act, alpha).to(dtype)
        x = samples(SHAPE, dtype)
        x[0] = 0
        for _ in range(3):
            model(x)
        model.eval()
        expected = oracle(exact(model), x.double())
        with torch.no_grad(), cl.layer_by_layer():
            assert relative_error(model(x), expected) <= TOLERANCES[dtype]
        for name, folded in folds(model, SHAPE).items():
            assert relative_error(folded(x), expected) <= TOLERANCES[dtype], name


@pytest.mark.parametrize("act", [cl.Gnomonic, partial(cl.ReSPro, projective=True)])
def test_scale_invariant_and_bounded(act: Callable[..., cl.RadialActivation]) -> None:
    model = stack(act, "spectral").double()
    x = samples(SHAPE, torch.float64)
    for _ in range(50):
        y = model(x).detach()
    assert relative_error(model.eval()(1e6 * x), model(x)) <= 1e-12
    assert float(y.flatten(1).norm(dim=1).max()) <= 1
    assert act().bounded
    alone = act(alpha=2.0)(100 * x)
    assert float(alone.flatten(1).norm(dim=1).max()) <= 1 + 1e-12


def test_gnomonic_collapses_to_one_form_at_any_depth() -> None:
    assert len(stage_of(stack(cl.Gnomonic, depth=5), SHAPE).groups) == 1
    assert len(stage_of(stack(Quartic, depth=5), SHAPE).groups) == 5
    # y = M x / √(xᵀ(I + Q)x), from the arrays of the fold itself.
    model = stack(cl.Gnomonic, depth=4).double()
    folded = cl.fold(model, SHAPE, strategy="dense")
    x = samples(SHAPE, torch.float64)
    (form,), (division,) = (operations(folded, kind) for kind in (SumSquares, Divide))
    factor, matrix, flat = folded.constants.factor, folded.constants.matrix, x.flatten(1)
    q = form.weight * (flat @ factor.T).square().sum(1)
    denominator = (flat.square().sum(1) + q).sqrt()
    y = (flat @ matrix.T) * division.scale / denominator[:, None]
    assert relative_error(y.view(4, 2, 8, 7), folded(x)) <= 1e-12


def test_the_base_alone_says_what_is_missing() -> None:
    with pytest.raises(NotImplementedError, match="growth"):
        cl.RadialActivation(1.0)(torch.ones(1, 3))


@pytest.mark.parametrize("act", [cl.Gnomonic, Quartic])
def test_bad_alpha_names_the_activation(act: type) -> None:
    with pytest.raises(cl.ConformalError, match=act.__name__):
        act(-1.0)
    with pytest.raises(cl.ConformalError, match=f"{act.__name__} called on its own"):
        act()(torch.ones(1, 2))


class _Bad(cl.RadialActivation):
    def __init__(self, growth: Callable[[Tensor], object], slope: object = 1.0) -> None:
        super().__init__(1.0)
        self.try_growth, self.slope = growth, slope

    def growth(self, q: Tensor) -> Tensor:
        return self.try_growth(q)


@pytest.mark.parametrize(
    ("growth", "slope", "message"),
    [
        (lambda q: 2 + q, 1.0, r"growth \[2.0, "),
        (lambda q: 1 - 2 * q, 1.0, r"growth \[1.0, "),
        (lambda q: 1 + q - q.mean(), 1.0, "no attribute 'mean'"),
        (lambda q: torch.where(q > 1, q, 1), 1.0, "TypeError in growth: '>' not supported"),
        (lambda q: 1 + torch.sin(q), 1.0, "TypeError in growth: sin is not one of "),
        (lambda q: None, 1.0, "a growth that gives None"),
        (lambda q: (1 + q)[:, None], 1.0, "TypeError in growth"),
        (lambda q: q * torch.ones(2), 1.0, "single numbers, not tensor"),
        (lambda q: q.sqrt() / q.sqrt(), 1.0, "growth .nan, "),
        (lambda q: 1 + q, -1.0, "slope=-1.0"),
        (lambda q: 1 + q, "2", "slope='2'"),
    ],
)
def test_an_activation_that_breaks_its_contract_is_refused(
    growth: Callable[[Tensor], object], slope: object, message: str
) -> None:
    with pytest.raises(cl.ConformalError, match=f"position 1: .* got _Bad with .*({message})"):
        cl.ConformalLayers(cl.Linear(3, 3), _Bad(growth, slope))
