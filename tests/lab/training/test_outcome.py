"""What a run leaves beside its numbers."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import torch

from conformallayers.lab.data.datasets import Dataset
from conformallayers.lab.report.figures import mistakes_figure
from conformallayers.lab.training.config import make_config
from conformallayers.lab.training.train import write_outcome

LABELS = ["=1+1", "$x$ é 猫", "a name that is much too long"]
SCORES = torch.tensor([[5.0, 0, 0], [9, 0, 0], [0, 1, 2], [0, 0, 3], [0, 0, 8]])
TRUE = torch.tensor([0, 1, 1, 2, 0])


def outcome(folder: Path) -> None:
    images = torch.randint(0, 256, (5, 3, 6, 8), dtype=torch.uint8)
    data = Dataset("own", images, TRUE, images, TRUE, 3)
    config = make_config(network="LeNet", dataset="own", classes=3, labels=LABELS)
    history = [{"epoch": 1, "loss": 1.0, "train_accuracy": 0.5, "learning_rate": 0.1}]
    write_outcome(folder, config, history, data, SCORES)


def test_files_are_written_and_count_every_image(tmp_path: Path) -> None:
    outcome(tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"training.png", "confusion.png", "confusion.csv", "mistakes.png"}
    with (tmp_path / "confusion.csv").open(newline="", encoding="utf-8") as stream:
        header, *rows = csv.reader(stream)
    assert header == ["true/predicted", "'=1+1", *LABELS[1:]]
    assert [row[1:] for row in rows] == [["1", "0", "1"], ["1", "0", "1"], ["0", "0", "1"]]


def test_surest_mistakes_come_first() -> None:
    images = torch.zeros(5, 1, 4, 4, dtype=torch.uint8)
    figure: Any = mistakes_figure(images, TRUE, SCORES.softmax(1), "abc", "title")
    titles = [axes.get_title() for axes in figure.axes if axes.get_title()]
    assert titles == ["true: b\na 100 %", "true: a\nc 100 %", "true: b\nc 67 %"]
    right = SCORES.argmax(1)
    assert mistakes_figure(images, right, SCORES.softmax(1), "abc", "title") is None
