"""Image sets: every format read, every way to break a file refused, and batches in their order."""

from __future__ import annotations

import contextlib
import functools
import gzip
import http.server
import pickle
import struct
import subprocess
import sys
import tarfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import conformallayers as cl
from conformallayers.cli import app as cli
from conformallayers.lab.data import catalogue, fetch, files
from conformallayers.lab.data.batches import Batches, as_input
from conformallayers.lab.data.cifar_pickle import PickleRefused, read_pickle
from conformallayers.lab.data.datasets import check, load
from conformallayers.lab.data.formats import read_cifar_pickle

NAMES = tuple(catalogue.LAYOUTS["mnist"][0].checksums)
RANDOM = np.random.default_rng(0)


def idx(array: np.ndarray) -> bytes:
    header = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    return header + array.astype(np.uint8).tobytes()


def some(count: int, *shape: int) -> np.ndarray:
    return RANDOM.integers(0, 256, (count, *shape), np.uint8)


def labels(count: int) -> np.ndarray:
    return RANDOM.integers(0, 10, count, np.uint8)


def short(text: bytes) -> bytes:
    return b"U" + bytes([len(text)]) + text


def python2_pickle(images: np.ndarray, classes: list[int]) -> bytes:
    """Write a batch as Python 2 did: protocol 2, its strings, numpy's old module names."""
    shape = b"".join(b"M" + struct.pack("<H", size) for size in images.shape)
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\nq\x02cnumpy\nndarray\nq\x03K\x00\x85q\x04U\x01b\x87Rq\x05"
        b"(K\x01" + shape + b"\x86cnumpy\ndtype\nq\x06U\x02u1K\x00K\x01\x87Rq\x07"
        b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89"
        b"T" + struct.pack("<I", images.size) + images.tobytes() + b"tb"
    )
    listed = b"](" + b"".join(b"K" + bytes([n]) for n in classes) + b"e"
    return b"\x80\x02}q\x01(" + short(b"data") + array + short(b"labels") + listed + b"u."


@pytest.fixture
def mnist(tmp_path: Path) -> Path:
    """Seven training and three test images in MNIST's files."""
    folder = tmp_path / "mnist"
    folder.mkdir()
    arrays = some(7, 28, 28), labels(7), some(3, 28, 28), labels(3)
    for name, array in zip(NAMES, arrays, strict=True):
        (folder / name).write_bytes(idx(array))
    return folder


@pytest.fixture
def cifar(tmp_path: Path) -> Path:
    """Six batches of two images in CIFAR-10's binary files."""
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    for name in catalogue.LAYOUTS["cifar10"][0].checksums:
        rows = np.concatenate([labels(2)[:, None], some(2, 3072)], 1)
        (folder / name).write_bytes(rows.tobytes())
    return folder


@pytest.fixture
def pretended(mnist: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Take the small files for the real ones: their checksums stand in the catalogue."""
    form = catalogue.LAYOUTS["mnist"][0]
    sums = {name: files.md5((mnist / name).read_bytes()) for name in NAMES}
    new = catalogue.Layout("idx", sums, form.folders)
    monkeypatch.setitem(catalogue.LAYOUTS, "mnist", (new,))
    return mnist


def run(*arguments: object) -> int:
    with pytest.raises(SystemExit) as leaving:
        cli.main([str(argument) for argument in arguments])
    return int(leaving.value.code or 0)


# -- reading ----------------------------------------------------------------------------------------


def test_idx_files_are_read_as_they_were_written(mnist: Path) -> None:
    found = load("mnist", mnist.parent, verify=False)
    assert found.train_images.shape == (7, 1, 28, 28)
    assert found.train_images.dtype == torch.uint8
    assert found.test_labels.dtype == torch.int64
    assert found.test_images.numpy().tobytes() == (mnist / NAMES[2]).read_bytes()[16:]
    assert bytes(found.train_labels.tolist()) == (mnist / NAMES[1]).read_bytes()[8:]
    assert (found.name, found.classes) == ("mnist", 10)


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


def test_the_three_forms_of_cifar_hold_the_same(cifar: Path, tmp_path: Path) -> None:
    binary = load("cifar10", tmp_path, verify=False)
    assert binary.train_images.shape == (10, 3, 32, 32)
    assert binary.test_labels.shape == (2,)
    rows = np.frombuffer((cifar / "data_batch_2.bin").read_bytes(), np.uint8).reshape(2, 3073)
    assert torch.equal(binary.train_labels[2:4], torch.from_numpy(rows[:, 0].copy()).long())
    assert binary.train_images[2:4].numpy().tobytes() == rows[:, 1:].tobytes()

    python = tmp_path / "python" / "cifar-10-batches-py"
    python.mkdir(parents=True)
    for path in cifar.iterdir():
        rows = np.frombuffer(path.read_bytes(), np.uint8).reshape(2, 3073)
        batch = python2_pickle(rows[:, 1:].copy(), rows[:, 0].tolist())
        (python / path.stem).write_bytes(batch)
    roots = [tmp_path / "python"]
    for source, name in ((cifar, "cifar-10-binary.tar.gz"), (python, "cifar-10-python.tar.gz")):
        roots.append(tmp_path / name.split(".")[0])
        roots[-1].mkdir()
        with tarfile.open(roots[-1] / name, "w:gz") as archive:
            for path in sorted(source.iterdir(), reverse=True):
                archive.add(path, f"{source.name}/{path.name}")
    for root in roots:
        other = load("cifar10", root, verify=False)
        assert torch.equal(other.train_images, binary.train_images)
        assert torch.equal(other.train_labels, binary.train_labels)
        assert torch.equal(other.test_images, binary.test_images)
        assert [verdict.fault for verdict in check("cifar10", root, verify=False)] == [None] * 6


@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_pickles_of_python_3_are_read(protocol: int) -> None:
    batch = {b"data": some(2, 3072), b"labels": [3, 9], b"filenames": [b"a.png", b"b.png"]}
    found = read_cifar_pickle(pickle.dumps(batch, protocol), "batch")
    assert found["images"].tobytes() == batch[b"data"].tobytes()
    assert found["labels"].tolist() == [3, 9]


def test_real_checksums_are_demanded_unless_told_otherwise(mnist: Path) -> None:
    with pytest.raises(cl.ConformalError, match=r"expected the md5 6bbc9ace.*--no-check"):
        load("mnist", mnist.parent)


def test_digits_need_no_files(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    found = load("digits", tmp_path / "nowhere")
    assert found.train_images.shape == (1347, 1, 8, 8)
    assert found.train_images.max() == 255
    train, held = found.split(100)
    assert torch.equal(train.test_images, found.test_images)
    assert (len(train.train_labels), len(held.test_labels)) == (1247, 100)
    again = found.split(100)[1]
    assert torch.equal(held.test_images, again.test_images)
    both = torch.cat([train.train_images, held.test_images]).flatten(1).long().sum(0)
    assert torch.equal(both, found.train_images.flatten(1).long().sum(0))
    for wrong in (-0.1, 1.5, 1347, float("nan")):
        with pytest.raises(cl.ConformalError, match="validation: expected"):
            found.split(wrong)


def test_missing_scikit_learn_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "conformallayers.lab.data.digits", raising=False)
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(cl.MissingExtra, match="the dataset digits needs scikit-learn: pip install"):
        load("digits")


# -- refusals ---------------------------------------------------------------------------------------


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


IMAGES, LABELS = NAMES[0], NAMES[1]
BROKEN: list[tuple[str, str, Callable[[bytes], bytes], str]] = [
    ("empty", IMAGES, lambda data: b"", "magic 00000803, got an empty file"),
    ("magic", IMAGES, lambda data: b"\0\0\x0d\3" + data[4:], "magic 00000803, got 00000d03"),
    ("labels for images", IMAGES, lambda data: idx(labels(7)), "00000803, got 00000801"),
    ("images for labels", LABELS, lambda data: idx(some(7, 28, 28)), "00000801, got 00000803"),
    ("header", IMAGES, lambda data: data[:9], "16 bytes, got 9: it is truncated"),
    ("truncated", IMAGES, lambda data: data[:-5], "5504 bytes, got 5499: it is truncated"),
    ("too long", LABELS, lambda data: data + b"\0", "15 bytes, got 16: it is too long"),
    ("sides", IMAGES, lambda data: idx(some(7, 27, 28)), "N × 28 × 28 .*, got 7 × 27 × 28"),
    ("none", LABELS, lambda data: idx(labels(0)), "N > 0, got 0 in its header"),
    ("label 10", LABELS, lambda data: data[:-2] + b"\x0a\0", "0 to 9, got 10 at position 5"),
    ("count", LABELS, lambda data: idx(labels(6)), "as many labels as images, got 7 and 6"),
]


@pytest.mark.parametrize(
    ("file", "change", "message"), [row[1:] for row in BROKEN], ids=[row[0] for row in BROKEN]
)
def test_broken_idx_files_are_refused(
    mnist: Path, file: str, change: Callable[[bytes], bytes], message: str
) -> None:
    (mnist / file).write_bytes(change((mnist / file).read_bytes()))
    with pytest.raises(cl.ConformalError, match=message):
        load("mnist", mnist.parent, verify=False)
    faults = [v.fault for v in check("mnist", mnist.parent, verify=False) if v.fault]
    assert len(faults) == 1


@pytest.mark.parametrize("cut", [5, 30, -4])
def test_broken_gzip_is_refused(mnist: Path, cut: int) -> None:
    compressed = gzip.compress((mnist / IMAGES).read_bytes())
    (mnist / f"{IMAGES}.gz").write_bytes(compressed[:cut])
    (mnist / IMAGES).unlink()
    with pytest.raises(cl.ConformalError, match=r"images-idx3-ubyte.gz: expected a file that can"):
        load("mnist", mnist.parent, verify=False)


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


def test_broken_cifar_files_are_refused(cifar: Path, tmp_path: Path) -> None:
    path = cifar / "data_batch_3.bin"
    good = path.read_bytes()
    for data, message in (
        (b"", "got 0: it is truncated"),
        (good[:-1], "a multiple of 3073 bytes such as 6146, got 6145"),
        (b"\x0a" + good[1:], "labels from 0 to 9, got 10 at position 0"),
    ):
        path.write_bytes(data)
        with pytest.raises(cl.ConformalError, match=message):
            load("cifar10", tmp_path, verify=False)


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
    verdicts = list(check("cifar10", root, verify=False))
    assert [verdict.fault is None for verdict in verdicts] == [True, False]
    assert sorted(child.name for child in root.iterdir()) == [path.name]


# -- pickles ----------------------------------------------------------------------------------------


class Hostile:
    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return print, ("executed",)


@pytest.mark.parametrize("protocol", range(6))
def test_nothing_in_a_pickle_is_executed(protocol: int, capsys: pytest.CaptureFixture[str]) -> None:
    data = pickle.dumps({"data": Hostile(), "labels": []}, protocol)
    with pytest.raises(cl.ConformalError, match="a pickle of arrays, lists and text, got it"):
        read_cifar_pickle(data, "batch")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ([1, 2], "an entry data of shape"),
        ({"data": np.zeros((2, 3071), np.uint8), "labels": [1, 2]}, r"got \(2, 3071\)"),
        ({"data": np.zeros((2, 3072), np.int8), "labels": [1, 2]}, "an array of type i1"),
        ({"data": np.zeros((2, 3072), np.uint8)}, "an entry labels"),
        ({"data": np.zeros((2, 3072), np.uint8), "labels": [1]}, "got 2 and 1"),
        ({"data": np.zeros((2, 3072), np.uint8), "labels": [1, 1000]}, "got 1000 at position 1"),
        ({"data": np.zeros((2, 3072), np.uint8), "labels": [-1, 2**70]}, "got -1 at position 0"),
        ({"data": np.zeros((2, 3072), np.uint8), "labels": [1, True]}, "an entry labels"),
    ],
)
def test_wrong_contents_of_a_pickle_are_refused(batch: object, message: str) -> None:
    with pytest.raises(cl.ConformalError, match=message):
        read_cifar_pickle(pickle.dumps(batch, 2), "batch")


@settings(deadline=None, max_examples=300)
@given(st.integers(0, 300), st.binary(min_size=1, max_size=4), st.booleans())
def test_damaged_pickles_are_refused_and_nothing_else(at: int, new: bytes, cut: bool) -> None:
    good = python2_pickle(some(1, 16), [3])
    at %= len(good)
    data = good[:at] + new + (b"" if cut else good[at + len(new) :])
    with contextlib.suppress(PickleRefused):
        read_pickle(data)


# -- the command ------------------------------------------------------------------------------------


def test_list_and_check_tell_what_is_there(
    pretended: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = pretended.parent
    monkeypatch.setenv("CONFORMALLAYERS_DATA", str(root))
    assert run("data", "list") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["mnist", str(pretended)]
    assert lines[2].split() == ["cifar10", "not", "found"]
    assert run("data", "check") == 0
    assert [line[:3] for line in capsys.readouterr().out.splitlines()] == ["ok "] * 5
    assert run("data", "check", "cifar10") == 1
    assert "no such file" in capsys.readouterr().out
    (pretended / LABELS).write_bytes(b"?")
    assert run("data", "check", "mnist", "--data-root", root) == 1
    assert [line[:3] for line in capsys.readouterr().out.splitlines()].count("BAD") == 1
    (pretended / LABELS).unlink()
    assert run("data", "check") == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("BAD mnist: ")
    assert lines[1] == "ok  scikit-learn's digits"  # one that is missing stops no other
    assert run("data", "check", "--data-root", root / "nowhere") != 0
    assert "data check --data-root: expected a folder" in capsys.readouterr().err


def test_get_copies_checked_files(
    pretended: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "target"
    arguments = "data", "get", "mnist", "--data-root", target, "--source", pretended
    assert run(*arguments) == 0
    assert load("mnist", target).train_images.shape == (7, 1, 28, 28)
    capsys.readouterr()
    assert run(*arguments) == 0
    assert capsys.readouterr().out == "mnist: already there\n"
    (target / "mnist" / LABELS).write_bytes(b"?")
    assert fetch.get("mnist", target, str(pretended)) == [target / "mnist" / LABELS]
    (target / "mnist" / LABELS).write_bytes(b"?")
    (pretended / LABELS).write_bytes(b"!")
    assert run(*arguments) == 1
    assert "expected the md5" in capsys.readouterr().err
    assert (target / "mnist" / LABELS).read_bytes() == b"?"
    assert sorted(path.name for path in (target / "mnist").iterdir()) == sorted(NAMES)


def test_get_without_a_source_says_what_is_needed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("data", "get", "cifar10", "--data-root", tmp_path) == 1
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    for part in ("--source", "test_batch.bin", f"cifar-10-python.tar.gz in {tmp_path}"):
        assert part in message
    assert run("data", "get", "digits", "--data-root", tmp_path) == 0
    assert run("data", "get", "mnist", "--data-root", tmp_path, "--source", tmp_path / "no") == 1
    assert "data get --source: expected a folder, or an address" in capsys.readouterr().err


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
    (target / "mnist").mkdir(parents=True)
    (target / "mnist" / NAMES[0]).write_bytes(b"?")
    with pytest.raises(cl.ConformalError, match=r"t10k-labels-idx1-ubyte: HTTP Error 404"):
        fetch.get("mnist", target, address)
    (folder / NAMES[3]).write_bytes((pretended / NAMES[3]).read_bytes())
    hidden = rf"{NAMES[0]}: expected the file .*, got another one, .* Move it away"
    for _ in range(2):  # a damaged file hides the new one beside it
        with pytest.raises(cl.ConformalError, match=hidden):
            fetch.get("mnist", target, address)
    (target / "mnist" / NAMES[0]).unlink()
    (target / "mnist" / NAMES[3]).unlink()
    assert fetch.get("mnist", target, address + "/") == [target / "mnist" / NAMES[3]]
    assert load("mnist", target).test_labels.shape == (3,)


def test_data_commands_do_not_need_torchvision_or_figures(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom conformallayers.lab.data import datasets, batches, fetch\n"
        "assert not {'matplotlib', 'torchvision', 'pandas'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# -- batches ----------------------------------------------------------------------------------------


def test_inputs_are_padded_enlarged_and_repeated() -> None:
    grey = torch.from_numpy(some(2, 1, 28, 28))
    x = as_input(grey)
    assert x.shape == (2, 3, 32, 32)
    assert x.untyped_storage().nbytes() == 4 * 2 * 32 * 32
    for channel in range(3):
        assert torch.equal(x[:, channel, 2:30, 2:30], grey[:, 0] / 255)
    assert x.sum() == pytest.approx(3 * float(x[:, 0, 2:30, 2:30].sum()))
    small = torch.from_numpy(some(2, 1, 8, 8))
    assert torch.equal(as_input(small)[:, :, 1::4, 2::4], (small / 255).expand(-1, 3, -1, -1))
    colour = torch.from_numpy(some(2, 3, 32, 32))
    assert torch.equal(as_input(colour), colour / 255)
    assert as_input(torch.ones(1, 1, 15, 9, dtype=torch.uint8)).shape == (1, 3, 32, 32)


def numbered(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    order = torch.arange(count)
    return order.to(torch.uint8).view(-1, 1, 1, 1).expand(-1, 1, 28, 28), order


def test_order_hangs_on_seed_and_epoch_alone() -> None:
    batches = Batches(*numbered(50), batch_size=8, shuffle=True, seed=3)
    state = torch.get_rng_state()
    orders = [torch.cat([y for _, y in batches.at(epoch)]).tolist() for epoch in (0, 1, 0)]
    assert torch.equal(torch.get_rng_state(), state)
    assert orders[0] == orders[2] != orders[1]
    assert sorted(orders[0]) == list(range(50))
    other = Batches(*numbered(50), batch_size=8, shuffle=True, seed=1)
    assert torch.cat([y for _, y in other]).tolist() not in orders
    for x, y in batches:
        assert torch.equal((255 * x[:, 0, 5, 5]).round().long(), y)


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_share_every_batch(world: int) -> None:
    whole = Batches(*numbered(17), batch_size=8, shuffle=True)
    parts = [
        Batches(*numbered(17), batch_size=8, shuffle=True, rank=rank, world=world)
        for rank in range(world)
    ]
    for index, (full, *shares) in enumerate(zip(whole, *parts, strict=True)):
        assert torch.equal(torch.cat([y for _, y in shares]), full[1])
        assert torch.equal(torch.cat([x for x, _ in shares]), full[0])
        sizes = [len(y) for _, y in shares]
        assert max(sizes) - min(sizes) <= 1
        assert whole.size(index) == len(full[1])
    assert index + 1 == len(whole) == 3


@pytest.mark.parametrize(
    "change",
    [
        {"images": torch.zeros(2, 28, 28, dtype=torch.uint8)},
        {"images": torch.zeros(2, 1, 33, 8, dtype=torch.uint8)},
        {"images": torch.zeros(2, 1, 8, 8)},
        {"labels": torch.zeros(3)},
        {"batch_size": 0},
        {"rank": 1},
    ],
)
def test_batches_refuse_what_does_not_fit(change: dict[str, object]) -> None:
    good = {"images": torch.zeros(2, 1, 8, 8, dtype=torch.uint8), "labels": torch.zeros(2)}
    with pytest.raises(cl.ConformalError, match="Batches: expected"):
        Batches(**{**good, "batch_size": 2, **change})  # type: ignore[arg-type]
