"""A small training run for tests of the commands that take one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rich.console import Console

from conformallayers.lab.data.datasets import Dataset, load
from conformallayers.lab.training.train import train


def few_digits() -> Dataset:
    """Return 200 training and 50 test images of digits."""
    full = load("digits")
    return replace(
        full,
        train_images=full.train_images[:200],
        train_labels=full.train_labels[:200],
        test_images=full.test_images[:50],
        test_labels=full.test_labels[:50],
    )


def train_few_digits(out: Path) -> Path:
    """Train LeNetCL, with every option that the fold must carry over, and return the run folder."""
    options = {"centre": True, "projective": True, "gain": 20.0, "alpha": "spectral"}
    steps = {"epochs": 3, "batch_size": 20, "learning_rate": 0.01}
    quiet = Console(quiet=True)
    return train("LeNetCL", few_digits(), out=out, console=quiet, **options, **steps).folder
