"""Habits of torch users: what works with any nn.Module works with ConformalLayers."""

from __future__ import annotations

import copy
import io
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import conformallayers as cl
from cases import ALPHAS
from nets import POOLED_SHAPE, pooled_net
from oracle import exact_output, randomise, relative_error


@pytest.fixture
def x() -> Tensor:
    return torch.rand(5, *POOLED_SHAPE, generator=torch.Generator().manual_seed(1))


def agrees(model: nn.Module, x: Tensor, expected: Tensor) -> bool:
    with torch.no_grad():
        return relative_error(model.eval()(x), expected) <= 5e-6


@pytest.mark.parametrize("alpha", ALPHAS)
def test_state_dicts_through_files(alpha: str | float | None, x: Tensor, tmp_path: Path) -> None:
    model = pooled_net(alpha)
    model(x)  # gives a spectral activation its norm
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    expected = exact_output(model, x)
    for state in (
        torch.load(buffer, weights_only=True),
        load_file(tmp_path / "model.safetensors"),
    ):
        other = randomise(pooled_net(alpha), 9)
        other.load_state_dict(state, strict=True)
        assert agrees(other, x, expected)


def test_averaged_model(x: Tensor) -> None:
    first, second = pooled_net(), randomise(pooled_net(), 9)
    averaged = AveragedModel(first)
    averaged.update_parameters(first)
    averaged.update_parameters(second)
    mean = copy.deepcopy(first)
    with torch.no_grad():
        for parameter, other in zip(mean.parameters(), second.parameters(), strict=True):
            parameter.lerp_(other, 0.5)
    assert agrees(averaged, x, exact_output(mean, x))


def test_backward_hooks_run() -> None:
    model = cl.ConformalLayers(cl.Linear(4, 4), cl.ReSPro(), cl.Linear(4, 2), cl.ReSPro())
    fired: list[int] = []
    for index in (0, 2):
        model[index].register_full_backward_hook(lambda *_, index=index: fired.append(index))
    model(torch.rand(2, 4, requires_grad=True)).sum().backward()
    assert fired == [2, 0]


@pytest.mark.parametrize("alpha", ALPHAS)
def test_equal_seeds_give_equal_runs(alpha: str | float | None, x: Tensor) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        runs = []
        for _ in range(2):
            torch.manual_seed(3)
            model = nn.Sequential(pooled_net(alpha), nn.Dropout(0.2))
            optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(3):
                optimiser.zero_grad()
                model(x).square().sum().backward()
                optimiser.step()
            with torch.no_grad():
                runs.append([*model.state_dict().values(), model.eval()(x)])
        assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
    finally:
        torch.use_deterministic_algorithms(False)
