"""Settings of the whole suite."""

from __future__ import annotations

import os

import pytest
import torch

from conformallayers.recipe.torch.module import RecipeModule

# The tests run many tiny tensors: a second thread would only wait, and slow the first one down.
torch.set_num_threads(1)
# Choices must not hang on how busy the machine is, and tests leave no files behind.
os.environ.setdefault("CONFORMALLAYERS_CALIBRATE", "0")


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[RecipeModule]:
    """Collect every folded chain that is built."""
    found: list[RecipeModule] = []
    original = RecipeModule.__init__

    def counting(self: RecipeModule, *arguments: object, **keywords: object) -> None:
        original(self, *arguments, **keywords)
        found.append(self)

    monkeypatch.setattr(RecipeModule, "__init__", counting)
    return found
