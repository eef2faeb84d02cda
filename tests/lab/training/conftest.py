"""A small data set and one finished run for the tests of training."""

from __future__ import annotations

from typing import Any

import pytest

from conformallayers.lab.data.datasets import Dataset
from conformallayers.lab.training.train import train
from training import QUIET, few_digits


@pytest.fixture(scope="session")
def small() -> Dataset:
    """The first few digits, under the name that finds all of them."""
    return few_digits()


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Any:
    out = tmp_path_factory.mktemp("runs") / "run"
    options = {"epochs": 8, "schedule": "one-cycle", "validation": 0.1, "batch_size": 64}
    options |= {"alpha": "spectral", "learning_rate": 0.02}
    return train("LeNetCL", "digits", out=out, console=QUIET, **options)
