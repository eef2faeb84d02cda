"""Captured models: one node a call, functions as modules, and what is kept as it is."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

import conformallayers as cl

pytestmark = pytest.mark.usefixtures("seeded")
SHAPE = (3, 8, 8)


class Model(nn.Module):
    """A convolution, plain or in a ConformalLayers, and a function of the model and of its result."""

    def __init__(self, function: Callable[[Any, Tensor], Any], conformal: bool = True) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        if conformal:
            self.conv = cl.ConformalLayers(cl.Conv2d(3, 4, 3, padding=1), cl.ReSPro())
        self.relu, self.dropout = nn.ReLU(inplace=True), nn.Dropout(inplace=True)
        self.scale, self.kernel = nn.Parameter(torch.randn(4, 1, 1)), torch.randn(6, 4, 3, 3)
        self.register_buffer("shift", torch.randn(1, 4, 1, 1))
        nn.init.normal_(self.norm.running_mean)
        nn.init.uniform_(self.norm.running_var, 0.5, 2.0)
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(self, self.conv(x))


def norm(model: Any, y: Tensor) -> Tensor:
    own = model.norm
    statistics = own.running_mean, own.running_var, own.weight, own.bias
    return F.batch_norm(y, *statistics, model.training, 0.1, own.eps)


def gate(model: Any, y: Tensor) -> Tensor:
    return y * torch.sigmoid(y.mean((2, 3), keepdim=True))


def same_after(model: Any, y: Tensor) -> Tensor:
    y.relu_()
    return y.contiguous()


def overwritten(model: Any, y: Tensor) -> Tensor:
    """Values in a list and in later lines see what was written in place."""
    kept, z = [y], y * 2
    y.relu_()
    y += 1
    y.tanh_()
    return kept[0] + 1 + z


def written(model: Any, y: Tensor) -> Tensor:
    """Pad as BNAndPadLayer of DBB does: the border gets the constant that a batch norm makes of zeros."""
    y = F.pad(y, [1] * 4)
    y[:, :, :1, :] = y[:, :, -1:, :] = model.shift
    y[:, :, :, :1] = y[:, :, :, -1:] = model.shift
    return F.conv2d(y, model.kernel)


# The operations of the fold that are not convolutions.
FUNCTIONS: dict[str, tuple[Callable[[Any, Tensor], Any], list[str]]] = {
    "zeros": (lambda m, y: 0 + y + 0, []),
    "sum": (lambda m, y: sum([y.relu(), y.abs()]), ["elementwise", "elementwise", "add"]),
    "difference": (lambda m, y: y.relu() - y, ["elementwise", "multiply", "add"]),
    "constants": (lambda m, y: m.scale * y + m.shift, []),
    "constant minus value": (lambda m, y: 1 - y, []),
    "division": (lambda m, y: y / m.shift, []),
    "computed constant": (lambda m, y: F.conv2d(y, m.kernel / m.kernel.norm(), padding=2), []),
    "norm": (norm, []),
    "call by keyword": (lambda m, y: m.norm(input=y), []),
    "split": (lambda m, y: torch.cat([y.split([1, 3], 1)[1], y[:, :2]], 1), ["slice", "slice", "concatenate"]),
    "chunk": (lambda m, y: y.chunk(2, dim=1)[1], ["slice"]),
    "mean": (lambda m, y: y.mean((2, 3)), ["adaptive_avg_pool", "reshape"]),
    "largest": (lambda m, y: torch.amax(y, (2, 3), keepdim=True), ["adaptive_max_pool"]),
    "clamp": (lambda m, y: y.clamp(min=0), ["elementwise"]),
    "interpolate": (lambda m, y: F.interpolate(y, scale_factor=2), ["upsample"]),
    "smoothed": (lambda m, y: F.interpolate(y, scale_factor=0.5, mode="bilinear", antialias=True), ["call"]),
    "pad": (lambda m, y: F.pad(y, (1, 1)), ["pad"]),
    "dropout": (lambda m, y: F.dropout(y, 0.5, m.training).contiguous(), []),
    "in place": (lambda m, y: F.relu_(y).add_(1), ["elementwise", "add_constant"]),
    "view": (lambda m, y: y.view(y.size(0), -1), ["reshape"]),
    "gelu": (lambda m, y: F.gelu(y), ["elementwise"]),
    "leaky": (lambda m, y: F.leaky_relu(y, 0.3), ["elementwise"]),
    "up to 6": (lambda m, y: y.clamp(0, 6), ["elementwise"]),
    "reflected": (lambda m, y: F.pad(y, (1, 2, 0, 1), mode="reflect"), ["pad"]),
    "largest of windows": (lambda m, y: F.max_pool2d(y, 2, 1), ["max_pool"]),
    "averages of windows": (lambda m, y: F.avg_pool2d(y.relu(), (2, 1), padding=(1, 0)), ["elementwise", "avg_pool"]),
    "norms of windows": (lambda m, y: F.lp_pool2d(y, 2, 2), ["norm_pool"]),
    "channels": (lambda m, y: y[:, 1:3], ["slice"]),
    "other channels": (lambda m, y: y[:, ::2], ["call"]),
    "every pixel": (lambda m, y: y[:, :], []),
    "other pixels": (lambda m, y: y[..., 1::2, ::2], ["pad", "avg_pool"]),
    "inner pixels": (lambda m, y: y[:, :, 1:, 2:], ["pad"]),
    "part without channels": (lambda m, y: y.tensor_split(5, 1)[4].sum(1), ["call"] * 3),
    "between two numbers": (lambda m, y: y.clamp(-1, 1), ["elementwise"]),
    "inverse": (lambda m, y: 1 / (2 + y.abs()), ["elementwise", "add_constant", "call"]),
    "mish": (lambda m, y: F.mish(y), ["call"]),
    "softmax": (lambda m, y: torch.softmax(y, 1), ["softmax"]),
    "softmax of the batch": (lambda m, y: torch.softmax(y, 0), ["call"]),
    "another dtype": (lambda m, y: F.softmax(y, 1, dtype=torch.float64), ["call"]),
    "view, batch last known": (lambda m, y: y.reshape(-1, y.size(1), 64), ["reshape", "reshape"]),
    "mean of channels": (lambda m, y: y.mean(1), ["call"]),
    "in place, read before": (lambda m, y: y * 2.0 + F.relu(y, inplace=True), ["elementwise", "multiply", "add"]),
    "in place in training alone": (lambda m, y: m.dropout(y) + y, ["add"]),
    "constant first": (lambda m, y: m.scale - y, []),
    "larger one": (lambda m, y: torch.maximum(m.scale, y), ["call"]),
    "chosen": (lambda m, y: torch.where(m.scale > 0, y, -y), ["multiply", "call"]),
    "expanded constant": (lambda m, y: m.scale.expand_as(y) + y, ["call", "add"]),
    "gate": (gate, ["adaptive_avg_pool", "elementwise", "product"]),
    "expanded gate": (lambda m, y: y * y.mean((2, 3))[:, :, None, None].expand_as(y), ["adaptive_avg_pool", "reshape", "reshape", "product"]),
    "module made in forward": (lambda m, y: nn.Softmax(1)(y), ["softmax"]),
    "swish": (lambda m, y: y * torch.sigmoid(y), ["elementwise", "product"]),
    "channels last": (lambda m, y: y.permute(0, 2, 3, 1).relu().transpose(-1, 1), ["permute", "elementwise", "permute"]),
    "pool of (B, H, W)": (lambda m, y: F.max_pool2d(y[:, 0], 2), ["call", "call"]),
    "batch on two axes": (lambda m, y: torch.relu(y[:, 0] + y[:, :1]).sum(1), ["call", "slice", "call", "call", "call"]),
    "batch last": (lambda m, y: y.flatten(1).transpose(0, 1).relu().T, ["reshape", "call", "call", "call"]),
    "in place and read again": (lambda m, y: F.relu(y, inplace=True) + y * 2, ["elementwise", "multiply"]),
    "module in place and read again": (lambda m, y: m.relu(y).add_(1) + y, ["elementwise", "add_constant", "add"]),
    "in place, then its own identity": (same_after, ["elementwise"]),
    "in place, read by its old name": (overwritten, ["elementwise", "add_constant", "call", "add_constant", "multiply", "add"]),
    "part written": (written, ["pad", "add_constant"]),
    "parts in a loop": (lambda m, y: sum(part * (k + 1) for k, part in enumerate(y.split(y.shape[1] // 2, 1))), ["slice", "slice", "multiply", "add"]),
    "factor of a summand": (lambda m, y: torch.sub(torch.add(y, y * 2, alpha=3), y, alpha=0.5), []),
    "sum with one channel": (lambda m, y: y + y[:, :1], ["slice", "concatenate", "add"]),
    "ordered dict": (lambda m, y: OrderedDict(a=y, b=y.relu()), ["elementwise", "call"]),
    "tuple": (lambda m, y: (y, y.relu()), ["elementwise", "call"]),
    "dict": (lambda m, y: {"a": y, "b": [y.relu(), None]}, ["elementwise", "call"]),
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize(("dtype", "conformal"), [(torch.float64, False), (torch.float32, True)])
def test_functions_fold_to_the_same_numbers(name: str, dtype: torch.dtype, conformal: bool) -> None:
    function, kinds = FUNCTIONS[name]
    model = Model(function, conformal).to(dtype).eval()
    model.kernel = model.kernel.to(dtype)
    folded, x = cl.fold(model, SHAPE), torch.randn(5, *SHAPE, dtype=dtype)
    found = [operation.kind for operation in folded.recipe.operations]
    assert conformal or [kind for kind in found if kind != "conv"] == kinds
    assert ("call" in found) == ("call" in kinds)
    with torch.no_grad():
        expected, y = model(x), folded(x)
    assert type(y) is type(expected)
    tolerance = cl.testing.TOLERANCES[dtype]
    for one, other in zip(tree_leaves(y), tree_leaves(expected), strict=True):
        if isinstance(other, Tensor):
            torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "pool", [nn.MaxPool2d(2), nn.LPPool2d(2, 2), nn.AdaptiveMaxPool2d(2), nn.AvgPool2d(2)], ids=str
)
def test_a_pooling_of_images_without_channels(pool: nn.Module) -> None:
    model, x = nn.Sequential(nn.Flatten(1, 2), nn.ReLU(), pool), torch.randn(4, 3, 4, 6)
    torch.testing.assert_close(cl.fold(model, (3, 4, 6))(x), model(x))


class Several(nn.Module):
    def forward(self, x: Tensor, y: Tensor, mask: Tensor | None = None) -> Tensor:
        return x + y


class Masked(nn.Module):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return x.relu() if mask is None else x * mask


class Branching(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            Several(),
            r"a model with one input, got x, y\. Fold a part of it: model\.part = cl\.fold",
        ),
        (
            Branching(),
            r"can trace, got .* control flow at line \d+ of test_capture.py, return x if x\.sum\(\)",
        ),
        (nn.Sequential(nn.DataParallel(nn.Linear(3, 2))), "at 0: expected a plain nn.Module"),
        (nn.Linear(5, 2), "any number of samples"),
    ],
    ids=["two inputs", "control flow", "data parallel", "another shape"],
)
def test_refusals_say_what_to_fold_instead(model: nn.Module, message: str) -> None:
    with pytest.raises(cl.ConformalError, match=message):
        cl.fold(model, (3,))


def test_optional_arguments_have_their_defaults() -> None:
    x = torch.randn(2, 3)
    assert torch.equal(cl.fold(Masked(), (3,))(x), x.relu())


def test_a_layer_that_stands_in_two_places_keeps_its_weights() -> None:
    conv = cl.Conv2d(2, 2, 3, padding=1)
    model = cl.ConformalLayers(cl.Residual(cl.Residual(conv, conv)), cl.ReSPro())
    x = torch.rand(2, 2, 5, 5)
    model(x).sum().backward()
    assert conv.weight.device.type == "cpu"
    assert conv.weight.grad is not None
    cl.testing.assert_folds(model, (2, 5, 5))
    assert cl.trace(model, (2, 5, 5)).steps[0].output_shape == (2, 5, 5)
    with torch.no_grad():
        assert model.eval()(x).shape == (2, 2, 5, 5)


# -- functions of the output of a folded part -------------------------------------------------------


def test_pieces_leave_the_statistics_of_a_batch_alone() -> None:
    features = cl.ConformalLayers(cl.Conv2d(3, 6, 5), cl.ReSPro())
    model = nn.Sequential(features, nn.BatchNorm2d(6, track_running_stats=False)).eval()
    folded = cl.fold(model, (3, 32, 32))
    assert folded.chunk_size is None
    x = torch.rand(3 * cl.fold(features, (3, 32, 32)).chunk_size, 3, 32, 32)
    x[len(x) // 2 :] *= -1
    assert cl.fold_error(model, folded, x) < 5e-6


class Enlarged(nn.Module):
    """A layer with an argument beside its input, after a folded part."""

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


def in_a_tuple(parts: tuple[Tensor, ...]) -> Tensor:
    changed = parts[0].relu_()
    return parts[0] + changed


def viewed_before(model: Any, y: Tensor) -> Tensor:
    flat = y.flatten(1)
    return torch.relu_(y).sum((1, 2, 3)) + flat.sum(1)


@pytest.mark.parametrize(
    "function",
    [
        lambda m, y: y.flatten(1).relu_() + y.flatten(1),
        lambda m, y: torch.cat([y.flatten(1), torch.relu_(y).flatten(1)], 1) + y.mean(),
        lambda m, y: in_a_tuple(y.split(2, 1)),
        lambda m, y: in_a_tuple(y.unbind(1)),
        viewed_before,
    ],
    ids=["view", "function", "split", "unbind", "view before"],
)
def test_functions_in_place_on_a_value_that_is_read_again_are_refused(
    function: Callable[[Any, Tensor], Tensor],
) -> None:
    with pytest.raises(cl.ConformalError, match=r"got an in-place layer\. Use inplace=False"):
        cl.fold(Model(function), SHAPE)


@pytest.mark.parametrize("head", [nn.Softmax(0), nn.LogSoftmax(-2)], ids=str)
def test_a_softmax_of_the_batch_is_not_cut_into_chunks(head: nn.Module) -> None:
    part = cl.ConformalLayers(cl.Conv2d(3, 4, 3), cl.ReSPro())
    assert not cl.fold(nn.Sequential(part, nn.Flatten(), head), (3, 8, 8)).recipe.by_sample
    assert cl.fold(nn.Sequential(part, nn.Flatten(), nn.Softmax(1)), (3, 8, 8)).recipe.by_sample
    after = Model(lambda m, y: torch.softmax(y.flatten(1), 0))
    assert not cl.fold(after, SHAPE).recipe.by_sample


def test_a_batch_axis_in_the_input_shape_is_named() -> None:
    with pytest.raises(cl.ConformalError, match=r"Leave out the batch axis: \(3, 8, 8\)\?"):
        cl.fold(nn.Conv2d(3, 2, 1), (1, 3, 8, 8))
