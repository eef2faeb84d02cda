"""Graphs of plain models: changes in place, modules that torch.nn nests, parts that are leaves."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import conformallayers as cl
from cnns import Dense, embedded, expected_of
from oracle import randomise, relative_error
from support import samples


class Changes(nn.Module):
    """A network whose forward is a function of its first map."""

    def __init__(self, function: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.function, self.relu = function, nn.ReLU(inplace=True)
        self.first, self.last = nn.Conv1d(2, 2, 1), nn.Conv1d(2, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function(self, self.first(x)))


def unused(net: nn.Module, x: Tensor) -> Tensor:
    net.relu(x)
    return x


@pytest.mark.parametrize(
    "function",
    [
        lambda net, x: net.relu(x) + x,
        lambda net, x: x + net.relu(x),
        lambda net, x: F.relu(x, inplace=True) + x,
        lambda net, x: x.relu_() + x,
        lambda net, x: torch.relu_(x) + x,
        lambda net, x: x.add_(F.relu(x)) + x,
        unused,
    ],
)
def test_a_map_that_is_overwritten_and_read_again_is_refused(
    function: Callable[[nn.Module, Tensor], Tensor],
) -> None:
    with pytest.raises(
        cl.ConformalError, match=r"in place that \w+ reads later. Compute a new one"
    ):
        cl.convert(Changes(function), (2, 5))


@pytest.mark.parametrize(
    "function",
    [
        lambda net, x: net.relu(net.relu(x)),
        lambda net, x: x.abs() + F.relu(net.last(x), inplace=True),
        lambda net, x: (x.abs() + x).add_(net.relu(x)),
    ],
)
def test_a_map_that_is_overwritten_last_is_the_same(
    function: Callable[[nn.Module, Tensor], Tensor],
) -> None:
    model = randomise(Changes(function)).double()
    twin, x = cl.convert(model, (2, 5), keep="all"), samples((2, 5), torch.float64)
    with torch.no_grad():
        assert relative_error(twin(x), model(embedded(twin, x))) <= 1e-12


def test_graphs_inside_numbered_modules() -> None:
    model = nn.Sequential(nn.Sequential(nn.Conv2d(3, 3, 1), Dense()), nn.Conv2d(9, 2, 1))
    model = randomise(model).double()
    twin, x = cl.convert(model, (3, 6, 6)), samples((3, 6, 6), torch.float64)
    with torch.no_grad(), cl.layer_by_layer():
        assert relative_error(twin(x), expected_of(model, twin, x)) <= 1e-12


def test_a_model_that_is_one_layer() -> None:
    for model in (nn.Conv1d(2, 3, 3), cl.Residual(nn.Conv1d(2, 2, 1), nn.ReLU())):
        twin, x = cl.convert(model.double(), (2, 5)), samples((2, 5), torch.float64)
        assert [one.path for one in twin.conversion.changes] == ["model"]
        with torch.no_grad():
            assert relative_error(twin(x), model(embedded(twin, x))) <= 1e-12


def test_subclasses_of_containers_are_read() -> None:
    class ConvNorm(nn.Sequential):
        def __init__(self, before: int, after: int) -> None:
            layer = nn.Conv1d(before, after, 3)
            super().__init__(layer, nn.BatchNorm1d(after), nn.ReLU(inplace=True))

    model = nn.Sequential(ConvNorm(2, 3), ConvNorm(3, 3), nn.MaxPool1d(2))
    twin = cl.convert(model, (2, 9))
    assert [one.path for one in twin.conversion.changes] == [
        *("0.0", "0.1", "0.2", "1.0", "1.1", "1.2", "2"),
    ]
    cl.testing.assert_folds(twin, (2, 9))


class Checked(nn.Module):
    """A forward that looks at its input first."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.conv = how, nn.Conv2d(3, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "assert":
            assert x.shape[1] == 3
        elif self.how == "raise":
            if x.size(1) != 3:
                raise ValueError("channels")
        elif x.sum() > 0:
            x = x + x
        result: Tensor = self.conv(x)
        return result


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("assert", "`assert x.shape[1] == 3`. Check inputs before the model is called"),
        ("raise", "`if x.size(1) != 3:`. Check inputs before the model is called"),
        ("flow", "`elif x.sum() > 0:`. Write its forward without control flow"),
    ],
)
def test_the_line_that_cannot_be_traced_is_shown_with_a_remedy(how: str, says: str) -> None:
    with pytest.raises(cl.ConformalError, match=re.escape(says)):
        cl.convert(Checked(how), (3, 8, 8))
