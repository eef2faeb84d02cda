"""Every refusal: one family, and a message that says what, where and what to do instead."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import conformallayers as cl
from blocks import Written
from support import assert_says


class Doubled(nn.Conv2d):
    """Overrides forward, so that nobody vouches for it."""

    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


REFUSED = [
    (nn.ReLU6, "ReLU6", "nn.ReLU()"),
    (nn.GELU, "GELU", "nn.LPPool2d(2, ...)"),
    (lambda: nn.ReLU(inplace=True), "got inplace=True", "needed later"),
    (lambda: nn.MaxPool2d(2, return_indices=True), "return_indices=False", "one tensor"),
    (lambda: nn.LPPool2d(3, 2), "norm_type=2, got norm_type=3", "Euclidean"),
    (lambda: nn.FractionalMaxPool2d(2, 2), "FractionalMaxPool2d", "nn.MaxPool2d"),
    (lambda: nn.LayerNorm(4), "LayerNorm", "nn.BatchNorm"),
    (lambda: nn.BatchNorm2d(4, track_running_stats=False), "track_running_stats", "each other"),
    (lambda: cl.ConformalLayers(cl.ReSPro(1.0)), "ConformalLayers", "Unpack it"),
    (lambda: Doubled(1, 1, 1, bias=False), "Doubled", "cl.register_linear"),
    (lambda: nn.LSTM(2, 2), "LSTM", "cl.register_homogeneous"),
    (lambda: nn.LazyConv2d(4, 3), "LazyConv2d", "number of input channels"),
    (lambda: nn.Dropout2d(inplace=True), "got inplace=True", "needed later"),
    (lambda: nn.ConstantPad2d(1, 2.5), "got 2.5", "Padding must be linear"),
    (lambda: nn.Flatten(0), "got axis 0", "Start at axis 1"),
    (lambda: nn.Unflatten(0, (1, 1)), "got axis 0", "Start at axis 1"),
    (lambda: 3, "got 3", "Pass modules"),
    (lambda: None, "got None", "Pass modules"),
    (lambda: [nn.Identity()], "got [Identity()]", "Pass modules"),
]
ids = [f"{row[1]}-{index}" for index, row in enumerate(REFUSED)]


@pytest.mark.parametrize(("build", "name", "remedy"), REFUSED, ids=ids)
def test_refused_at_construction_and_later(
    build: Callable[[], object], name: str, remedy: str
) -> None:
    named = OrderedDict([("first", nn.Identity()), ("second", build())])
    assert_says(lambda: cl.ConformalLayers(named), "at position second", name, remedy)
    model = cl.ConformalLayers(nn.Identity(), cl.ReSPro(1.0))
    before = list(model)
    actions: dict[str, Callable[[], object]] = {
        "2": lambda: model.append(build()),
        "1": lambda: model.insert(1, build()),
        "0": lambda: model.__setitem__(0, build()),
        "extra": lambda: model.add_module("extra", build()),
        " 2": lambda: model.__add__([build()]),
        "  2": lambda: model.extend([build()]),
    }
    for position, action in actions.items():
        assert_says(action, f"at position {position.strip()}:", name, remedy)
        assert list(model) == before


def test_refused_inside_a_nested_sequential() -> None:
    inner = nn.Sequential(nn.Identity(), nn.GELU())
    assert_says(lambda: cl.ConformalLayers(inner), "at position 0.1", "GELU", "cl.ReSPro()")
    inner = nn.Sequential(nn.Identity())
    model = cl.ConformalLayers(inner, cl.ReSPro(1.0))
    inner.append(nn.GELU())  # behind the model's back
    for mode in (True, False):
        model.train(mode)
        assert_says(lambda: model(torch.ones(1, 2)), "at position 0.1", "GELU", "cl.ReSPro()")


@pytest.mark.parametrize(
    "alpha", [0, -1.0, 1e-160, 1e160, float("nan"), float("inf"), "Young", True, [1]]
)
def test_bad_alpha(alpha: object) -> None:
    assert_says(lambda: cl.ReSPro(alpha), "ReSPro(alpha=...)", f"got {alpha!r}", "[1e-150, 1e+150]")


def test_a_learned_alpha_out_of_range() -> None:
    model = cl.ConformalLayers(cl.Linear(2, 2), cl.ReSPro("learned")).eval()
    for value, got in ((-2000.0, "got 0"), (2000.0, "got inf"), (-400.0, "e-17")):
        with torch.no_grad():
            model[1].log_factor.fill_(value)
            assert_says(lambda: model(torch.ones(1, 2)), "ReSPro at position 1", got, "log_factor")


def test_a_layer_that_needs_other_axes() -> None:
    model = cl.ConformalLayers(nn.Unflatten(2, (3, -1)), cl.ReSPro(1.0))
    for mode in (True, False):
        model.train(mode)
        assert_says(lambda: model(torch.ones(1, 6)), "Unflatten at position 0", "Dimension out of")


@pytest.mark.parametrize("alpha", [None, "young", "spectral", "learned"])
def test_respro_on_its_own_needs_a_number(alpha: str | None) -> None:
    parts = ("on its own", f'alpha="{alpha or "young"}"', "cl.ConformalLayers", "give a number")
    assert_says(lambda: cl.ReSPro(alpha)(torch.ones(1, 2)), *parts)


def image_model() -> cl.ConformalLayers:
    return cl.ConformalLayers(cl.ReSPro(2.0), cl.Conv2d(3, 4, 3), cl.ReSPro())


INPUTS = {
    "unbatched": (
        torch.ones(3, 8, 8),
        ["Conv2d at position 1", "a batch with 4 axes", "(3, 8, 8)", "x.unsqueeze(0)"],
    ),
    "too many axes": (
        torch.ones(1, 1, 3, 8, 8),
        ["Conv2d at position 1", "4 axes", "(1, 1, 3, 8, 8)"],
    ),
    "channels last": (torch.ones(7, 8, 8, 3), ["channels last?", "x.permute(0, 3, 1, 2)"]),
    "channels": (torch.ones(7, 5, 8, 8), ["Conv2d at position 1", "in_channels=3", "(7, 5, 8, 8)"]),
    "integers": (
        torch.ones(2, 3, 8, 8, dtype=torch.int64),
        ["floating-point", "torch.int64", "x.float()"],
    ),
    "complex": (torch.ones(2, 3, 8, 8, dtype=torch.cfloat), ["floating-point", "torch.complex64"]),
    "no tensor": ([1.0], ["floating-point tensor", "got list"]),
    "dtype": (
        torch.ones(2, 3, 8, 8).double(),
        ["torch.float32", "torch.float64", "model.to(x.dtype)"],
    ),
    "one axis": (torch.ones(3), ["a batch of samples", "(3,)", "x.unsqueeze(0)"]),
    "no coefficients": (torch.ones(2, 3, 0, 8), ["at least one coefficient", "(2, 3, 0, 8)"]),
    "kernel too large": (
        torch.ones(2, 3, 2, 2),
        ["Conv2d at position 1", "(3, 2, 2)", "Kernel size: (3 x 3)"],
    ),
}


@pytest.mark.parametrize("name", list(INPUTS))
def test_bad_inputs_in_every_path(name: str) -> None:
    x, parts = INPUTS[name]
    model = image_model()
    assert_says(lambda: model.train()(x), *parts)
    with torch.no_grad():
        assert_says(lambda: model.eval()(x), *parts)
        with cl.layer_by_layer():
            assert_says(lambda: model(x), *parts)


def test_a_merged_batch_axis() -> None:
    model = cl.ConformalLayers(nn.Flatten(-3))  # axis 0 of a batch with three axes
    for mode in (True, False):
        model.train(mode)
        assert_says(
            lambda: model(torch.ones(2, 5, 3)), "Flatten at position 0", "batch axis", "Keep axis 0"
        )
    assert_says(lambda: cl.fold(model, (5, 3)), "Flatten at position 0", "batch axis")


@pytest.mark.parametrize("shape", ["abc", (), (3, 0, 8), (3.0, 8, 8), 5, None, (True, 8, 8)])
@pytest.mark.parametrize("function", [cl.fold, cl.trace])
def test_bad_input_shape(function: Callable[..., object], shape: object) -> None:
    where = f"{function.__name__}(input_shape=...)"
    assert_says(
        lambda: function(image_model(), shape), where, repr(shape), "without the batch axis"
    )


@pytest.mark.parametrize("strategy", ["fast", None, 3])
def test_unknown_strategy(strategy: object) -> None:
    action = lambda: cl.fold(image_model(), (3, 8, 8), strategy=strategy)  # noqa: E731
    assert_says(action, "fold(strategy=...)", '"auto"', '"dense"', '"layers"', repr(strategy))


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64, "float32"])
def test_bad_dtype(dtype: object) -> None:
    action = lambda: cl.fold(image_model(), (3, 8, 8), dtype=dtype)  # noqa: E731
    assert_says(action, "fold(dtype=...)", "floating-point", repr(dtype))


def test_models_that_do_not_fold() -> None:
    assert_says(lambda: cl.fold(3, (2,)), "an nn.Module", "got int")
    folded = cl.fold(image_model(), (3, 8, 8))
    assert_says(lambda: cl.fold(folded, (3, 8, 8)), "got a Folded", "already")
    part = cl.ConformalLayers(cl.Linear(2, 2), cl.ReSPro())
    branching = Written(lambda m, x: m.part(x) if x.sum() > 0 else x, part=part)
    assert_says(lambda: cl.fold(branching, (2,)), "fold(Written)", "torch.fx", "Fold a part")
    head = nn.Sequential(image_model(), nn.Flatten(), nn.Linear(5, 2))
    assert_says(lambda: cl.fold(head, (3, 8, 8)), "fold(Sequential)", "(3, 8, 8)", "mat1 and mat2")


def test_a_model_with_hooks_does_not_fold() -> None:
    model = nn.Sequential(image_model(), nn.Flatten())
    for module, name in (
        (model[0][1], "Conv2d at position 0.1"),
        (model[1], "Flatten at position 1"),
        (model, "Sequential"),
    ):
        handle = module.register_forward_hook(lambda *arguments: None)
        assert_says(lambda: cl.fold(model, (3, 8, 8)), name, "hooks", "handle.remove()")
        handle.remove()
    assert cl.fold(model, (3, 8, 8)).output_shape == (144,)


def test_weights_that_are_not_finite_do_not_fold() -> None:
    model = image_model()
    nn.init.constant_(model[1].weight, float("nan"))
    assert_says(
        lambda: cl.fold(model, (3, 8, 8)), "Conv2d at position 1", "finite", "nan", "weights"
    )


def test_folded_refuses_other_inputs() -> None:
    folded = cl.fold(image_model(), (3, 8, 8))
    assert_says(lambda: folded(torch.ones(3, 8, 8)), "(B, 3, 8, 8)", "unbatched", "x.unsqueeze(0)")
    assert_says(lambda: folded(torch.ones(2, 8, 8, 3)), "channels last", "x.permute(0, 3, 1, 2)")
    assert_says(
        lambda: folded(torch.ones(2, 3, 9, 8)), "(B, 3, 8, 8)", "(2, 3, 9, 8)", "Fold again"
    )
    assert_says(
        lambda: folded(torch.ones(2, 3, 8, 8).double()), "torch.float32", "torch.float64", "dtype="
    )


def test_linear_and_reshaping_layers_name_their_sizes() -> None:
    linear = cl.ConformalLayers(cl.Linear(4, 2))
    assert_says(lambda: linear(torch.ones(2, 5)), "Linear at position 0", "in_features=4", "(2, 5)")
    unflatten = cl.ConformalLayers(nn.Unflatten(1, (2, 2)))
    assert_says(lambda: unflatten(torch.ones(2, 5)), "Unflatten at position 0", "(5,)")
    shuffle = cl.ConformalLayers(nn.PixelShuffle(2))
    assert_says(lambda: shuffle(torch.ones(2, 5, 3, 3)), "PixelShuffle at position 0", "(5, 3, 3)")
