"""What a run leaves beside its numbers."""

from __future__ import annotations

import csv
from pathlib import Path

import torch

from conformallayers.lab.training.config import make_config
from conformallayers.lab.training.train import write_outcome

LABELS = ["=1+1", "$x$ é 猫", "a name that is much too long"]
SCORES = torch.tensor([[5.0, 0, 0], [9, 0, 0], [0, 1, 2], [0, 0, 3], [0, 0, 8]])
TRUE = torch.tensor([0, 1, 1, 2, 0])


def outcome(folder: Path) -> None:
    config = make_config(network="LeNet", dataset="own", classes=3, labels=LABELS)
    history = [{"epoch": 1, "loss": 1.0, "train_accuracy": 0.5, "learning_rate": 0.1}]
    write_outcome(folder, config, history, TRUE, SCORES)


def test_files_are_written_and_count_every_image(tmp_path: Path) -> None:
    outcome(tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"training.png", "confusion.csv"}
    with (tmp_path / "confusion.csv").open(newline="", encoding="utf-8") as stream:
        header, *rows = csv.reader(stream)
    assert header == ["true/predicted", "'=1+1", *LABELS[1:]]
    assert [row[1:] for row in rows] == [["1", "0", "1"], ["1", "0", "1"], ["0", "0", "1"]]
