"""The rectifiers that stay: by pooling and strides, by name, and wrong choices."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import conformallayers as cl
from cnns import Mobile, ResNet, replaced, signal_net, vgg
from support import assert_says

SHAPE = (3, 8, 8)


def test_those_beside_a_pooling_stay() -> None:
    assert replaced(cl.convert(vgg(), SHAPE)) == ["0.0.2", "0.1.2"]
    assert replaced(cl.convert(vgg(norm=False), SHAPE)) == ["0.0.1", "0.1.1"]
    assert replaced(cl.convert(signal_net(), (2, 24))) == ["2"]


@pytest.mark.parametrize(
    "neighbour",
    [
        nn.MaxPool2d(2),
        nn.AvgPool2d(2),
        nn.LPPool2d(2, 2),
        nn.AdaptiveAvgPool2d(2),
        nn.AdaptiveMaxPool2d(2),
        nn.Conv2d(4, 4, 3, stride=(1, 2)),
        nn.ConvTranspose2d(4, 4, 2, stride=2),
    ],
)
def test_before_and_behind(neighbour: nn.Module) -> None:
    through = nn.BatchNorm2d(4), nn.Dropout2d(0.1), nn.Identity()
    conv = nn.Conv2d(4, 4, 3, padding=1)
    name = type(neighbour).__name__
    before = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), *through, neighbour, conv, nn.ReLU())
    twin = cl.convert(before, SHAPE)
    assert replaced(twin) == ["7"]
    assert twin.conversion.changes[1].reason == f"before {name} 5"
    behind = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), conv, neighbour, *through, nn.PReLU())
    twin = cl.convert(behind, SHAPE)
    assert replaced(twin) == ["1"]
    assert twin.conversion.changes[7].reason == f"behind {name} 3"


def test_a_sum_separates() -> None:
    twin = cl.convert(ResNet(), SHAPE)
    kept = [one.path for one in twin.conversion.changes if one.action == "kept as ReLU"]
    assert kept == ["relu_4", "relu_5", "relu_6"]


def test_by_name() -> None:
    model = vgg()
    assert replaced(cl.convert(model, SHAPE, keep=["0.0.2", "0.1.5"])) == ["0.0.5", "0.1.2"]
    assert replaced(cl.convert(model, SHAPE, keep=())) == replaced(
        cl.convert(model, SHAPE, keep="none")
    )
    assert replaced(cl.convert(ResNet(), SHAPE, keep={"relu", "relu_2"})) == [
        f"relu_{n}" for n in (1, 3, 4, 5, 6)
    ]


def test_all_calls_of_a_module_or_one_of_them() -> None:
    model, shape = Mobile(), (3, 7, 7)
    assert replaced(cl.convert(model, shape, keep=["relu"])) == ["prelu"]
    assert replaced(cl.convert(model, shape, keep=["relu_1"])) == ["relu", "prelu"]
    rows = {
        one.path: one.reason for one in cl.convert(model, shape, keep="none").conversion.changes
    }
    assert rows["relu (relu_1)"] == 'keep="none"'
    assert rows["prelu"] == 'keep="none"; its weight is dropped'


def test_names_of_functions_and_modules_are_apart() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.relu, self.relu_1 = nn.Conv1d(2, 2, 1), nn.ReLU(), nn.ReLU()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = F.relu(self.relu(F.relu(self.first(x))))
            return self.first(self.relu_1(self.first(self.relu(x))))

    def kept(*keep: str) -> list[str]:
        rows = cl.convert(Named(), (2, 5), keep=keep).conversion.changes
        assert len({one.path for one in rows}) == len(rows) == 8
        return [one.path for one in rows if one.reason == "named in keep"]

    assert kept("relu") == ["relu", "relu (relu_3)"]
    assert kept("relu_3") == ["relu (relu_3)"]
    for name in ("relu_1", "relu_2", "relu_1_1"):  # the module, and two functions
        assert kept(name) == [name]


def test_the_head_keeps_its_rectifiers() -> None:
    for keep in ("none", ["1.2"]):
        twin = cl.convert(vgg(), SHAPE, keep=keep)
        assert isinstance(twin.head[2], nn.ReLU)
        assert not any(isinstance(module, nn.ReLU) for module in twin.features.modules())


def test_wrong_choices() -> None:
    model = vgg()

    def converting(keep: object) -> object:
        return lambda: cl.convert(model, SHAPE, keep=keep)

    assert_says(converting("pool"), "convert(keep=...)", 'Did you mean "pooling"?', "'pool'")
    assert_says(converting("0.0.2"), "One path is a list too: keep=['0.0.2']")
    assert_says(converting(["0.0.3"]), "'0.0.3', which is a Conv2d", "The model has 0.0.2, ")
    assert_says(converting(["0.0.22"]), "paths of rectifiers, got '0.0.22'", "Did you mean")
    for wrong in (None, 3, b"all", [1], True, torch.ones(2)):
        assert_says(converting(wrong), "a list of paths of rectifiers", 'The default is "pooling"')
    plain = nn.Sequential(nn.Conv2d(3, 4, 3))
    assert_says(lambda: cl.convert(plain, SHAPE, keep=["1"]), "The model has no rectifier.")
