"""Files made to do harm, with a right checksum, and models that a file would not give back whole."""

from __future__ import annotations

import json
import os
import resource
import stat
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import conformallayers as cl
import conformallayers.numpy as cln
from conformallayers.export.archive import checksum, open_archive
from nets import SHAPE, net
from support import samples

Header = dict[str, Any]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "net.safetensors"


class File:
    """A file taken apart: its header, the document in it, and the bytes of its arrays."""

    def __init__(self, model: nn.Module, path: Path) -> None:
        cl.save(model, path)
        content, self.path = path.read_bytes(), path
        (length,) = struct.unpack("<Q", content[:8])
        self.header: Header = json.loads(content[8 : 8 + length])
        self.document: Header = json.loads(self.header["__metadata__"]["conformallayers"])
        self.data = content[8 + length :]

    @property
    def structure(self) -> Any:
        return self.document["structure"]

    @property
    def core(self) -> Any:
        return dict(self.structure["children"])["core"]

    def replace(self, name: str, dtype: str, shape: list[int], data: bytes = b"") -> None:
        """Put another array in the place of one."""
        start, stop = self.header[name]["data_offsets"]
        more = len(data) - (stop - start)
        self.data = self.data[:start] + data + self.data[stop:]
        for key, entry in self.header.items():
            if key not in ("__metadata__", name) and entry["data_offsets"][0] >= stop:
                entry["data_offsets"] = [place + more for place in entry["data_offsets"]]
        places = [start, start + len(data)]
        self.header[name] = {"dtype": dtype, "shape": shape, "data_offsets": places}

    def write(self, change: Callable[[str], str] = str, encoding: str = "utf-8") -> None:
        """Sign and write it; ``change`` may put something into the text that no object makes."""
        document = change(json.dumps(self.document))
        self.header["__metadata__"]["conformallayers"] = document
        self.header["__metadata__"]["sha256"] = checksum(self.header, [self.data])
        text = change(json.dumps(self.header)).encode(encoding)
        self.path.write_bytes(struct.pack("<Q", len(text)) + text + self.data)


def fold(name: str = "unpadded", strategy: str = "dense") -> cl.Folded:
    return cl.fold(net(name), SHAPE, strategy=strategy)


def refused(path: Path, message: str = "expected", *loaders: Callable[[Path], Any]) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for load in loaders or (cl.load, cln.load):
        with pytest.raises(cl.ConformalError, match=message) as caught:
            load(path)
        assert str(caught.value).startswith(f"load({path})")
        assert len(str(caught.value)) < 300 + len(str(path))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KiB


# -- memory and indices -------------------------------------------------------------------------


def test_sparse_indices_stay_inside_of_the_sample(path: Path) -> None:
    file = File(fold(strategy="sparse"), path)
    file.core["settings"]["largest"] = 10**9
    name = "body.core.matrix_column"
    wrong = np.full(file.header[name]["shape"], 900_000_000, np.int32)
    file.replace(name, "I32", list(wrong.shape), wrong.tobytes())
    file.write()
    refused(path)


@pytest.mark.parametrize("part", ["value", "column", "crow"])
def test_sparse_arrays_belong_together(part: str, path: Path) -> None:
    file = File(fold(strategy="sparse"), path)
    name = f"body.core.matrix_{part}"
    dtype = file.header[name]["dtype"]
    file.replace(name, dtype, [1], b"\0" * 4)
    file.write()
    refused(path)
    file = File(fold(strategy="sparse"), path)
    count = file.header[name]["shape"][0]
    file.replace(name, "I64", [count], b"\0" * 8 * count)
    file.write()
    refused(path, "expected", cl.load)


@pytest.mark.parametrize(
    ("name", "strategy", "array"),
    [("unpadded", "dense", "forms"), ("circular", "spectral", "symbols")],
)
@pytest.mark.parametrize("shape", [[2**30, 0, 0], [2**47, 2**47, 0], [2**20, 0, 0]], ids=str)
def test_empty_arrays_do_not_run_away(
    name: str, strategy: str, array: str, shape: list[int], path: Path
) -> None:
    file = File(fold(name, strategy), path)
    file.replace(f"body.core.{array}", "F32", shape)
    file.write()
    refused(path)


def test_an_empty_kernel_does_not_run_away(path: Path) -> None:
    model = cl.ConformalLayers(cl.ConvTranspose1d(2, 2, 3), cl.ReSPro(1.0))
    file = File(cl.fold(model, (2, 5), strategy="layers"), path)
    (name,) = (name for name in file.header if name.endswith("weight"))
    file.replace(name, "F32", [2, 0, 2**26])
    file.write()
    refused(path)


def test_an_array_is_read_once(path: Path) -> None:
    file = File(nn.Sequential(nn.Linear(1000, 1000, bias=False)), path)
    (child,) = file.structure["children"]
    file.structure["children"] = [[str(index), child[1]] for index in range(300)]
    file.write()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    loaded = cl.load(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KiB, not 1.2 GB
    assert len(list(loaded)) == 300


# -- text ---------------------------------------------------------------------------------------


def test_headers_that_are_no_json_are_refused(path: Path) -> None:
    file = File(fold(), path)
    file.write(encoding="utf-16-le")
    refused(path, "no JSON")
    file = File(fold(), path)
    file.write(lambda text: text.replace('"scale": ', '"scale": 1e999, "was": '))
    refused(path, "no JSON")
    file = File(fold(), path)
    file.write(lambda text: text.replace("{", '{"__metadata__": {}, ', 1))
    refused(path, "no JSON")
    for inside in ("[" * 200_000 + "]" * 200_000, "[" * 900 + "]" * 900, "1" * 5000, "NaN"):
        text = f'{{"a": {inside}}}'.encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text)
        refused(path)


@pytest.mark.parametrize("value", ["1e999", "1", "[" * 300 + "]" * 300])
def test_metadata_is_text(value: str, path: Path) -> None:
    file = File(fold(), path)
    file.header["__metadata__"]["more"] = "?"
    file.write(lambda text: text.replace('"more": "?"', f'"more": {value}'))
    refused(path)


def test_a_header_may_not_be_larger_than_any_network_needs(path: Path) -> None:
    text = b'{"a": [' + b"[]," * 7_000_000 + b"0]}"
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    refused(path, "a header of 21000010 bytes")


def test_messages_are_short(path: Path) -> None:
    file = File(fold(), path)
    file.document |= {"format": 9, "library": "x" * 10**6}
    file.write()
    refused(path, r"format 9, written by conformallayers x+\.\.\.\. Upgrade")
    file.document["format"] = [[["x"] * 1000]]
    file.write()
    refused(path, "got format a list")


# -- documents ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("piece", value) for value in (0, -1, 0.7, True, "x", [1])),
        *(("dtype", value) for value in ("int64", "load", None, ["float32"])),
        *(("input_shape", value) for value in ([], [0], [2.0, 6, 6], "266", None)),
        *(("output_shape", value) for value in ([-1], {}, [2**60])),
        ("strategy", None),
        ("origin", 1),
    ],
)
def test_facts_of_a_fold_are_facts(key: str, value: Any, path: Path) -> None:
    file = File(fold(), path)
    file.document[key] = value
    file.write()
    refused(path, "expected a whole file of cl.save")


@pytest.mark.parametrize(
    ("key", "value"),
    [("piece", 0), ("piece", 0.5), ("scale", "x"), ("scale", {"is": "Cost"}), ("rules", [])],
)
def test_settings_of_a_part_are_numbers(key: str, value: Any, path: Path) -> None:
    file = File(fold(), path)
    file.structure["settings"][key] = value
    file.write()
    refused(path)


@pytest.mark.parametrize("limits", [["a"], [], [1, 2, 3], "ab", {"is": "float", "value": "inf"}])
def test_limits_are_two_numbers(limits: Any, path: Path) -> None:
    file = File(fold(), path)
    file.structure["settings"]["limits"] = limits
    file.write()
    refused(path, "expected", cl.load)  # numpy does not look at them


def test_an_empty_batch_hides_nothing(path: Path) -> None:
    """What takes any shape, or any factor, for no sample at all, is still found."""
    file = File(fold("chain", "banded"), path)
    file.core["settings"]["weights"] = [{"is": "Cost"}]
    file.write()
    refused(path)
    for strategy in ("dense", "sparse"):
        file = File(fold(strategy=strategy), path)
        file.core["settings"]["output_shape"] = [5, 7]
        file.document["output_shape"] = [5, 7]
        file.write()
        refused(path)
    file = File(fold(), path)
    file.header["body.core.forms"]["shape"].insert(0, 1)
    file.write()
    refused(path)


@pytest.mark.parametrize(
    "change",
    [
        {"padding": [0, 0, 0]},
        {"padding": [-1, 0]},
        {"stride": [0, 1]},
        {"dilation": ["x", "y"]},
        {"kernel_size": [3]},
        {"groups": 0},
        {"padding_mode": "none"},
    ],
    ids=str,
)
def test_windows_have_a_size(change: dict[str, Any], path: Path) -> None:
    file = File(net("unpadded"), path)
    file.structure["children"][0][1]["settings"] |= change
    file.write()
    refused(path, "makes no network", cl.load)


def test_steps_of_a_route_have_the_axes_of_the_image(path: Path) -> None:
    file = File(fold("chain", "conv"), path)
    steps = file.core["settings"]["geometry"]["steps"]
    next(step for step in steps if step[1])[1].append(0)
    file.write()
    refused(path, "makes no network", cl.load)


def test_parts_of_a_model_are_those_of_its_class(path: Path) -> None:
    for old, new in (('["features", ', '["other", '), ('["head", ', '["features.0", ')):
        file = File(cl.networks.LeNetCL(), path)
        file.write(lambda text, old=old, new=new: text.replace(old, new))
        refused(path, "makes no network", cl.load)
    for old, new in (
        ('"how": "concatenate"', '"how": "nothing"'),
        ('"dim": 1', '"dim": 0'),
        ('"dim": 1', '"dim": "x"'),
        ('["join", ', '["body", '),
    ):
        file = File(net("branches"), path)
        assert old in json.dumps(file.document)
        file.write(lambda text, old=old, new=new: text.replace(old, new))
        refused(path, "makes no network", cl.load)


# -- what a file would not give back ------------------------------------------------------------


def with_parameter() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2))
    model.register_parameter("gain", nn.Parameter(torch.ones(1)))
    return model


def with_buffer() -> nn.Module:
    model = cl.ConformalLayers(cl.Linear(2, 2), cl.ReSPro())
    model.register_buffer("mask", torch.ones(1))
    return model


def with_child() -> nn.Module:
    layer = nn.Linear(2, 2)
    layer.add_module("adapter", nn.Linear(2, 2))
    return nn.Sequential(layer)


def with_names() -> nn.Module:
    several = nn.ModuleList([nn.Linear(2, 2)])
    several.add_module("last", nn.Linear(2, 2))
    return nn.Sequential(several)


def tied_by_memory() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 3, bias=False), nn.Linear(3, 2, bias=False))
    model[1].weight = nn.Parameter(model[0].weight.data.T)
    return model


def with_stale_padding() -> nn.Module:
    layer = nn.Conv1d(1, 1, 3, padding="same")
    layer.padding = "some"
    return layer


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (with_parameter, "Sequential with tensors of its own"),
        (with_buffer, "ConformalLayers with tensors of its own"),
        (with_child, "Linear with other settings or with children"),
        (with_names, "a list with names"),
        (tied_by_memory, r"save: 1\.weight: expected a tensor of its own, got .* 0\.weight"),
        (with_stale_padding, "this fails"),
    ],
)
def test_what_would_be_lost_is_refused(
    make: Callable[[], nn.Module], message: str, path: Path
) -> None:
    with pytest.raises(cl.ConformalError, match=message):
        cl.save(make(), path)
    assert not path.exists()


def test_parameters_side_by_side_in_one_memory_are_kept(path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    memory = torch.rand(8)
    for layer, part in zip(model, memory.split(4), strict=True):
        layer.weight = nn.Parameter(part.view(2, 2))
    cl.save(model, path)
    x = torch.rand(3, 2)
    assert torch.equal(cl.load(path)(x), model(x))


def test_frozen_statistics_stay_frozen(path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2), nn.Dropout(0.5)).train()
    model[1].eval()
    cl.save(model, path)
    loaded: Any = cl.load(path)
    assert [module.training for module in loaded.modules()] == [True, True, False, True]
    loaded[2].eval()
    model[2].eval()
    x = samples(SHAPE, torch.float32)
    assert torch.equal(loaded(x), model(x))
    assert torch.equal(loaded[1].running_mean, torch.zeros(2))
    cl.save(model.eval(), path)
    assert not any(module.training for module in cl.load(path).modules())


def test_numbers_of_numpy_are_numbers(path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(2, np.int64(3), 3, stride=np.int32(2)), nn.Dropout(0.25))
    model[1].p = np.float32(0.25)
    cl.save(model.eval(), path)
    x = samples(SHAPE, torch.float32)
    assert torch.equal(cl.load(path)(x), model(x))


# -- places -------------------------------------------------------------------------------------


def test_a_device_is_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    link = tmp_path / "link"
    link.symlink_to(pipe)
    for place in (pipe, link, tmp_path):
        with pytest.raises(cl.ConformalError, match="expected a file or a free name, got a "):
            cl.save(nn.Linear(2, 2), place)
        refused(place, "expected a file of cl.save, got a (device or a pipe|folder)")
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    with pytest.raises(cl.ConformalError, match="a device"):
        cl.save(nn.Linear(2, 2), os.devnull)
    assert stat.S_ISCHR(os.stat(os.devnull).st_mode)


def test_permissions_stay(path: Path) -> None:
    cl.save(nn.Linear(2, 2), path)
    path.chmod(0o600)
    cl.save(nn.Linear(3, 3), path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert cl.load(path).in_features == 3


def test_long_names_are_names(tmp_path: Path) -> None:
    path = tmp_path / ("n" * 250)
    cl.save(nn.Linear(2, 2), path)
    assert cl.load(path).in_features == 2


def test_a_new_file_does_not_mix_with_the_old_one(path: Path) -> None:
    """Somebody saves the next epoch while the last one is being loaded."""
    old, new = nn.Linear(64, 64), nn.Linear(64, 64)
    cl.save(old, path)
    archive = open_archive(path)
    cl.save(new, path)
    weight = torch.empty(64, 64)
    archive.fill("weight", weight.view(-1).view(torch.uint8).numpy().data)
    assert torch.equal(weight, old.weight)
    assert torch.equal(cl.load(path).weight, new.weight)


def test_a_full_disk_leaves_the_old_file(path: Path) -> None:
    """A limit on the size of files stands for the disk: the write itself fails, half way."""
    cl.save(nn.Linear(2, 2), path)
    before = path.read_bytes()
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            cl.save(nn.Linear(100, 100), path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]
