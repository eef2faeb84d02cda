"""conformallayers predict: rows of files and folders, broken ones included."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import conformallayers as cl
from conformallayers.lab.options import PredictOptions
from conformallayers.lab.predict import predict as network_module
from conformallayers.lab.predict.predict import likeliest, open_network, score
from pictures import GREY, classifier, image_bytes, pixels, save_grey
from support import run_command
from training import source_environment

WORDS = ("zero", "one", "two", "three")


@pytest.fixture(scope="module")
def grey(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The fold of a classifier of grey images."""
    path = tmp_path_factory.mktemp("models") / "grey.safetensors"
    cl.save(cl.fold(classifier(GREY), GREY), path, labels=WORDS)
    return path


def scores(model: Path, x: Any) -> Any:
    return cl.load(model)(torch.as_tensor(x, dtype=torch.float32)).double().numpy()


def rows_of(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize("engine", ["torch", "numpy", "onnxruntime"])
def test_rows_hold_softmax_and_scores(
    engine: str, grey: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = save_grey(tmp_path / "a.png")
    options = ("--format", "jsonl", "--top", 9, "--engine", engine)
    assert run_command("predict", grey, path, *options) == 0
    (row,) = rows_of(capsys)
    expected = scores(grey, pixels(8, 8)[None, None] / np.float32(255))[0]
    shares = torch.softmax(torch.from_numpy(expected), 0).numpy()
    assert row["path"] == str(path)
    assert [c["class"] for c in row["top"]] == list(np.argsort(-expected))
    for choice in row["top"]:
        index = choice["class"]
        assert choice["label"] == WORDS[index]
        assert choice["score"] == pytest.approx(expected[index], rel=1e-5)
        assert choice["probability"] == pytest.approx(shares[index], rel=1e-4)


def animation(format: str) -> bytes:
    frames = [Image.fromarray(pixels(8, 8, seed=seed)) for seed in (1, 2)]
    return image_bytes(frames[0], format, save_all=True, append_images=frames[1:])


def bomb() -> bytes:
    """A PNG that says it has 2^32 pixels."""
    whole = bytearray(image_bytes(Image.new("L", (8, 8))))
    whole[16:24] = (65536).to_bytes(4, "big") * 2
    whole[29:33] = zlib.crc32(bytes(whole[12:29])).to_bytes(4, "big")
    return bytes(whole)


FAULTS: dict[str, tuple[bytes, str]] = {
    "empty.png": (b"", "not an image of PNG"),
    "text.png": (b"I am no picture.\n" * 9, "not an image of PNG"),
    "cut.png": (image_bytes(Image.fromarray(pixels(8, 8)))[:60], "a damaged image|no image"),
    "cut.jpg": (image_bytes(Image.fromarray(pixels(8, 8)), "JPEG")[:-40], "a damaged image"),
    "moving.gif": (animation("GIF"), "several images"),
    "float.tif": (image_bytes(Image.fromarray(np.ones((8, 8), np.float32)), "TIFF"), "of mode F"),
    "bomb.png": (bomb(), "too many pixels"),
}  # fmt: skip


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """A folder with sound and broken files."""
    folder = tmp_path / "mixed"
    for index, name in enumerate(("a.png", "sub/b.PNG", "sub/deep/c.png", "z.png")):
        save_grey(folder / name, index)
    for name, (data, _) in FAULTS.items():
        (folder / name).write_bytes(data)
    (folder / "dangling.png").symlink_to("nowhere.png")
    (folder / "loop.png").symlink_to("loop.png")
    (folder / "again").symlink_to(folder)
    os.mkfifo(folder / "pipe.png")
    for name in (".hidden.png", "notes.txt", "Thumbs.db"):
        (folder / name).write_text("nothing")
    return folder


def test_broken_files_are_reported_skipped_and_counted(
    mixed: Path, grey: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command("predict", grey, mixed, "--format", "csv", "--batch", 3) == 1
    shown = capsys.readouterr()
    paths = [row["path"] for row in csv.DictReader(shown.out.splitlines())]
    good = ["a.png", "z.png", "sub/b.PNG", "sub/deep/c.png"]
    assert paths == [str(mixed / name) for name in good]
    lines = dict(
        line.removeprefix(f"conformallayers: {mixed}/").split(": ", 1)
        for line in shown.err.splitlines()[:-1]
    )
    expected = {name: reason for name, (_, reason) in FAULTS.items()} | {
        "dangling.png": "No such file or directory",
        "loop.png": "Too many levels of symbolic links",
        "pipe.png": "not a regular file",
    }  # fmt: skip
    assert set(lines) == set(expected)
    for name, reason in expected.items():
        assert any(part in lines[name] for part in reason.replace("\\", "").split("|")), name
    assert shown.err.splitlines()[-1] == f"4 predicted, {len(expected)} broken"


def test_nothing_to_predict_is_an_error(
    grey: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "rows.csv"
    assert run_command("predict", grey, tmp_path, "--out", out) == 1
    assert "expected at least one readable image, got none. Name" in capsys.readouterr().err
    assert run_command("predict", grey, tmp_path / "nothing.png", "--out", out) == 1
    error = capsys.readouterr().err
    assert "nothing.png: No such file or directory" in error
    assert "got 1 broken. Name images" in error
    assert not list(tmp_path.iterdir())


def test_table_and_csv(
    grey: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    paths = [save_grey(Path(f"{name}.png"), seed) for seed, name in enumerate(("a", "b,c\x1b"))]
    assert run_command("predict", grey, *paths, "--top", 2) == 0
    header, *lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("b,c\\x1b.png ")  # control codes are escaped
    assert header.split() == ["image", "1.", "2."]
    assert len(lines) == 2
    place = header.index("1.")
    assert all(line[place:].startswith(WORDS) and line.count(" % (") == 2 for line in lines)
    assert run_command("predict", grey, *paths, "--top", 2, "--format", "csv") == 0
    rows = list(csv.DictReader(capsys.readouterr().out.splitlines()))
    names = [
        f"{n}{rank}" for rank in ("", "_2") for n in ("label", "class", "probability", "score")
    ]
    assert list(rows[0]) == ["path", *names]
    assert [row["path"] for row in rows] == [str(path) for path in paths]
    assert all(float(row["score"]) >= float(row["score_2"]) for row in rows)


def test_labels_of_ones_own_and_csv_without_formulas(
    grey: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names = tmp_path / "names.txt"
    names.write_text("=1+1\n-2+3\n@SUM(A1)\n-1\n", "utf-8")
    save_grey(Path("=cmd.png"))
    fold, options = ("fold", grey, "--out", tmp_path / "own", "--labels", names), ("--top", 4)
    assert run_command(*fold) == 0
    capsys.readouterr()
    assert run_command("predict", "own", "=cmd.png", *options, "--format", "csv") == 0
    (row,) = csv.DictReader(capsys.readouterr().out.splitlines())
    assert row["path"] == "'=cmd.png"
    labels = {row[f"label{rank}"] for rank in ("", "_2", "_3", "_4")}
    assert labels == {"'=1+1", "'-2+3", "'@SUM(A1)", "-1"}
    assert run_command("predict", "own", "=cmd.png", *options, "--format", "jsonl") == 0
    (row,) = rows_of(capsys)
    assert row["path"] == "=cmd.png"
    words = names.read_text().splitlines()
    assert [c["label"] for c in row["top"]] == [words[c["class"]] for c in row["top"]]
    names.write_text("one\ntwo\n")
    assert run_command(*fold) == 1
    assert (
        "names.txt: expected one label for each output of (4,), got 2 lines"
        in capsys.readouterr().err
    )


def test_out_is_written_whole_or_not_at_all(
    grey: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, out = save_grey(tmp_path / "a.png"), tmp_path / "out" / "rows.jsonl"
    assert (
        run_command("predict", grey, path, tmp_path / "b.png", "--out", out, "--format", "jsonl")
        == 1
    )
    assert json.loads(out.read_text())["path"] == str(path)
    assert capsys.readouterr().out == ""
    before = out.read_bytes()

    def stopped(*arguments: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(network_module, "likeliest", stopped)
    assert run_command("predict", grey, path, "--out", out) == 130
    assert out.read_bytes() == before
    assert [file.name for file in out.parent.iterdir()] == ["rows.jsonl"]
    assert run_command("predict", grey, path, "--out", out.parent) == 1
    assert "a folder" in capsys.readouterr().err


def test_a_closed_pipe_ends_quietly(grey: Path, tmp_path: Path) -> None:
    paths = 2000 * [str(save_grey(tmp_path / "a.png"))]
    words = [sys.executable, "-m", "conformallayers", "predict", str(grey), *paths]
    options = ["--engine", "numpy", "--format", "csv", "--batch", "1"]
    with subprocess.Popen(
        [*words, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=source_environment()
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline().startswith(b"path,label")
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--format", "xml"], '"xml"'),
        (["--top", 0], 'Invalid value "0" for --top'),
        (["--engine", "jax"], '"jax"'),
    ],
)
def test_wrong_options_are_refused(
    arguments: list[Any], message: str, grey: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command("predict", grey, "a.png", *arguments) == 1
    assert message in capsys.readouterr().err


def test_scores_that_are_not_finite_are_reported(
    grey: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = open_network(grey, PredictOptions())
    monkeypatch.setattr(session, "_run", lambda x: np.full((len(x), 4), np.nan))
    path = str(save_grey(tmp_path / "a.png"))
    broken = {"path": path, "broken": "scores that are not finite"}
    assert score([path], session, PredictOptions()) == [broken]


def test_equal_scores_keep_the_order_of_the_classes() -> None:
    found = likeliest(np.array([1.0, 3.0, 3.0, 1.0]), 3, "abcd")
    assert [choice["class"] for choice in found] == [1, 2, 0]
    huge = likeliest(np.array([1e30, -1e30], np.float32), 2, "ab")
    assert [choice["probability"] for choice in huge] == [1.0, 0.0]


def test_networks_without_classes_are_refused(tmp_path: Path) -> None:
    stages = cl.Conv2d(1, 2, 3), cl.ReSPro()
    cl.save(cl.fold(cl.ConformalLayers(*stages), GREY), path := tmp_path / "net.safetensors")
    message = r"expected a network that gives scores .*got \(B, 2, 6, 6\)"
    with pytest.raises(cl.ConformalError, match=message):
        open_network(path, PredictOptions())
