"""Finding data files: every layout and spelling, missing and swapped files, broken containers."""

from __future__ import annotations

import gzip
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch

import conformallayers as cl
from conformallayers.lab.data import catalogue
from conformallayers.lab.data.datasets import check, load
from datafiles import NAMES
from support import without_override
from training import source_environment


@pytest.mark.parametrize(
    ("folder", "spelling"),
    [(f, n % 4) for n, f in enumerate(catalogue.LAYOUTS["fashion-mnist"].folders)],
)
def test_every_layout_and_spelling_is_found(
    mnist: Path, tmp_path: Path, folder: str, spelling: int
) -> None:
    form = catalogue.LAYOUTS["fashion-mnist"]
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
    for part in (root / "cifar-10-batches-bin", "data_batch_5.bin", "data get cifar10 --source"):
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


def test_files_with_a_flipped_bit_are_refused(pretended: Path) -> None:
    load("mnist", pretended.parent)
    data = (pretended / NAMES[0]).read_bytes()
    (pretended / NAMES[0]).write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
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


def test_a_closed_folder_hides_no_other(mnist: Path) -> None:
    closed = mnist.parent / "cifar10"
    (closed / "cifar-10-batches-bin").mkdir(parents=True)
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
