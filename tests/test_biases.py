"""Biases anywhere: one more constant part each, exact in every strategy, and off where x = 0."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import conformallayers as cl
from conformallayers.folding.affine import chain_recurrence
from conformallayers.recipe.layer_operations import Concatenate, Pad
from oracle import exact, oracle, randomise, relative_error
from support import DTYPES, TOLERANCES, both_forms, chain_of, folds, operations, samples

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
def test_a_bias_anywhere(places: str, projective: bool) -> None:
    for dtype in DTYPES:
        model = stack(places, projective).to(dtype).eval()
        x = samples(SHAPE, dtype)
        x[2] = 0
        expected = oracle(exact(model), x.double())
        with torch.no_grad(), cl.layer_by_layer():
            assert relative_error(model(x), expected) <= TOLERANCES[dtype]
        found = folds(model, SHAPE)
        assert {"dense", "banded", "layers"} <= set(found)
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


@pytest.mark.parametrize("act", [cl.ReSPro, cl.Gnomonic, cl.RadialTanh])
def test_batch_normalisation_trains_on_points_and_folds(act: type) -> None:
    torch.manual_seed(0)
    model = cl.ConformalLayers(
        cl.Conv2d(2, 4, 3), nn.BatchNorm2d(4), act(), cl.AvgPool2d(2), nn.BatchNorm2d(4), act()
    ).double()
    x = samples(SHAPE, torch.float64, 16)
    points = nn.functional.conv2d(
        x / x.flatten(1).norm(dim=1)[:, None, None, None], model[0].weight
    )
    model(x)
    assert torch.allclose(model[1].running_mean, 0.1 * points.mean((0, 2, 3)))
    cl.testing.assert_folds(model, SHAPE)
    model.eval()
    expected = oracle(exact(model), x)
    for name, folded in folds(model, SHAPE).items():
        assert relative_error(folded(x), expected) <= 1e-12, name


@pytest.mark.parametrize("alpha", [None, "spectral", "learned"])
def test_alpha_does_not_follow_running_statistics(alpha: str | None) -> None:
    """It would change the scale of what comes next, whose statistics lag: evaluation fell to chance."""
    torch.manual_seed(0)
    normalisation = nn.BatchNorm2d(4)
    model = cl.ConformalLayers(cl.Conv2d(2, 4, 3), normalisation, cl.Gnomonic(alpha)).double()
    x = samples(SHAPE, torch.float64, 16)
    before = model(x)
    with torch.no_grad():
        normalisation.running_var.mul_(100)
    for _ in range(30):  # the power iteration goes on
        after = model(x)
    if alpha != "spectral":
        assert torch.equal(before, after)
    else:
        assert (before - after).norm() < 0.05 * before.norm()


def test_a_normalisation_disappears_into_the_convolution_before_it() -> None:
    model = randomise(cl.ConformalLayers(cl.Conv2d(2, 3, 3), nn.BatchNorm2d(3), cl.ReSPro()))
    chain = chain_of(model, SHAPE)
    assert [type(op.module).__name__ for op in chain.operators] == ["Conv2d"]
    linear = cl.ConformalLayers(cl.Linear(4, 3), nn.BatchNorm1d(3), cl.ReSPro())
    assert len(chain_of(randomise(linear), (4,)).operators) == 1


def test_without_running_statistics_it_is_refused() -> None:
    with pytest.raises(cl.ConformalError, match="track_running_stats"):
        cl.ConformalLayers(nn.BatchNorm2d(3, track_running_stats=False))


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
    assert folded.certificate is not None
    assert folded.certificate.epsilon <= 1e-2
    assert cl.fold_error(model, folded, samples(SHAPE, torch.float32)) <= TOLERANCES[torch.float32]


@both_forms
def test_grey_images_fold_from_their_own_pixels(projective: bool) -> None:
    inner = cl.networks.LeNetCL(projective=projective)
    model = randomise(nn.Sequential(nn.ZeroPad2d(2), cl.RepeatChannels(3), inner), 1)
    x = samples((1, 28, 28), torch.float32).abs()
    folded = cl.fold(model, (1, 28, 28))
    assert folded.input_shape == (1, 28, 28)
    assert cl.fold_error(model, folded, x) <= TOLERANCES[torch.float32]
    assert not operations(folded, Concatenate), "channels are repeated"
    dense = cl.fold(model, (1, 28, 28), strategy="dense")
    assert dense.constants.form.shape == (784, 784)
    assert cl.fold_error(model, dense, x) <= TOLERANCES[torch.float32]
    assert all(finding.ok for finding in cl.verify(dense, model))


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


def test_only_what_keeps_the_norm_folds_before_the_part() -> None:
    shape = (1, 6, 6)
    inner = cl.ConformalLayers(cl.Conv2d(1, 2, 3), cl.ReSPro())
    for before in (nn.ReflectionPad2d(1), nn.ConstantPad2d(1, 2.0)):
        model = randomise(nn.Sequential(before, inner))
        folded = cl.fold(model, shape)
        assert operations(folded, Pad), "the pad is gone"
        assert cl.fold_error(model, folded, samples(shape, torch.float32)) <= 5e-6
