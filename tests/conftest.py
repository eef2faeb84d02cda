"""Settings of the whole suite."""

from __future__ import annotations

import os

import pytest
import torch

from conformallayers.folding.folded import Conformal

# The tests run many tiny tensors: a second thread would only wait, and slow the first one down.
torch.set_num_threads(1)
# Choices must not hang on how busy the machine is, and tests leave no files behind.
os.environ.setdefault("CONFORMALLAYERS_CALIBRATE", "0")


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Conformal]:
    """Collect every folded chain that is built."""
    found: list[Conformal] = []
    original = Conformal.__init__

    def counting(self: Conformal, *arguments: object, **keywords: object) -> None:
        original(self, *arguments, **keywords)
        found.append(self)

    monkeypatch.setattr(Conformal, "__init__", counting)
    return found
