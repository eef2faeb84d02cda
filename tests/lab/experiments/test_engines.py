"""Engines of the benchmark: plain networks in other runtimes, and costs of networks as they are deployed."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import nn

import conformallayers as cl
from conformallayers.errors import ignored_warnings
from conformallayers.lab.experiments.engines import (
    deployed_relu,
    multiply_adds,
    relu_engines,
    weights,
)
from oracle import randomise, relative_error


def test_engines_that_are_missing_or_differ_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openvino", None)
    model, x = nn.Sequential(nn.Linear(3, 2), nn.ReLU()).eval(), torch.rand(4, 3)
    engines, notes = relu_engines(model, x, ("eager", "openvino"))
    assert list(engines) == ["eager"]
    assert notes["openvino"].startswith("skipped: ModuleNotFoundError: ")
    torch.testing.assert_close(engines["eager"](), model(x).detach())
    noisy = nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.5)).train()
    torch.manual_seed(0)
    assert relu_engines(noisy, x, ("eager",))[1] == {"eager": "skipped: its output differs"}


def test_a_plain_network_runs_in_onnx_runtime() -> None:
    pytest.importorskip("onnxruntime")
    model, x = cl.networks.LeNet().eval(), torch.rand(2, 3, 32, 32)
    with ignored_warnings():
        engines, notes = relu_engines(model, x, ("onnx",))
    assert notes == {}
    result: Any = engines["onnx"]()
    torch.testing.assert_close(torch.from_numpy(result), model(x).detach())


PLAIN: dict[str, dict[str, Any]] = {
    "LeNet": {},
    "MLP": {},
    "ResNet8": {},
    "StageReLUNet": {"preset": "base", "depth": 3, "pool": "max"},
}


@pytest.mark.parametrize("name", PLAIN)
def test_deployed_networks_equal_their_layers(name: str) -> None:
    model = randomise(getattr(cl.networks, name)(**PLAIN[name]), 1).double().eval()
    x = torch.randn(3, 3, 32, 32, dtype=torch.float64)
    with torch.no_grad():
        assert relative_error(deployed_relu(model)(x), model(x)) < 1e-12


def test_depth_inside_a_stage_costs_nothing() -> None:
    for kind in ("StageNet", "StageReLUNet"):
        networks = (getattr(cl.networks, kind)("micro", depth=depth) for depth in (3, 1))
        deep, flat = (cl.fold(network.eval(), (3, 32, 32)) for network in networks)
        assert multiply_adds(deep) == multiply_adds(flat) <= 450_000
        assert weights(deep) <= weights(flat) < 27_000


def test_costs_are_those_that_were_written_down() -> None:
    folds = [cl.fold(one().eval(), (3, 32, 32)) for one in (cl.networks.LeNet, cl.networks.ResNet8)]
    assert [multiply_adds(one) for one in folds] == [651_720, 12_501_632]
    # BatchNorms of ResNet8 become biases that are there.
    assert [weights(one) for one in folds] == [62_006, 78_186 - 480]
