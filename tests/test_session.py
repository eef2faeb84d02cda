"""Sessions: every engine gives the numbers of torch, to several threads, or says why it does not run."""

from __future__ import annotations

import copy
import pickle
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import conformallayers as cl
from conformallayers import session
from oracle import randomise
from support import assert_says

ENGINES = ["onnxruntime", "torch", "numpy"]


def need(engine: str) -> None:
    if engine == "onnxruntime":
        pytest.importorskip("onnxruntime")


def fold(**options: Any) -> cl.Folded:
    torch.manual_seed(0)
    model = nn.Sequential(
        cl.ConformalLayers(
            *(cl.Conv2d(2, 4, 3), cl.Conv2d(4, 4, 3), cl.ReSPro(1.0, projective=True)),
            *(nn.LPPool2d(2, 2), nn.BatchNorm2d(4), cl.Conv2d(4, 6, 2), cl.ReSPro(), nn.ReLU()),
            offset="learned",
            unit="rms",
        ),
        nn.Flatten(),
        nn.Linear(24, 3),
    )
    return cl.fold(randomise(model, 1), (2, 10, 10), **options)


@pytest.mark.parametrize("engine", ENGINES)
def test_other_sizes_run_as_in_the_fold(engine: str) -> None:
    need(engine)
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Hardtanh(-0.1, 0.2), nn.Conv2d(3, 2, 1))
    folded = cl.fold(model, (2, 10, 10))
    run, x = cl.Session(folded, engine=engine), torch.randn(3, 2, 14, 9)
    torch.testing.assert_close(run(x), model(x), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(run(x.numpy()), run(x).numpy())
    fixed = cl.Session(cl.fold(nn.Sequential(model, nn.Flatten()), (2, 10, 10)), engine=engine)
    with pytest.raises(cl.ConformalError, match="Fold again for this shape"):
        fixed(x)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_engines_give_the_numbers_of_torch(engine: str, dtype: torch.dtype) -> None:
    need(engine)
    folded = fold(dtype=dtype)
    if (engine, dtype) == ("onnxruntime", torch.float64):
        with pytest.raises(cl.ConformalError, match=r"a fold in float32, got torch\.float64"):
            cl.Session(folded, engine=engine)
        engine = "torch"
        assert cl.Session(folded).engine == engine
    run = cl.Session(folded, engine=engine)
    assert run.engine == engine
    rtol = 1e-5 if dtype == torch.float32 else 1e-12
    for batch in (0, 1, 7):
        x = torch.randn(batch, 2, 10, 10, dtype=dtype)
        y = run(x)
        assert isinstance(y, torch.Tensor)
        torch.testing.assert_close(y, folded(x), rtol=rtol, atol=rtol / 10)
        array = run(x.numpy())
        assert isinstance(array, np.ndarray)
        np.testing.assert_array_equal(array, y.numpy())


def test_auto_takes_onnx_runtime_where_it_runs_the_fold(monkeypatch: pytest.MonkeyPatch) -> None:
    need("onnxruntime")
    folded, x = fold(), torch.rand(3, 2, 10, 10)
    run = cl.Session(folded)
    assert run.engine == "onnxruntime"
    torch.testing.assert_close(run(x), folded(x), rtol=1e-5, atol=1e-6)

    def refuse(*_: object) -> Any:
        raise cl.ConformalError("no such operation")

    monkeypatch.setattr(session, "ENGINES", {**session.ENGINES, "onnxruntime": refuse})
    assert cl.Session(folded).engine == "torch"
    monkeypatch.setattr(session, "find_spec", lambda name: None)
    monkeypatch.setattr(session, "ENGINES", {"torch": session.ENGINES["torch"]})
    assert cl.Session(folded).engine == "torch"


def test_an_engine_with_other_numbers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = lambda folded, threads: lambda x: np.zeros((len(x), 3), np.float32)  # noqa: E731
    monkeypatch.setattr(session, "ENGINES", {"numpy": wrong})
    with pytest.raises(cl.ConformalError, match="the numbers of torch up to 1e-05, got an error"):
        cl.Session(fold(), engine="numpy")


@pytest.mark.parametrize(
    "x",
    [
        pytest.param(np.ones((2, 2, 10, 10), ">f8"), id="byte order"),
        pytest.param(np.ones((2, 2, 10, 10), np.float32)[:, :, ::-1], id="strides"),
        pytest.param(np.broadcast_to(np.float32(1), (2, 2, 10, 10)), id="read-only"),
        pytest.param(torch.ones(2, 2, 10, 10, dtype=torch.bfloat16), id="bfloat16"),
        pytest.param(torch.ones(2, 2, 10, 10).to(torch.float8_e4m3fn), id="float8"),
        pytest.param(torch.ones(2, 10, 10, 2).permute(0, 3, 1, 2), id="channels last"),
        pytest.param(torch.ones(2, 2, 10, 10, requires_grad=True), id="gradient"),
        pytest.param((-1j * torch.ones(2, 2, 10, 10)).conj().imag, id="negative bit"),
    ],
)
@pytest.mark.parametrize("engine", ["torch", "numpy"])
def test_takes_numbers_of_any_kind(x: Any, engine: str) -> None:
    folded = fold()
    expected = folded(torch.ones(2, 2, 10, 10))
    result = cl.Session(folded, engine=engine)(x)
    torch.testing.assert_close(torch.as_tensor(result), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("engine", ENGINES)
def test_threads_share_a_session(engine: str) -> None:
    need(engine)
    folded = fold()
    run = cl.Session(folded, engine=engine, threads=1)
    batches = [torch.randn(n % 5 + 1, 2, 10, 10) for n in range(64)]
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(run, batches))
    for x, y in zip(batches, results, strict=True):
        torch.testing.assert_close(y, folded(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"engine": "tvm"}, "expected one of auto, onnxruntime, torch, numpy, got 'tvm'"),
        ({"threads": 0}, "expected an integer > 0, got 0"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(cl.ConformalError, match=message):
        cl.Session(fold(), **arguments)


def test_wrong_networks_and_inputs_are_refused() -> None:
    with pytest.raises(cl.ConformalError, match="expected a Folded or a path, got Linear"):
        cl.Session(nn.Linear(2, 2))  # type: ignore[arg-type]
    with pytest.raises(cl.ConformalError, match=r"float32 or float64, got torch\.bfloat16"):
        cl.Session(fold(dtype=torch.bfloat16))
    run = cl.Session(fold(), engine="torch")
    with pytest.raises(cl.ConformalError, match=r"Add the batch axis with x\[None\]"):
        run(np.zeros((2, 10, 10)))
    with pytest.raises(cl.ConformalError, match=r"channels last .* x\.transpose\(0, 3, 1, 2\)"):
        run(np.zeros((1, 10, 10, 2)))
    with pytest.raises(cl.ConformalError, match="an array of real numbers, got complex128"):
        run(np.zeros((1, 2, 10, 10), complex))
    with pytest.raises(cl.ConformalError, match="a tensor on the CPU, got one on meta"):
        run(torch.zeros(1, 2, 10, 10, device="meta"))


def test_a_session_keeps_its_own_fold() -> None:
    folded = fold()
    x = torch.rand(2, 2, 10, 10)
    expected = folded(x)
    for engine in ENGINES:
        run = cl.Session(folded, engine=engine)
        changed = folded.double()
        torch.testing.assert_close(run(x), expected, rtol=1e-5, atol=1e-6)
        folded = changed.float()


@pytest.mark.parametrize("engine", ENGINES)
def test_sessions_are_copied_and_pickled(engine: str) -> None:
    need(engine)
    run, x = cl.Session(fold(), engine=engine, threads=1), torch.rand(2, 2, 10, 10)
    for again in (copy.deepcopy(run), pickle.loads(pickle.dumps(run))):
        assert (again.engine, again.threads) == (engine, 1)
        assert torch.equal(again(x), run(x))


def test_autocast_and_devices_of_the_caller_do_not_matter() -> None:
    folded = fold()
    x = torch.rand(2, 2, 10, 10)
    expected = folded(x)
    with torch.autocast("cpu", torch.bfloat16), torch.device("meta"):
        for engine in ("torch", "numpy"):
            run = cl.Session(folded, engine=engine)
            torch.testing.assert_close(run(x), expected, rtol=1e-5, atol=1e-6)


def test_bytes_are_refused_unless_the_notes_say_that_white_is_255() -> None:
    folded, x = fold(), np.ones((1, 2, 10, 10), np.uint8)
    for run in (cl.Session(folded, engine="numpy"), cl.Session(folded, engine="torch")):
        with pytest.raises(cl.ConformalError, match=r"got bytes\. Scale them to floats"):
            run(x)
    with pytest.raises(cl.ConformalError, match=r"torch.uint8\. Scale the bytes as in training"):
        folded(torch.from_numpy(x))
    folded.about = {"white": 255.0}
    cl.Session(folded, engine="numpy")(x)
    folded.about = {"white": 1.0}
    for engine in ("numpy", "torch"):
        with pytest.raises(cl.ConformalError, match=r"from 0 to 1, got bytes\. Divide them"):
            cl.Session(folded, engine=engine)(x)  # type: ignore[arg-type]
    cl.Session(folded, engine="numpy")(x / 255)


def test_without_onnxruntime_it_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(cl.MissingExtra, match=r"cl.Session needs onnxruntime.*\[onnx\]"):
        cl.Session(fold(), engine="onnxruntime")


@pytest.mark.parametrize("kind", [dict, tuple])
def test_several_outputs_are_refused_by_name(kind: type, tmp_path: Path) -> None:
    class Several(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return {"a": x, "b": 2 * x} if kind is dict else (x, 2 * x)

    folded = cl.fold(Several(), (1, 4, 4))
    got = f"one output, got {'a dict' if kind is dict else '2 outputs'}. Return one tensor."
    for run in (
        lambda: cl.Session(folded),
        lambda: cl.export_c(folded, tmp_path),
        lambda: cl.export_onnx(folded, tmp_path / "net.onnx"),
        lambda: cl.save(folded, tmp_path / "net.safetensors"),
        lambda: cl.quantize(folded, torch.rand(2, 1, 4, 4)),
    ):
        assert_says(run, got)


def test_it_prints_its_engine_and_knows_names_of_the_zoo() -> None:
    assert "(3,), dtype=torch.float32" in repr(cl.Session(fold(), engine="torch"))
    assert "engine='torch'" in repr(cl.Session(fold(), engine="torch"))
    assert_says(lambda: cl.Session("mnist-nano"), "cl.zoo.load('mnist-nano')")
