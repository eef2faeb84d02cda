"""Functions of torch as modules: each against the function, with every argument varied."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import conformallayers as cl
from cnns import embedded
from oracle import relative_error
from support import samples

Function = Callable[[Tensor], Tensor]


class Calls(nn.Module):
    """A convolution, a function, and another convolution of the shape that comes out of it."""

    def __init__(self, function: Function, shape: tuple[int, ...], *, last: bool = True) -> None:
        super().__init__()
        self.function, axes = function, len(shape) - 1
        conv = getattr(nn, f"Conv{axes}d")
        self.first, self.last = conv(shape[0], 4, 1), None
        channels = function(torch.rand(2, 4, *shape[1:])).shape[1]
        if last:
            self.last = conv(channels, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.function(self.first(x))
        return x if self.last is None else self.last(x)


MAPS: list[tuple[str, Function, int]] = [
    ("F.relu", lambda x: F.relu(x), 2),
    ("F.relu in place", lambda x: F.relu(x, inplace=True), 2),
    ("torch.relu", torch.relu, 1),
    ("x.relu", lambda x: x.relu(), 1),
    ("x.relu_", lambda x: x.relu_(), 2),
    ("x.clamp", lambda x: x.clamp(min=0), 2),
    ("torch.clamp", lambda x: torch.clamp(x, 0.0), 1),
    ("x.clamp_min", lambda x: x.clamp_min(0), 3),
    ("torch.abs", torch.abs, 1),
    ("abs", abs, 2),
    ("x.abs", lambda x: x.abs(), 3),
    ("F.leaky_relu", lambda x: F.leaky_relu(x, 0.3, inplace=True), 2),
    ("F.leaky_relu, default", lambda x: F.leaky_relu(x), 2),
    ("F.dropout", lambda x: F.dropout(x, 0.4, training=False), 2),
    ("F.dropout2d", lambda x: F.dropout2d(x, training=False), 2),
    ("F.max_pool1d", lambda x: F.max_pool1d(x, 3, 2, 1), 1),
    ("F.max_pool2d", lambda x: F.max_pool2d(x, (2, 3), dilation=2, ceil_mode=True), 2),
    ("F.max_pool3d", lambda x: F.max_pool3d(x, kernel_size=2, stride=1), 3),
    ("F.avg_pool1d", lambda x: F.avg_pool1d(x, 3, 2, 1, True, False), 1),
    ("F.avg_pool2d", lambda x: F.avg_pool2d(x, 3, padding=1, count_include_pad=False), 2),
    ("F.avg_pool2d, divisor", lambda x: F.avg_pool2d(x, 2, divisor_override=3), 2),
    ("F.avg_pool3d", lambda x: F.avg_pool3d(x, 2, ceil_mode=True), 3),
    ("F.avg_pool2d of a size", lambda x: F.avg_pool2d(x, x.size()[3] // 3), 2),
    ("F.avg_pool2d of a shape", lambda x: F.avg_pool2d(x, x.shape[2:]), 2),
    ("F.adaptive_avg_pool1d", lambda x: F.adaptive_avg_pool1d(x, 2), 1),
    ("F.adaptive_avg_pool2d", lambda x: F.adaptive_avg_pool2d(x, (2, 1)), 2),
    ("F.adaptive_max_pool2d", lambda x: F.adaptive_max_pool2d(x, output_size=(1, 2)), 2),
    ("F.lp_pool1d", lambda x: F.lp_pool1d(x, 2.0, 2), 1),
    ("F.lp_pool2d", lambda x: F.lp_pool2d(x, 2.0, 2, stride=1, ceil_mode=True), 2),
    ("x.mean, kept", lambda x: x.mean((-1, 2), keepdim=True), 2),
    ("torch.mean, kept", lambda x: torch.mean(x, [2, 3, 4], True), 3),
    ("x + x", lambda x: x + x, 1),
    ("torch.add", lambda x: torch.add(x, F.relu(x)), 2),
    ("x.add", lambda x: x.add(x.abs()), 2),
    ("x.add_", lambda x: F.relu(x).add_(x), 2),
    ("torch.cat", lambda x: torch.cat([x, F.relu(x), x.abs()], 1), 2),
    ("torch.cat of an axis", lambda x: torch.cat((x, x), dim=-1), 2),
    ("torch.concat", lambda x: torch.concat([x, x], dim=1), 1),
    ("reshape", lambda x: x.reshape(x.size(0), 2, -1), 2),
    ("flatten of some axes", lambda x: torch.flatten(x, 2), 2),
    ("contiguous", lambda x: x.contiguous(), 2),
]


@pytest.mark.parametrize(
    ("function", "axes"), [case[1:] for case in MAPS], ids=[c[0] for c in MAPS]
)
def test_functions_of_maps(function: Function, axes: int) -> None:
    torch.manual_seed(0)
    shape = (2, *(6, 7, 5)[:axes])
    rank = function(torch.rand(2, 4, *shape[1:])).dim()
    model = Calls(function, shape, last=rank == axes + 2).double().eval()
    twin, x = cl.convert(model, shape, keep="all"), samples(shape, torch.float64)
    with torch.no_grad():
        expected = model(embedded(twin, x))
        with cl.layer_by_layer():
            assert relative_error(twin(x), expected) <= 1e-12
    assert [name for name, _ in twin.named_children()] == ["features"]


HEADS: list[tuple[str, Function, str]] = [
    ("view", lambda x: x.view(x.size(0), -1), "Flatten"),
    ("view of -1", lambda x: x.view(-1, 4 * 6 * 6), "Flatten"),
    ("reshape of a shape", lambda x: x.reshape(x.shape[0], -1), "Flatten"),
    ("torch.flatten", lambda x: torch.flatten(x, start_dim=1), "Flatten"),
    ("torch.sigmoid", torch.sigmoid, "Sigmoid"),
    ("x.tanh", lambda x: x.tanh(), "Tanh"),
    ("F.gelu", lambda x: F.gelu(x, approximate="tanh"), "GELU"),
    ("F.silu", lambda x: F.silu(x, inplace=True), "SiLU"),
    ("F.relu6", lambda x: F.relu6(x), "ReLU6"),
    ("F.softmax", lambda x: F.softmax(x, dim=-1), "Softmax"),
    ("x.softmax", lambda x: x.softmax(1), "Softmax"),
    ("torch.log_softmax", lambda x: torch.log_softmax(x, dim=1), "LogSoftmax"),
]


@pytest.mark.parametrize(
    ("function", "kind"), [case[1:] for case in HEADS], ids=[c[0] for c in HEADS]
)
def test_functions_of_heads(function: Function, kind: str) -> None:
    torch.manual_seed(0)
    model, shape = Calls(function, (2, 6, 6), last=False).double().eval(), (2, 6, 6)
    twin, x = cl.convert(model, shape), samples(shape, torch.float64)
    assert [type(module).__name__ for module in twin.head] == [kind]
    with torch.no_grad():
        assert relative_error(twin(x), model(embedded(twin, x))) <= 1e-12


def test_dropout_of_a_function_follows_the_mode() -> None:
    class Drops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(2, 3, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(F.dropout(x, 0.9, self.training))

    for training in (True, False):
        twin = cl.convert(Drops().train(training), (2, 6, 6))
        assert isinstance(twin.features[0], nn.Dropout)
        assert (twin.features[0].p, twin.features[0].training) == (0.9, training)


def test_a_dropout_that_is_off_is_the_identity() -> None:
    class Off(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(2, 3, 1)

        def forward(self, x: Tensor) -> Tensor:
            x = F.dropout2d(self.conv(F.dropout(x, 0.5, False)), 0.5, training=bool(self.training))
            return F.dropout2d(x, training=False)

    model = Off().train()
    twin = cl.convert(model, (2, 6, 6))
    kinds = [type(module).__name__ for module in twin.features]
    assert kinds == ["Identity", "Conv2d", "Dropout2d", "Identity"]
    assert model.training
    assert twin.features[2].training


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 1, 1))
        self.conv = nn.Conv2d(2, 4, 1)
        self.last = nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.conv(x) + self.weight)


REFUSED: list[tuple[str, Function, str]] = [
    ("mul", lambda x: x * x, "mul(model_first, model_first) is no layer. Write it with modules"),
    ("constant", lambda x: x + 1, "is no sum of two maps. Give a constant to a layer as its bias."),
    ("alpha", lambda x: torch.add(x, x, alpha=2), "is no sum of two maps"),
    ("broadcast", lambda x: x + x.mean((2, 3), keepdim=True), "shapes (4, 6, 6) and (4, 1, 1)"),
    (
        "batches",
        lambda x: torch.cat([x, x]),
        "is no concatenation of maps. Concatenate along axis 1",
    ),
    ("mean", lambda x: x.mean(1, keepdim=True), "is no mean over all spatial axes"),
    ("mean of an axis", lambda x: x.mean(-1), "is no mean over all spatial axes"),
    ("dropout", lambda x: F.dropout(x), "drops values at evaluation too"),
    ("interpolate", lambda x: F.interpolate(x, scale_factor=2), "Use the module nn.Upsample."),
    ("transpose", lambda x: x.transpose(2, 3), "is no layer"),
    ("view", lambda x: x.view(-1, 4, 3, 6), "does not keep the batch axis. Use flatten(1)."),
    ("getitem", lambda x: x[:, :2], "is no layer"),
    ("gelu", lambda x: F.gelu(x), "Use nn.ReLU(), nn.LPPool2d(2, ...) or cl.ReSPro()"),
    ("indices", lambda x: F.max_pool2d(x, 2, return_indices=True)[0], "is no layer"),
]


@pytest.mark.parametrize(
    ("function", "says"), [case[1:] for case in REFUSED], ids=[c[0] for c in REFUSED]
)
def test_functions_that_are_refused(function: Function, says: str) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.pool = nn.Conv2d(2, 4, 1), nn.AdaptiveAvgPool2d(1)

        def forward(self, x: Tensor) -> Tensor:
            return self.pool(function(self.first(x)))

    with pytest.raises(cl.ConformalError, match="that cannot be converted") as caught:
        cl.convert(Net(), (2, 6, 6))
    assert says in str(caught.value), str(caught.value)


def test_parameters_of_functions_are_refused() -> None:
    with pytest.raises(cl.ConformalError, match="Give a constant to a layer as its bias"):
        cl.convert(Scaled(), (2, 6, 6))

    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 2, 1, 1))

        def forward(self, x: Tensor) -> Tensor:
            return F.conv2d(x, self.weight)

    with pytest.raises(cl.ConformalError, match=r"reads a parameter\. Use the module that has it"):
        cl.convert(Functional(), (2, 6, 6))


class Standardised(nn.Module):
    """A model that standardises its input, as people copy it from training code."""

    def __init__(self, function: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.function, self.conv, self.relu = function, nn.Conv2d(3, 4, 3), nn.ReLU()
        self.register_buffer("mean", torch.tensor([0.4, 0.5, 0.6]).view(3, 1, 1))
        self.register_buffer("std", torch.tensor([0.2, 0.3, 0.1]).view(1, 3, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.conv(self.function(self, x)))


STANDARDISATIONS: list[tuple[str, Callable[[Any, Tensor], Tensor]]] = [
    ("buffers", lambda m, x: (x - m.mean) / m.std),
    ("numbers", lambda m, x: (x - 0.5) / 0.25),
    ("bytes", lambda m, x: x / 255 * 2 - 1),
    ("methods", lambda m, x: x.sub(0.5).div(m.std).mul(2).add(m.mean)),
    ("functions", lambda m, x: torch.mul(torch.div(torch.sub(x, m.mean), m.std), 3)),
    ("tensors", lambda m, x: x - torch.tensor([0.1, 0.2, 0.3])[:, None, None]),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    "function", [f for _, f in STANDARDISATIONS], ids=[name for name, _ in STANDARDISATIONS]
)
def test_constants_on_the_input_are_layers_that_do_not_train(
    function: Callable[[nn.Module, Tensor], Tensor], dtype: torch.dtype
) -> None:
    model = Standardised(function).to(dtype).eval()
    twin = cl.convert(model, (3, 8, 8), keep="all")
    x = samples((3, 8, 8), dtype)
    with torch.no_grad():
        found, expected = twin(x), model.double()(embedded(twin, x))
    assert relative_error(found, expected) < cl.testing.TOLERANCES[dtype]
    trained = [name for name, one in twin.named_parameters() if one.requires_grad]
    assert trained == ["features.log_offset", "features.conv.weight", "features.conv.bias"]


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (lambda m, x: x - m.mean.expand(3, 8, 8), "reads a parameter"),
        (lambda m, x: (x - x.mean()) / 2, "is no layer"),
        (lambda m, x: m.conv(x) - 1, "is no layer"),
        (lambda m, x: (x - 0.5) / 0, "not finite in torch.float32"),
        (lambda m, x: x / m.nought, "not finite in torch.float32"),
        (lambda m, x: x / 1e-50, "not finite in torch.float32"),
        (lambda m, x: x - 1e50, "not finite in torch.float32"),
        (lambda m, x: x.clamp(-1, 1), "is no rectifier. Use relu, which clamp"),
        (lambda m, x: x.clamp(0, 6), "nn.ReLU"),
        (lambda m, x: x.clamp(m.mean[0, 0, 0], 6), "is no rectifier. Use relu, which clamp"),
        (lambda m, x: x.clamp(torch.zeros(()), m.six), "is no rectifier. Use relu, which clamp"),
        (lambda m, x: torch.clamp(x, 0, m.six), "is no rectifier. Use relu, which clamp"),
    ],
)
def test_other_arithmetic_is_refused(function: Callable[[Any, Tensor], Tensor], says: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.last = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 4, 3)
            self.register_buffer("mean", torch.ones(3, 1, 1))
            self.register_buffer("six", torch.tensor(6.0))
            self.register_buffer("nought", torch.eye(3)[0].view(3, 1, 1))

        def forward(self, x: Tensor) -> Tensor:
            return self.last(function(self, x))

    with pytest.raises(cl.ConformalError, match=re.escape(says)):
        cl.convert(Model(), (3, 8, 8))
