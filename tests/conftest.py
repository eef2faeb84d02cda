"""Settings of the whole suite."""

from __future__ import annotations

import os
from collections.abc import Callable
from hashlib import sha256
from typing import Any

import pytest
import torch
from hypothesis import settings

from conformallayers import container
from conformallayers.folding import fold
from conformallayers.folding.folded import Folded
from conformallayers.recipe.torch.module import RecipeModule

# Training would keep freed memory in a process that runs other tests as well; this is glibc's default.
os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", "131072")
# The tests run many tiny tensors: a second thread would only wait, and slow the first one down.
torch.set_num_threads(1)
# The same cases in every run; make soak draws new ones.
settings.register_profile("suite", derandomize=True)
settings.load_profile("suite")


@pytest.hookimpl(tryfirst=True)  # before slow tests are left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all cases of a sampled test as slow, but for one of n by their names, so that no option is left out."""
    for item in items:
        mark = item.get_closest_marker("sampled")
        if mark is not None and sha256(item.nodeid.encode()).digest()[0] % mark.args[0]:
            item.add_marker("slow")


@pytest.fixture
def seeded() -> None:
    """Start a test from the same random numbers, whichever tests ran before it."""
    torch.manual_seed(0)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[RecipeModule]:
    """Collect every fold that a ConformalLayers keeps or that cl.fold returns."""
    found: list[RecipeModule] = []

    def collecting(kind: type[RecipeModule]) -> Callable[..., RecipeModule]:
        def make(*arguments: Any) -> RecipeModule:
            found.append(kind(*arguments))
            return found[-1]

        return make

    monkeypatch.setattr(container, "RecipeModule", collecting(RecipeModule))
    monkeypatch.setattr(fold, "Folded", collecting(Folded))
    return found
