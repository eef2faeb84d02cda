"""Norms of operators, quadratic forms, and the fold written out: M and Q of cl.inspect."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import conformallayers as cl
from conformallayers.folding.forms import forms_of, stacked_layers
from oracle import randomise, relative_error
from support import both_forms, folds, samples, stage_of

pytestmark = pytest.mark.usefixtures("seeded")


@pytest.mark.parametrize("activation", [cl.ReSPro, cl.Gnomonic])
def test_terms_left_out_are_negligible(activation: type[cl.RadialActivation]) -> None:
    epsilon = 1e-3
    layers = [
        module
        for channels in (1, *[8] * 11)
        for module in (cl.Conv2d(channels, 8, 3, padding=1), activation())
    ]
    stage = stage_of(cl.ConformalLayers(*layers), (1, 12, 12))
    unit = float(activation is cl.Gnomonic)
    assert stage.unit == unit
    (exact,), (short,) = forms_of(stage), forms_of(stage, epsilon)
    assert not torch.equal(exact, short)
    room = epsilon * (exact + unit * torch.eye(len(exact)))
    for sign in (1, -1):
        assert float(torch.linalg.eigvalsh(room + sign * (exact - short)).min()) >= 0


@pytest.mark.parametrize("height", [1, 2, 3, 6, 10, 13])
@both_forms
def test_forms_are_the_products_of_the_responses(height: int, projective: bool) -> None:
    model = cl.ConformalLayers(
        cl.Conv2d(2, 4, 3, padding=1),
        cl.ReSPro(projective=projective),
        cl.Conv2d(4, 4, (5, 3), padding=(2, 1), groups=2),
        cl.Scale(1.5),
        cl.ReSPro(projective=projective),
        cl.Conv2d(4, 3, 3, padding=2, dilation=2),
        cl.ReSPro(projective=projective),
    ).double()
    stage = stage_of(model, (2, height, 5))
    for group, form in enumerate(forms_of(stage)):
        responses = stacked_layers(stage, group)
        expected = responses.T @ responses
        assert torch.allclose(form, expected, rtol=1e-12, atol=1e-14 * float(expected.max()))


SHAPE = (2, 6, 6)


def network(
    projective: bool = False, *, last: nn.Module | None = None, **embedding: object
) -> cl.ConformalLayers:
    model = cl.ConformalLayers(
        *(cl.Conv2d(2, 3, 3), cl.ReSPro(1.5, projective=projective), cl.Conv2d(3, 4, 2)),
        *(last or cl.ReSPro(0.8, projective=projective), cl.Conv2d(4, 2, 1)),
        **embedding,
    )
    return randomise(model).double()  # type: ignore[return-value]


def written_out(model: nn.Module, x: Tensor, rules: list[str], offset: float = 0.0) -> Tensor:
    """Compute M x / D from the arrays, by the recurrence that the docstring of ``inspection.Form`` has."""
    (part,) = cl.inspect(model, tuple(x.shape[1:])).parts
    x = x.flatten(1)
    d = torch.sqrt(x.square().sum(1) + offset**2)
    for form, rule in zip(part.forms, rules, strict=True):
        n = (x @ form.matrix * x).sum(1)
        if rule == "published":
            d = d + n
        elif rule == "projective":
            d = d + n / d
        else:
            d = torch.sqrt(d**2 + n)
    y = x @ part.templates.flatten(1).T / d[:, None]
    return (y if part.bias is None else y + part.bias).view(-1, *part.output_shape)


@both_forms
@pytest.mark.parametrize("offset", [None, 0.7])
def test_arrays_reproduce_the_fold_by_every_strategy(
    projective: bool, offset: float | None
) -> None:
    unit = "rms" if offset else "norm"
    features = network(projective, offset=offset, unit=unit)
    model = nn.Sequential(nn.ZeroPad2d(1), features, nn.Flatten(), nn.Linear(50, 4).double())
    rules = ["projective"] * 2 if projective else ["published"]
    x, shape = samples((2, 6, 6), torch.float64), (2, 6, 6)
    # ZeroPad2d(1) makes 8 × 8 pixels of 6 × 6
    own = (offset or 0.0) * math.sqrt(2 * 8 * 8)
    for folded in folds(model, shape).values():
        assert relative_error(written_out(model, x, rules, own), folded(x)) < 1e-12


def test_different_rules_have_forms_of_their_own() -> None:
    model = network(last=cl.Gnomonic(0.8))
    x = samples(SHAPE, torch.float64)
    found = written_out(model, x, ["published", "gnomonic"])
    assert relative_error(found, cl.fold(model, SHAPE, strategy="layers")(x)) < 1e-12
