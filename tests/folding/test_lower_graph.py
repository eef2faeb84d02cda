"""Models as recipes: which layers treat every sample by itself, and which are called."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import conformallayers as cl

pytestmark = pytest.mark.usefixtures("seeded")


def test_pieces_leave_the_statistics_of_a_batch_alone() -> None:
    features = cl.ConformalLayers(cl.Conv2d(3, 6, 5), cl.ReSPro())
    model = nn.Sequential(features, nn.BatchNorm2d(6, track_running_stats=False)).eval()
    folded = cl.fold(model, (3, 32, 32))
    assert folded.chunk_size is None
    x = torch.rand(3 * cl.fold(features, (3, 32, 32)).chunk_size, 3, 32, 32)
    x[len(x) // 2 :] *= -1
    assert cl.fold_error(model, folded, x) < 5e-6


def test_pieces_leave_the_batch_axis_alone() -> None:
    features = cl.ConformalLayers(cl.Conv2d(3, 6, 5), cl.ReSPro())
    model = nn.Sequential(features, nn.Flatten(0, 1), nn.ReLU()).eval()
    folded = cl.fold(model, (3, 32, 32))
    assert folded(torch.rand(750, 3, 32, 32)).shape == (750 * 6, 28, 28)


class Enlarged(nn.Module):
    """A layer with an argument beside its input, behind a folded part."""

    def __init__(self) -> None:
        super().__init__()
        self.features = cl.ConformalLayers(cl.Conv2d(1, 16, 3), cl.ReSPro())
        self.enlarge = nn.ConvTranspose2d(16, 1, 1, stride=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.enlarge(self.features(x), output_size=[12, 12])
        return y.relu()


@pytest.mark.parametrize("strategy", ["layers", "dense"])
def test_a_layer_with_another_argument_is_called(strategy: str) -> None:
    model = Enlarged().eval()
    folded, x = cl.fold(model, (1, 8, 8), strategy=strategy), torch.rand(3, 1, 8, 8)
    assert folded(x).shape == model(x).shape == (3, 1, 12, 12)
    assert cl.fold_error(model, folded, x) < 5e-6


class Behind(nn.Module):
    """A function of the output of a folded part."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.features = cl.ConformalLayers(cl.Conv2d(3, 4, 3), cl.ReSPro())
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.features(x))


FUNCTIONS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "tanh": (torch.tanh, "elementwise"),
    "gelu": (lambda y: F.gelu(y), "elementwise"),
    "mish": (F.mish, "call"),
    "max_pool": (lambda y: F.max_pool2d(y, 2), "max_pool"),
    "softmax": (lambda y: torch.softmax(y, 1), "softmax"),
    "softmax of the batch": (lambda y: torch.softmax(y, 0), "call"),
    "view": (lambda y: y.view(y.size(0), -1), "reshape"),
    "view, batch last known": (lambda y: y.reshape(-1, y.size(1), 36), "reshape"),
    "reshape": (lambda y: torch.reshape(y, (y.size()[0], -1)), "reshape"),
    "mean": (lambda y: y.mean((2, 3)), "reshape"),
    "mean that keeps axes": (lambda y: torch.mean(y, [-1, -2], keepdim=True), "adaptive_avg_pool"),
    "mean of channels": (lambda y: y.mean(1), "call"),
    "in place": (lambda y: F.relu(y, inplace=True), "elementwise"),
    "in place, read before": (lambda y: y * 2.0 + F.relu(y, inplace=True), "add"),
    "another dtype": (lambda y: F.softmax(y, 1, dtype=torch.float64), "call"),
}


def in_a_tuple(parts: tuple[Tensor, ...]) -> Tensor:
    changed = parts[0].relu_()
    return parts[0] + changed


def viewed_before(y: Tensor) -> Tensor:
    flat = y.flatten(1)
    return torch.relu_(y).sum((1, 2, 3)) + flat.sum(1)


class Weighted(nn.Module):
    """A function of a parameter, and of the output of a folded part."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.features = cl.ConformalLayers(cl.Conv2d(3, 4, 3), cl.ReSPro())
        self.weight = nn.Parameter(torch.randn(4, 1, 1))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.weight, self.features(x))


@pytest.mark.parametrize(
    "function",
    [
        lambda w, y: w * y,
        lambda w, y: w - y,
        lambda w, y: torch.maximum(w, y),
        lambda w, y: torch.where(w > 0, y, -y),
        lambda w, y: w.expand_as(y) + y,
        lambda w, y: y.view(y.size(0), -1) * w.mean(),
    ],
)
def test_parameters_may_come_first(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    model, x = Weighted(function).eval(), torch.rand(5, 3, 8, 8)
    folded = cl.fold(model, (3, 8, 8))
    with torch.no_grad():
        torch.testing.assert_close(folded(x), model(x), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_that_have_an_operation_are_lowered(name: str) -> None:
    function, kind = FUNCTIONS[name]
    model, x = Behind(function).eval(), torch.rand(5, 3, 8, 8)
    folded = cl.fold(model, (3, 8, 8))
    assert folded.recipe.operations[-1].kind == kind
    with torch.no_grad():
        torch.testing.assert_close(folded(x), model(x), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    "function",
    [
        lambda y: F.relu(y, inplace=True) + y,
        lambda y: y.relu_() + y,
        lambda y: y.flatten(1).relu_() + y.flatten(1),
        lambda y: torch.cat([y.flatten(1), torch.relu_(y).flatten(1)], 1) + y.mean(),
        lambda y: in_a_tuple(y.split(2, 1)),
        lambda y: in_a_tuple(y.unbind(1)),
        viewed_before,
    ],
    ids=["argument", "method", "view", "function", "split", "unbind", "view before"],
)
def test_functions_in_place_on_a_value_that_is_read_again_are_refused(
    function: Callable[[Tensor], Tensor],
) -> None:
    with pytest.raises(cl.ConformalError, match=r"got one that works in place\. Use inplace=False"):
        cl.fold(Behind(function), (3, 8, 8))
    with pytest.raises(cl.ConformalError, match="works in place"):
        cl.fold(Rectified(), (3, 8, 8))


class Rectified(Behind):
    """A module in place behind a folded part."""

    def __init__(self) -> None:
        super().__init__(nn.ReLU(inplace=True))

    def forward(self, x: Tensor) -> Tensor:
        y = self.features(x)
        return self.function(y) + y


def test_a_module_that_would_work_in_place_only_in_training_folds() -> None:
    model = Rectified()
    model.function = nn.Dropout(inplace=True)
    x = torch.rand(2, 3, 8, 8)
    torch.testing.assert_close(cl.fold(model.eval(), (3, 8, 8))(x), model(x), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("head", [nn.Softmax(0), nn.LogSoftmax(-2)], ids=str)
def test_a_softmax_of_the_batch_is_not_cut_into_chunks(head: nn.Module) -> None:
    part = cl.ConformalLayers(cl.Conv2d(3, 4, 3), cl.ReSPro())
    assert not cl.fold(nn.Sequential(part, nn.Flatten(), head), (3, 8, 8)).recipe.by_sample
    assert cl.fold(nn.Sequential(part, nn.Flatten(), nn.Softmax(1)), (3, 8, 8)).recipe.by_sample
    behind = Behind(lambda y: torch.softmax(y.flatten(1), 0))
    assert not cl.fold(behind, (3, 8, 8)).recipe.by_sample


def test_random_numbers_that_a_trace_would_keep_are_refused() -> None:
    model = Behind(lambda y: y + torch.randn(4, 1, 1))
    with pytest.raises(cl.ConformalError, match="got random numbers drawn in forward"):
        cl.fold(model, (3, 8, 8))
