"""Converted networks: against the model itself on points, through training, folds and files."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import conformallayers as cl
from blocks import Written
from cnns import (
    CNNS,
    Mobile,
    OnPoints,
    ResNet,
    embedded,
    expected_of,
    replaced,
    signal_net,
    vgg,
)
from models import Generator
from oracle import randomise, relative_error
from support import TOLERANCES, assert_says, samples

SHAPE = (3, 8, 8)


def twin_of(
    model: nn.Module, shape: tuple[int, ...], **options: object
) -> tuple[nn.Module, Tensor]:
    """Return a float64 twin in evaluation mode with another offset than 1, and samples."""
    twin = cl.convert(model.double(), shape, **options).eval()
    with torch.no_grad():
        twin.features.log_offset.fill_(-0.4)
    return twin, samples(shape, torch.float64)


FUNCTIONAL = (
    "resnet",
    "mobile",
    "dense",
    "unet",
)  # models of functions: expected_of cannot replace their rectifiers
KEEPS = [(name, "all") for name in CNNS]
KEEPS += [(name, keep) for name in CNNS if name not in FUNCTIONAL for keep in ("pooling", "none")]


@pytest.mark.parametrize(("name", "keep"), KEEPS)
def test_a_twin_is_the_model_on_points_with_some_rectifiers_replaced(name: str, keep: str) -> None:
    build, shape = CNNS[name]
    model = randomise(build())
    twin, x = twin_of(model, shape, keep=keep)
    assert bool(replaced(twin)) == (keep != "all")
    expected = expected_of(model, twin, x)
    with torch.no_grad(), cl.layer_by_layer():
        assert relative_error(twin(x), expected) <= 1e-12


def test_a_resnet_of_functions() -> None:
    model = randomise(ResNet()).double()
    twin, x = twin_of(model, SHAPE)
    # relu, then two of each block; the last block has the stride, and pooling follows it.
    assert replaced(twin) == ["relu", "relu_1", "relu_2", "relu_3"]
    assert [type(module).__name__ for module in twin.features] == [
        *("Conv2d", "BatchNorm2d", "ReSPro", "Traced", "ReSPro", "Traced", "ReLU", "Traced"),
        *("ReLU", "AvgPool2d"),
    ]
    on_points = OnPoints()
    model.functions = (on_points,) * 4 + (F.relu,) * 3
    with torch.no_grad(), cl.layer_by_layer():
        expected = model.eval()(embedded(twin, x))
        assert relative_error(twin(x), expected) <= 1e-12


@pytest.mark.parametrize("seed", range(16))
@pytest.mark.sampled(2)
def test_random_cnns(seed: int) -> None:
    model, shape = Generator(seed).plain(rectifiers=True)
    whole = cl.convert(model, shape, keep="none")
    for keep in ("all", "pooling", "none", replaced(whole)[::2]):
        twin, x = twin_of(copy.deepcopy(model), shape, keep=keep)
        expected = expected_of(model, twin, x)
        with torch.no_grad():
            with cl.layer_by_layer():
                assert relative_error(twin(x), expected) <= 1e-12
            assert relative_error(cl.fold(twin, shape)(x), expected) <= TOLERANCES[torch.float64]


def test_the_model_is_not_touched_and_shares_nothing() -> None:
    model = vgg().train()
    model[0][0][1].eval()  # a frozen BatchNorm
    model[0][0][0].weight.requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    twin = cl.convert(model, SHAPE)
    assert [module.training for module in model.modules()].count(False) == 1
    assert isinstance(model[0][0][2], nn.ReLU)
    assert model[0][0][2].inplace
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    storages = {value.data_ptr() for value in model.state_dict().values()}
    assert not storages & {value.data_ptr() for value in twin.state_dict().values()}
    found = dict(twin.features.named_children())
    assert twin.training
    assert not found["0_0_1"].training
    assert not found["0_0_0"].weight.requires_grad
    assert not cl.convert(model.eval(), SHAPE).training


def test_features_without_parameters_have_the_dtype_of_the_head() -> None:
    model = nn.Sequential(nn.MaxPool2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(48, 2)).double()
    assert cl.convert(model, SHAPE).features.log_offset.dtype == torch.float64


def test_twins_are_copied_pickled_and_loaded(tmp_path: Path) -> None:
    for build, shape in CNNS.values():
        twin = cl.convert(randomise(build()), shape).eval()
        x = samples(shape, torch.float32)
        with torch.no_grad():
            expected = twin(x)
            for again in (copy.deepcopy(twin), pickle.loads(pickle.dumps(twin))):
                assert torch.allclose(again(x), expected, rtol=1e-5)
                assert str(again.conversion) == str(twin.conversion)
            torch.save(twin.state_dict(), tmp_path / "twin.pt")
            other = cl.convert(build(), shape).eval()
            other.load_state_dict(torch.load(tmp_path / "twin.pt"))
            assert torch.allclose(other(x), expected, rtol=1e-5)


def test_the_record_is_a_table() -> None:
    twin = cl.convert(ResNet(), SHAPE)
    lines = str(twin.conversion).splitlines()
    assert lines[0].split() == ["path", "type", "what", "why"]
    assert len(lines) == 2 + len(twin.conversion.changes)
    rows = {one.path: (one.type, one.action, one.reason) for one in twin.conversion.changes}
    assert rows["stem"] == ("Conv2d", "kept", "affine")
    assert rows["relu"] == ("relu", "replaced by ReSPro", "not next to a pooling or stride")
    assert rows["relu_5"] == ("relu", "kept as ReLU", "after Conv2d blocks.2.conv1")
    assert rows["relu_6"] == ("relu", "kept as ReLU", "before avg_pool2d")
    assert rows["iadd"] == ("iadd", "kept", "join")
    assert rows["avg_pool2d"] == ("avg_pool2d", "kept as AvgPool2d", "affine")
    assert rows["view"] == ("view", "kept in the head as Flatten", "after the division")
    assert rows["fc"] == ("Linear", "kept in the head", "after the division")


def refusal_of(model: nn.Module, shape: tuple[int, ...] = SHAPE) -> list[str]:
    """Return the lines of the one error that a conversion raises."""
    with pytest.raises(cl.ConformalError) as caught:
        cl.convert(model, shape)
    lines = str(caught.value).splitlines()
    assert lines[1].split() == ["path", "type", "what", "why"]
    assert f"got {len(lines) - 3} that cannot be converted. Change these" in lines[0]
    return lines[3:]


def test_all_refusals_come_at_once() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.Sigmoid(),
        nn.LayerNorm([4, 8, 8]),
        nn.Conv2d(4, 4, 3),
        nn.ReLU6(),
        nn.LPPool2d(3, 2),
        nn.BatchNorm2d(4, track_running_stats=False),
        nn.Flatten(),
        nn.Linear(36, 2),
        nn.Softmax(1),
    )
    rows = refusal_of(model)
    assert [row.split()[:3] for row in rows] == [
        ["1", "Sigmoid", "refused"],
        ["2", "LayerNorm", "refused"],
        ["4", "ReLU6", "refused"],
        ["5", "LPPool2d", "refused"],
        ["6", "BatchNorm2d", "refused"],
    ]
    assert "Use nn.ReLU(), nn.LPPool2d(2, ...) or cl.ReSPro()" in rows[0]
    assert "Use nn.BatchNorm, which folds" in rows[1]
    assert "expected norm_type=2, got norm_type=3" in rows[3]
    assert "expected track_running_stats=True" in rows[4]


def test_gates_are_refused() -> None:
    model = Written(
        lambda m, x: m.last(m.conv(x) * m.gate(m.conv(x).mean((2, 3), keepdim=True))),
        conv=nn.Conv2d(3, 4, 3),
        gate=nn.Sequential(nn.Conv2d(4, 4, 1), nn.Sigmoid()),
        last=nn.Conv2d(4, 4, 1),
    )
    rows = refusal_of(model)
    assert [row.split()[1] for row in rows] == ["Sigmoid", "mul"]
    assert "does not fold. Write it with modules" in rows[1]


def test_what_a_model_must_be() -> None:
    model = vgg()
    assert_says(lambda: cl.convert(SHAPE, SHAPE), "convert(model)", "an nn.Module", "tuple")
    for shape in ((1, *SHAPE), (3, 8), (4, 8, 8)):
        assert_says(
            lambda shape=shape: cl.convert(model, shape),
            "a model that takes any number of samples",
            "Check input_shape",
        )
    assert_says(lambda: cl.convert(model, 3), "convert(input_shape=...)", "without the batch axis")
    conformal = nn.Sequential(cl.ConformalLayers(cl.Conv2d(3, 4, 3), cl.ReSPro()))
    assert_says(lambda: cl.convert(conformal, SHAPE), "a plain model", "ConformalLayers")
    folded = nn.Sequential(cl.fold(nn.Conv2d(3, 4, 3), SHAPE))
    assert_says(lambda: cl.convert(folded[0], SHAPE), "convert(model)", "got a Folded")
    assert "It is folded already: convert the model" in refusal_of(folded)[0]
    assert_says(lambda: cl.convert(model, (8, 8, 3)), "first axis: (3, 8, 8)?")
    lazy = nn.Sequential(nn.LazyConv2d(4, 3), nn.ReLU())
    assert_says(lambda: cl.convert(lazy, SHAPE), "uninitialized parameters", "model(x)")
    assert_says(lambda: cl.convert(nn.Sequential(), SHAPE), "a model with layers")

    two = Written(lambda m, x: (x, x))
    assert_says(lambda: cl.convert(two, SHAPE), "returns one batch, got an output that is not")
    gate = nn.Sequential(Written(lambda m, x: x if x.sum() > 0 else -x))
    assert_says(lambda: cl.convert(gate, SHAPE), "torch.fx can trace", "control")
    model[0][0][3].register_forward_hook(lambda module, args, result: 2 * result)
    assert_says(lambda: cl.convert(model, SHAPE), "Conv2d at position 0.0.3", "forward hooks")


def test_layers_that_are_never_called_are_dropped() -> None:
    model = Written(
        lambda m, x: m.conv(x) + m.extra(m.conv(x)).sum() if m.training else m.conv(x),
        conv=nn.Conv2d(3, 4, 3),
        extra=nn.Conv2d(4, 1, 1),
    )
    twin = cl.convert(model.train(), SHAPE)
    last = twin.conversion.changes[-1]
    assert (last.path, last.action, last.reason) == ("extra", "dropped", "not called at evaluation")
    assert not any("extra" in key for key in twin.state_dict())


def test_where_the_head_begins() -> None:
    flat = nn.Sequential(nn.Flatten(), nn.Linear(12, 4), nn.ReLU(), nn.Linear(4, 2), nn.Softmax(1))
    twin = cl.convert(flat, (3, 2, 2))
    assert [type(module).__name__ for module in twin.head] == ["Softmax"]
    assert replaced(twin) == ["2"]
    back = nn.Sequential(
        nn.Conv1d(2, 2, 3),
        nn.Flatten(),
        nn.Linear(12, 12),
        nn.Unflatten(1, (2, 6)),
        nn.Conv1d(2, 1, 1),
    )
    twin = cl.convert(back, (2, 8))
    assert [name for name, _ in twin.named_children()] == ["features"]
    cl.testing.assert_folds(twin, (2, 8))


CONVS = {name: nn.Conv1d(2, 2, 1) for name in ("offset", "unit", "conv")}
# Models for (2, 5), and the paths of their changes.
WRITTEN: dict[str, tuple[nn.Module, list[str]]] = {
    "names that a container has already": (
        Written(lambda m, x: m.unit(m.train_(m.offset(x))), **CONVS, train_=nn.ReLU()),
        ["offset", "train_", "unit", "conv"],
    ),
    "a value twice": (
        Written(lambda m, x: torch.cat([m.conv(m.conv(x) * 2)] * 2, 1), conv=CONVS["conv"]),
        ["conv", "mul", "conv (2)", "cat"],
    ),
    "constants": (
        Written(lambda m, x: m.conv((x - 0.5) / 2).relu(), **CONVS),
        ["sub", "truediv", "conv", "relu", "offset", "unit"],
    ),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_models_as_people_write_them(name: str) -> None:
    model, paths = copy.deepcopy(WRITTEN[name])
    model.double()
    twin, x = twin_of(model, (2, 5), keep="all")
    assert [one.path for one in twin.conversion.changes] == paths
    called = {key for key, _ in model.named_parameters() if key.split(".")[0] in paths}
    dropped = [one.path for one in twin.conversion.changes if one.action == "dropped"]
    trained = [key for key, _ in model.named_parameters() if key.split(".")[0] not in dropped]
    assert len(called) >= len(trained) == len(list(twin.features.parameters())) - 1  # the offset
    with torch.no_grad(), cl.layer_by_layer():
        assert relative_error(twin(x), model(embedded(twin, x))) <= 1e-12


def test_those_beside_a_pooling_stay() -> None:
    assert replaced(cl.convert(vgg(), SHAPE)) == ["0.0.2", "0.1.2"]
    assert replaced(cl.convert(vgg(norm=False), SHAPE)) == ["0.0.1", "0.1.1"]
    assert replaced(cl.convert(signal_net(), (2, 24))) == ["2"]


@pytest.mark.parametrize(
    "neighbour",
    [
        nn.MaxPool2d(2),
        nn.AdaptiveAvgPool2d(2),
        nn.Conv2d(4, 4, 3, stride=(1, 2)),
        nn.ConvTranspose2d(4, 4, 2, stride=2),
    ],
)
def test_before_and_after(neighbour: nn.Module) -> None:
    through = nn.BatchNorm2d(4), nn.Dropout2d(0.1), nn.Identity()
    conv = nn.Conv2d(4, 4, 3, padding=1)
    name = type(neighbour).__name__
    before = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), *through, neighbour, conv, nn.ReLU())
    twin = cl.convert(before, SHAPE)
    assert replaced(twin) == ["7"]
    assert twin.conversion.changes[1].reason == f"before {name} 5"
    after = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), conv, neighbour, *through, nn.PReLU())
    twin = cl.convert(after, SHAPE)
    assert replaced(twin) == ["1"]
    assert twin.conversion.changes[7].reason == f"after {name} 3"


def test_by_name() -> None:
    model = vgg()
    assert replaced(cl.convert(model, SHAPE, keep=["0.0.2", "0.1.5"])) == ["0.0.5", "0.1.2"]
    everything = cl.convert(model, SHAPE, keep="none")
    assert replaced(cl.convert(model, SHAPE, keep=())) == replaced(everything)
    assert isinstance(everything.head[2], nn.ReLU)
    assert replaced(cl.convert(ResNet(), SHAPE, keep={"relu", "relu_2"})) == [
        f"relu_{n}" for n in (1, 3, 4, 5, 6)
    ]


def test_all_calls_of_a_module_or_one_of_them() -> None:
    model, shape = Mobile(), (3, 7, 7)
    assert replaced(cl.convert(model, shape, keep=["relu"])) == ["prelu"]
    assert replaced(cl.convert(model, shape, keep=["relu (2)"])) == ["relu", "prelu"]
    rows = {
        one.path: one.reason for one in cl.convert(model, shape, keep="none").conversion.changes
    }
    assert rows["relu (2)"] == 'keep="none"'
    assert rows["prelu"] == 'keep="none"; its weight is dropped'


def test_wrong_choices() -> None:
    model = vgg()

    def converting(keep: object) -> object:
        return lambda: cl.convert(model, SHAPE, keep=keep)

    assert_says(converting("pool"), "convert(keep=...)", 'Did you mean "pooling"?', "'pool'")
    assert_says(converting("0.0.2"), "Put a single path into a list: keep=['0.0.2']")
    for wrong in (["0.0.3"], ["0.0.22"], None, 3, b"all", [1], True):
        assert_says(converting(wrong), "a list of paths of rectifiers", "are 0.0.2, 0.0.5, 0.1.2")
    plain = nn.Sequential(nn.Conv2d(3, 4, 3))
    assert_says(
        lambda: cl.convert(plain, SHAPE, keep=["1"]), "The rectifiers of the model are none."
    )


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: m.relu(m.same(x)) + x,
        lambda m, x: F.relu_(torch.flatten(x, 2)) + x,
        lambda m, x: F.relu(x.contiguous(), inplace=True) + x,
    ],
)
def test_a_map_that_is_overwritten_by_another_name_is_followed(function: Any) -> None:
    parts = {"relu": nn.ReLU(inplace=True), "same": nn.Identity(), "conv": nn.Conv1d(2, 2, 1)}
    model = Written(lambda m, x: m.conv(function(m, m.conv(x))), **parts)
    twin, x = twin_of(model, (2, 5), keep="all")
    with torch.no_grad(), cl.layer_by_layer():
        assert relative_error(twin(x), model(embedded(twin, x))) <= 1e-12
