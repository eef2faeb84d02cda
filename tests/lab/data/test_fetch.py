"""Data sets are copied and downloaded, checked, and kept if correct."""

from __future__ import annotations

import functools
import gzip
import http.server
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import conformallayers as cl
from conformallayers.lab.data import files
from conformallayers.lab.data.datasets import load
from datafiles import NAMES
from support import run_command

LABELS = NAMES[1]


def test_get_copies_checked_files(
    pretended: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "target"
    arguments = "data", "get", "mnist", "--data-root", target, "--source", pretended
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
    assert sorted(path.name for path in (target / "mnist").iterdir()) == sorted(NAMES)


def test_get_without_a_source_says_what_is_needed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command("data", "get", "cifar10", "--data-root", tmp_path) == 1
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    for part in ("--source", "test_batch.bin", f"cifar-10-binary.tar.gz in {tmp_path}"):
        assert part in message
    assert run_command("data", "get", "digits", "--data-root", tmp_path) == 0
    assert (
        run_command("data", "get", "mnist", "--data-root", tmp_path, "--source", tmp_path / "no")
        == 1
    )
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
        files.fetch("mnist", target, address)
    (folder / NAMES[3]).write_bytes((pretended / NAMES[3]).read_bytes())
    assert files.fetch("mnist", target, address + "/") == [target / "mnist" / NAMES[3]]
    (target / "mnist" / NAMES[0]).unlink()  # it hides the correct file beside it
    assert load("mnist", target).test_labels.shape == (3,)
