"""What several test files share: inputs, folds by every strategy, common parameters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import conformallayers as cl
from conformallayers.folding.strategies import STRATEGIES

TOLERANCES = cl.testing.TOLERANCES
DTYPES = (torch.float64, torch.float32)
ALWAYS = {"dense", "layers"}  # strategies that apply to every network

both_forms = pytest.mark.parametrize("projective", [False, True], ids=["published", "projective"])


def samples(shape: tuple[int, ...], dtype: torch.dtype, batch: int = 4, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, *shape, generator=generator).to(dtype)


def folds(model: nn.Module, shape: tuple[int, ...]) -> dict[str, cl.Folded]:
    """Fold with every strategy that applies."""
    found = {}
    for name in STRATEGIES:
        try:
            found[name] = cl.fold(model, shape, strategy=name)
        except cl.ConformalError:
            assert name not in ALWAYS
    return found


def stops_after(epoch: int, save: Callable[..., None]) -> Callable[..., None]:
    """Return a function that saves a checkpoint, and interrupts the run after that epoch."""

    def stopping(path: Path, model: object, optimizer: object, state: dict[str, Any]) -> None:
        save(path, model, optimizer, state)
        if state["epoch"] == epoch:
            raise KeyboardInterrupt

    return stopping


def run_command(*arguments: object) -> int:
    """Run the command line in this process and return its exit status."""
    from conformallayers.cli.app import main

    with pytest.raises(SystemExit) as leaving:
        main([str(argument) for argument in arguments])
    return int(leaving.value.code or 0)
