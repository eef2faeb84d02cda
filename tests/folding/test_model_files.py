"""cl.save and cl.load of models: layers, composites and networks, or one clear error."""

from __future__ import annotations

import json
import random
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import conformallayers as cl
from cases import HOMOGENEOUS_CASES, LINEAR_CASES, Case
from conformallayers.folding.model_files import COMPOSITES
from conformallayers.utils.fingerprint import fingerprint
from nets import NETS, SHAPE, net
from stored import JUNK, StoredFile, places, refused
from support import samples


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "net.safetensors"


@pytest.mark.parametrize("name", list(NETS))
def test_models_come_back(name: str, path: Path) -> None:
    model = net(name)
    if name == "calls":
        with pytest.raises(cl.ConformalError, match=r"save: model.*got Called\. Save its weights"):
            cl.save(model, path)
        return
    first = next(model.parameters()).requires_grad_(False)
    model(samples(SHAPE, torch.float32))  # statistics of normalisations move
    cl.save(model, path)
    state = torch.get_rng_state()
    loaded = cl.load(path)
    assert torch.equal(torch.get_rng_state(), state)
    assert type(loaded) is type(model)
    assert loaded.training
    assert repr(loaded) == repr(model)
    assert fingerprint(loaded) == fingerprint(model)
    assert [p.requires_grad for p in loaded.parameters()] == [
        p is not first for p in model.parameters()
    ]
    x = samples(SHAPE, torch.float32)
    with torch.no_grad():
        assert torch.equal(loaded.eval()(x), model.eval()(x))
    cl.save(model, path)
    assert not cl.load(path).training


@pytest.mark.parametrize("name", [n for n in cl.networks.__all__ if n.endswith(("Net", "NetCL"))])
def test_networks_of_the_paper_come_back(name: str, path: Path) -> None:
    model = getattr(cl.networks, name)(*([2] if name.startswith("Dk") else [])).eval()
    cl.save(model, path)
    loaded = cl.load(path)
    x = samples((3, 32, 32), torch.float32, batch=1)
    with torch.no_grad(), cl.layer_by_layer():
        assert torch.equal(loaded(x), model(x))
    assert type(loaded) is type(model)
    assert loaded.arguments == model.arguments


def test_every_network_can_be_stored() -> None:
    classes = {name for name in cl.networks.__all__ if isinstance(getattr(cl.networks, name), type)}
    stored = {name.removeprefix("networks.") for name in COMPOSITES if "networks." in name}
    assert stored == classes


def test_a_network_may_have_another_head(path: Path) -> None:
    model = cl.networks.LeNetCL(alpha=2.0, gain=3.0)
    model.head[-1] = nn.Linear(84, 3, bias=False)
    model.features.requires_grad_(False)
    cl.save(model, path)
    loaded: Any = cl.load(path)
    assert loaded.arguments == model.arguments
    assert [p.requires_grad for p in loaded.parameters()] == [
        p.requires_grad for p in model.parameters()
    ]
    x = samples((3, 32, 32), torch.float32, batch=1)
    with torch.no_grad():
        assert torch.equal(loaded.eval()(x), model.eval()(x))


def test_spectral_norms_and_layouts_come_back(path: Path) -> None:
    model = cl.ConformalLayers(cl.Conv2d(2, 4, 3), cl.ReSPro("spectral"), cl.Conv2d(4, 2, 3))
    model(samples(SHAPE, torch.float32))
    model = model.to(memory_format=torch.channels_last)
    cl.save(model, path)
    loaded: Any = cl.load(path)
    assert torch.equal(loaded[1].norm, model[1].norm)
    assert loaded[0].weight.stride() == model[0].weight.stride()
    shared = nn.Sequential(layer := nn.Linear(3, 3), nn.ReLU(), layer)
    cl.save(shared, path)
    loaded = cl.load(path)
    assert loaded[0] is loaded[2]


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("kind", sorted({type(case.build()).__name__ for case in LINEAR_CASES}))
@pytest.mark.sampled(3)
def test_linear_layers_come_back(kind: str, path: Path) -> None:
    for case in LINEAR_CASES:
        layer = case.build()
        if type(layer).__name__ != kind:
            continue
        model = cl.ConformalLayers(layer, cl.ReSPro()).eval()
        cl.save(model, path)
        loaded = cl.load(path)
        assert str(loaded) == str(model), case.name
        x = samples(case.input_shape, torch.float32)
        with cl.layer_by_layer():
            assert torch.equal(loaded(x), model(x)), case.name


@pytest.mark.parametrize("case", HOMOGENEOUS_CASES, ids=lambda case: case.name)
def test_maps_with_an_offset_and_a_unit_come_back(case: Case, path: Path) -> None:
    model = cl.ConformalLayers(case.build(), cl.ReSPro(), offset="learned", unit="rms")
    model.log_offset.data.fill_(0.3)
    cl.save(model, path)
    loaded: Any = cl.load(path)
    assert str(loaded) == str(model)
    assert loaded.embedding == model.embedding
    x = samples(case.input_shape, torch.float32)
    assert torch.equal(loaded(x), model(x))


# -- refused ------------------------------------------------------------------------------------


class Own(nn.Module):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * input


class Cauchy(cl.RadialActivation):
    def growth(self, q: Tensor) -> Tensor:
        return 1 + q / 4


def hooked() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].register_forward_hook(lambda module, inputs, output: output + 1)
    return model


def extended(mask: Tensor) -> nn.Module:
    layer = nn.Linear(2, 2)
    layer.register_buffer("mask", mask)
    return layer


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    return model


def traced() -> nn.Module:
    return cl.ConformalLayers(cl.Traced(nn.Sequential(cl.Linear(3, 3))), cl.ReSPro())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.Sequential(nn.Identity(), Own()), r"save: 1: .* got Own\. Save its weights"),
        (lambda: cl.ConformalLayers(cl.Linear(2, 2), Cauchy()), "got Cauchy"),
        (traced, "got Traced"),
        (hooked, "got Linear with hooks"),
        (tied, r"save: 1\.weight: expected a tensor of its own, got the tensor of 0\.weight"),
        (lambda: nn.Sequential(weight_norm(nn.Linear(2, 2))), "got ParametrizedLinear"),
        (lambda: nn.Linear(2, 2, device="meta"), "on meta"),
        (lambda: extended(torch.zeros(1, dtype=torch.bool)), "save: mask: .*torch.bool"),
        (lambda: extended(torch.zeros(1)), "this fails: Linear with other tensors"),
    ],
)
def test_what_a_file_cannot_hold_is_refused_by_name(
    make: Callable[[], Any], message: str, path: Path
) -> None:
    with pytest.raises(cl.ConformalError, match=message):
        cl.save(make(), path)
    assert not list(path.parent.iterdir())


def test_arrays_of_another_layer_are_refused(path: Path) -> None:
    file = StoredFile(nn.Linear(3, 2), path)
    file.document["model"]["settings"]["in_features"] = 10**12
    file.write()
    refused(path, "makes no network", cl.load)
    file.document["model"] |= {"type": "os.system", "settings": {}}
    file.write()
    refused(path, "makes no network", cl.load)


@pytest.mark.parametrize(
    "change",
    [
        {"padding": [0, 0, 0]},
        {"padding": [-1, 0]},
        {"stride": [0, 1]},
        {"dilation": ["x", "y"]},
        {"kernel_size": [3]},
        {"dilation": [1]},
        {"groups": 0},
        {"padding_mode": "none"},
    ],
    ids=str,
)
def test_windows_have_a_size(change: dict[str, Any], path: Path) -> None:
    file = StoredFile(net("unpadded"), path)
    file.document["model"]["children"][0][1]["settings"] |= change
    file.write()
    refused(path, "makes no network", cl.load)


@pytest.mark.parametrize(
    ("layer", "change", "message"),
    [
        (nn.BatchNorm2d(2), {"eps": "x"}, "eps: 'x'"),
        (nn.BatchNorm2d(2), {"momentum": [0.1]}, "momentum"),
        (nn.Flatten(), {"places": 2}, "_readers in .*_files.py lacks 'places', .* of nn.Flatten"),
        (nn.BatchNorm2d(2), {"eps": 10**30}, "eps: 1000000000000000000000000000000 is no number"),
        (nn.LeakyReLU(), {"negative_slope": 10**400}, "negative_slope: 10000"),
        (nn.ELU(), {"alpha": "x"}, "alpha: 'x'"),
        (nn.Dropout(), {"inplace": 3}, "inplace: 3"),
        (nn.Softmax(1), {"dim": "x"}, "dim: 'x'"),
        (nn.Flatten(), {"start_dim": 10**9}, "start_dim: 1000000000, and 15 is the most"),
        (nn.Conv2d(2, 2, 1), {"padding": [20000, 20000]}, "padding: 20000, and 4096 is the most"),
        (nn.ConvTranspose1d(1, 1, 1), {"output_padding": []}, "output_padding of"),
        (nn.ConvTranspose2d(1, 1, 1), {"output_padding": [0]}, "output_padding of"),
        (
            nn.ConvTranspose2d(1, 1, 1, stride=(1, 2), dilation=(1, 3)),
            {"output_padding": [0, 3]},
            "not below stride or dilation",
        ),
        (nn.ZeroPad2d(1), {"padding": [20000] * 4}, "padding: 20000, and 4096 is the most"),
        (nn.Upsample(2), {"size": 40000}, "size: 40000, and 4096 is the most"),
        (nn.Upsample(None, 2), {"scale_factor": 4000.0}, "scale_factor: 4000.0, and 128"),
        (nn.AdaptiveAvgPool2d(2), {"output_size": 10**6}, "output_size: 1000000, and 4096"),
        (cl.RepeatChannels(2), {"times": 10**8}, "times: 100000000, and 4096 is the most"),
    ],
    ids=str,
)
def test_settings_that_would_fail_or_fill_the_memory_later(
    layer: nn.Module, change: dict[str, Any], message: str, path: Path
) -> None:
    file = StoredFile(layer, path)
    file.document["model"]["settings"] |= change
    file.write()
    refused(path, message, cl.load)


def test_layers_are_counted_as_often_as_they_run(path: Path) -> None:
    file = StoredFile(nn.Sequential(nn.Tanh()), path)
    plain = {"type": "nn.Sequential", "settings": {}, "tensors": {}}
    model = file.document["model"]["children"][0][1]
    for depth in reversed(range(28)):
        inner = ".".join(["0"] * (depth + 1))
        model = {**plain, "children": [["0", model], ["1", {"same": inner}]]}
    file.document["model"] = model
    file.write()
    refused(path, "16383 layers, and 10000 are the most", cl.load)


def test_parts_of_a_model_are_those_of_its_class(path: Path) -> None:
    for old, new in (
        ('["features", ', '["other", '),
        ('["head", ', '["features.0", '),
        ('"num_classes": 10', '"classes": 10'),
    ):
        file = StoredFile(cl.networks.LeNetCL(), path)
        file.write(lambda text, old=old, new=new: text.replace(old, new))
        refused(path, "makes no network", cl.load)
    for old, new in (
        ('"join": "concatenate"', '"join": "nothing"'),
        ('"dim": 1', '"dim": 0'),
        ('"dim": 1', '"dim": "x"'),
        ('["shortcut", ', '["body", '),
    ):
        file = StoredFile(net("branches"), path)
        assert old in json.dumps(file.document)
        file.write(lambda text, old=old, new=new: text.replace(old, new))
        refused(path, "makes no network", cl.load)


@pytest.mark.parametrize("name", ["branches", "several", "centred", "learned"])
def test_a_document_without_sense_is_refused_or_loads(name: str, path: Path) -> None:
    choice = random.Random(name)
    file = StoredFile(net(name), path)
    text = json.dumps(file.document)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refusals = 0
    for _ in range(60):
        file.document = json.loads(text)
        container, key = choice.choice(places(file.document["model"]))
        container[key] = choice.choice(JUNK)
        file.write()
        try:
            cl.load(path)
        except cl.ConformalError:
            refusals += 1
    assert refusals > 30
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KiB


# -- what a file would not give back ------------------------------------------------------------


def with_parameter() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2))
    model.register_parameter("gain", nn.Parameter(torch.ones(1)))
    return model


def with_buffer() -> nn.Module:
    model = cl.ConformalLayers(cl.Linear(2, 2), cl.ReSPro())
    model.register_buffer("mask", torch.ones(1))
    return model


def with_child() -> nn.Module:
    layer = nn.Linear(2, 2)
    layer.add_module("adapter", nn.Linear(2, 2))
    return nn.Sequential(layer)


def with_names() -> nn.Module:
    several = nn.ModuleList([nn.Linear(2, 2)])
    several.add_module("last", nn.Linear(2, 2))
    return nn.Sequential(several)


def tied_by_memory() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 3, bias=False), nn.Linear(3, 2, bias=False))
    model[1].weight = nn.Parameter(model[0].weight.data.T)
    return model


def with_stale_padding() -> nn.Module:
    layer = nn.Conv1d(1, 1, 3, padding="same")
    layer.padding = "some"
    return layer


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (with_parameter, "Sequential with other tensors"),
        (with_buffer, "ConformalLayers with other tensors"),
        (with_child, "Linear with other settings or with children"),
        (with_names, "a list with names"),
        (tied_by_memory, r"save: 1\.weight: expected a tensor of its own, got .* 0\.weight"),
        (with_stale_padding, "this fails"),
    ],
)
def test_what_would_be_lost_is_refused(
    make: Callable[[], nn.Module], message: str, path: Path
) -> None:
    with pytest.raises(cl.ConformalError, match=message):
        cl.save(make(), path)
    assert not path.exists()


def test_parameters_side_by_side_in_one_memory_are_kept(path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    memory = torch.rand(8)
    for layer, part in zip(model, memory.split(4), strict=True):
        layer.weight = nn.Parameter(part.view(2, 2))
    cl.save(model, path)
    x = torch.rand(3, 2)
    assert torch.equal(cl.load(path)(x), model(x))


def test_frozen_statistics_stay_frozen(path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2), nn.Dropout(0.5)).train()
    model[1].eval()
    cl.save(model, path)
    loaded: Any = cl.load(path)
    assert [module.training for module in loaded.modules()] == [True, True, False, True]
    loaded[2].eval()
    model[2].eval()
    x = samples(SHAPE, torch.float32)
    assert torch.equal(loaded(x), model(x))
    assert torch.equal(loaded[1].running_mean, torch.zeros(2))
    cl.save(model.eval(), path)
    assert not any(module.training for module in cl.load(path).modules())


def test_numbers_of_numpy_are_numbers(path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(2, np.int64(3), 3, stride=np.int32(2)), nn.Dropout(0.25))
    model[1].p = np.float32(0.25)
    cl.save(model.eval(), path)
    x = samples(SHAPE, torch.float32)
    assert torch.equal(cl.load(path)(x), model(x))
