"""Sessions: every engine gives the numbers of torch, to several threads, or says why it does not run."""

from __future__ import annotations

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import conformallayers as cl
from conformallayers.session import compiled, session
from oracle import randomise
from programs import COMPILER

ENGINES = ["onnxruntime", "torch", "numpy", "c"]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CONFORMALLAYERS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def need(engine: str) -> None:
    if engine == "onnxruntime":
        pytest.importorskip("onnxruntime")
    if engine == "c" and COMPILER is None:
        pytest.skip("no compiler")


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
def test_engines_give_the_numbers_of_torch(engine: str) -> None:
    need(engine)
    folded = fold()
    run = cl.Session(folded, engine=engine)
    assert run.engine == engine
    assert str(run.explain()) == f"engine {engine}, as asked for"
    for batch in (0, 1, 7):
        x = torch.randn(batch, 2, 10, 10)
        y = run(x)
        assert isinstance(y, torch.Tensor)
        torch.testing.assert_close(y, folded(x), rtol=1e-5, atol=1e-6)
        array = run(x.numpy())
        assert isinstance(array, np.ndarray)
        np.testing.assert_array_equal(array, y.numpy())


def test_auto_races_the_engines_once() -> None:
    folded = fold()
    run = cl.Session(folded, threads=1)
    assert run.engine is None
    with pytest.raises(cl.ConformalError, match="expected a session that has run"):
        run.explain()
    x = np.random.default_rng(0).normal(size=(3, 2, 10, 10))
    y = run(x)
    race = run.explain()
    assert run.engine == race.engine == min(race.milliseconds, key=lambda n: race.milliseconds[n])
    assert not set(race.milliseconds) & set(race.reasons)
    assert set(race.milliseconds) | set(race.reasons) == set(ENGINES)
    assert "ms for a batch of 3" in str(race)
    assert f"→ {race.engine}" in str(race)
    run(x[:1])
    assert run.explain() is race
    expected = folded(torch.from_numpy(x).float()).numpy()
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", [cl.ConformalError, RuntimeError, OSError])
def test_reasons_are_said(kind: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> Any:
        raise kind("no such thing here")

    monkeypatch.setattr(session, "ENGINES", {"torch": session.ENGINES["torch"], "c": refuse})
    run = cl.Session(fold())
    run(torch.rand(1, 2, 10, 10))
    assert run.engine == "torch"
    assert "no such thing here" in str(run.explain())


def test_an_engine_with_other_numbers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = lambda folded, threads: lambda x: np.zeros((len(x), 3), np.float32)  # noqa: E731
    monkeypatch.setattr(session, "ENGINES", {"numpy": wrong})
    with pytest.raises(cl.ConformalError, match="the numbers of torch up to 1e-05, got an error"):
        cl.Session(fold(), engine="numpy")


def test_runs_a_file(tmp_path: Path) -> None:
    folded = fold()
    cl.save(folded, tmp_path / "net.safetensors")
    x = torch.rand(2, 2, 10, 10)
    run = cl.Session(tmp_path / "net.safetensors", engine="torch")
    torch.testing.assert_close(run(x), folded(x))
    cl.save(cl.ConformalLayers(cl.Linear(2, 2), cl.ReSPro()), tmp_path / "model.safetensors")
    with pytest.raises(cl.ConformalError, match=r"a fold in .*model.safetensors, got a model"):
        cl.Session(tmp_path / "model.safetensors")


def test_float64_has_its_digits() -> None:
    folded = fold(dtype=torch.float64)
    x = torch.rand(4, 2, 10, 10, dtype=torch.float64)
    run = cl.Session(folded, engine="numpy")
    assert run(x).dtype == torch.float64
    torch.testing.assert_close(run(x), folded(x), rtol=1e-12, atol=1e-14)
    with pytest.raises(cl.ConformalError, match=r"a fold in float32, got torch\.float64"):
        cl.Session(folded, engine="c")


@pytest.mark.parametrize(
    "x",
    [
        pytest.param(np.ones((2, 2, 10, 10), np.uint8), id="bytes"),
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


def test_threads_race_once(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[str] = []
    plain = session.ENGINES["torch"]
    engines = {"torch": lambda f, t: (built.append("torch"), plain(f, t))[1]}
    monkeypatch.setattr(session, "ENGINES", engines)
    run = cl.Session(fold())
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(run, [torch.rand(1, 2, 10, 10)] * 16))
    assert built == ["torch"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"engine": "tvm"}, "expected one of auto, onnxruntime, torch, numpy, c, got 'tvm'"),
        ({"threads": 0}, "expected a whole number > 0, got 0"),
        ({"threads": True}, "expected a whole number > 0, got True"),
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
    with pytest.raises(cl.ConformalError, match="expected real numbers, got an array of complex"):
        run(np.zeros((1, 2, 10, 10), complex))
    with pytest.raises(cl.ConformalError, match="a tensor on the CPU, got one on meta"):
        run(torch.zeros(1, 2, 10, 10, device="meta"))


@pytest.mark.skipif(COMPILER is None, reason="no compiler")
def test_compiled_programs_are_kept(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cl.Session(fold(), engine="c")
    programs = sorted((cache / "programs").iterdir())
    assert [path.suffix for path in programs] == [".sha256", ".so"]
    assert stat.S_IMODE((cache / "programs").stat().st_mode) == 0o700

    def fail(*_: object) -> None:
        raise AssertionError("compiled twice")

    monkeypatch.setattr(compiled, "_compile", fail)
    run = cl.Session(fold(), engine="c")
    x = torch.rand(2, 2, 10, 10)
    torch.testing.assert_close(run(x), fold()(x), rtol=1e-5, atol=1e-6)
    assert sorted((cache / "programs").iterdir()) == programs
    monkeypatch.undo()
    monkeypatch.setenv("CONFORMALLAYERS_CACHE", str(cache))
    whole = programs[1].read_bytes()
    programs[1].unlink()  # this process has it in use
    programs[1].write_bytes(whole[:1000])
    assert cl.Session(fold(), engine="c")(x).shape == (2, 3)
    assert programs[1].read_bytes() == whole


@pytest.mark.skipif(COMPILER is None, reason="no compiler")
def test_a_compiled_program_may_be_kept_elsewhere(cache: Path, tmp_path: Path) -> None:
    folder, x = tmp_path / "own", torch.rand(2, 2, 10, 10)
    folder.mkdir()
    run = compiled.compile_fold(fold(), folder)
    torch.testing.assert_close(torch.from_numpy(run(x.numpy())), fold()(x), rtol=1e-5, atol=1e-6)
    assert sorted(path.suffix for path in folder.iterdir()) == [".sha256", ".so"]
    assert not (cache / "programs").exists()


def test_a_session_keeps_its_own_fold() -> None:
    folded = fold()
    x = torch.rand(2, 2, 10, 10)
    expected = folded(x)
    for engine in ENGINES:
        if engine != "c" or COMPILER is not None:
            run = cl.Session(folded, engine=engine)
            changed = folded.double()
            torch.testing.assert_close(run(x), expected, rtol=1e-5, atol=1e-6)
            folded = changed.float()


def test_autocast_and_devices_of_the_caller_do_not_matter() -> None:
    folded = fold()
    x = torch.rand(2, 2, 10, 10)
    expected = folded(x)
    with torch.autocast("cpu", torch.bfloat16), torch.device("meta"):
        for engine in ("torch", "numpy"):
            run = cl.Session(folded, engine=engine)
            torch.testing.assert_close(run(x), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (np.ma.masked_less(np.zeros((1, 2, 10, 10)), 1), "a masked array"),
        (torch.zeros(1, 2, 10, 10).to_sparse(), "a dense tensor"),
    ],
)
def test_numbers_that_would_lose_something_are_refused(x: Any, message: str) -> None:
    with pytest.raises(cl.ConformalError, match=message):
        cl.Session(fold(), engine="torch")(x)


def test_bytes_are_refused_where_the_notes_say_that_white_is_1() -> None:
    folded, x = fold(), np.ones((1, 2, 10, 10), np.uint8)
    cl.Session(folded, engine="numpy")(x)
    folded.about = {"white": 1.0}
    for engine in ("numpy", "torch"):
        with pytest.raises(cl.ConformalError, match=r"from 0 to 1, got bytes\. Divide them"):
            cl.Session(folded, engine=engine)(x)  # type: ignore[arg-type]
    cl.Session(folded, engine="numpy")(x / 255)


def test_without_a_compiler_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(cl.ConformalError, match="expected a C compiler, got no 'no-such-compiler'"):
        cl.Session(fold(), engine="c")
    broken = tmp_path / "cc"
    broken.write_text("#!/bin/sh\necho 'it is broken' >&2\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CC", str(broken))
    with pytest.raises(cl.ConformalError, match="a compiler of C99, got cc: it is broken"):
        cl.Session(fold(), engine="c")
    assert list((tmp_path / "cache/programs").iterdir()) == []


@pytest.mark.skipif(COMPILER is None, reason="no compiler")
def test_a_folder_of_others_is_refused(cache: Path) -> None:
    folder = cache / "programs"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    with pytest.raises(cl.ConformalError, match="which others can write to"):
        cl.Session(fold(), engine="c")
    folder.rmdir()
    folder.write_text("a file")
    with pytest.raises(cl.ConformalError, match=f"{os.strerror(17)}.*CONFORMALLAYERS_CACHE"):
        cl.Session(fold(), engine="c")


def test_without_onnxruntime_it_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(cl.MissingExtra, match=r"cl.Session needs onnxruntime.*\[onnx\]"):
        cl.Session(fold(), engine="onnxruntime")
