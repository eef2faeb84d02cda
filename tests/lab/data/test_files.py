"""Finding data files: every layout and spelling, missing and swapped files, broken containers."""

from __future__ import annotations

import gzip
import io
import subprocess
import sys
import tarfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import conformallayers as cl
from conformallayers.lab.data import catalogue, files
from conformallayers.lab.data.datasets import check, load
from datafiles import NAMES
from support import without_override
from training import source_environment


@pytest.mark.parametrize("folder", [*catalogue.LAYOUTS["fashion-mnist"][0].folders])
@pytest.mark.parametrize("spelling", [0, 1, 2, 3])
def test_every_layout_and_spelling_is_found(
    mnist: Path, tmp_path: Path, folder: str, spelling: int
) -> None:
    form = catalogue.LAYOUTS["fashion-mnist"][0]
    target = tmp_path / "root" / folder
    target.mkdir(parents=True)
    for name in NAMES:
        data = (mnist / name).read_bytes()
        new = target / form.spellings(name)[spelling]
        new.write_bytes(gzip.compress(data) if new.suffix == ".gz" else data)
    found = load("fashion-mnist", tmp_path / "root", verify=False)
    assert torch.equal(found.train_images, load("mnist", tmp_path, verify=False).train_images)


def test_missing_files_are_named_with_the_command_that_gets_them(mnist: Path) -> None:
    root = mnist.parent
    with pytest.raises(cl.ConformalError) as caught:
        load("cifar10", root)
    for part in (root / "cifar-10-batches-py", "data_batch_5.bin", "data get cifar10 --source"):
        assert str(part) in str(caught.value)
    (mnist / NAMES[3]).unlink()
    with pytest.raises(cl.ConformalError, match=r"t10k-labels-idx1-ubyte, got no such file\. Run"):
        load("mnist", root)
    with pytest.raises(cl.ConformalError, match=r"expected one of mnist, .*got 'MNIST'"):
        load("MNIST", root)


@pytest.mark.parametrize(
    ("name", "meant"),
    [("cifar-10", "cifar10"), ("MNIST", "mnist"), ("fashion_mnist", "fashion-mnist")],
)
def test_misspelt_names_get_a_suggestion(name: str, meant: str, tmp_path: Path) -> None:
    with pytest.raises(cl.ConformalError, match=f'Did you mean "{meant}"'):
        load(name, tmp_path)


def test_real_checksums_are_demanded_unless_told_otherwise(mnist: Path) -> None:
    with pytest.raises(cl.ConformalError, match=r"expected the md5 6bbc9ace.*--no-check"):
        load("mnist", mnist.parent)


def test_swapped_files_are_recognised(pretended: Path) -> None:
    load("mnist", pretended.parent)
    first, other = pretended / NAMES[0], pretended / NAMES[2]
    data = first.read_bytes()
    first.write_bytes(other.read_bytes())
    with pytest.raises(
        cl.ConformalError, match=r"train-images.* got t10k-images-idx3-ubyte of mnist"
    ):
        load("mnist", pretended.parent)
    first.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(cl.ConformalError, match="expected the md5"):
        load("mnist", pretended.parent)


@pytest.mark.parametrize("cut", [5, 30, -4])
def test_broken_gzip_is_refused(mnist: Path, cut: int) -> None:
    compressed = gzip.compress((mnist / NAMES[0]).read_bytes())
    (mnist / f"{NAMES[0]}.gz").write_bytes(compressed[:cut])
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
    with pytest.raises(cl.ConformalError, match=r"an archive with data_batch_1.bin, data_batch_2"):
        load("cifar10", root, verify=False)
    faults = [fault for _, fault in check("cifar10", root, verify=False)]
    assert [fault is None for fault in faults] == [True, False]
    assert sorted(child.name for child in root.iterdir()) == [path.name]


def header(name: str, size: int, kind: bytes = tarfile.REGTYPE) -> bytearray:
    info = tarfile.TarInfo(name)
    info.size, info.type = size, kind
    return bytearray(info.tobuf(tarfile.GNU_FORMAT))


def sparse_archive() -> bytes:
    """Return an archive of one file that says it has 4 GiB, and holds 512 bytes."""
    block = header("test_batch.bin", 512, tarfile.GNUTYPE_SPARSE)
    block[386:410] = b"%011o\0%011o\0" % (0, 512)
    block[483:495] = b"%011o\0" % 2**32
    block[148:156] = b" " * 8
    block[148:155] = b"%06o\0" % sum(block)
    with tarfile.open(fileobj=io.BytesIO(bytes(block) + bytes(3 * 512))) as archive:
        (member,) = archive
        assert member.issparse()
        assert member.size == 2**32
    return bytes(block) + bytes(3 * 512)


BOMBS = {
    "a long comment": (bytes(header("x", 2**23, tarfile.XHDTYPE)), 2**23, "at most 1048576 bytes"),
    "a long name": (bytes(header("x", 2**23, tarfile.GNUTYPE_LONGNAME)), 2**23, "at most 1048576"),
    "a long file": (bytes(header("test_batch.bin", 2**23)), 2**23, "at most 1048576 bytes, got more"),
    "more than it holds": (bytes(header("test_batch.bin", 2**40)), 512, "a file that can be read"),
    "a sparse file": (sparse_archive(), 0, r"an archive with .*test_batch\.bin"),
}  # fmt: skip


@pytest.mark.parametrize(("start", "zeros", "message"), BOMBS.values(), ids=BOMBS)
def test_archives_that_grow_are_refused(
    start: bytes, zeros: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_LIMIT", 2**20)
    path = tmp_path / "cifar-10-binary.tar.gz"
    path.write_bytes(gzip.compress(start + bytes(zeros)))
    with pytest.raises(cl.ConformalError, match=message):
        load("cifar10", tmp_path, verify=False)


def test_a_file_that_grows_is_refused(mnist: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_LIMIT", 2**20)
    (mnist / NAMES[0]).unlink()
    (mnist / f"{NAMES[0]}.gz").write_bytes(gzip.compress(bytes(2**21)))
    with pytest.raises(cl.ConformalError, match="expected at most 1048576 bytes, got more"):
        load("mnist", mnist.parent, verify=False)


def test_a_closed_folder_hides_no_other(mnist: Path) -> None:
    closed = mnist.parent / "cifar10"
    (closed / "cifar-10-batches-py").mkdir(parents=True)
    closed.chmod(0)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "conformallayers", "data", "list", "--data-root", mnist.parent],
            env=source_environment(), preexec_fn=without_override,
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    finally:
        closed.chmod(0o700)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0].split() == ["mnist", str(mnist)]
    assert "cifar10        not found" in done.stdout


def test_two_threads_load_at_once(mnist: Path, cifar: Path) -> None:
    names = ["mnist", "cifar10"] * 4
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda name: load(name, mnist.parent, verify=False), names))
    for name, one in zip(names, found, strict=True):
        alone = load(name, mnist.parent, verify=False)
        assert torch.equal(one.train_images, alone.train_images)
        assert torch.equal(one.test_labels, alone.test_labels)
