"""Defects that a review of the engine found, each once."""

from __future__ import annotations

import importlib

import pytest
import torch
from torch import Tensor, nn

import conformallayers as cl
from conformallayers.folding.cost import TYPICAL
from conformallayers.folding.strategies import conv
from conformallayers.networks import LeNetCL
from conformallayers.registry import bounds


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def test_an_activation_may_come_first() -> None:
    model = cl.ConformalLayers(cl.ReSPro(), cl.Conv2d(2, 3, 3), cl.Flatten(), cl.Linear(108, 4))
    for strategy in ("auto", "conv", "dense"):
        cl.testing.assert_folds(model, (2, 8, 8), strategy=strategy)


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


@pytest.mark.parametrize("scale", [1e-9, 1.0, 1e6])
@pytest.mark.parametrize("strategy", ["dense", "banded", "conv", "layers", "spectral"])
def test_autocast_to_float16_at_any_scale(strategy: str, scale: float) -> None:
    model = nn.Sequential(
        cl.ConformalLayers(cl.Conv2d(3, 6, 5), cl.ReSPro()),
        nn.Flatten(),
        nn.Linear(384, 10, bias=False),
    ).eval()
    folded = cl.fold(model, (3, 12, 12), strategy=strategy)
    x = scale * torch.rand(3, 3, 12, 12)
    with torch.no_grad():
        expected = folded(x)
        with torch.autocast("cpu", torch.float16):
            y = folded(x)
    assert bool(torch.isfinite(y).all())
    if scale < 1e6:  # beyond, the outputs themselves are below what float16 resolves
        assert float((y - expected).norm() / expected.norm()) < 5e-3


def positive(depth: int, channels: int, kernel: int, gain: float = 1.0) -> cl.ConformalLayers:
    layers: list[nn.Module] = []
    for index in range(depth):
        conv = cl.Conv2d(channels if index else 3, channels, kernel, padding=kernel // 2)
        with torch.no_grad():
            conv.weight.abs_().mul_(gain)
        layers += [conv, cl.ReSPro()]
    return cl.ConformalLayers(*layers).eval()


@pytest.mark.parametrize("norm", [1e-2, 1.0, 1e4, 1e8, 3e11])
@pytest.mark.parametrize("strategy", ["conv", "layers", "dense"])
@pytest.mark.parametrize(
    ("depth", "channels", "kernel", "gain"), [(20, 8, 3, 1.0), (6, 8, 1, 1e3), (60, 4, 1, 1.0)]
)
def test_no_sample_is_helped_by_its_neighbour(
    depth: int, channels: int, kernel: int, gain: float, strategy: str, norm: float
) -> None:
    model = positive(depth, channels, kernel, gain)
    folded = cl.fold(model, (3, 6, 6), strategy=strategy)
    x = torch.rand(2, 3, 6, 6)
    x = x / x.flatten(1).norm(dim=1).view(-1, 1, 1, 1) * norm
    beside = torch.cat([x, torch.full_like(x[:1], float("nan"))])  # forces the division
    with torch.no_grad():
        torch.testing.assert_close(folded(x), folded(beside)[:2], rtol=2e-5, atol=0)


def test_a_module_that_computes_something_else_is_no_plain_convolution() -> None:
    class Shifted(nn.Conv2d):
        def forward(self, input: Tensor) -> Tensor:
            ramp = torch.linspace(0, 1, input.shape[-1] - 2, dtype=input.dtype)
            return super().forward(input) * ramp

    cl.register_linear(Shifted, bound=bounds.conv_bound)
    model = cl.ConformalLayers(
        Shifted(1, 8, 3, bias=False), cl.ReSPro(), cl.AvgPool2d(2), cl.ReSPro()
    )
    cl.testing.assert_folds(model, (1, 12, 12))
    for strategy in ("conv", "spectral"):
        with pytest.raises(cl.ConformalError, match=strategy):
            cl.fold(model, (1, 12, 12), strategy=strategy)


def test_the_output_can_be_viewed() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.features = LeNetCL().features
            self.head = nn.Linear(400, 10)

        def forward(self, x: Tensor) -> Tensor:
            x = self.features(x)
            return self.head(x.view(x.size(0), -1))

    model, x = Net().eval(), torch.rand(4, 3, 32, 32)
    with torch.no_grad():
        y = model(x)
        with cl.layer_by_layer():
            torch.testing.assert_close(y, model(x))
    assert cl.fold_error(model, cl.fold(model, (3, 32, 32)), x) < 5e-6


def test_eval_does_not_build_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [layer for i in range(6) for layer in (cl.Conv2d(32 if i else 3, 32, 3), cl.ReSPro())]
    model = cl.ConformalLayers(*layers, cl.AdaptiveAvgPool2d(1)).eval()
    module = importlib.import_module("conformallayers.folding.forms")
    monkeypatch.setattr(module, "dense_matrix", lambda *_: pytest.fail("built a large matrix"))
    with torch.no_grad():
        model(torch.rand(1, 3, 224, 224))


def test_a_matrix_that_cannot_be_built_is_refused() -> None:
    model = cl.ConformalLayers(cl.Conv2d(3, 32, 3), cl.ReSPro(), cl.AvgPool2d(2))
    with pytest.raises(cl.ConformalError, match="M would have"):
        cl.fold(model, (3, 224, 224), strategy="spectral")


def test_spectral_says_what_stands_in_its_way() -> None:
    model = cl.ConformalLayers(cl.Conv2d(3, 4, 3, padding=1), cl.ReSPro())
    deeper = cl.ConformalLayers(*model, cl.Conv2d(4, 4, 3, padding=1), cl.ReSPro())
    cl.testing.assert_folds(model, (3, 9, 9), strategy="spectral")
    with pytest.raises(cl.ConformalError, match="pads behind the first layer"):
        cl.fold(deeper, (3, 9, 9), strategy="spectral")


def test_float64_keeps_away_from_differences() -> None:
    layers = [layer for i in range(3) for layer in (cl.Conv2d(32 if i else 3, 32, 3), cl.ReSPro())]
    model = nn.Sequential(cl.ConformalLayers(*layers), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    assert cl.fold(model, (3, 128, 128)).strategy == "spectral"
    assert cl.fold(model.double(), (3, 128, 128)).strategy != "spectral"


def test_a_route_is_searched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    search = conv.best_route
    monkeypatch.setattr(conv, "machine", lambda: TYPICAL)
    monkeypatch.setattr(conv, "best_route", lambda *a: calls.append(a) or search(*a))
    cl.fold(cl.ConformalLayers(cl.Conv2d(3, 4, 3), cl.ReSPro()), (3, 9, 9), strategy="conv")
    assert len(calls) == 1


def block() -> cl.ConformalLayers:
    layers: list[nn.Module] = []
    for index in range(4):
        layers += [cl.Conv2d(4 if index else 1, 4, 3, padding=1), cl.ReSPro()]
    return cl.ConformalLayers(*layers)


def test_the_norm_of_the_input_says_nothing_of_later_parts() -> None:
    model = nn.Sequential(
        *(block(), nn.Flatten(), nn.Linear(400, 100, bias=False), nn.ReLU()),
        *(nn.Unflatten(1, (1, 10, 10)), block()),
    ).eval()
    with torch.no_grad():
        model[2].weight.mul_(1e4)
    folded = cl.fold(model, (1, 10, 10), tolerance=1e-2, max_norm=1e-3)
    first, second = (plan.certificate for plan in folded.plans.values())
    assert first.max_norm == folded.certificate.max_norm == 1e-3
    assert second.max_norm == float("inf")
    assert cl.verify(folded, model)
    assert cl.fold_error(model, folded, 1e-4 * torch.rand(8, 1, 10, 10)) < 3e-2


@pytest.mark.parametrize("strategy", ["dense", "banded", "conv", "auto"])
def test_verify_knows_what_was_absorbed(strategy: str) -> None:
    features = cl.ConformalLayers(cl.Conv2d(1, 1, 3, padding=1), cl.ReSPro())
    model = nn.Sequential(features, nn.Flatten(), nn.Linear(100, 100))
    assert cl.verify(cl.fold(model, (1, 10, 10), strategy=strategy), model)


def test_messages_of_common_mistakes() -> None:
    model = block()
    with pytest.raises(cl.ConformalError, match="Leave the batch axis out"):
        cl.fold(model, (4, 1, 10, 10))
    with pytest.raises(cl.ConformalError, match=r"Pass float\(max_norm\)"):
        cl.fold(model, (1, 10, 10), tolerance=1e-2, max_norm=torch.tensor(3.0))
    with pytest.raises(cl.ConformalError, match=r"torch\.dtype"):
        cl.fold(model, (1, 10, 10), dtype="float64")
    with pytest.raises(cl.ConformalError, match="there is no activation"):
        cl.fold(cl.ConformalLayers(cl.Conv2d(1, 4, 3)), (1, 10, 10), strategy="conv")
    folded = cl.fold(model, (1, 10, 10))
    with pytest.raises(cl.ConformalError, match="The order is fold_error"):
        cl.fold_error(folded, model, torch.rand(2, 1, 10, 10))
