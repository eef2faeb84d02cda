"""Helpers for the tests of training runs."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from safetensors.torch import load_file

import conformallayers as cl
from conformallayers.lab.data.datasets import Dataset, load
from conformallayers.lab.training.train import train

QUIET = Console(quiet=True)


def source_environment() -> dict[str, str]:
    """Return the environment of a process that imports the package under test."""
    source = str(Path(cl.__file__).parents[1])
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": source}


def assert_same_weights(one: Path, other: Path) -> None:
    """Compare the checkpoints of two runs bit by bit."""
    first, second = (load_file(run / "checkpoint.safetensors") for run in (one, other))
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


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
    return train("LeNetCL", few_digits(), out=out, console=QUIET, **options, **steps).folder
