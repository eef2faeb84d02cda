"""The offset and the unit of ConformalLayers: their numbers, and that they stay."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from torch import nn

import conformallayers as cl
from cnns import embedded
from oracle import exact, oracle, randomise, relative_error
from support import assert_says, samples

EMBEDDINGS = [
    {"offset": offset, "unit": unit}
    for offset in (None, 0.6, "learned")
    for unit in ("norm", "rms")
]
embeddings = pytest.mark.parametrize("settings", EMBEDDINGS, ids=str)


def small(activation, **settings):
    model = cl.ConformalLayers(
        cl.Conv2d(2, 4, 3, bias=True),
        activation(),
        cl.Conv2d(4, 3, 3),
        activation(),
        cl.Flatten(),
        cl.Linear(12, 2),
        **settings,
    )
    return randomise(model, 1).double()


@embeddings
@pytest.mark.parametrize("projective", [False, True])
@pytest.mark.parametrize("alpha", [None, "spectral", "learned", 1.7])
def test_offset_and_unit_are_those_of_the_recurrence(settings, projective, alpha):
    model = small(lambda: cl.ReSPro(alpha, projective=projective), **settings)
    x = samples((2, 6, 6), torch.float64)
    x[0] = 0
    model(x)  # power iteration
    model.eval()
    expected = oracle(exact(model), x).detach()
    assert relative_error(model(x), expected) <= 1e-13
    with torch.no_grad():
        assert relative_error(model(x), expected) <= 1e-13
    if settings["offset"] is None:
        assert expected[0].abs().max() == 0
    else:
        assert expected[0].abs().max() > 0  # a bias counts where t > 0
    narrow = copy.deepcopy(model).float()
    assert relative_error(narrow(x.float()), expected) <= 5e-6


def test_the_recurrence_in_root_mean_squares_by_hand():
    x = torch.tensor([[1.0, 2.0, -2.0, 0.0]], dtype=torch.float64)  # mean of squares 9/4
    model = cl.ConformalLayers(
        cl.Scale(2.0), cl.ReSPro(3.0, projective=True), offset=2.0, unit="rms"
    ).double()
    t = math.sqrt(9 / 4 + 4)  # 2.5
    t = 1.5 * t + 9 / (2 * 3 * t)
    assert torch.allclose(model(x), 2 * x / t, rtol=1e-14)
    model[1] = cl.ReSPro()  # young: the bound of rms by rms is 2
    t = 1.0 * 2.5 + 9 / (2 * 2)
    assert torch.allclose(model(x), 2 * x / t, rtol=1e-14)
    assert cl.trace(model, (4,)).alphas == (2.0,)
    model.unit = "norm"
    t = 1.0 * math.sqrt(9 + 4) + 36 / (2 * 2)
    assert torch.allclose(model(x), 2 * x / t, rtol=1e-14)


@embeddings
def test_offset_and_unit_stay(settings):
    model = small(lambda: cl.ReSPro(), **settings)
    x = samples((2, 6, 6), torch.float64)

    def same(other):
        assert (other._offset, other.unit) == (settings["offset"], settings["unit"])
        assert other.embedding == model.embedding

    assert model[:2]._parameters.get("log_offset") is model._parameters.get("log_offset")
    for other in (
        model[:2],
        model + cl.ConformalLayers(cl.Scale()),
        model * 1,
        1 * model,
        model[2:],
    ):
        same(other)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        same(other)
        assert torch.equal(other(x), model(x))
    whole = model[:2] + model[2:]
    assert torch.equal(whole(x), model(x))
    other = small(lambda: cl.ReSPro(), **settings)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.5)
    other.load_state_dict(model.state_dict())
    same(other)
    model.append(cl.Scale()).insert(0, cl.Identity())
    same(model)


@pytest.mark.parametrize("offset", [0, 0.0, -1.0, math.nan, math.inf, True, "big", [1.0]])
def test_bad_offsets_are_refused(offset):
    assert_says(
        lambda: cl.ConformalLayers(offset=offset), "ConformalLayers(offset=...)", repr(offset)
    )
    model = cl.ConformalLayers(offset=2.0)
    assert_says(lambda: setattr(model, "offset", offset), "ConformalLayers(offset=...)")
    assert model.offset == 2.0


@pytest.mark.parametrize("unit", ["RMS", None, 1, ["rms"]])
def test_bad_units_are_refused(unit):
    assert_says(lambda: cl.ConformalLayers(unit=unit), "ConformalLayers(unit=...)", repr(unit))


def test_a_learned_offset_starts_at_one_and_trains():
    model = cl.ConformalLayers(cl.Linear(4, 2), cl.ReSPro(projective=True), offset="learned")
    assert model.offset.item() == 1.0
    assert model.log_offset.dtype == torch.float32
    model(torch.randn(3, 4)).square().sum().backward()
    assert model.log_offset.grad.abs() > 0
    model.log_offset.data.fill_(3.0)
    model.reset_parameters()
    assert model.offset.item() == 1.0


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_learned_offset_that_is_not_finite_is_refused(value: float) -> None:
    model = cl.ConformalLayers(cl.Linear(3, 2), cl.ReSPro(), offset="learned").eval()
    with torch.no_grad():
        model.log_offset.fill_(value)
    with pytest.raises(cl.ConformalError, match=r"a finite offset.*log_offset"):
        cl.fold(model, (3,))


SHAPE = (2, 7, 6)


def test_refusals_in_training_name_the_layer() -> None:
    with pytest.raises(cl.ConformalError, match="BatchNorm1d at position 0"):
        cl.ConformalLayers(nn.BatchNorm1d(2), cl.ReSPro(1.0))(torch.rand(3, 2, 4, 4))
    with pytest.raises(cl.ConformalError, match="growth"):
        cl.ConformalLayers(cl.RadialActivation())


@pytest.mark.parametrize("alpha", [None, "spectral", "learned"])
def test_alpha_does_not_follow_running_statistics(alpha: str | None) -> None:
    """It would change the scale of what comes next, whose statistics lag: evaluation fell to chance."""
    torch.manual_seed(0)
    normalisation = nn.BatchNorm2d(4)
    model = cl.ConformalLayers(cl.Conv2d(2, 4, 3), normalisation, cl.Gnomonic(alpha)).double()
    x = samples((2, 8, 7), torch.float64, 16)
    before = model(x)
    with torch.no_grad():
        normalisation.running_var.mul_(100)
    for _ in range(30):  # the power iteration goes on
        after = model(x)
    if alpha != "spectral":
        assert torch.equal(before, after)
    else:
        assert (before - after).norm() < 0.05 * before.norm()


@pytest.mark.parametrize("momentum", [0.1, None])
def test_running_means_are_those_of_the_plain_model(momentum: float | None) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4, momentum=momentum)).double()
    with torch.no_grad():
        plain[0].bias.fill_(5.0)
        plain[1].running_mean.fill_(4.998)
    twin = cl.convert(plain, SHAPE, keep="all")
    x = samples(SHAPE, torch.float64, 8)
    for _ in range(3):
        plain(embedded(twin, x))
        twin(x)
        found = dict(twin.features.named_children())["1"].running_mean
        assert torch.allclose(found, plain[1].running_mean, rtol=1e-12)


def test_groups_of_channels_run_hooks_and_refuse_other_shapes() -> None:
    pools = [cl.AvgPool2d(2), nn.LPPool2d(2, 2)]
    model = cl.ConformalLayers(cl.Conv2d(2, 6, 3), cl.Split([2, 4], pools), cl.ReSPro(1.0))
    calls = []
    hook = pools[1].register_forward_hook(lambda *_: calls.append(1))
    x = samples((2, 10, 10), torch.float32)
    y = model(x)
    assert len(calls) == 1
    hook.remove()
    torch.testing.assert_close(model(x), y, rtol=1e-5, atol=1e-6)
    assert len(calls) == 1
    pools[1].stride = 1  # 7×7 windows beside 4×4
    with pytest.raises(cl.ConformalError, match="a concatenation of branches"):
        model(x)
    with pytest.raises(cl.ConformalError, match="in_channels=2"):
        model(x[:, :1])


def test_spectral_training_under_inference_mode() -> None:
    model = cl.ConformalLayers(cl.Linear(8, 8), cl.ReSPro("spectral"))
    with torch.inference_mode():
        assert model(torch.rand(2, 8)).isfinite().all()
