"""The container of files: headers, checksums, places, and writing whole or not at all."""

from __future__ import annotations

import errno
import os
import resource
import stat
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import conformallayers as cl
import conformallayers.numpy as cln
from conformallayers.recipe.archive import open_archive
from nets import SHAPE, net
from stored import StoredFile, fold, refused

DATA = Path(__file__).parents[1] / "data"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "net.safetensors"


def test_other_readers_understand_the_arrays(path: Path) -> None:
    folded = fold("chain")
    cl.save(folded, path)
    arrays = load_file(path)
    assert arrays.keys() == folded.recipe.constants.keys()
    for name, array in folded.recipe.constants.items():
        assert torch.equal(arrays[name], array)
    with safe_open(path, "pt") as file:
        assert set(file.metadata()) == {"conformallayers", "sha256"}


# -- versions -----------------------------------------------------------------------------------


def test_files_of_format_1_ask_for_a_new_fold() -> None:
    message = (
        r"expected a file of format 2, got format 1, written by conformallayers 0\.1\.0\. "
        r"Fold and save the model again\.$"
    )
    for load in (cl.load, cln.load):
        with pytest.raises(cl.ConformalError, match=message):
            load(DATA / "format-1.safetensors")


def test_newer_files_ask_for_a_newer_library(path: Path) -> None:
    file = StoredFile(fold(), path)
    file.document |= {"format": 3, "library": "9.0"}
    file.write()
    refused(path, r"format 3, .* 9\.0\. Upgrade")


def test_messages_are_short(path: Path) -> None:
    file = StoredFile(fold(), path)
    file.document |= {"format": 9, "library": "x" * 10**6}
    file.write()
    refused(path, r"format 9, written by conformallayers x+\.\.\.\. Upgrade")
    file.document["format"] = [[["x"] * 1000]]
    file.write()
    refused(path, "got format a list")


def test_other_files_are_told_apart(path: Path) -> None:
    save_file({"weight": torch.ones(2)}, path)
    refused(path, r"another safetensors file.*load_file")
    torch.save(nn.Linear(2, 2).state_dict(), path)
    refused(path, r"got a zip archive, such as torch\.save writes\. .*load_state_dict")
    path.write_bytes(b"")
    refused(path, "a header of 0 bytes in a file of 0")
    with pytest.raises(FileNotFoundError):
        cl.load(path.with_name("none"))


# -- text ---------------------------------------------------------------------------------------


def test_headers_that_are_no_json_are_refused(path: Path) -> None:
    file = StoredFile(fold(), path)
    file.write(encoding="utf-16-le")
    refused(path, "no JSON")
    file = StoredFile(fold(), path)
    file.write(lambda text: text.replace('"scale": ', '"scale": 1e999, "was": '))
    refused(path, "no JSON")
    file = StoredFile(fold(), path)
    file.write(lambda text: text.replace('"kind": ', '"kind": "model", "kind": '))
    refused(path, "no JSON")
    file = StoredFile(fold(), path)
    file.write(lambda text: text.replace("{", '{"__metadata__": {}, ', 1))
    refused(path, "no JSON")
    for inside in ("[" * 200_000 + "]" * 200_000, "[" * 900 + "]" * 900, "1" * 5000, "NaN"):
        text = f'{{"a": {inside}}}'.encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text)
        refused(path)


@pytest.mark.parametrize("value", ["1e999", "1", "[" * 300 + "]" * 300])
def test_metadata_is_text(value: str, path: Path) -> None:
    file = StoredFile(fold(), path)
    file.header["__metadata__"]["more"] = "?"
    file.write(lambda text: text.replace('"more": "?"', f'"more": {value}'))
    refused(path)


def test_a_header_may_not_be_larger_than_any_network_needs(path: Path) -> None:
    text = b'{"a": [' + b"[]," * 7_000_000 + b"0]}"
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    refused(path, "a header of 21000010 bytes")


# -- arrays -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "strategy", "array"),
    [("unpadded", "dense", "factor"), ("circular", "banded", "band")],
)
@pytest.mark.parametrize("shape", [[2**30, 0, 0], [2**47, 2**47, 0], [2**20, 0, 0]], ids=str)
def test_empty_arrays_do_not_run_away(
    name: str, strategy: str, array: str, shape: list[int], path: Path
) -> None:
    file = StoredFile(fold(name, strategy), path)
    file.replace(array, "F32", shape)
    file.write()
    refused(path)


def test_arrays_fill_the_file(path: Path) -> None:
    for change in ([0, 4], [-4, 0], [4, 4]):
        file = StoredFile(fold(), path)
        name = next(name for name in file.header if name != "__metadata__")
        places = file.header[name]["data_offsets"]
        file.header[name]["data_offsets"] = [a + b for a, b in zip(places, change, strict=True)]
        file.write()
        refused(path)
    file = StoredFile(fold(), path)
    names = [name for name in file.header if name != "__metadata__"]
    file.header[names[0]]["data_offsets"] = file.header[names[1]]["data_offsets"]
    file.write()
    refused(path)
    file = StoredFile(fold(), path)
    file.data += b"\0" * 8
    file.write()
    refused(path, "bytes of arrays where")


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


def test_links_and_modes_are_those_of_any_file(path: Path) -> None:
    link = path.with_name("link")
    link.symlink_to(path)
    mask = os.umask(0o022)
    try:
        cl.save(nn.Linear(2, 2), link)
    finally:
        os.umask(mask)
    assert link.is_symlink()
    assert path.stat().st_mode & 0o777 == 0o644
    with pytest.raises(FileNotFoundError, match=r"No such folder; create it first: .*none"):
        cl.save(nn.Linear(2, 2), path.parent / "none" / "net")


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


# -- writing ------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_failed_save_leaves_the_old_file(
    step: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = cl.fold(net("chain"), SHAPE), cl.fold(net("biases"), SHAPE)
    cl.save(old, path)
    before = path.read_bytes()

    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, step, full)
    with pytest.raises(OSError, match="No space"):
        cl.save(new, path)
    monkeypatch.undo()
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


def test_an_interrupt_leaves_the_old_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cl.save(nn.Linear(2, 2), path)
    before = path.read_bytes()

    def interrupted(handle: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cl.save(nn.Linear(3, 3), path)
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


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


@pytest.mark.parametrize(
    ("ending", "other"), [("onnx", "cl.export_onnx"), ("PT", "torch.save"), ("c", "cl.export_c")]
)
def test_an_ending_of_another_format_is_refused(ending: str, other: str, tmp_path: Path) -> None:
    with pytest.raises(cl.ConformalError, match=rf"save\(path\): .*there is {other}"):
        cl.save(cl.fold(net("chain"), SHAPE), tmp_path / f"net.{ending}")
    assert not list(tmp_path.iterdir())


def test_an_array_is_read_once(path: Path) -> None:
    file = StoredFile(nn.Sequential(nn.Linear(1000, 1000, bias=False)), path)
    structure: Any = file.document["model"]
    (child,) = structure["children"]
    structure["children"] = [[str(index), child[1]] for index in range(300)]
    file.write()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    loaded = cl.load(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KiB, not 1.2 GB
    assert len(list(loaded)) == 300
