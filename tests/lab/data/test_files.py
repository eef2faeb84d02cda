"""Data files: found in every layout and spelling, refused if broken, copied and downloaded."""

from __future__ import annotations

import functools
import gzip
import http.server
import tarfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import conformallayers as cl
from conformallayers.lab.data import catalogue, files
from conformallayers.lab.data.datasets import load
from datafiles import NAMES, idx, random_images, random_labels
from support import run_command


@pytest.mark.parametrize("folder", catalogue.LAYOUTS["fashion-mnist"].folders)
@pytest.mark.parametrize("compressed", [False, True])
def test_every_folder_is_searched(
    mnist: Path, tmp_path: Path, folder: str, compressed: bool
) -> None:
    target = tmp_path / "root" / folder
    target.mkdir(parents=True)
    for name in NAMES:
        data = (mnist / name).read_bytes()
        path = target / (f"{name}.gz" if compressed else name)
        path.write_bytes(gzip.compress(data) if compressed else data)
    found = load("fashion-mnist", tmp_path / "root", verify=False)
    assert torch.equal(found.train_images, load("mnist", tmp_path, verify=False).train_images)


def test_missing_files_are_named_with_the_command_that_gets_them(mnist: Path) -> None:
    root = mnist.parent
    with pytest.raises(cl.ConformalError) as caught:
        load("cifar10", root)
    for part in (root / "cifar-10-batches-bin", "data_batch_5.bin", "data get cifar10 --source"):
        assert str(part) in str(caught.value)
    (mnist / NAMES[3]).unlink()
    with pytest.raises(cl.ConformalError, match=r"t10k-labels-idx1-ubyte, got no such file\. Run"):
        load("mnist", root)
    with pytest.raises(cl.ConformalError, match=r"got 'MNIST'.* Did you mean \"mnist\""):
        load("MNIST", root)


def test_files_with_a_flipped_bit_are_refused(pretended: Path) -> None:
    load("mnist", pretended.parent)
    data = (pretended / NAMES[0]).read_bytes()
    (pretended / NAMES[0]).write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(cl.ConformalError, match="expected the md5"):
        load("mnist", pretended.parent)


def test_broken_gzip_is_refused(mnist: Path) -> None:
    compressed = gzip.compress((mnist / NAMES[0]).read_bytes())
    (mnist / f"{NAMES[0]}.gz").write_bytes(compressed[:30])
    (mnist / NAMES[0]).unlink()
    with pytest.raises(cl.ConformalError, match=r"images-idx3-ubyte.gz: expected a file that can"):
        load("mnist", mnist.parent, verify=False)


def test_broken_archives_are_refused(cifar: Path, tmp_path: Path) -> None:
    root = tmp_path / "archive"
    root.mkdir()
    path = root / "cifar-10-binary.tar.gz"
    path.write_bytes(b"no archive")
    with pytest.raises(cl.ConformalError, match="expected a file that can be read"):
        load("cifar10", root, verify=False)
    with tarfile.open(path, "w:gz") as archive:
        archive.add(cifar / "test_batch.bin", "../../test_batch.bin")
        link = tarfile.TarInfo("data_batch_1.bin")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    with pytest.raises(cl.ConformalError, match=r"an archive with data_batch_1.bin"):
        load("cifar10", root, verify=False)
    assert [path.name for path in root.iterdir()] == [path.name]


def test_files_that_unpack_to_gigabytes_are_refused(
    mnist: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_LARGEST", 2**20)
    (mnist / f"{NAMES[0]}.gz").write_bytes(gzip.compress(bytes(2**20 + 1)))
    (mnist / NAMES[0]).unlink()
    with pytest.raises(cl.ConformalError, match=r"ubyte.gz: expected at most 1 MiB, got more"):
        load("mnist", tmp_path, verify=False)
    with tarfile.open(tmp_path / "cifar-10-binary.tar.gz", "w:gz") as archive:
        huge = tarfile.TarInfo("data_batch_1.bin")
        huge.pax_headers = {"comment": "0" * 2**20}
        archive.addfile(huge)
    with pytest.raises(cl.ConformalError, match=r"tar.gz: expected at most 1 MiB, got more"):
        load("cifar10", tmp_path, verify=False)


IMAGES, LABELS = NAMES[0], NAMES[1]
BROKEN: dict[str, tuple[str, Callable[[bytes], bytes], str]] = {
    "empty": (IMAGES, lambda data: b"", "a whole idx file of unsigned bytes, N × 28 × 28"),
    "magic": (IMAGES, lambda data: b"\0\0\x0d\3" + data[4:], "bytes, 00000d03"),
    "labels for images": (IMAGES, lambda data: idx(random_labels(7)), "bytes, 00000801"),
    "truncated": (IMAGES, lambda data: data[:-5], "N × 28 × 28, got 5499 bytes"),
    "sides": (IMAGES, lambda data: idx(random_images(7, 27, 28)), "N × 28 × 28, got"),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_broken_idx_files_are_refused(mnist: Path, fault: str) -> None:
    file, change, message = BROKEN[fault]
    (mnist / file).write_bytes(change((mnist / file).read_bytes()))
    with pytest.raises(cl.ConformalError, match=message):
        load("mnist", mnist.parent, verify=False)


def test_labels_of_another_set_are_refused(mnist: Path) -> None:
    (mnist / LABELS).write_bytes(idx(random_labels(6)))
    with pytest.raises(cl.ConformalError, match="as many labels as images, got 6 for 7"):
        load("mnist", mnist.parent, verify=False)


def test_broken_cifar_files_are_refused(cifar: Path, tmp_path: Path) -> None:
    path = cifar / "data_batch_3.bin"
    good = path.read_bytes()
    for data, message in (
        (b"", "got 0: it is truncated"),
        (good[:-1], "a multiple of 3073 bytes, got 6145"),
        (b"\x0a" + good[1:], "labels from 0 to 9, got 10"),
    ):
        path.write_bytes(data)
        with pytest.raises(cl.ConformalError, match=message):
            load("cifar10", tmp_path, verify=False)


def test_get_copies_checked_files(
    pretended: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "target"
    arguments = "data", "get", "mnist", "--data-root", target, "--source", pretended
    assert run_command(*arguments[:-2]) == 1
    told = capsys.readouterr().err
    assert all(part in told for part in ("--source", str(target / "mnist"), *NAMES))
    assert run_command("data", "get", "digits", "--data-root", target) == 0
    assert run_command(*arguments[:-1], tmp_path / "none") == 1
    assert (
        "data get --source: expected the files of the data set, got file:"
        in capsys.readouterr().err
    )
    assert run_command(*arguments) == 0
    assert load("mnist", target).train_images.shape == (7, 1, 28, 28)
    capsys.readouterr()
    assert run_command(*arguments) == 0
    assert capsys.readouterr().out == "mnist: already there\n"
    (target / "mnist" / LABELS).write_bytes(b"?")
    assert files.fetch("mnist", target, str(pretended)) == [target / "mnist" / LABELS]
    (target / "mnist" / LABELS).write_bytes(b"?")
    (pretended / LABELS).write_bytes(b"!")
    assert run_command(*arguments) == 1
    assert "expected the md5" in capsys.readouterr().err
    assert (target / "mnist" / LABELS).read_bytes() == b"?"


def test_get_unpacks_the_archive(
    cifar: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    form = catalogue.LAYOUTS["cifar10"]
    sums = {path.name: files.md5(path.read_bytes()) for path in sorted(cifar.iterdir())}
    changed = catalogue.Layout(sums, form.folders, form.archive)
    monkeypatch.setitem(catalogue.LAYOUTS, "cifar10", changed)
    (tmp_path / "source").mkdir()
    with tarfile.open(tmp_path / "source" / "cifar-10-binary.tar.gz", "w:gz") as archive:
        archive.add(cifar, "cifar-10-batches-bin")
    assert len(files.fetch("cifar10", tmp_path / "new", str(tmp_path / "source"))) == 6
    found, expected = load("cifar10", tmp_path / "new"), load("cifar10", tmp_path)
    assert torch.equal(found.train_images, expected.train_images)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """Serve a folder on this machine."""
    folder = tmp_path / "served"
    folder.mkdir()

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *arguments: object) -> None:
            pass

    handler = functools.partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield folder, f"http://127.0.0.1:{running.server_address[1]}"
        running.shutdown()


def test_get_downloads_checked_files(pretended: Path, server: tuple[Path, str]) -> None:
    folder, address = server
    target = pretended.parent / "target"
    for name in NAMES[:3]:
        (folder / f"{name}.gz").write_bytes(gzip.compress((pretended / name).read_bytes()))
    with pytest.raises(cl.ConformalError, match=r"t10k-labels-idx1-ubyte: HTTP Error 404"):
        files.fetch("mnist", target, address)
    (folder / NAMES[3]).write_bytes((pretended / NAMES[3]).read_bytes())
    assert files.fetch("mnist", target, address + "/") == [target / "mnist" / NAMES[3]]
    assert load("mnist", target).test_labels.shape == (3,)
