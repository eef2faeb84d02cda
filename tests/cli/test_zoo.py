"""conformallayers zoo, and the names of its networks in other commands."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch

import conformallayers as cl
from conformallayers.cli.app import build_app
from conformallayers.lab.data.datasets import load
from conformallayers.lab.training.config import resolved
from support import run_command

NAME = "digits-micro"


def test_table_and_cards_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("zoo") == 0
    assert capsys.readouterr().out == f"{cl.zoo.list()}\n"
    for record in cl.zoo.list():
        assert run_command("zoo", "card", record.name) == 0
        assert capsys.readouterr().out == record.card


def test_present_options_take_the_commands_of_all_cards() -> None:
    for record in cl.zoo.list():
        words = shlex.split(record.command)[1:]
        command, bound, _ = build_app().parse_args(words, exit_on_error=False, print_error=False)
        options = {**bound.arguments, **bound.arguments.pop("options")}
        assert (command.__name__, resolved(options)["optimizer"]) == ("train", "adamw")


def test_predict_takes_a_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from PIL import Image

    data = load("digits")
    for index, image in enumerate(data.test_images[:5]):
        Image.fromarray(np.asarray(image[0])).save(tmp_path / f"{index}.png")
    paths = sorted(tmp_path.iterdir())
    assert run_command("predict", NAME, *paths, "--format", "jsonl", "--top", 1) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    with torch.no_grad():
        classes = cl.zoo.load(NAME)(data.test_images[:5].float() / 255).argmax(1).tolist()
    assert [int(row["top"][0]["label"]) for row in rows] == classes
    with Image.open(paths[0]) as digit:
        digit.resize((40, 40)).save(tmp_path / "large.png")
    assert run_command("predict", NAME, tmp_path / "large.png", "--format", "jsonl") == 0
    assert json.loads(capsys.readouterr().out)["top"][0]["label"] == str(classes[0])


def test_missing_folders_of_files_are_created(tmp_path: Path) -> None:
    for number, words in enumerate(
        [
            ("quantize", NAME),
            ("export", NAME, "--format", "onnx"),
            ("export", NAME, "--format", "numpy"),
            ("playground", NAME),
        ]
    ):
        out = tmp_path / f"{number}" / "new" / "file"
        assert run_command(*words, "--out", out) == 0
        assert out.is_file()


def test_a_mistyped_name_is_suggested(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("evaluate", "digit-micro") == 1
    error = capsys.readouterr().err
    assert (
        'got no such file. Check the path; conformallayers zoo lists the names. Did you mean "digits-micro"?'
        in error
    )
    assert error.count("\n") == 1
