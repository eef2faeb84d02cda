"""Networks as they are deployed: merged layers against their own, costs, ONNX Runtime."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import conformallayers as cl
from conformallayers.lab.experiments.deployed import (
    deployed,
    merged,
    multiply_adds,
    weights,
    without_centre,
)
from conformallayers.recipe.onnx.export import open_session
from oracle import randomise, relative_error

PLAIN: dict[str, dict[str, Any]] = {
    "LeNet": {},
    "MLP": {},
    "ResNet8": {},
    "StageReLUNet": {"preset": "base", "depth": 3, "pool": "max"},
}


@pytest.mark.parametrize("name", PLAIN)
def test_merged_networks_equal_their_layers(name: str) -> None:
    model = randomise(getattr(cl.networks, name)(**PLAIN[name]), 1).double().eval()
    x = torch.randn(3, 3, 32, 32, dtype=torch.float64)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with torch.no_grad():
        expected = model(x)
        assert relative_error(merged(model)(x), expected) < 1e-12
        assert relative_error(deployed(model)(x), expected) < 1e-12
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def test_depth_inside_a_stage_costs_nothing() -> None:
    for kind in ("StageNet", "StageReLUNet"):
        model = getattr(cl.networks, kind)
        deep, flat = (deployed(model("micro", depth=depth).eval()) for depth in (3, 1))
        assert multiply_adds(deep) == multiply_adds(flat) <= 450_000
        assert weights(deep) <= weights(flat) < 27_000
    kinds = [type(module) for module in merged(model("micro", depth=3)).features]
    assert kinds.count(nn.Conv2d) + kinds.count(cl.Conv2d) == 2
    assert nn.BatchNorm2d not in kinds


def test_costs_are_those_that_were_written_down() -> None:
    costs = {name: deployed(getattr(cl.networks, name)()) for name in ("LeNet", "ResNet8")}
    assert {name: multiply_adds(one) for name, one in costs.items()} == {
        "LeNet": 651_720,
        "ResNet8": 12_501_632,
    }
    assert weights(costs["LeNet"]) == 62_006
    assert weights(costs["ResNet8"]) == 78_186 - 480  # BatchNorms become biases that are there


def test_convolutions_that_are_not_one_are_left_alone() -> None:
    layers = nn.Sequential(
        nn.Conv2d(3, 4, 3, stride=2, bias=False),
        nn.Conv2d(4, 4, 3, padding=1, bias=False),
        nn.Conv2d(4, 4, 1, bias=True),
        nn.Conv2d(4, 2, 3),
    ).eval()
    x = torch.randn(2, 3, 16, 16)
    assert [one.kernel_size for one in merged(layers)] == [(3, 3), (3, 3), (3, 3)]
    with torch.no_grad():
        assert torch.allclose(merged(layers)(x), layers(x), atol=1e-6)


def test_the_mean_image_is_left_out() -> None:
    network = cl.networks.MLP()
    centred = nn.Sequential(cl.Centre((3, 32, 32)), network)
    assert without_centre(centred) is network
    assert without_centre(network) is network


@pytest.mark.parametrize("name", ["StageNet", "StageReLUNet", "ResNet8"])
def test_onnx_runtime_gives_the_same_scores(name: str) -> None:
    pytest.importorskip("onnxruntime")
    model = randomise(getattr(cl.networks, name)(), 1).eval()
    run = open_session(deployed(model), threads=1)
    x = torch.randn(5, 3, 32, 32)
    scores = run(x.numpy())
    with torch.no_grad(), cl.layer_by_layer():
        assert relative_error(torch.from_numpy(scores), model(x)) < 1e-4
