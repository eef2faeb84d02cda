"""cl.export_onnx: one file, any batch size, the numbers of torch; or one clear error and no file."""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import conformallayers as cl
from conformallayers.export import onnx as exporter
from conformallayers.export.plain import Fourier, plain
from conformallayers.export.replacements import LONG, average, convolve, norm
from nets import NETS, SHAPE, folds, net
from oracle import randomise, relative_error
from support import samples

onnx = pytest.importorskip("onnx", reason="the extra onnx is not installed")
runtime = pytest.importorskip("onnxruntime", reason="the extra onnx is not installed")
LIMITS = {torch.float32: 1e-5, torch.float64: 1e-11}
BATCHES = 1, 4, 64


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "net.onnx"


def run(path: Path, x: Tensor) -> Tensor:
    session = runtime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(["y"], {"x": x.numpy()})[0])


def check(folded: cl.Folded, path: Path) -> None:
    """Compare one file with torch: batch sizes, zero, NaN, infinity, sizes of numbers."""
    cl.export_onnx(folded, path)
    limit = LIMITS[folded.dtype]
    with torch.no_grad():
        for batch in BATCHES:
            x = samples(folded.input_shape, folded.dtype, batch, seed=7)
            assert relative_error(run(path, x), folded(x)) <= limit
        for scale in (1e-20, 1e15):
            assert relative_error(run(path, scale * x[:9]), folded(scale * x[:9])) <= limit
        odd = x[:5].clone()
        odd[0], odd[1].view(-1)[5], odd[2].view(-1)[5] = 0, float("nan"), float("inf")
        actual, expected = run(path, odd), folded(odd)
        assert relative_error(actual[[0, 3, 4]], expected[[0, 3, 4]]) <= limit
        assert expected[1:3].isnan().all()
        assert actual[1:3].isnan().all()


# -- the same numbers ---------------------------------------------------------------------------


FAST = [
    ("chain", "dense", torch.float32),
    ("chain", "banded", torch.float32),
    ("chain", "sparse", torch.float32),
    ("unpadded", "conv", torch.float32),
    ("circular", "spectral", torch.float32),
    ("unpadded", "spectral", torch.float32),
    ("branches", "layers", torch.float32),
    ("residual", "dense", torch.float32),
    ("rules", "dense", torch.float64),
]


@pytest.mark.parametrize(("name", "strategy", "dtype"), FAST, ids=str)
def test_numbers_are_those_of_torch(
    name: str, strategy: str, dtype: torch.dtype, path: Path
) -> None:
    check(cl.fold(net(name), SHAPE, strategy=strategy, dtype=dtype), path)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", list(LIMITS), ids=str)
@pytest.mark.parametrize("name", list(NETS))
def test_numbers_of_every_network_and_strategy(name: str, dtype: torch.dtype, path: Path) -> None:
    for folded in folds(name, dtype):
        check(folded, path)


class Kept(nn.Module):
    """Layers of one's own around the folded part, some called as functions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.part = nn.Conv2d(2, 2, 3, padding=1), net("chain")
        self.last = nn.Linear(36, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        return self.last(torch.flatten(self.part(x), 1)).relu()


def test_layers_before_and_behind_are_kept(path: Path) -> None:
    folded = cl.fold(randomise(Kept()), SHAPE, strategy="dense")
    cl.export_onnx(folded, path)
    x = samples(SHAPE, torch.float32, 5)
    x[0], x[1, 0, 0, 0] = 0, float("nan")
    actual, expected = run(path, x), folded(x)
    assert expected[0].any()  # the biases of the layers around it
    assert relative_error(actual[[0, 2, 3, 4]], expected[[0, 2, 3, 4]]) <= 1e-5
    assert torch.equal(actual[1].isnan(), expected[1].isnan())


def test_heads_and_pieces_of_large_batches(path: Path) -> None:
    model = randomise(nn.Sequential(net("chain"), nn.Flatten(), nn.Linear(36, 4), nn.ReLU()))
    folded = cl.fold(model, SHAPE, strategy="dense")
    for module in folded.modules():
        if hasattr(module, "piece"):
            module.piece = 1  # a file must not keep the sizes it was made with
    check(folded, path)
    zero = run(path, torch.zeros(3, *SHAPE))
    assert torch.equal(zero, model[2].bias.detach().relu().expand(3, 4))
    operators = [node.op_type for node in onnx.load(path).graph.node]
    assert not set(operators) & {"If", "Loop", "Scan", "Split", "Shape", "DFT"}
    assert len(operators) <= 36


# -- the file -----------------------------------------------------------------------------------


def test_what_the_file_says_of_itself(path: Path) -> None:
    model = net("chain")
    folded = cl.fold(model, SHAPE, strategy="banded", tolerance=1e-2)
    cl.export_onnx(folded, path)
    first = path.read_bytes()
    assert str(Path.cwd()).encode() not in first  # no line of code with its place
    assert b"stack_trace" not in first
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    loaded = onnx.load(path)
    (version,) = [entry.version for entry in loaded.opset_import if entry.domain == ""]
    assert version == exporter._newest() >= 18
    session = runtime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (x,), (y,) = session.get_inputs(), session.get_outputs()
    assert (x.name, x.shape, x.type) == ("x", ["batch", *SHAPE], "tensor(float)")
    assert (y.name, y.shape) == ("y", ["batch", *folded.output_shape])
    said = session.get_modelmeta().custom_metadata_map
    assert said["conformallayers.library"] == cl.__version__
    assert said["conformallayers.origin"] == folded.origin
    assert said["conformallayers.strategy"] == "banded"
    assert said["conformallayers.dtype"] == "float32"
    proof = json.loads(said["conformallayers.certificate"])
    assert (proof["epsilon"], proof["max_norm"]) == (1e-2, "inf")
    assert json.loads(said["conformallayers.input_shape"]) == list(SHAPE)


@pytest.mark.slow
def test_equal_folds_give_equal_files(path: Path) -> None:
    for name in ("chain", "biases", "unpadded"):
        contents = set()
        for _ in range(2):
            cl.export_onnx(cl.fold(net(name), SHAPE), path)
            contents.add(path.read_bytes())
        assert len(contents) == 1


@pytest.mark.slow
@pytest.mark.parametrize("opset", [18, 20, 22, 25])
def test_an_older_opset_on_request(opset: int, path: Path) -> None:
    for name, strategy in (("several", "dense"), ("chain", "banded"), ("MLP head", "conv")):
        folded = cl.fold(net(name), SHAPE, strategy=strategy)
        cl.export_onnx(folded, path, opset=opset)
        assert [entry.version for entry in onnx.load(path).opset_import] == [opset]
        x = samples(SHAPE, torch.float32)
        assert relative_error(run(path, x), folded(x)) <= 1e-5


# -- refused ------------------------------------------------------------------------------------


class Sorted(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.linalg.eigvalsh(x @ x.mT)


def narrow() -> cl.Folded:
    return cl.fold(net("chain"), SHAPE, dtype=torch.float16)


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (lambda: net("chain"), {}, r"expected a Folded, got ConformalLayers\. Fold it first: "),
        (lambda: "net", {}, r"expected a Folded, got str\. Pass the result of cl\.fold"),
        (narrow, {}, r"got torch\.float16\. Fold with dtype=torch\.float32"),
        (lambda: cl.fold(net("chain"), SHAPE).to("meta"), {}, "one on meta"),
        (lambda: cl.fold(net("chain"), SHAPE), {"opset": 9}, "from 18 to 25, got 9"),
        (lambda: cl.fold(net("chain"), SHAPE), {"opset": True}, "got True"),
        (
            lambda: cl.fold(nn.Sequential(net("chain"), Sorted()), SHAPE),
            {},
            "operators that ONNX has, got what torch.onnx does not translate: .*eigh",
        ),
    ],
)
def test_what_cannot_be_exported_is_refused_by_name(
    make: Callable[[], Any], options: dict[str, Any], message: str, path: Path
) -> None:
    with pytest.raises(cl.ConformalError, match=message):
        cl.export_onnx(make(), path, **options)
    assert not list(path.parent.iterdir())


def test_a_missing_folder_is_told_at_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporter, "_translated", None)  # nothing is built before
    with pytest.raises(FileNotFoundError):
        cl.export_onnx(cl.fold(net("chain"), SHAPE), path.parent / "none" / "net.onnx")


@pytest.mark.parametrize("package", ["onnx", "onnxscript"])
def test_a_missing_extra_is_named(
    package: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(cl.MissingExtra, match=rf"needs {package}: pip install .*\[onnx\]"):
        cl.export_onnx(cl.fold(net("chain"), SHAPE), path)
    assert not list(path.parent.iterdir())


def test_without_onnxruntime_a_file_is_only_checked(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folded = cl.fold(net("chain"), SHAPE, strategy="dense")
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "onnxruntime", None)
        exporter._newest.cache_clear()
        cl.export_onnx(folded, path)
    exporter._newest.cache_clear()
    assert [entry.version for entry in onnx.load(path).opset_import] == [20]
    x = samples(SHAPE, torch.float32)
    assert relative_error(run(path, x), folded(x)) <= 1e-5


@pytest.fixture(scope="module")
def translated() -> tuple[cl.Folded, Any]:
    folded = cl.fold(net("chain"), SHAPE, strategy="dense")
    return folded, exporter._translated(folded, 20)


class Wrong:
    """A session that returns other numbers than the file."""

    def __init__(self, session: Any, change: Callable[[Any], Any]) -> None:
        self.session, self.change = session, change

    def run(self, *arguments: Any) -> list[Any]:
        return [self.change(y) for y in self.session.run(*arguments)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda y: y * 1.0001, r"an error of 0\.0001 at batch size 1"),
        (lambda y: y[..., :1], "an error of inf at batch size 1"),
        (np.nan_to_num, "an error of inf at batch size 64"),
    ],
    ids=["other numbers", "another shape", "no NaN"],
)
def test_other_numbers_refuse_the_export(
    change: Callable[[Any], Any],
    message: str,
    translated: tuple[cl.Folded, Any],
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folded, model = translated
    path.write_bytes(b"the file before")
    session = exporter._session
    monkeypatch.setattr(exporter, "_translated", lambda *arguments: model)
    monkeypatch.setattr(exporter, "_session", lambda *a: Wrong(session(*a), change))
    with pytest.raises(cl.ConformalError, match=message):
        cl.export_onnx(folded, path)
    assert [file.read_bytes() for file in path.parent.iterdir()] == [b"the file before"]


def test_an_invalid_graph_or_a_full_disk_leaves_the_old_file(
    translated: tuple[cl.Folded, Any], path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folded, model = translated
    monkeypatch.setattr(exporter, "_translated", lambda *arguments: model)
    path.write_bytes(b"the file before")
    with monkeypatch.context() as patched:
        patched.setattr(exporter, "_serialised", lambda model: b"no model")
        with pytest.raises(cl.ConformalError, match="a valid model, got what onnx refuses"):
            cl.export_onnx(folded, path)

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            cl.export_onnx(folded, path)
    with monkeypatch.context() as patched:
        patched.setattr(exporter, "_LARGEST", 1000)
        with pytest.raises(cl.ConformalError, match="expected at most 2 GiB"):
            cl.export_onnx(folded, path)
    assert [file.read_bytes() for file in path.parent.iterdir()] == [b"the file before"]


# -- in plain operators -------------------------------------------------------------------------


def test_plain_folds_share_arrays_and_leave_the_fold_alone() -> None:
    for name in ("chain", "circular", "unpadded"):
        for folded in folds(name, torch.float64):
            x = samples(SHAPE, torch.float64)
            before, copied = folded(x), plain(folded)
            assert relative_error(copied(x), before) <= 1e-11
            assert torch.equal(folded(x), before)
            assert not {t.data_ptr() for t in copied.body.buffers() if t.dim() == 1} - {
                t.data_ptr() for t in folded.buffers()
            }


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=3), st.integers(1, 3), st.integers(0, 3))
def test_transforms_are_products(spatial: list[int], channels: int, batch: int) -> None:
    fourier = Fourier(tuple(spatial), torch.float64)
    x = torch.randn(batch, channels, *spatial, dtype=torch.float64)
    u = fourier(x)
    if batch:
        spectrum = torch.fft.rfftn(x, dim=tuple(range(2, x.dim()))).flatten(2)
        expected = torch.cat([spectrum.real, spectrum.imag], 1).permute(2, 0, 1)
        assert torch.allclose(u, expected, rtol=0, atol=1e-12)
    assert torch.allclose(fourier.back(u), x, rtol=0, atol=1e-12)


@st.composite
def windows(draw: st.DrawFn) -> dict[str, Any]:
    axes = draw(st.integers(1, 3))

    def sizes(low: int, high: int) -> tuple[int, ...]:
        return tuple(draw(st.lists(st.integers(low, high), min_size=axes, max_size=axes)))

    kernel, stride, dilation = sizes(1, 3), sizes(1, 3), sizes(1, 2)
    spatial = tuple(n + (k - 1) * d for n, k, d in zip(sizes(1, 5), kernel, dilation, strict=True))
    padding = tuple(min(p, k // 2) for p, k in zip(sizes(0, 1), kernel, strict=True))
    return {
        "kernel": kernel,
        "stride": stride,
        "dilation": dilation,
        "spatial": spatial,
        "padding": padding,
        "groups": draw(st.sampled_from([1, 2])),
    }


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@settings(max_examples=60, deadline=None)
@given(windows(), st.booleans(), st.booleans(), st.sampled_from([None, 3]))
def test_windows_are_those_of_torch(
    w: dict[str, Any], ceil_mode: bool, count_include_pad: bool, divisor: int | None
) -> None:
    axes, groups = len(w["kernel"]), w["groups"]
    x = torch.randn(2, 4, *w["spatial"], dtype=torch.float64)
    weight = torch.randn(6, 4 // groups, *w["kernel"], dtype=torch.float64)
    bias = torch.randn(6, dtype=torch.float64)
    functional = torch.nn.functional
    arguments = weight, bias, w["stride"], w["padding"], w["dilation"], groups
    expected = getattr(functional, f"conv{axes}d")(x, *arguments)
    assert torch.allclose(convolve(x, *arguments), expected, rtol=1e-12, atol=1e-12)
    same = weight, None, [1], "same", w["dilation"], groups
    expected = getattr(functional, f"conv{axes}d")(x, *same)
    assert torch.allclose(convolve(x, *same), expected, rtol=1e-12, atol=1e-12)
    pooling = w["kernel"], w["stride"], w["padding"], ceil_mode, count_include_pad
    pooling += () if axes == 1 else (divisor,)
    expected = getattr(functional, f"avg_pool{axes}d")(x, *pooling)
    assert torch.allclose(average(x, *pooling), expected, rtol=1e-12, atol=1e-12)


def test_long_norms_are_those_of_torch() -> None:
    x = torch.rand(3, 2, 128, 128)
    exact = torch.linalg.vector_norm(x.double(), dim=(1, 2, 3))
    assert x[0].numel() > LONG
    assert torch.allclose(norm(x, 2, (1, 2, 3)).double(), exact, rtol=2e-7, atol=0)
    assert norm(x, 2, [1, 2, 3], True).shape == (3, 1, 1, 1)
    assert norm(x, 2, [1, 2, 3], dtype=torch.float64).dtype == torch.float64
    for arguments in ((x[:, :, :9], 2, (1, 2, 3)), (x, 1, (1, 2, 3)), (x, 2), (x.double(), 2)):
        assert norm(*arguments) is NotImplemented


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "strategy"), [((3, 224, 224), "spectral"), ((1, 90, 190), "conv")]
)
def test_large_images(shape: tuple[int, ...], strategy: str, path: Path) -> None:
    mode = "circular" if strategy == "spectral" else "zeros"
    layers = cl.Conv2d(shape[0], 4, 3, padding=1, padding_mode=mode), cl.ReSPro()
    folded = cl.fold(randomise(cl.ConformalLayers(*layers)), shape, strategy=strategy)
    cl.export_onnx(folded, path)
    x = samples(shape, torch.float32, 2)
    assert relative_error(run(path, x), folded(x)) <= 5e-6
