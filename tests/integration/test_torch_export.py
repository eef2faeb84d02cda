"""torch.export and AOTInductor of folds: every strategy, any batch size, the numbers of eager mode."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import conformallayers as cl
from nets import NETS, SHAPE, folds, net
from oracle import relative_error
from support import samples

BATCHES = 1, 4, 64
compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
# torch's own compiler warns about itself.
compiles = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def exported(folded: cl.Folded, *, strict: bool = False) -> torch.export.ExportedProgram:
    """Export for any batch size; chunks must not be frozen."""
    folded.chunk_size = 1
    batch = torch.export.Dim("batch")
    x = samples(SHAPE, folded.dtype, 3)
    return torch.export.export(folded, (x,), dynamic_shapes={"x": {0: batch}}, strict=strict)


def agree(run: nn.Module, folded: cl.Folded, limit: float) -> None:
    for batch in BATCHES:
        x = samples(SHAPE, folded.dtype, batch, seed=3)
        assert relative_error(run(x), folded(x)) <= limit
    x = odd(x)
    actual, expected = run(x), folded(x)
    assert relative_error(actual[1:4], expected[1:4]) <= limit
    assert torch.equal(actual[0].isnan(), expected[0].isnan())
    assert expected[0].isnan().all()


def odd(x: Tensor) -> Tensor:
    x = x.clone()
    x[0, 0, 0, 0], x[1] = float("nan"), 0
    x[2] *= 1e-12
    x[3] *= 1e11
    return x


@compiles
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", list(NETS))
@pytest.mark.sampled(8)
def test_every_network_exports(name: str, strict: bool) -> None:
    for dtype, limit in ((torch.float32, 1e-6), (torch.float64, 1e-11)):
        for folded in folds(name, dtype):
            agree(exported(folded, strict=strict).module(), folded, limit)


@compiles
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


class _Block(nn.Module):
    """A residual block that ends in a concatenation, for cl.Traced."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = cl.Conv2d(2, 2, 3, padding=1), cl.Conv2d(2, 2, 3, padding=1)
        self.activation = cl.ReSPro(projective=True)

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.second(self.activation(self.first(x)))
        return torch.cat([y + y, x], 1).flatten(1)


@compiles
@pytest.mark.slow
def test_traced_modules_export_strictly_and_compile_as_one_graph() -> None:
    torch.manual_seed(0)
    traced = cl.Traced(_Block())
    model = cl.ConformalLayers(cl.Conv2d(1, 2, 3), cl.ReSPro(), traced, cl.ReSPro())
    x = torch.rand(3, 1, 6, 6)
    folded = cl.fold(model, (1, 6, 6), strategy="layers")
    program = torch.export.export(folded, (x,), strict=True)
    assert relative_error(program.module()(x), folded(x)) < 1e-6
    for network in (folded, model.train()):
        compiled = torch.compile(network, fullgraph=True, backend="aot_eager")
        assert relative_error(compiled(x), network(x)) < 1e-6
