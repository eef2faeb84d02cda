"""torch.compile, torch.export and AOTInductor of models and folds: one graph, any batch size, the numbers of eager mode."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import conformallayers as cl
from models import Join
from nets import NETS, SHAPE, circular_net, net
from nets import folds as folds_of
from oracle import exact, exact_output, gradient_error, oracle, relative_error
from support import folds, samples

BATCHES = 1, 4, 64
compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
# torch's own compiler warns about itself.
pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning",
    "ignore::FutureWarning",
    "ignore:The .grad attribute",
    "ignore:Dynamo detected a call",
)


def inputs(batch: int = 5, seed: int = 0) -> Tensor:
    return samples(SHAPE, torch.float32, batch, seed).abs()


@pytest.fixture
def dynamo() -> Iterator[None]:
    """Start from an empty compiler, and count anew."""
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.usefixtures("dynamo")
@pytest.mark.parametrize(
    "build",
    [
        lambda: circular_net("learned"),
        lambda: net("stages")[0],
        lambda: cl.ConformalLayers(
            cl.Traced(Join([nn.Sequential(cl.Conv2d(2, 3, 1), cl.ReSPro()), cl.Conv2d(2, 3, 1)])),
            cl.ReSPro(),
        ),
        lambda: cl.ConformalLayers(
            *(nn.Upsample(scale_factor=1.5, mode="bilinear"), cl.Conv2d(2, 3, 3), cl.ReSPro()),
            *(cl.AvgPool2d(2), nn.LPPool2d(2, 2)),
        ),
    ],
)
def test_compiled_training_with_gradients(build: Callable[[], nn.Module]) -> None:
    model = build()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for batch in (16, 20, 33):  # torch's convolutions make their own difference below 16
        x = inputs(batch).requires_grad_()
        y = compiled(x)
        twin, wide = exact(model), x.detach().double().requires_grad_()
        wanted = oracle(twin, wide)
        assert relative_error(y, wanted) <= 5e-6
        actual = torch.autograd.grad(y.square().sum(), [x, *model.parameters()])
        found = torch.autograd.grad(wanted.square().sum(), [wide, *twin.parameters()])
        assert gradient_error(list(actual), list(found)) <= 1e-4
    assert counters["stats"]["unique_graphs"] <= 2  # one for the first size, one for all others
    assert not counters["graph_break"]


@pytest.mark.slow
@pytest.mark.usefixtures("dynamo")
def test_compiled_training_advances_spectral_norms() -> None:
    model, plain = circular_net("spectral"), circular_net("spectral")
    compiled = torch.compile(model, backend="aot_eager")
    for step in range(2):
        y = compiled(inputs(4, step))
        assert relative_error(y, plain(inputs(4, step))) <= 5e-6
        assert torch.allclose(model[1].norm, plain[1].norm, rtol=1e-5)
        assert model[1].norm > 0


@pytest.mark.slow
@pytest.mark.usefixtures("dynamo")
def test_compiled_folds_do_not_recompile_over_batch_sizes() -> None:
    model = nn.Sequential(circular_net(), nn.ReLU(), nn.Linear(4, 2))
    for name, folded in folds(model, SHAPE).items():
        torch._dynamo.reset()
        counters.clear()
        compiled = torch.compile(folded, backend="aot_eager", fullgraph=True, dynamic=True)
        for batch in (17, 64, 20):
            x = inputs(batch).requires_grad_()
            pair = compiled(x), folded(x)
            assert relative_error(*pair) <= 5e-6, name
            gradients = [torch.autograd.grad(y.square().sum(), x)[0] for y in pair]
            assert gradient_error(gradients[:1], [gradients[1].double()]) <= 1e-5, name
        assert counters["stats"]["unique_graphs"] == 1, name


@pytest.mark.slow
@pytest.mark.usefixtures("dynamo")
def test_inductor_trains_and_runs_folds() -> None:
    model, x = circular_net(), inputs(16)
    y = torch.compile(model, fullgraph=True)(x)
    y.square().sum().backward()
    assert relative_error(y, exact_output(model, x)) <= 5e-6
    for folded in folds(model, SHAPE).values():
        assert relative_error(torch.compile(folded, fullgraph=True)(x), y) <= 1e-5


def exported(folded: cl.Folded, *, strict: bool = False) -> torch.export.ExportedProgram:
    """Export for any batch size; chunks must not be frozen."""
    folded.chunk_size = 1
    shapes = {"x": {0: torch.export.Dim("batch")}}
    x = samples(SHAPE, folded.dtype, 3)
    return torch.export.export(folded, (x,), dynamic_shapes=shapes, strict=strict)


def agree(run: nn.Module, folded: cl.Folded, limit: float) -> None:
    for batch in BATCHES:
        x = samples(SHAPE, folded.dtype, batch, seed=3)
        assert relative_error(run(x), folded(x)) <= limit
    x[0, 0, 0, 0], x[1] = float("nan"), 0
    x[2] *= 1e-12
    x[3] *= 1e11
    actual, expected = run(x), folded(x)
    assert relative_error(actual[1:4], expected[1:4]) <= limit
    assert torch.equal(actual[0].isnan(), expected[0].isnan())
    assert expected[0].isnan().all()


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", list(NETS))
@pytest.mark.sampled(8)
def test_every_network_exports(name: str, strict: bool) -> None:
    for dtype, limit in ((torch.float32, 1e-6), (torch.float64, 1e-11)):
        for folded in folds_of(name, dtype):
            agree(exported(folded, strict=strict).module(), folded, limit)


@pytest.mark.slow
@pytest.mark.skipif(compiler is None, reason="AOTInductor needs a C++ compiler, and there is none")
@pytest.mark.parametrize(
    ("name", "strategy"), [("MLP head", "dense"), ("unpadded", "conv"), ("biases", "dense")]
)
def test_aot_inductor_compiles_folds(name: str, strategy: str, tmp_path: Path) -> None:
    folded = cl.fold(net(name), SHAPE, strategy=strategy)
    path = str(tmp_path / "net.pt2")
    package = torch._inductor.aoti_compile_and_package(exported(folded), package_path=path)
    agree(torch._inductor.aoti_load_package(package), folded, 1e-6)
