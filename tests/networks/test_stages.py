"""StageNet and its ReLU twin: shapes, cost when folded, training, and folds against the layers."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import conformallayers as cl
from conformallayers.networks.stages import PRESETS
from oracle import randomise, relative_error
from support import DTYPES, TOLERANCES, samples

# multiply-adds
LIMITS = {
    "nano": 0.28e6,
    "micro": 0.45e6,
    "small": 0.66e6,
    "base": 2.5e6,
    "compact": 5.6e6,
    "large": 8.5e6,
}
KINDS = ["StageNet", "StageReLUNet"]
slow = functools.partial(pytest.param, marks=pytest.mark.slow)  # seconds to fold
every_preset = pytest.mark.parametrize("preset", PRESETS)
every_kind = pytest.mark.parametrize("kind", KINDS)


def network(kind: str, *arguments: Any, **options: Any) -> nn.Module:
    return randomise(getattr(cl.networks, kind)(*arguments, **options), 2)


def multiply_adds(model: nn.Module, dtype: torch.dtype = torch.float32) -> int:
    x = torch.rand(1, *cl.networks.IMAGE_SHAPE, dtype=dtype)
    with FlopCounterMode(display=False) as counter, torch.no_grad(), cl.layer_by_layer():
        model(x)
    return int(counter.get_total_flops()) // 2


@every_kind
@every_preset
def test_presets_keep_their_limits(kind: str, preset: str) -> None:
    model = network(kind, preset).eval()
    assert 0.9 * LIMITS[preset] <= multiply_adds(model) <= LIMITS[preset]


@pytest.mark.parametrize(
    "preset", ["nano", "micro", "small", *map(slow, ["base", "compact", "large"])]
)
def test_folded_presets_keep_their_limits(preset: str) -> None:
    folded = cl.fold(network("StageNet", preset), cl.networks.IMAGE_SHAPE)
    assert multiply_adds(folded) <= LIMITS[preset]


def test_expanded_stages_fold_to_the_same_operations() -> None:
    model = network("StageNet", "micro")
    plain, bigger = (cl.fold(m, (3, 32, 32)) for m in (model, cl.expand(model)))
    kinds = [[operation.kind for operation in fold.recipe.operations] for fold in (plain, bigger)]
    assert kinds[0] == kinds[1]
    assert multiply_adds(plain) == multiply_adds(bigger)


def test_width_and_pooling_of_the_twin() -> None:
    plain = network("StageReLUNet", "micro", width=1.5).features
    assert [m.out_channels for m in plain if isinstance(m, nn.Conv2d)] == [24, 72]
    twin, stage = network("StageReLUNet", "micro", pool="norm"), network("StageNet", "micro")
    shapes = [[p.shape for p in m.parameters() if p.dim() > 1] for m in (twin, stage)]
    assert shapes[0] == shapes[1]
    assert multiply_adds(twin.eval()) == multiply_adds(stage.eval())


@pytest.mark.parametrize("rectifier", ["norm", "relu", "abs", "max"])
@pytest.mark.parametrize("signed", [0, 0.5, 0.999])
def test_a_step_of_training_moves_every_weight(rectifier: Any, signed: float) -> None:
    torch.manual_seed(0)
    model = cl.networks.StageNet("micro", rectifier=rectifier, signed=signed)
    x, labels = torch.rand(8, 3, 32, 32), torch.arange(8)
    loss = nn.functional.cross_entropy(model(x), labels)
    loss.backward()
    for name, weight in model.named_parameters():
        assert weight.grad is not None, name
        assert 0 < weight.grad.abs().max() < torch.inf, name
    torch.optim.SGD(model.parameters(), 0.01).step()
    assert nn.functional.cross_entropy(model(x), labels) < loss


@pytest.mark.parametrize(
    ("preset", "options"),
    [
        ("micro", {}),
        ("micro", {"respro": False}),
        ("micro", {"rectifier": "relu", "unit": "norm", "offset": None}),
        slow("base", {}),
    ],
)
def test_folds_equal_the_layers(preset: str, options: dict[str, Any]) -> None:
    shallow = multiply_adds(network("StageNet", preset).eval())
    for dtype in DTYPES:
        model = network("StageNet", preset, **options).to(dtype).eval()
        x = samples((3, 32, 32), dtype, batch=2)
        with torch.no_grad():
            with cl.layer_by_layer():
                expected = model.double()(x.double())
            folded = cl.fold(model.to(dtype), (3, 32, 32), strategy="conv")
            assert relative_error(folded(x), expected) <= TOLERANCES[dtype]
            assert multiply_adds(folded, dtype) == shallow


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        *(
            (kind, {"preset": "huge"}, "preset: expected one of nano, micro, small")
            for kind in KINDS
        ),
        (
            "StageNet",
            {"in_shape": (3, 8, 8)},
            r"images of at least 23 × 23 pixels, got \(3, 8, 8\)",
        ),
        ("StageNet", {"in_shape": (3, 32)}, r"in_shape: expected \(C, H, W\)"),
        ("StageNet", {"rectifier": "gelu"}, "rectifier: expected one of norm, relu, abs, max"),
        ("StageNet", {"signed": 1}, "signed: expected a number from 0 to below 1"),
        ("StageReLUNet", {"pool": "sum"}, 'pool: expected "average", "max" or "norm"'),
        ("StageReLUNet", {"width": 0}, "width: expected a number above 0"),
        ("MLP", {"hidden": 0}, "hidden: expected an integer > 0, got 0"),
    ],
)
def test_wrong_arguments_are_refused(kind: str, options: Any, message: str) -> None:
    with pytest.raises(cl.ConformalError, match=message):
        getattr(cl.networks, kind)(**options)
