"""Helpers for the tests of training runs."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from rich.console import Console
from safetensors.torch import load_file

import conformallayers as cl

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
