"""Measurements: every number of a health check against a literal computation."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import conformallayers as cl
from conformallayers.diagnosis.measure import Measurement, PartHealth
from models import EMBEDDINGS, Generator
from oracle import exact_output, randomise
from support import both_forms

SHAPE = (2, 8, 8)


def batch(count: int = 5) -> Tensor:
    return torch.randn(count, *SHAPE, generator=torch.Generator().manual_seed(3))


def part_of(model: nn.Module, x: Tensor) -> PartHealth:
    (part,) = Measurement(model, x).parts
    return part


@both_forms
@pytest.mark.parametrize("unit", ["norm", "rms"])
def test_lengths_and_shares_follow_x_and_t_literally(projective: bool, unit: str) -> None:
    model = randomise(
        cl.ConformalLayers(
            *(cl.Conv2d(2, 3, 3, bias=True), cl.ReSPro(1.5, projective=projective), nn.ReLU()),
            *(cl.Conv2d(3, 2, 3), cl.ReSPro(0.8, projective=projective)),
            offset=0.7,
            unit=unit,
        )
    ).double()
    x = batch().double()

    def length(v: Tensor) -> Tensor:
        found = v.flatten(1).norm(dim=1)
        return found / math.sqrt(v[0].numel()) if unit == "rms" else found

    part = part_of(model, x)
    assert part.entering == pytest.approx(float(length(x).median()))
    t = (length(x) ** 2 + 0.7**2).sqrt()
    with torch.no_grad():
        for layer, module in zip(part.layers, model, strict=True):
            if isinstance(module, cl.ReSPro):
                alpha, before = float(module.alpha), t
                arriving = length(x) / t
                added = length(x) ** 2 / (2 * alpha)
                added = added / t if projective else added
                t = alpha / 2 * before + added
                assert layer.alpha == alpha
                assert layer.arriving == pytest.approx(float(arriving.median()))
                assert layer.added == pytest.approx(float((added / t).median()))
            elif isinstance(module, nn.Conv2d) and module.bias is not None:
                x = nn.functional.conv2d(x, module.weight)
                x = x + t.view(-1, 1, 1, 1) * module.bias.view(-1, 1, 1)
            else:
                x = module(x)
            assert layer.finite
            assert layer.length == pytest.approx(float((length(x) / t).median()))
            assert layer.shape == tuple(x.shape[1:])
    leaving = (x / t.view(-1, 1, 1, 1)).square().mean().sqrt()
    assert part.leaving == pytest.approx(float(leaving))


def test_outputs_are_those_of_the_model() -> None:
    model = randomise(
        nn.Sequential(
            cl.ConformalLayers(
                *(cl.Conv2d(2, 4, 3), cl.ReSPro("learned"), nn.LPPool2d(2, 2)),
                cl.Residual(cl.Conv2d(4, 4, 3, padding=1), cl.Gnomonic(), nn.ReLU()),
            ),
            nn.Flatten(),
        )
    )
    x = batch()
    part = part_of(model, x)
    expected = exact_output(model, x).square().mean().sqrt()
    assert part.leaving == pytest.approx(float(expected))
    assert [layer.path for layer in part.layers] == [
        *("0.0", "0.1", "0.2", "0.3.shortcut", "0.3.body.0", "0.3.body.1", "0.3.body.2")
    ]


@pytest.mark.parametrize("seed", range(12))
def test_outputs_of_random_networks_are_those_of_the_oracle(seed: int) -> None:
    model, shape = Generator(seed).staged(**EMBEDDINGS[seed % len(EMBEDDINGS)])
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.num_batches_tracked.fill_(1000)  # settled, so that the running statistics count
    x = torch.randn(5, *shape, generator=torch.Generator().manual_seed(seed))
    expected = exact_output(model, x).square().mean().sqrt()
    assert part_of(model, x).leaving == pytest.approx(float(expected))


def test_dead_channels_are_counted_behind_maps() -> None:
    conv = cl.Conv2d(2, 4, 3, bias=True)
    with torch.no_grad():
        conv.bias[:] = torch.tensor([-50.0, 50.0, -50.0, 50.0])
    layers = part_of(cl.ConformalLayers(conv, nn.ReLU(), nn.Flatten()), batch()).layers
    assert [(layer.dead, layer.channels) for layer in layers] == [
        (None, None),
        (2, 4),
        (None, None),
    ]


def test_a_norm_that_has_seen_no_batch_uses_the_batch() -> None:
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(3)
    model = cl.ConformalLayers(cl.Conv2d(2, 3, 3), norm, nn.ReLU(), unit="rms")
    found = part_of(model, batch()).layers[1]
    assert found.length == pytest.approx(1.0, rel=0.05)
    assert found.norm is not None
    assert found.norm.lag is None
    model.train()
    model(batch())
    sigma = norm.running_var.sub(0.9).div(0.1).median()  # torch stores the unbiased variance
    assert found.norm.variance == pytest.approx(float(sigma), rel=0.02)


def test_a_settled_norm_uses_its_statistics_and_tells_how_late_they_are() -> None:
    norm = nn.BatchNorm2d(3)
    norm.num_batches_tracked.fill_(100)
    norm.running_var.fill_(4.0)
    norm.running_mean.fill_(20.0)
    model = cl.ConformalLayers(cl.Conv2d(2, 3, 3), norm, nn.ReLU(), unit="rms")
    found = part_of(model, batch()).layers[1].norm
    assert found is not None
    assert (found.variance, found.mean, found.below_eps, found.eps) == (4.0, 10.0, 0.0, norm.eps)
    assert found.lag == pytest.approx(10.0, abs=0.5)


@pytest.mark.parametrize(("momentum", "batches", "settled"), [(0.1, 28, False), (0.1, 29, True)])
def test_statistics_settle_with_the_momentum(momentum: float, batches: int, settled: bool) -> None:
    norm = nn.BatchNorm2d(3, momentum=momentum)
    norm.num_batches_tracked.fill_(batches)
    found = part_of(cl.ConformalLayers(cl.Conv2d(2, 3, 3), norm), batch()).layers[1].norm
    assert found is not None
    assert (found.lag is not None) is settled


def test_every_call_of_a_part_is_measured() -> None:
    part = cl.ConformalLayers(cl.Linear(4, 4), cl.ReSPro())
    found = Measurement(nn.Sequential(part, nn.Identity(), part), torch.rand(3, 4))
    assert [part.path for part in found.parts] == ["0", "0"]
