"""The shipped networks: small files whose records are true, and which run everywhere."""

from __future__ import annotations

import importlib.resources
import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import conformallayers as cl
import conformallayers.numpy as cln
from conformallayers.zoo.catalogue import ENDING, FOLDER, Record, RecordList, read_record
from support import FORM, TOLERANCES

LARGEST = 3 * 2**20  # bytes of all files
RECORDS = cl.zoo.list()
SHAPES = {
    "digits": (1, 8, 8),
    "mnist": (1, 28, 28),
    "fashion-mnist": (1, 28, 28),
    "cifar10": (3, 32, 32),
}
each = pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.name)


def test_files_are_small_and_all_of_them_are_listed() -> None:
    files = list(FOLDER.iterdir())
    assert sum(path.stat().st_size for path in files) <= LARGEST
    assert sorted(path.name for path in files) == [f"{one.name}{ENDING}" for one in RECORDS]
    shipped = importlib.resources.files("conformallayers").joinpath("zoo", "networks")
    assert shipped.joinpath(f"digits-micro{ENDING}").is_file()


@each
def test_record_agrees_with_its_file(record: Record) -> None:
    path = FOLDER / f"{record.name}{ENDING}"
    assert read_record(path) == record
    assert record.bytes == path.stat().st_size
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
    assert record.limits


def test_cards_and_the_table_hold_the_record() -> None:
    record = replace(cl.zoo.list()[0], name="toy<1>", labels=("no", "yes | perhaps"), commit=None)
    title, _, _, _, *lines = record.card.splitlines()
    rows = dict(line[2:-2].split(" | ", 1) for line in lines)
    share = f"{100 * record.accuracy:.2f} %"
    assert (title, rows["Classes"]) == ("# toy<1>", "no, yes \\| perhaps")
    assert rows["Accuracy"] == f"{share} of {record.images:,} test images"
    assert (rows["Training"], rows["Commit"]) == (f"`{record.command}`", "not recorded")
    for number in (record.multiply_adds, record.weights, record.parameters, record.bytes):
        assert f"{number:,}" in record.card
    header, _, line = str(RecordList([record])).splitlines()
    assert header.split("  ")[0] == "name"
    assert line.split("  ")[:1] == ["toy<1>"]
    assert share in line
    assert "<1>" not in RecordList([record])._repr_html_()


@each
def test_networks_run_at_the_recorded_cost(record: Record) -> None:
    folded, net = cl.zoo.load(record.name), cln.load(FOLDER / f"{record.name}{ENDING}")
    assert (folded.input_shape, folded.output_shape) == (record.input_shape, (10,))
    assert (folded.dtype, folded.labels) == (torch.float32, record.labels)
    assert (net.labels, net.about) == (record.labels, folded.about)
    x = torch.rand(1, *record.input_shape, generator=torch.Generator().manual_seed(0))
    with FlopCounterMode(display=False) as counter, torch.inference_mode():
        expected = folded(x)
    assert record.multiply_adds == counter.get_total_flops() // 2
    assert record.weights == sum(one.numel() for one in folded.recipe.constants.values())
    found = torch.from_numpy(net(np.asarray(x)))
    assert cl.testing.relative_error(found, expected) < TOLERANCES[torch.float32]


@pytest.mark.parametrize(
    "record",
    [
        pytest.param(one, id=one.name, marks=[pytest.mark.slow] if one.dataset != "digits" else [])
        for one in RECORDS
    ],
)
def test_accuracy_is_that_of_the_record(record: Record) -> None:
    pytest.importorskip("sklearn")
    from conformallayers.lab.data.datasets import load
    from conformallayers.lab.data.files import data_root, found_where

    if record.dataset != "digits" and not found_where(data_root(None))[record.dataset]:
        pytest.skip(f"no {record.dataset} in {data_root(None)}; see CONFORMALLAYERS_DATA")
    data, folded = load(record.dataset), cl.zoo.load(record.name)
    with torch.inference_mode():
        chosen = [folded(x.float() / 255).argmax(1) for x in data.test_images.split(1000)]
    right = int((torch.cat(chosen) == data.test_labels).sum())
    images = len(data.test_labels)
    assert (images, right / images) == (record.images, record.accuracy)


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        ("Digits_Mikro", 'Did you mean "digits-micro"?'),
        ("../networks/digits-micro", "cl.zoo.list() describes them."),
        (None, "cl.zoo.list() describes them."),
    ],
)
def test_unknown_names_are_refused(name: str, suggestion: str) -> None:
    with pytest.raises(cl.ConformalError, match=r"expected one of .*digits-lenetcl") as caught:
        cl.zoo.load(name)
    assert FORM.match(str(caught.value))
    assert f"got {name!r}" in str(caught.value)
    assert suggestion in str(caught.value)


def test_listing_needs_no_torch() -> None:
    code = "import conformallayers as cl, sys, json; names = [one.name for one in cl.zoo.list()]\n"
    code += "print(json.dumps([names, sorted({name.partition('.')[0] for name in sys.modules})]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    names, modules = json.loads(done.stdout)
    assert names == [one.name for one in RECORDS]
    assert not {"torch", "pydantic", "sklearn", "cyclopts", "rich"} & set(modules)
