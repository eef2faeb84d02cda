"""The shipped networks: small files whose records are true, which fold, run everywhere and train further."""

from __future__ import annotations

import importlib.resources
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import conformallayers as cl
import conformallayers.numpy as cln
from conformallayers.folding.files import read_network
from conformallayers.recipe.archive import open_archive
from conformallayers.zoo.catalogue import ENDING, FOLDER, network_files, read_record
from conformallayers.zoo.records import Record
from support import FORM, TOLERANCES

LARGEST = 3_000_000  # bytes of all files
RECORDS = cl.zoo.list()
SHAPES = {
    "digits": (1, 8, 8),
    "mnist": (1, 28, 28),
    "fashion-mnist": (1, 28, 28),
    "cifar10": (3, 32, 32),
}
each = pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.name)


def pixels(record: Record, count: int = 4) -> torch.Tensor:
    """Return random images with pixels in [0, 1]; the first one is black."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(count, *record.input_shape, generator=generator)
    x[0] = 0
    return x


def test_files_are_small_and_all_of_them_are_listed() -> None:
    files = list(FOLDER.iterdir())
    assert sum(path.stat().st_size for path in files) <= LARGEST
    assert sorted(path.name for path in files) == [f"{one.name}{ENDING}" for one in RECORDS]
    needed = {f"{data}-{kind}" for data in ("digits", "cifar10") for kind in ("micro", "lenetcl")}
    assert needed <= set(network_files())


def test_files_belong_to_the_package() -> None:
    shipped = importlib.resources.files("conformallayers").joinpath("zoo", "networks")
    assert shipped.joinpath(f"digits-micro{ENDING}").is_file()


@each
def test_record_agrees_with_its_file(record: Record) -> None:
    path = FOLDER / f"{record.name}{ENDING}"
    assert read_record(path) == record
    assert record.bytes == path.stat().st_size
    model = read_network(open_archive(path))
    assert record.parameters == sum(weight.numel() for weight in model.parameters())
    assert record.input_shape == SHAPES[record.dataset]
    assert record.name.startswith(f"{record.dataset}-")
    assert record.network.partition(" ")[0] in cl.networks.__all__
    assert len(record.labels) == 10
    assert 0.5 < record.accuracy <= 1
    assert (record.accuracy * record.images) % 1 == pytest.approx(0, abs=1e-9)
    assert record.command.startswith("conformallayers train ")
    assert not set("/\\~") & set(record.command), "paths of the machine it was trained on"
    assert record.commit is None or len(record.commit.partition("-")[0]) == 40
    assert record.licence == "Apache-2.0"
    assert all(getattr(record, name) for name in ("limits", "images"))


@each
def test_costs_are_those_of_the_fold(record: Record) -> None:
    """After a change of the folding: ``conformallayers zoo build NAME ...`` counts them again."""
    from torch.utils.flop_counter import FlopCounterMode

    folded = cl.zoo.load(record.name)
    with FlopCounterMode(display=False) as counter, torch.inference_mode():
        folded(pixels(record, 1))
    assert record.multiply_adds == counter.get_total_flops() // 2
    constants = folded.recipe.constants.values()
    assert record.weights == sum(constant.numel() for constant in constants)


@each
def test_fold_equals_the_model(record: Record) -> None:
    model, folded = cl.zoo.load(record.name, folded=False), cl.zoo.load(record.name)
    assert isinstance(folded, cl.Folded)
    assert not isinstance(model, cl.Folded)
    assert not model.training
    assert (folded.input_shape, folded.output_shape) == (record.input_shape, (10,))
    assert (folded.dtype, folded.labels) == (torch.float32, record.labels)
    assert cl.fold_error(model, folded, pixels(record)) < 5e-6
    cl.testing.assert_folds(model, record.input_shape, dtypes=(torch.float64,))


@each
def test_fold_is_saved_and_runs_in_numpy(record: Record, tmp_path: Path) -> None:
    folded, x = cl.zoo.load(record.name), pixels(record)
    cl.save(folded, path := tmp_path / "net.safetensors")
    net = cln.load(path)
    assert (net.labels, net.about) == (record.labels, folded.about)
    with torch.no_grad():
        expected = folded(x)
        assert torch.equal(cl.load(path)(x), expected)
    found = torch.from_numpy(net(np.asarray(x)))
    assert cl.testing.relative_error(found, expected) < TOLERANCES[torch.float32]


@each
def test_model_is_trained_further(record: Record) -> None:
    model = cl.zoo.load(record.name, folded=False).train()
    x, labels = pixels(record, 16), torch.arange(16) % 10
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), labels)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[1] < losses[0]
    gradients = [weight.grad for weight in model.parameters()]
    assert all(gradient is not None and gradient.any() for gradient in gradients)
    cl.testing.assert_folds(model.eval(), record.input_shape, dtypes=(torch.float32,))


def measured(record: Record, root: str | None = None) -> tuple[int, float]:
    """Return the number of test images, and the share that the shipped file classifies correctly."""
    pytest.importorskip("sklearn")
    from conformallayers.lab.data.datasets import load

    data = load(record.dataset, root)
    folded, right = cl.zoo.load(record.name), 0
    with torch.inference_mode():
        for images, labels in zip(
            data.test_images.split(1000), data.test_labels.split(1000), strict=True
        ):
            right += int((folded(images.float() / 255).argmax(1) == labels).sum())
    return len(data.test_labels), right / len(data.test_labels)


@pytest.mark.parametrize("name", ["digits-micro", "digits-lenetcl"])
def test_accuracy_on_digits_is_that_of_the_record(name: str) -> None:
    (record,) = (one for one in RECORDS if one.name == name)
    assert measured(record) == (record.images, record.accuracy)


@pytest.mark.slow
@pytest.mark.parametrize(
    "record", [one for one in RECORDS if one.dataset != "digits"], ids=lambda one: one.name
)
def test_accuracy_is_that_of_the_record(record: Record) -> None:
    pytest.importorskip("sklearn")
    from conformallayers.lab.data.files import data_root, found_where

    if not found_where(data_root(None))[record.dataset]:
        pytest.skip(f"no {record.dataset} in {data_root(None)}; see CONFORMALLAYERS_DATA")
    assert measured(record) == (record.images, record.accuracy)


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        ("digits-mikro", 'Did you mean "digits-micro"?'),
        ("Digits_Micro", 'Did you mean "digits-micro"?'),
        ("imagenet", "cl.zoo.list() describes them."),
        ("../networks/digits-micro", "cl.zoo.list() describes them."),
        ("", "cl.zoo.list() describes them."),
        (None, "cl.zoo.list() describes them."),
    ],
)
def test_unknown_names_are_refused(name: str, suggestion: str) -> None:
    with pytest.raises(cl.ConformalError, match=r"expected one of .*digits-lenetcl") as caught:
        cl.zoo.load(name)
    assert FORM.match(str(caught.value))
    assert f"got {name!r}" in str(caught.value)
    assert suggestion in str(caught.value)


def test_damaged_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = bytearray((FOLDER / f"digits-micro{ENDING}").read_bytes())
    content[-1] ^= 1
    (tmp_path / f"digits-micro{ENDING}").write_bytes(content)
    monkeypatch.setattr("conformallayers.zoo.catalogue.FOLDER", tmp_path)
    for use in (cl.zoo.list, lambda: cl.zoo.load("digits-micro")):
        with pytest.raises(cl.ConformalError, match="bytes that differ from its checksum"):
            use()


def test_listing_needs_no_torch() -> None:
    code = "import conformallayers as cl, sys, json; names = [one.name for one in cl.zoo.list()]\n"
    code += "print(json.dumps([names, sorted({name.partition('.')[0] for name in sys.modules})]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    names, modules = json.loads(done.stdout)
    assert names == [one.name for one in RECORDS]
    assert not {"torch", "pydantic", "sklearn", "cyclopts", "rich"} & set(modules)


def test_networks_are_modules_of_the_library() -> None:
    model = cl.zoo.load("digits-micro", folded=False)
    assert isinstance(model, nn.Sequential)
    assert isinstance(model[0], cl.Centre)
    assert isinstance(model[-1], cl.networks.StageNet)
