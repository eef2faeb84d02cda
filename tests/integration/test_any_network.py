"""Networks as people write them: folded, saved, exported, quantized and compiled, against the model itself."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import conformallayers as cl
import conformallayers.numpy as cln
from blocks import MobileOne, RepVGG, Residual, UNet, conv_bn, randomised
from conformallayers.testing import relative_error
from programs import compiled, needs_compiler

SHAPE, CLOSE = (3, 16, 16), 1e-5
pytestmark = pytest.mark.usefixtures("seeded")


class SqueezeExcite(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(channels, 4), nn.Linear(4, channels)

    def forward(self, x: Tensor) -> Tensor:
        b, c, _, _ = x.size()
        gate = torch.sigmoid(self.second(torch.relu(self.first(x.mean((2, 3)))))).view(b, c, 1, 1)
        return x * gate.expand_as(x)


class HardSwish(nn.Module):
    """An inverted residual of MobileNetV3."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        wide = 4 * channels
        layers = *conv_bn(channels, wide, 1), nn.Hardswish(), *conv_bn(wide, wide, 3, 1, 1, wide)
        self.body = nn.Sequential(*layers, nn.Hardswish(), *conv_bn(wide, channels, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


def network(*blocks: nn.Module) -> nn.Module:
    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)
    return randomised(nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), *blocks, *head))


# The network, and what C and int8 refuse in it.
NETWORKS = {
    "RepVGG": (lambda: network(RepVGG(8, 8), RepVGG(8, 8)), "", ""),
    "MobileOne": (lambda: network(MobileOne(8, 8, 3, groups=8), MobileOne(8, 8, 1)), "", ""),
    "ResNet with SE": (lambda: network(Residual(8), SqueezeExcite(8)), "", "sigmoid"),
    "hard-swish": (lambda: network(HardSwish(8)), "", "hardswish"),
    "U-Net": (lambda: network(UNet(8)), "", "conv_transpose"),
}


@needs_compiler
@pytest.mark.parametrize("name", NETWORKS)
def test_every_way_out_gives_the_numbers_of_the_model(name: str, tmp_path: Path) -> None:
    build, lacked_by_c, lacked_by_integers = NETWORKS[name]
    model, x = build(), torch.randn(64, *SHAPE)
    folded, path = cl.fold(model, SHAPE), tmp_path / "net.safetensors"
    with torch.no_grad():
        expected = model(x)
    cl.save(folded, path)
    found = {
        "torch": folded(x),
        "file": cl.load(path)(x),
        "numpy": torch.from_numpy(cln.load(path)(x.numpy())),
        "ONNX Runtime": cl.Session(folded, engine="onnxruntime")(x),
        "torch.export": torch.export.export(folded, (x,)).module()(x),
        "torch.compile": torch.compile(folded, backend="aot_eager", fullgraph=True)(x),
    }
    if lacked_by_c:
        with pytest.raises(cl.ConformalError, match=f"supported by C, got {lacked_by_c}"):
            cl.export_c(folded, tmp_path)
    else:
        (run,) = compiled(tmp_path, [cl.export_c(folded, tmp_path)])
        found["C"] = run(x)[1]
    errors = {way: relative_error(torch.as_tensor(y), expected) for way, y in found.items()}
    assert max(errors.values()) < CLOSE, errors
    if lacked_by_integers:
        with pytest.raises(cl.ConformalError, match=lacked_by_integers):
            cl.quantize(folded, x)
        return
    quantized = cl.quantize(folded, x)
    assert relative_error(quantized(x), expected) < 0.1
    assert torch.equal(torch.as_tensor(cl.Session(quantized, engine="numpy")(x)), quantized(x))


def test_a_part_folds_in_place() -> None:
    model, x = network(RepVGG(8, 8)), torch.randn(2, *SHAPE)
    expected = model(x)
    model[2] = cl.fold(model[2], (8, 8, 8))
    for twin in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert relative_error(twin(x), expected) < CLOSE
    assert relative_error(cl.fold(model, SHAPE)(x), expected) < CLOSE
