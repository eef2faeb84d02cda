"""Engines of the benchmark: what is skipped and why, and ONNX files that do not fit."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import conformallayers as cl
from conformallayers.lab.experiments.engines import (
    OnnxFile,
    fold_engines,
    open_sessions,
    relu_engines,
)
from support import assert_says


def write(path: Path, model: nn.Module, *inputs: Tensor, **options: Any) -> Path:
    pytest.importorskip("onnxruntime")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporter's deprecation
        torch.onnx.export(model.eval(), inputs, path, dynamo=False, **options)
    return path


ANY_BATCH = {"input_names": ["image"], "dynamic_axes": {"image": {0: "n"}}}


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
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engines, notes = relu_engines(model, x, ("onnx",))
    assert notes == {}
    result: Any = engines["onnx"]()
    torch.testing.assert_close(torch.from_numpy(result), model(x).detach())


def test_sessions_that_do_not_open_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    model = cl.ConformalLayers(cl.Linear(3, 2), cl.ReSPro())
    folded = cl.fold(model, (3,))
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    sessions, notes = open_sessions(folded, ["numpy", "onnxruntime"])
    assert list(sessions) == ["session-numpy"]
    assert "onnxruntime" in notes["session-onnxruntime"]


def test_an_onnx_file_runs_batches_of_any_size(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    file = OnnxFile.open(write(tmp_path / "net.onnx", model, torch.rand(1, 3), **ANY_BATCH))
    file.check("net", (3,), (1, 64))
    for batch in (1, 5):
        x = torch.rand(batch, 3, dtype=torch.float64)  # converted to what the file takes
        y: Any = file.engine(x)()
        torch.testing.assert_close(torch.from_numpy(y), model(x.float()).detach())


def test_onnx_files_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    fixed = OnnxFile.open(write(tmp_path / "fixed.onnx", nn.Linear(3, 2), torch.rand(4, 3)))
    fixed.check("net", (3,), (4,))
    where = f"bench --against {tmp_path / 'fixed.onnx'}: expected "
    for shape, got in (((5,), "(4, 3)"), ((3, 1), "(4, 3)")):
        expected = f"an input (batch, {', '.join(map(str, shape))}) as net has, got {got}."
        assert_says(lambda shape=shape: fixed.check("net", shape, (4,)), where + expected)
    batches = "a model of batches of 1, got one of 4. Give --batch 4"
    assert_says(lambda: fixed.check("net", (3,), (4, 1)), where + batches)
    assert_says(lambda: fixed.engine(torch.rand(1, 3)), where + "a model that runs batches of 1")


def test_files_that_are_no_model_of_one_input_are_refused(tmp_path: Path) -> None:
    two = write(tmp_path / "two.onnx", nn.PairwiseDistance(), torch.rand(1, 2), torch.rand(1, 2))
    whole = write(tmp_path / "whole.onnx", nn.Embedding(4, 2), torch.tensor([1]))
    broken = tmp_path / "broken.onnx"
    broken.write_bytes(b"no model")
    for path, words in (
        (two, "a model of one input, got one of 2"),
        (whole, "an input of tensor(float), tensor(double), tensor(float16), got tensor(int64)"),
        (broken, "a model that ONNX Runtime"),
        (tmp_path / "none.onnx", "an ONNX file, got no such file. Check the path."),
        (tmp_path, "an ONNX file, got no such file"),
    ):
        assert_says(lambda path=path: OnnxFile.open(path), f"bench --against {path}: ", words)


def test_missing_onnx_runtime_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    (tmp_path / "net.onnx").write_bytes(b"")
    with pytest.raises(cl.MissingExtra, match=r"--against .*net.onnx needs onnxruntime: pip inst"):
        OnnxFile.open(tmp_path / "net.onnx")


def test_a_fold_that_no_session_takes_runs_in_torch() -> None:
    model = cl.ConformalLayers(cl.Conv2d(1, 4, 3), cl.ReSPro(), cl.Flatten())
    folded = cl.fold(model, (1, 8, 8), dtype=torch.bfloat16)
    sessions, notes = open_sessions(folded, ("numpy", "onnxruntime"))
    assert (sessions, list(notes)) == ({}, ["session-numpy", "session-onnxruntime"])
    (run,) = fold_engines({"folded": folded}, sessions, torch.rand(2, 1, 8, 8).bfloat16()).values()
    assert run().shape == (2, 144)
