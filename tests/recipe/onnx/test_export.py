"""Recipes as ONNX files: the numbers of torch at any batch size, or one clear error and no file."""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import conformallayers as cl
from conformallayers.recipe import integer_operations as integer
from conformallayers.recipe import layer_operations as layer
from conformallayers.recipe import point_operations as point
from conformallayers.recipe.onnx import export as exporter
from conformallayers.recipe.onnx.export import export_onnx, onnx_model
from conformallayers.recipe.recipe import INPUT, OPERATIONS, Recipe, RecipeBuilder
from onnx_support import runtime, session
from programs import Fold
from recipe_cases import RECIPE_CASES

onnx = pytest.importorskip("onnx", reason="the extra onnx is not installed")
CASES = {case.name: case for case in RECIPE_CASES}
TYPICAL = "points published"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "net.onnx"


def network(name: str = TYPICAL, dtype: torch.dtype = torch.float32) -> Fold:
    return Fold(CASES[name].build(), dtype)


# -- the same numbers ---------------------------------------------------------------------------


def test_every_operation_has_a_translation_or_is_refused() -> None:
    assert set(OPERATIONS.values()) - set(exporter.RUN) == {layer.Call}


@pytest.mark.parametrize("opset", [18, 25])
def test_graphs_are_valid_in_every_opset(opset: int) -> None:
    for case in RECIPE_CASES[::3] + RECIPE_CASES[-30:]:
        model = onnx_model(case.build(), opset)
        onnx.checker.check_model(model, full_check=True)
        assert [entry.version for entry in model.opset_import] == [opset]


def test_constants_of_numpy_give_the_same_graph() -> None:
    recipe = network().recipe
    arrays = recipe.with_constants(lambda _, array: array.numpy())
    first, second = (onnx_model(r, 20) for r in (recipe, arrays))
    assert first == second


def test_a_recipe_without_operations_is_the_identity() -> None:
    x = torch.randn(3, 2)
    assert torch.equal(session(Recipe((2,), (2,), (), INPUT))(x), x)


def test_values_that_are_read_again_may_be_the_result() -> None:
    builder = RecipeBuilder((3,))
    y = builder.add(layer.Elementwise, INPUT, function="tanh")
    builder.add(layer.Add, y, y)
    model = onnx_model(builder.recipe(y), 20)
    assert [node.op_type for node in model.graph.node] == ["Tanh"]
    assert not model.graph.initializer


# -- the file -----------------------------------------------------------------------------------


def test_what_the_file_says_of_itself(path: Path) -> None:
    net = network()
    export_onnx(net, path)
    assert str(Path.cwd()).encode() not in path.read_bytes()
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    (version,) = [entry.version for entry in onnx.load(path).opset_import]
    assert version == exporter._newest() >= 18
    export_onnx(net, path.with_name("older.onnx"), opset=19)
    (older,) = [entry.version for entry in onnx.load(path.with_name("older.onnx")).opset_import]
    assert older == 19
    held = runtime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (x,), (y,) = held.get_inputs(), held.get_outputs()
    assert (x.name, x.shape, x.type) == ("x", ["batch", *net.input_shape], "tensor(float)")
    assert (y.name, y.shape) == ("y", ["batch", *net.output_shape])
    said = held.get_modelmeta().custom_metadata_map
    assert said["conformallayers.library"] == cl.__version__
    assert said["conformallayers.origin"] == net.origin
    assert said["conformallayers.strategy"] == net.strategy
    assert said["conformallayers.dtype"] == "float32"
    assert json.loads(said["conformallayers.input_shape"]) == list(net.input_shape)


def test_equal_recipes_give_equal_files(path: Path) -> None:
    contents = set()
    for _ in range(2):
        export_onnx(network(), path)
        contents.add(path.read_bytes())
    assert len(contents) == 1


# -- refused ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (lambda: nn.Linear(2, 2), {}, r"expected a Folded, got Linear\. Fold it first: "),
        (lambda: "net", {}, r"expected a Folded, got str\. Pass the result of cl\.fold"),
        (
            lambda: network(dtype=torch.float64),
            {},
            r"got torch\.float64\. Fold with dtype=torch\.float32",
        ),
        (lambda: network().to("meta"), {}, "one on meta"),
        (network, {"opset": 9}, "from 18 to 25, got 9"),
        (network, {"opset": True}, "got True"),
    ],
)
def test_what_cannot_be_exported_is_refused_by_name(
    make: Callable[[], Any], options: dict[str, Any], message: str, path: Path
) -> None:
    with pytest.raises(cl.ConformalError, match=message):
        export_onnx(make(), path, **options)
    assert not list(path.parent.iterdir())


@pytest.mark.usefixtures("seeded")
def test_outputs_far_below_their_inputs(path: Path) -> None:
    convs = (cl.Conv2d(size, 32, 3, padding=1) for size in (3, *[32] * 9))
    body = cl.ConformalLayers(*(part for conv in convs for part in (conv, cl.ReSPro())))
    model = nn.Sequential(body, nn.Flatten(), nn.Linear(32 * 144, 2, bias=False))
    folded = cl.fold(model, (3, 12, 12), strategy="layers")
    assert folded(torch.rand(1, 3, 12, 12)).abs().max() < 1e-10
    export_onnx(folded, path)
    cl.Session(folded, engine="onnxruntime")


@pytest.mark.parametrize("seed", [16, 18, 24])
def test_one_output_that_is_near_zero_for_some_samples(seed: int, path: Path) -> None:
    torch.manual_seed(seed)
    first, second = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 16, 3, padding=1)
    body = first, nn.ReLU(), nn.MaxPool2d(2), second, nn.ReLU(), nn.AdaptiveAvgPool2d(1)
    model = nn.Sequential(*body, nn.Flatten(), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
    folded = cl.fold(model, (1, 12, 12))
    export_onnx(folded, path)
    assert cl.Session(folded).engine == "onnxruntime"


def test_a_missing_extra_is_named(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(cl.MissingExtra, match=r"needs onnx: pip install .*\[onnx\]"):
        export_onnx(network(), path)
    assert not list(path.parent.iterdir())


@pytest.fixture
def without_runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "onnxruntime", None)
        exporter._newest.cache_clear()
        yield
    exporter._newest.cache_clear()


@pytest.mark.usefixtures("without_runtime")
@pytest.mark.parametrize("name", [TYPICAL, "integer points projective 1.5", "integers 2d"])
def test_without_onnxruntime_the_evaluator_of_onnx_compares(name: str, path: Path) -> None:
    export_onnx(network(name), path)
    assert [entry.version for entry in onnx.load(path).opset_import] == [20]


@pytest.mark.usefixtures("without_runtime")
def test_without_onnxruntime_other_numbers_refuse_the_export(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = lambda op, graph, z: abs(z).reduce_sample("ReduceSum").scalar()  # noqa: E731
    monkeypatch.setitem(exporter.RUN, point.SumSquares, wrong)
    model = cl.ConformalLayers(cl.Conv2d(1, 8, 3), cl.ReSPro(), nn.LPPool2d(2, 1, 2), cl.Flatten())
    with pytest.raises(
        cl.ConformalError, match="at batch size 1 in the reference evaluator of onnx"
    ):
        export_onnx(cl.fold(model, (1, 8, 8)), path)
    assert not list(path.parent.iterdir())


class Wrong:
    """A session that returns other numbers than the file."""

    def __init__(self, held: Any, change: Callable[[Any], Any]) -> None:
        self.held, self.change = held, change

    def run(self, *arguments: Any) -> list[Any]:
        return [self.change(y) for y in self.held.run(*arguments)]


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
    change: Callable[[Any], Any], message: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path.write_bytes(b"the file before")
    held = exporter.inference_session
    exporter._newest()
    monkeypatch.setattr(exporter, "inference_session", lambda *a: Wrong(held(*a), change))
    with pytest.raises(cl.ConformalError, match=message):
        export_onnx(network(), path)
    assert [file.read_bytes() for file in path.parent.iterdir()] == [b"the file before"]


def test_multipliers_do_not_round_sums_of_integers() -> None:
    # Sums of 2^16 after larger ones; times 201 / 2^17 they are 100.5, which any rounding of a sum moves.
    draw = np.random.default_rng(0)
    q, weight = draw.integers(-127, 128, 400), draw.integers(-127, 128, (64, 400))
    q[-120:] = [127] * 119 + [1]
    weight[:, -120:] = 0
    missing = 2**16 - weight @ q
    whole, rest = np.divmod(missing, 127)
    weight[:, -1] = rest
    weight[:, -120:-1] = (whole[:, None] + np.arange(119)) // 119
    assert np.all(weight @ q == 2**16)
    assert abs(weight).max() <= 127
    builder = RecipeBuilder((400, 1, 2))
    held: dict[str, Any] = {
        "weight": builder.constant("w", torch.from_numpy(weight[..., None, None]).to(torch.int8)),
        "multiplier": builder.constant("m", torch.full((64,), 201, dtype=torch.int32)),
    }
    windows: dict[str, Any] = {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1)}
    z = builder.add(integer.Quantize, INPUT, factor=1.0)
    z = builder.add(integer.IntegerConv, z, **held, **windows, shift=17)
    recipe = builder.recipe(builder.add(integer.Dequantize, z, scale=1.0))
    x = torch.from_numpy(q).float().reshape(1, 400, 1, 1).expand(-1, -1, -1, 2).contiguous()
    assert (session(recipe)(x) == 100).all()


def test_a_failed_export_leaves_the_old_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net = network()
    path.write_bytes(b"the file before")
    with monkeypatch.context() as patched:
        patched.setattr(exporter, "_serialized", lambda model: b"no model")
        with pytest.raises(cl.ConformalError, match=r"that onnx\.checker accepts, got"):
            export_onnx(net, path)

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            export_onnx(net, path)
    with monkeypatch.context() as patched:
        patched.setattr(exporter, "_LARGEST", 100)
        with pytest.raises(cl.ConformalError, match="expected at most 2 GiB"):
            export_onnx(net, path)
    assert [file.read_bytes() for file in path.parent.iterdir()] == [b"the file before"]


def test_large_maps_are_checked_in_small_batches(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = network()
    monkeypatch.setattr(exporter, "_ELEMENTS", 2 * net.recipe.peak_elements())
    assert [len(x) for x in exporter._batches(net)] == [1, 2, 2, 2, 2, 1]
    export_onnx(net, path)
    monkeypatch.setattr(exporter, "_ELEMENTS", 2**27)
    assert [len(x) for x in exporter._batches(net)] == [1, 4, 64]
