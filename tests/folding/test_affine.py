"""Biases anywhere: one more constant part each, exact in every strategy, and off where x = 0."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import conformallayers as cl
from conformallayers.folding.affine import chain_recurrence
from oracle import exact, oracle, randomise, relative_error
from support import DTYPES, TOLERANCES, both_forms, chain_of, folds, samples

SHAPE = (2, 8, 7)


def stack(places: str, projective: bool, act: type = cl.ReSPro) -> cl.ConformalLayers:
    """Build four convolutions, biased where a letter of ``places`` is b, with activations between."""
    options = {"projective": projective} if act is cl.ReSPro else {}
    modules: list[nn.Module] = []
    for index, place in enumerate(places):
        modules.append(cl.Conv2d(2, 2, 3, padding=1, bias=place == "b"))
        if index + 1 < len(places):
            modules.append(act(**options))
    return randomise(cl.ConformalLayers(*modules), 3)


@both_forms
@pytest.mark.parametrize("places", ["b...", "...b", "b..b", ".b..", "..b.", ".bb.", "bbbb"])
@pytest.mark.sampled(2)
def test_a_bias_anywhere(places: str, projective: bool) -> None:
    for dtype in DTYPES:
        model = stack(places, projective).to(dtype).eval()
        x = samples(SHAPE, dtype)
        x[2] = 0
        expected = oracle(exact(model), x.double())
        with torch.no_grad(), cl.layer_by_layer():
            assert relative_error(model(x), expected) <= TOLERANCES[dtype]
        found = folds(model, SHAPE)
        assert {"dense", "banded", "sparse", "layers"} <= set(found)
        for name, folded in found.items():
            assert relative_error(folded(x), expected) <= TOLERANCES[dtype], name
            assert not folded(x)[2].any()


@pytest.mark.parametrize(
    ("places", "forms", "dots"),
    [
        ("....", 1, 0),
        ("b...", 1, 1),
        ("...b", 1, 0),
        ("b..b", 1, 1),
        (".b..", 2, 1),
        ("bbb.", 3, 6),
    ],
)
def test_what_a_bias_costs(places: str, forms: int, dots: int) -> None:
    model = stack(places, projective=False)
    chain = chain_of(model, SHAPE)
    assert len(chain.groups) == forms
    assert chain_recurrence(chain, torch.device("cpu")).dots == dots
    text = str(cl.fold(model, SHAPE).explain())
    assert ("more dot products" in text) == ("b" in places)
    if "b" in places:
        assert f"{dots} more dot products" in text


def test_published_coordinates_that_explode_send_points_to_zero_not_to_nan() -> None:
    # t ← (α/2)·t + t²‖p‖²/(2α): with a bias ‖p‖ stays, and t is squared at every layer.
    torch.manual_seed(0)
    layers = (m for _ in range(14) for m in (cl.Linear(6, 6, bias=True), cl.ReSPro(0.1)))
    model = cl.ConformalLayers(*layers, cl.Linear(6, 2, bias=True)).double().eval()
    x = 50 * samples((6,), torch.float64)
    for path in (model, cl.fold(model, (6,), strategy="dense")):
        y = path(x)
        assert torch.isfinite(y).all()
        assert torch.allclose(y, model[-1].bias.expand_as(y), atol=1e-12)
    x = x.requires_grad_()
    model(x).sum().backward()
    assert torch.isfinite(x.grad).all()


@pytest.mark.parametrize("strategy", ["auto", "dense"])
def test_a_tolerance_with_biases_leaves_nothing_out(strategy: str) -> None:
    model = stack("bbb.", projective=False)
    folded = cl.fold(model, SHAPE, strategy=strategy, tolerance=1e-2, max_norm=50.0)
    assert folded.certificate is None  # nothing is proven of a sum of parts
    assert cl.fold_error(model, folded, samples(SHAPE, torch.float32)) <= TOLERANCES[torch.float32]


@both_forms
def test_biases_behind_layers_that_fold_away(projective: bool) -> None:
    inner = stack("bb.b", projective)
    model = nn.Sequential(nn.ZeroPad2d(1), cl.RepeatChannels(2), inner).double().eval()
    x = samples((1, 6, 5), torch.float64)
    with torch.no_grad():
        expected = oracle(exact(inner), model[:2](x))
    for name, folded in folds(model, (1, 6, 5)).items():
        assert relative_error(folded(x), expected) <= 1e-12, name


def test_the_state_of_a_fold_holds_its_biases() -> None:
    x = samples(SHAPE, torch.float32)
    one, two = (cl.fold(stack("bbb.", False), SHAPE, strategy="dense") for _ in range(2))
    other = cl.fold(randomise(stack("bbb.", False), 9), SHAPE, strategy="dense")
    other.load_state_dict(one.state_dict())
    assert torch.equal(other(x), two(x))


@pytest.mark.filterwarnings("ignore:batch normalisation at position")  # variances below eps
def test_a_normalised_mean_does_not_cost_digits() -> None:
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(4, momentum=None)
    layers = cl.Conv2d(1, 4, 3), norm, cl.Gnomonic(1.0), cl.Flatten(), cl.Linear(144, 10)
    model = cl.ConformalLayers(*layers)
    x = 100 + torch.rand(64, 1, 8, 8)
    model(x)
    model.eval()
    expected = oracle(exact(model), x.double())
    with torch.no_grad(), cl.layer_by_layer():
        by_layers = relative_error(model(x), expected)
    for name, folded in folds(model, (1, 8, 8)).items():
        assert relative_error(folded(x), expected) <= max(by_layers, 5e-6), name
    with torch.no_grad():
        assert relative_error(model(x), expected) <= max(by_layers, 5e-6)


def test_a_residual_that_cancels_does_not_cost_digits() -> None:
    torch.manual_seed(0)
    minus = cl.Linear(6, 6)
    with torch.no_grad():
        minus.weight.copy_(-torch.eye(6) + 1e-3 * torch.randn(6, 6))
    model = cl.ConformalLayers(
        cl.Residual(minus, cl.Gnomonic(1e4), cl.Scale(1e4)), cl.Gnomonic(1e-3), cl.Linear(6, 3)
    )
    x = samples((6,), torch.float32)
    folded = cl.fold(model, (6,), strategy="dense")
    assert cl.fold_error(model, folded, x) <= 5e-6


def test_tiny_radii_stay_in_range() -> None:
    torch.manual_seed(0)
    layers = (m for _ in range(8) for m in (cl.Linear(8, 8, bias=True), cl.Gnomonic(1e-7)))
    model = cl.ConformalLayers(*layers, cl.Linear(8, 3)).eval()
    x = samples((8,), torch.float32)
    expected = oracle(exact(model), x.double())
    for name, folded in folds(model, (8,)).items():
        assert relative_error(folded(x), expected) <= 5e-6, name


def test_gradients_of_folds_whose_coordinate_explodes() -> None:
    torch.manual_seed(0)
    layers = (m for _ in range(10) for m in (cl.Linear(6, 6, bias=True), cl.ReSPro(0.1)))
    model = cl.ConformalLayers(*layers, cl.Linear(6, 2, bias=True)).double().eval()
    x = (50 * samples((6,), torch.float64)).requires_grad_()
    (gradient,) = torch.autograd.grad(cl.fold(model, (6,), strategy="dense")(x).sum(), x)
    assert torch.isfinite(gradient).all()


@both_forms
@pytest.mark.parametrize("offset", [None, 0.5])
@pytest.mark.parametrize("biased", [False, True])
def test_branches_and_biases_in_root_mean_squares(
    projective: bool, biased: bool, offset: float | None
) -> None:
    branch = nn.Sequential(cl.Linear(4, 4, bias=biased), cl.ReSPro(0.7, projective=projective))
    model = cl.ConformalLayers(
        cl.Parallel(branch, nn.Identity(), join="concatenate"),
        cl.ReSPro(0.5, projective=projective),
        cl.Linear(8, 3, bias=biased),
        offset=offset,
        unit="rms",
    )
    model = randomise(model, 1).double().eval()
    x = samples((4,), torch.float64)
    expected = oracle(exact(model), x)
    for name, folded in folds(model, (4,)).items():
        assert relative_error(folded(x), expected) <= TOLERANCES[torch.float64], name
