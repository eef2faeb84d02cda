"""cl.diagnose: arguments, and that nothing of the model changes."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import conformallayers as cl
from conformallayers.diagnosis.diagnose import HealthWarning
from support import FORM

SHAPE = (2, 8, 8)


class Noisy(nn.Module):
    """A model with noise of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.part, self.head = network(), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.part(x + 1e-3 * torch.rand_like(x)).flatten(1)[:, :8])
        return y


def network() -> cl.ConformalLayers:
    torch.manual_seed(0)
    return cl.ConformalLayers(
        *(cl.Conv2d(2, 4, 3, bias=True), nn.BatchNorm2d(4), cl.ReSPro("spectral")),
        *(cl.Dropout(0.5), nn.ReLU(), cl.Conv2d(4, 4, 3), cl.ReSPro("learned")),
        offset="learned",
        unit="rms",
    )


def batch() -> Tensor:
    return torch.rand(6, *SHAPE, generator=torch.Generator().manual_seed(1))


def state(model: nn.Module) -> dict[str, Any]:
    """Return everything of a model that a look at it must leave alone."""
    return {
        "state": {name: tensor.clone() for name, tensor in model.state_dict().items()},
        "modes": [module.training for module in model.modules()],
        "gradients": [None if p.grad is None else p.grad.clone() for p in model.parameters()],
        "needs": [p.requires_grad for p in model.parameters()],
        "hooks": [
            (dict(m._forward_hooks), dict(m._forward_pre_hooks), dict(m._backward_hooks))
            for m in model.modules()
        ],
        "names": [sorted(vars(module)) for module in model.modules()],
        "torch": torch.get_rng_state(),
    }


def assert_same(one: Any, other: Any) -> None:
    if isinstance(one, Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key, value in one.items():
            assert_same(value, other[key])
    elif isinstance(one, (list, tuple)):
        for left, right in zip(one, other, strict=True):
            assert_same(left, right)
    else:
        assert one == other


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("make", [network, Noisy])
def test_the_model_is_left_alone(make: Any, training: bool) -> None:
    model = make()
    model.train()
    for _ in range(3):
        model(batch()).square().sum().backward()
    model.train(training)
    calls: list[str] = []
    inner = model if isinstance(model, cl.ConformalLayers) else model.part
    inner[0].register_forward_hook(lambda *_: calls.append("forward"))
    inner[5].register_full_backward_hook(lambda *_: calls.append("backward"))
    inner[5].weight.register_hook(lambda gradient: calls.append("tensor"))
    before, python, numbers = state(model), random.getstate(), np.random.get_state()[1].copy()  # type: ignore[union-attr]
    x = batch()
    kept = x.clone()
    found = cl.diagnose(model, x)
    assert_same(before, state(model))
    assert random.getstate() == python
    assert np.array_equal(np.random.get_state()[1], numbers)  # type: ignore[arg-type]
    assert torch.equal(x, kept)
    assert calls == []
    assert found.samples == 6


def test_the_mode_makes_no_difference() -> None:
    model = network()
    model(batch())
    assert str(cl.diagnose(model.train(), batch())) == str(cl.diagnose(model.eval(), batch()))


def test_inference_mode_and_float_types() -> None:
    with torch.inference_mode():
        x = torch.rand(4, *SHAPE)
        assert cl.diagnose(network(), x).samples == 4
    for dtype in (torch.float64, torch.bfloat16):
        assert cl.diagnose(network().to(dtype), batch().to(dtype)).parts[0].path == ""


def test_parametrised_and_shared_layers() -> None:
    conv = parametrizations.weight_norm(cl.Conv2d(2, 2, 3, padding=1))
    model = cl.ConformalLayers(conv, nn.ReLU(), conv, cl.ReSPro(1.0), offset=0.5, unit="rms")
    assert len(cl.diagnose(model, batch()).parts[0].layers) == 4


# -- refusals ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ((torch.rand(2, 3), network()), r"diagnose\(model\): expected an nn.Module"),
        ((nn.Linear(3, 3), torch.rand(2, 3)), "expected a cl.ConformalLayers"),
        ((network(), [1.0]), "a floating-point tensor, got list"),
        ((network(), torch.ones(2, *SHAPE).long()), "a floating-point tensor, got torch.int64"),
        (
            (network(), torch.rand(8)),
            r"a batch of at least one sample, got a tensor of shape \(8,\)",
        ),
        ((network(), torch.rand(0, *SHAPE)), "a batch of at least one sample"),
        ((network(), torch.full((2, *SHAPE), torch.nan)), "finite numbers"),
        ((network(), torch.zeros(2, *SHAPE)), "samples with a norm, got zeros"),
        ((network(), torch.rand(2, 3, 8, 8)), "Conv2d"),
        ((network(), torch.rand(*SHAPE)), "Conv2d"),
        ((Noisy(), torch.rand(2, 2, 3, 3)), "any number of samples|Conv2d"),
    ],
)
def test_bad_arguments_are_refused(arguments: tuple[Any, Any], match: str) -> None:
    with pytest.raises(cl.ConformalError, match=match) as refused:
        cl.diagnose(*arguments)
    assert FORM.match(str(refused.value))


def test_folds_and_other_options_are_refused() -> None:
    folded = cl.fold(cl.ConformalLayers(cl.Linear(4, 2), cl.ReSPro()), (4,))
    with pytest.raises(cl.ConformalError, match="a module with some inside, got Folded"):
        cl.diagnose(folded, torch.rand(2, 4))


def test_a_model_that_never_runs_its_layers_is_refused() -> None:
    class Idle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = network()

        def forward(self, x: Tensor) -> Tensor:
            return x * 2

    with pytest.raises(cl.ConformalError, match="a model that runs its ConformalLayers, got none"):
        cl.diagnose(Idle(), batch())


# -- how it prints ----------------------------------------------------------------------------------


def diagnosis() -> cl.Diagnosis:
    torch.manual_seed(0)
    layers = cl.Conv2d(1, 4, 3), cl.ReSPro(500.0), nn.BatchNorm2d(4), cl.Flatten()
    model = nn.Sequential(cl.ConformalLayers(*layers), nn.Linear(144, 3))
    return cl.diagnose(model, torch.rand(8, 1, 8, 8))


def test_it_prints_tables_and_every_warning_with_its_remedy() -> None:
    found = diagnosis()
    text = str(found)
    assert repr(found) == text
    for part in found.parts:
        assert str(part) in text
    assert "0.1   ReSPro" in text
    assert f"{len(found.warnings)} warnings on 8 samples" in text
    for warning in found.warnings:
        assert all(piece in text for piece in (warning.seen, warning.why, warning.remedy))
        assert str(warning) in text


def test_columns_without_numbers_are_left_out() -> None:
    part = cl.ConformalLayers(cl.Linear(4, 4), nn.ReLU())
    text = str(cl.diagnose(part, torch.rand(4, 4)).parts[0])
    assert "dead" in text
    assert "alpha" not in text
    assert "variance" not in text


def test_paths_are_listed_up_to_three() -> None:
    paths = ("a", "", "c", "d", "e")
    warning = HealthWarning("kind", paths, "seen", "why", "Remedy.")
    assert warning.path == "a, model, c and 2 more"
    assert warning.line == "a, model, c and 2 more: seen; why. Remedy."
    assert str(warning) == "a, model, c and 2 more: seen\n  why: why\n  remedy: Remedy."
