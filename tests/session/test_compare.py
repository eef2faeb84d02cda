"""compare: times and errors of a model and its fold side by side, and arguments that are refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import conformallayers as cl
from conformallayers.session.compare import Comparison
from conformallayers.utils.timing import Timing
from oracle import randomise
from support import assert_says

SHAPE = (1, 8, 8)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = cl.ConformalLayers(
        *(cl.Conv2d(1, 4, 3), cl.ReSPro(), nn.BatchNorm2d(4), cl.Dropout(0.5)),
        *(cl.Conv2d(4, 4, 3), cl.ReSPro(1.0, projective=True)),
    )
    return randomise(nn.Sequential(layers, nn.Flatten(), nn.Linear(64, 3)), 1)


def test_layers_fold_and_sessions_are_compared() -> None:
    model = network().train()
    folded, x = cl.fold(model, SHAPE), torch.rand(3, *SHAPE)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    result = cl.compare(model, folded, x, engines=["numpy", "torch"], executions=4)
    names = ["layers", "folded", "numpy", "torch"]
    assert result.batch == 3
    assert list(result.timings) == list(result.errors) == list(result.milliseconds) == names
    assert all(0 < time.low <= time.median <= time.high for time in result.timings.values())
    assert result.errors["folded"] == cl.fold_error(model, folded, x)
    assert all(error < 5e-6 for error in result.errors.values())
    assert model.training
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_errors_are_against_the_layers_in_float64() -> None:
    model = network()
    x = torch.rand(2, *SHAPE, dtype=torch.float64)
    exact = cl.compare(model, cl.fold(model, SHAPE, dtype=torch.float64), x, executions=1)
    assert exact.errors["folded"] < 1e-12
    assert 1e-9 < exact.errors["layers"] < 5e-6  # the model is float32
    other = cl.fold(randomise(network(), 2), SHAPE)
    assert cl.compare(model, other, x.float(), executions=1).errors["folded"] > 1e-2


def test_prints_as_a_table_and_is_frozen() -> None:
    times = {"layers": Timing(2e-3, 1e-3, 3e-3), "c": Timing(5e-4, 4e-4, 6e-4)}
    result = Comparison(64, times, {"layers": 1e-7, "c": 3e-7})
    assert str(result) == repr(result)
    assert str(result).splitlines() == [
        "engine  ms for a batch of 64  time / layers    error",
        "------  --------------------  -------------  -------",
        "layers                 2.000           1.00  1.0e-07",
        "c                      0.500           0.25  3.0e-07",
    ]
    with pytest.raises(dataclasses.FrozenInstanceError):
        result.batch = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"model": "folded", "folded": "model"}, "the model first, got a Folded"),
        ({"folded": "model"}, "a Folded second, got Sequential"),
        ({"x": np.ones((1, *SHAPE))}, "expected a tensor third, got ndarray"),
        ({"x": torch.ones(0, *SHAPE)}, "got a tensor (0, 1, 8, 8)"),
        ({"x": torch.ones(1, *SHAPE, device="meta")}, "on the CPU, whose time is measured, got"),
        ({"x": torch.ones(SHAPE)}, "Add the batch axis"),
        ({"x": torch.ones(1, 2, 8, 8)}, "a batch of shape (B, 1, 8, 8), got an input of shape"),
        ({"x": torch.ones(1, *SHAPE, dtype=torch.float64)}, "an input of dtype torch.float32"),
        ({"engines": ["onnx"]}, "a list of onnxruntime, torch, numpy, c, got ['onnx']"),
        ({"engines": "c"}, "got 'c'. For one: engines"),
        ({"executions": 0}, "compare(executions=...): expected a whole number > 0, got 0"),
        ({"threads": 0, "engines": ["numpy"]}, "compare(threads=...): expected a whole number"),
    ],
)
def test_wrong_arguments_are_refused(changed: dict[str, Any], words: str) -> None:
    model = network()
    meant: dict[Any, Any] = {"model": model, "folded": cl.fold(model, SHAPE)}
    given = {**meant, "x": torch.ones(1, *SHAPE)}
    for name, value in changed.items():
        given[name] = meant[value] if isinstance(value, str) and value in meant else value
    assert_says(lambda: cl.compare(**given), words)
