"""Running layers one by one in training."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import conformallayers as cl
from cnns import embedded
from support import samples

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


def test_a_norm_inside_a_branch() -> None:
    torch.manual_seed(0)
    body = cl.Conv2d(2, 2, 3, padding=1, bias=True), nn.BatchNorm2d(2)
    for layers in (body, (*body, cl.ReSPro())):
        model = cl.ConformalLayers(cl.Residual(*layers), cl.ReSPro())
        model(samples(SHAPE, torch.float32)).square().sum().backward()
        cl.testing.assert_folds(model, SHAPE)


def test_spectral_training_under_inference_mode() -> None:
    model = cl.ConformalLayers(cl.Linear(8, 8), cl.ReSPro("spectral"))
    with torch.inference_mode():
        assert model(torch.rand(2, 8)).isfinite().all()
