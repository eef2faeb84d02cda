"""Advice: each sentence where its fact holds, and nowhere else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import conformallayers as cl
from oracle import randomise

PADDING = "padding inside the stage: pad once at its start and its 3 convolutions become one"
INNER = (
    "an activation between layers needs an energy of its own: at the end of the stage it is free"
)
IMAGE = "a bias before a padded convolution makes the bias an image: put it behind the convolution"
_ONE = "without that bias this stage and the next are one"
BEHIND = "a bias behind an activation ends the stage there: " + _ONE
BEFORE = "an activation behind a bias ends the stage there: " + _ONE


def conv(padding: int = 0, bias: bool = False) -> nn.Module:
    return cl.Conv2d(2, 2, 3, padding=padding, bias=bias)


def respro() -> nn.Module:
    return cl.ReSPro(projective=True)


@pytest.mark.parametrize(
    ("strategy", "layers", "expected"),
    [
        ("conv", [conv(3), conv(), conv(), respro()], []),
        ("conv", [conv(1), conv(1), conv(1), respro()], [PADDING]),
        ("layers", [conv(1), conv(1), conv(1), respro()], [PADDING]),
        ("dense", [conv(1), conv(1), conv(1), respro()], []),
        ("conv", [conv(), respro(), conv(), respro()], [INNER]),
        ("conv", [conv(), respro(), cl.AvgPool2d(2)], []),
        ("conv", [conv(bias=True), conv(), respro()], []),
        ("conv", [nn.BatchNorm2d(2), conv(1), respro()], []),
        ("conv", [nn.ReLU(), nn.BatchNorm2d(2), conv(), conv(), respro()], []),
        ("conv", [conv(bias=True), conv(1), conv(1), respro()], [PADDING, IMAGE]),
        ("layers", [conv(), nn.BatchNorm2d(2), conv(), respro()], []),
        ("conv", [conv(1), respro(), conv(bias=True)], [BEHIND]),
        ("conv", [conv(bias=True), respro(), conv()], [BEFORE]),
        ("conv", [conv(bias=True), nn.ReLU(), conv()], []),
    ],
)
def test_the_first_stage_gets_this_advice(
    strategy: str, layers: list[nn.Module], expected: list[str]
) -> None:
    model = randomise(cl.ConformalLayers(*layers, nn.ReLU(), cl.Conv2d(2, 2, 1)))
    plan = next(iter(cl.fold(model, (2, 12, 12), strategy=strategy).explain().values()))
    assert list(plan.advice) == expected
    assert str(plan).count("\ncheaper: ") == len(plan.advice)


def test_layers_behind_a_biased_stage_that_only_move_get_none() -> None:
    model = cl.ConformalLayers(nn.ReLU(), conv(bias=True), respro(), cl.AvgPool2d(2), nn.Flatten())
    (plan,) = cl.fold(randomise(model), (2, 12, 12)).explain().values()
    assert plan.advice == ()


def test_a_network_of_one_stage_gets_none() -> None:
    model = cl.ConformalLayers(conv(1), cl.ReSPro(), conv(1), cl.ReSPro())
    assert cl.fold(model, (2, 8, 8)).explain()[""].advice == ()


def test_advice_is_stored_in_files(tmp_path: Path) -> None:
    model = cl.ConformalLayers(conv(), respro(), conv(), nn.ReLU(), conv())
    folded = cl.fold(model, (2, 8, 8), dtype=torch.float32)
    cl.save(folded, tmp_path / "net.safetensors")
    loaded = cl.load(tmp_path / "net.safetensors")
    assert loaded.explain()["stage 1"].advice == (INNER,)
    assert str(loaded.explain()) == str(folded.explain())
