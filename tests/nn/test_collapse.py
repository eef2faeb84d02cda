"""Convolutions in a row run as one while they train."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import conformallayers as cl
from conformallayers.networks import StageReLUNet
from conformallayers.nn import layerwise
from conformallayers.nn.collapse import collapsible, run_collapsed, run_sequence

CHAINS = {
    "1-D": lambda: [cl.Conv1d(2, 4, 3, padding=1), cl.Conv1d(4, 3, 3, stride=2)],
    "2-D": lambda: [cl.Conv2d(2, 8, 1), cl.Conv2d(8, 8, 3), cl.Conv2d(8, 3, (2, 3), stride=(1, 2))],
    "3-D": lambda: [cl.Conv3d(2, 4, 2, padding=(1, 0, 1)), cl.Conv3d(4, 2, 2)],
    "torch's own": lambda: [nn.Conv2d(2, 8, 3, bias=False), nn.Conv2d(8, 3, 3, bias=False)],
}


@pytest.mark.parametrize("chain", CHAINS)
def test_collapsed_equals_layers_with_gradients(chain: str) -> None:
    layers = nn.Sequential(*CHAINS[chain]()).double()
    axes = layers[0].weight.dim() - 2
    x = torch.randn(64, 2, *[7] * axes, dtype=torch.float64)
    shapes = collapsible(list(layers), x)
    assert len(shapes) == len(layers)
    expected = layers(x)
    result = run_collapsed(list(layers), x)
    torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)
    grads = torch.autograd.grad(expected.square().sum(), list(layers.parameters()))
    others = torch.autograd.grad(result.square().sum(), list(layers.parameters()))
    torch.testing.assert_close(grads, others, rtol=1e-12, atol=1e-10)


@pytest.mark.parametrize("alpha", [1.0, "learned", "spectral", None])
def test_training_step_equals_layers(alpha: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    activation = cl.ReSPro(projective=True) if alpha is None else cl.ReSPro(alpha, projective=True)
    model = cl.ConformalLayers(
        nn.Sequential(cl.Conv2d(2, 8, 3, padding=1), cl.Conv2d(8, 4, 3)),
        activation,
        nn.LPPool2d(2, 2),
        nn.BatchNorm2d(4),
        cl.Residual(cl.Conv2d(4, 16, 1), cl.Conv2d(16, 4, 1), cl.ReSPro(2.0)),
        unit="rms",
    ).double()
    twin, x = copy.deepcopy(model), torch.randn(32, 2, 8, 8, dtype=torch.float64)
    calls = []
    monkeypatch.setattr(layerwise, "run_collapsed", lambda *a: calls.append(a) or run_collapsed(*a))
    result = _step(model, x)
    assert len(calls) == 2
    monkeypatch.setattr(layerwise, "collapsible", lambda *_: [])
    for one, other in zip(result, _step(twin, x), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(model.state_dict(), twin.state_dict(), rtol=1e-10, atol=1e-12)


def _step(model: nn.Module, x: Tensor) -> list[Tensor]:
    y = model(x)
    y.square().sum().backward()
    return [y, *(p.grad for p in model.parameters() if p.grad is not None)]


def test_twin_trains_on_collapsed_kernels() -> None:
    torch.manual_seed(0)
    network = StageReLUNet("micro", depth=3).double()
    features = copy.deepcopy(network.features)
    x = torch.randn(8, 3, 32, 32, dtype=torch.float64)
    torch.testing.assert_close(run_sequence(network.features, x), features(x))
    torch.testing.assert_close(network(x), network.head(features(x).flatten(1)))


def _changed(**changes: Any) -> list[nn.Module]:
    first = {"in_channels": 2, "out_channels": 8, "kernel_size": 3, "bias": False}
    return [nn.Conv2d(**{**first, **changes}), nn.Conv2d(8, 2, 3, bias=False)]


@pytest.mark.parametrize(
    "layers",
    [
        pytest.param(_changed(bias=True), id="bias"),
        pytest.param(_changed(stride=2), id="stride"),
        pytest.param(_changed(groups=2), id="groups"),
        pytest.param(_changed(dilation=2), id="dilation"),
        pytest.param(_changed(padding=1, padding_mode="circular"), id="circular"),
        pytest.param(_changed(padding="same"), id="same"),
        pytest.param([*_changed()[:1], cl.Conv2d(8, 2, 3, padding=1)], id="padded inside"),
        pytest.param([*_changed()[:1], nn.ReLU(), *_changed()[1:]], id="a map between"),
        pytest.param([cl.Conv2d(2, 1, 1), cl.Conv2d(1, 64, 1)], id="narrow inside"),
        pytest.param([cl.Conv2d(2, 8, 9), cl.Conv2d(8, 2, 1)], id="too small a map"),
        pytest.param([cl.Conv2d(5, 8, 3), cl.Conv2d(8, 2, 3)], id="other channels"),
    ],
)
def test_other_layers_run_one_by_one(layers: list[nn.Module]) -> None:
    assert collapsible(layers, torch.rand(64, 2, 8, 8)) == []
    assert len(collapsible(_changed(), torch.rand(64, 2, 8, 8))) == 2


def test_small_batches_run_one_by_one() -> None:
    layers = [cl.Conv2d(16, 64, 1), cl.Conv2d(64, 16, 3)]
    assert not collapsible(layers, torch.rand(1, 16, 4, 4))
    assert collapsible(layers, torch.rand(64, 16, 4, 4))


def test_autocast_runs_one_by_one() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert collapsible(_changed(), torch.rand(64, 2, 8, 8)) == []


def test_hooks_see_their_layer() -> None:
    model = cl.ConformalLayers(*_changed(), cl.ReSPro())
    seen = []
    model[0].register_forward_hook(lambda _, __, output: seen.append(output.shape))
    model(torch.rand(64, 2, 8, 8))
    assert seen == [(64, 8, 6, 6)]


def test_own_forward_is_kept() -> None:
    layers: list[Any] = _changed()
    layers[0].forward = lambda x: 3 * x
    assert collapsible(layers, torch.rand(64, 2, 8, 8)) == []


def test_hooks_of_the_twin_are_called() -> None:
    network, seen = StageReLUNet("micro"), []
    network.features.register_forward_hook(lambda *_: seen.append(True))
    network(torch.rand(8, 3, 32, 32))
    assert seen == [True]
