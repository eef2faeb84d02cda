"""Engines of the benchmark: plain networks in other runtimes, and why an engine is skipped."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import nn

import conformallayers as cl
from conformallayers.lab.experiments.engines import relu_engines
from conformallayers.utils.quiet import ignored_warnings


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
