"""What several test files share: inputs, folds by every strategy, common parameters."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import conformallayers as cl
from conformallayers.folding.stage_graph import stages_by_part
from conformallayers.folding.stages import RadialStage, Scaling
from conformallayers.folding.strategies import STRATEGIES
from oracle import exact, gradient_error, oracle, relative_error

TOLERANCES = cl.testing.TOLERANCES
DTYPES = (torch.float64, torch.float32)
ALWAYS = {"dense", "layers"}  # strategies that apply to every network

FORM = re.compile(r"^.+: expected .+, got .+\. .+", re.DOTALL)
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

    def stopping(*arguments: Any) -> None:
        save(*arguments)
        if len(arguments[-1]) == epoch:  # the history
            raise KeyboardInterrupt

    return stopping


def stage_of(model: nn.Module, shape: tuple[int, ...]) -> RadialStage:
    """Return the only stage of a model behind its embedding, its whole linear head included."""
    (graph,) = stages_by_part(model, shape)
    (stage,) = graph.stages
    assert isinstance(stage, RadialStage)
    return stage.entered(Scaling(graph.norm_factor), least=1.0)


def operations(folded: cl.Folded, kind: Any) -> list[Any]:
    """Return the operations of a kind that a fold runs."""
    return [operation for operation in folded.recipe.operations if isinstance(operation, kind)]


def message_of(action: Callable[[], object]) -> str:
    """Return the message of the refusal, after checking its family and form."""
    with pytest.raises(cl.ConformalError) as caught:
        action()
    assert isinstance(caught.value, ValueError)
    text = str(caught.value)
    assert FORM.match(text), text
    assert "\n" not in text, text
    return text


def assert_says(action: Callable[[], object], *parts: str) -> None:
    text = message_of(action)
    for part in parts:
        assert part in text, text


def run_command(*arguments: object) -> int:
    """Run the command line in this process; return its exit code."""
    from conformallayers.cli.app import main

    with pytest.raises(SystemExit) as leaving:
        main([str(argument) for argument in arguments])
    return int(leaving.value.code or 0)


def run_script(path: Path, folder: Path, seconds: int = 120) -> str:
    """Run a program in a folder with warnings as errors, and return what it prints."""
    done = subprocess.run(
        [sys.executable, "-W", "error", str(path)],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def count(folded: cl.Folded, kind: str) -> int:
    """Count the operations of a kind, by its name."""
    return sum(op.kind == kind for op in folded.recipe.operations)


def error_of_all(found: Tensor, expected: Tensor) -> float:
    """Return the largest error, relative to the largest number."""
    return float((found - expected).abs().max() / expected.abs().max().clamp_min(1e-3))


def gradients(y: Tensor, *inputs: Tensor) -> list[Tensor]:
    """Return the gradients of a fixed random combination of the outputs."""
    generator = torch.Generator().manual_seed(7)
    weights = torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y.dtype)
    return list(torch.autograd.grad((y * weights).sum(), inputs))


def check_training(model: cl.ConformalLayers, x: Tensor, limit: float) -> None:
    """Compare values and all gradients of the training path with the oracle."""
    model.train()
    model(x)  # gives a spectral activation its vector
    twin = exact(model)
    spectral = [m for m in twin.modules() if getattr(m, "alpha", None) == "spectral"]
    vectors = {m: m.vector for m in spectral if m.vector is not None}
    x = x.clone().requires_grad_()
    wide = x.detach().double().requires_grad_()
    torch.manual_seed(1)  # of dropout
    y = model(x)
    torch.manual_seed(1)
    expected = oracle(twin, wide, vectors)
    assert relative_error(y, expected) <= TOLERANCES[x.dtype]
    wanted = gradients(expected, wide, *twin.parameters())
    assert gradient_error(gradients(y, x, *model.parameters()), wanted) <= limit
