"""Models that do not compute what their graph shows: maps with two names, samples that are mixed."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import conformallayers as cl
from cnns import ResNet, vgg
from oracle import randomise

Function = Callable[[nn.Module, Tensor], Tensor]


class Net(nn.Module):
    """A network whose forward is a function of its first map, with modules that return what they get."""

    def __init__(self, function: Function, channels: int = 4) -> None:
        super().__init__()
        self.function, self.relu = function, nn.ReLU(inplace=True)
        self.drop, self.same = nn.Dropout(0.5), nn.Identity()
        self.first, self.last = nn.Conv1d(2, channels, 1), nn.Conv1d(channels, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function(self, self.first(x)))


def added(net: nn.Module, x: Tensor) -> Tensor:
    y = net.same(x)
    y += F.relu(x)
    return x + y


@pytest.mark.parametrize(
    "function",
    [
        lambda net, x: net.relu(net.drop(x)) + x,
        lambda net, x: net.relu(net.same(x)) + x,
        lambda net, x: F.relu_(torch.flatten(x, 2)) + x,
        lambda net, x: F.relu(x.contiguous(), inplace=True) + x,
        added,
    ],
)
@pytest.mark.parametrize("keep", ["all", "none"])
def test_a_map_that_is_overwritten_by_another_name_is_refused(
    function: Function, keep: str
) -> None:
    torch.manual_seed(0)
    for model in (Net(function), Net(function).train().half()):
        with pytest.raises(cl.ConformalError, match="in place that it reads again by another name"):
            cl.convert(model, (2, 5), keep=keep)


def test_a_branch_that_begins_at_zero_hides_nothing() -> None:
    model = Net(lambda net, x: net.relu(net.drop(x)) + x)
    nn.init.zeros_(model.last.weight)
    with pytest.raises(cl.ConformalError, match="in place that it reads again"):
        cl.convert(model, (2, 5))


@pytest.mark.parametrize("channels", [2, 3, 7])
def test_samples_that_are_mixed_are_refused(channels: int) -> None:
    class Mixes(nn.Module):
        def __init__(self, count: int | None) -> None:
            super().__init__()
            self.conv, self.count = nn.Conv1d(2, channels, 1), count

        def forward(self, x: Tensor) -> Tensor:
            y = self.conv(x)
            return y.reshape(self.count or y.size(1), -1)

    for count in (None, 2, channels):
        with pytest.raises(cl.ConformalError, match=r"keep the batch axis|any number of samples"):
            cl.convert(Mixes(count), (2, 6))


def test_nothing_is_touched() -> None:
    model = randomise(vgg()).train()
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    twin = cl.convert(model, (3, 8, 8))
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    assert twin.training
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert {value.dtype for value in twin.parameters()} == {torch.float32}
    zeros = ResNet()
    for block in zeros.blocks:
        nn.init.zeros_(block.bn2.weight)
    converted = cl.convert(zeros, (3, 8, 8)).state_dict()
    names = [key for key in converted if key.endswith("bn2.weight")]
    assert len(names) == 3
    assert not any(converted[key].any() for key in names)


class Single(nn.Module):
    """A layer for float32 alone."""

    __module__ = "torch.nn.single"  # torch.fx calls it as one layer

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, torch.ones(2, 2))


def test_models_that_have_no_numbers_in_float64() -> None:
    plain = nn.Sequential(nn.Conv1d(2, 2, 1), nn.ReLU(), nn.Conv1d(2, 2, 1))
    for model in (copy.deepcopy(plain).to("meta"), copy.deepcopy(plain).half()):
        assert len(cl.convert(model, (2, 5)).features) == 3
    single = nn.Sequential(nn.Conv1d(2, 2, 1), nn.Flatten(), nn.Linear(10, 2), Single())
    assert isinstance(cl.convert(single, (2, 5)).head[-1], Single)
    wrong = Net(lambda net, x: net.relu(net.drop(x)) + x)
    with pytest.raises(cl.ConformalError, match="in place that it reads again"):
        cl.convert(nn.Sequential(wrong, nn.Flatten(), nn.Linear(10, 2), Single()), (2, 5))


def test_a_tensor_of_the_code_is_refused() -> None:
    class Constant(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, torch.ones(2, 2))

    with pytest.raises(cl.ConformalError, match="reads a parameter"):
        cl.convert(nn.Sequential(nn.Linear(3, 2), Constant()), (3,))
