"""cl.save and cl.load of folds: the same numbers again, or one clear error."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import conformallayers as cl
import conformallayers.numpy as cln
from conformallayers.folding.fold import fingerprint
from nets import DTYPES, NETS, SHAPE, folds, net
from support import samples


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "net.safetensors"


def same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.isnan(), b.isnan()) and torch.equal(*zeroed(a, b))


def zeroed(*tensors: Tensor) -> list[Tensor]:
    return [tensor.nan_to_num() for tensor in tensors]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", list(NETS))
@pytest.mark.sampled(4)
def test_folds_come_back_to_the_bit(name: str, dtype: torch.dtype, path: Path) -> None:
    x = samples(SHAPE, dtype, batch=5)
    x[1], x[2, 0, 0, 0] = 0, float("nan")
    seen = set()
    for folded in folds(name, dtype):
        cl.save(folded, path)
        loaded = cl.load(path)
        assert isinstance(loaded, cl.Folded)
        for batch in (x, x[:0], 1e3 * x):
            assert same(loaded(batch), folded(batch))
        for attribute in (
            "strategy",
            "dtype",
            "chunk_size",
            "origin",
            "input_shape",
            "output_shape",
        ):
            assert getattr(loaded, attribute) == getattr(folded, attribute)
        assert dict(loaded.explain()) == dict(folded.explain())
        assert str(loaded.recipe) == str(folded.recipe)
        assert not list(loaded.parameters())
        assert not loaded.training
        seen.add(folded.strategy)
    assert len(seen) >= 2 or seen == {"merged"}  # no stage with activations and without biases


def test_what_is_loaded_can_be_saved_and_moved_again(path: Path) -> None:
    folded = cl.fold(net("biases"), SHAPE, strategy="dense")
    cl.save(folded, path)
    first = path.read_bytes()
    cl.save(cl.load(path), path)
    assert path.read_bytes() == first
    x = samples(SHAPE, torch.float64)
    assert torch.equal(cl.load(path).double()(x), folded.double()(x))


def test_origin_tells_the_weights(path: Path) -> None:
    model = net("chain")
    folded = cl.fold(model, SHAPE)
    assert folded.origin == fingerprint(model)
    with torch.no_grad():
        model[0].weight += 1
    assert folded.origin != fingerprint(model)
    cl.save(folded, path)
    assert cl.load(path).origin == folded.origin


# -- refused ------------------------------------------------------------------------------------


class Own(nn.Module):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * input


def registered(strategy: str) -> cl.Folded:
    cl.register_linear(Own, bound=lambda module, shape: 2.0)
    model = cl.ConformalLayers(cl.Linear(3, 3), Own(), cl.ReSPro())
    return cl.fold(model, (3,), strategy=strategy)


def without_values() -> cl.Folded:
    return cl.fold(cl.ConformalLayers(cl.Linear(3, 3), cl.ReSPro()), (3,)).to("meta")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: registered("layers"), "got Own. Fold only the layers before it"),
        (without_values, "on meta"),
        (lambda: net("chain"), r"expected a Folded, got ConformalLayers\. Fold a model first"),
    ],
)
def test_what_a_file_cannot_hold_is_refused_by_name(
    make: Callable[[], Any], message: str, path: Path
) -> None:
    with pytest.raises(cl.ConformalError, match=message):
        cl.save(make(), path)
    assert not list(path.parent.iterdir())


def test_a_registered_layer_may_fold_away(path: Path) -> None:
    folded = registered("dense")
    cl.save(folded, path)
    x = samples((3,), torch.float32)
    assert torch.equal(cl.load(path)(x), folded(x))


@pytest.mark.parametrize(
    ("notes", "message"),
    [
        ({"labels": "ab"}, "'ab' in place of a list"),
        ({"labels": ["a"]}, "1 labels for 36 outputs"),
        ({"labels": [1] * 36}, "1 in place of str"),
        ({"about": {"x": float("nan")}}, "not JSON compliant"),
        ({"about": {"x": object()}}, "not JSON serializable"),
    ],
)
def test_notes_are_checked(notes: dict[str, Any], message: str, path: Path) -> None:
    with pytest.raises(cl.ConformalError, match=message):
        cl.save(cl.fold(net("chain"), SHAPE), path, **notes)
    assert not path.exists()


def test_notes_come_back(path: Path) -> None:
    labels, about = [f"class {index}" for index in range(36)], {"dataset": "pets", "white": 255}
    cl.save(cl.fold(net("chain"), SHAPE), path, labels=labels, about=about)
    for loaded in (cl.load(path), cln.load(path)):
        assert (loaded.labels, loaded.about) == (tuple(labels), about)
    cl.save(cl.load(path), path)
    assert cl.load(path).labels == tuple(labels)


@pytest.mark.parametrize("ending", ["onnx", "PT", "c"])
def test_an_ending_of_another_format_is_refused(ending: str, tmp_path: Path) -> None:
    with pytest.raises(cl.ConformalError, match=r"save\(path\): .*export_onnx.*torch.save"):
        cl.save(cl.fold(net("chain"), SHAPE), tmp_path / f"net.{ending}")
    assert not list(tmp_path.iterdir())


def test_a_device_is_not_replaced(tmp_path: Path) -> None:
    folded = cl.fold(net("chain"), SHAPE)
    for place in (tmp_path, os.devnull):
        with pytest.raises(cl.ConformalError, match="expected the path of a file, got a "):
            cl.save(folded, place)
    cl.save(folded, tmp_path / "new" / "one" / "net")  # a missing folder is created
    assert [file.name for file in (tmp_path / "new" / "one").iterdir()] == ["net"]


def test_a_full_disk_leaves_the_old_file(path: Path) -> None:
    """A limit on the size of files stands for the disk: the write itself fails, half way."""
    folded = cl.fold(net("chain"), SHAPE)
    cl.save(folded, path)
    before = path.read_bytes()
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            cl.save(folded, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


def test_a_loaded_fold_says_that_its_regions_are_not_known(path: Path) -> None:
    folded = cl.fold(nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3)), (2, 8, 8))
    cl.save(folded, path)
    assert "affine regions" in str(cl.load(path).explain())
    assert "affine regions" not in str(folded.explain())
