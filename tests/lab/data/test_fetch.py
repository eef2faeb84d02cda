"""Data sets are copied and downloaded, checked, and kept if correct."""

from __future__ import annotations

import contextlib
import functools
import gzip
import http.server
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import conformallayers as cl
from conformallayers.lab.data import fetch, files
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
    assert fetch.get("mnist", target, str(pretended)) == [target / "mnist" / LABELS]
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
    for part in ("--source", "test_batch.bin", f"cifar-10-python.tar.gz in {tmp_path}"):
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


@pytest.mark.parametrize("length", ["many", str(10**30), "0"])
def test_servers_that_lie_are_refused(
    length: str, pretended: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One announces what it likes, and sends without an end."""
    monkeypatch.setattr(files, "_LIMIT", 2**22)

    class Endless(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", length)
            self.end_headers()
            with contextlib.suppress(OSError):
                while True:
                    self.wfile.write(bytes(2**16))

        def log_message(self, *arguments: object) -> None:
            pass

    target = pretended.parent / "target"
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Endless) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        with pytest.raises(cl.ConformalError):
            fetch.get("mnist", target, f"http://127.0.0.1:{running.server_address[1]}")
        running.shutdown()
    assert not list(target.rglob("*ubyte*"))
