"""torch.compile and torch.export of models and folds: one graph, any batch size, the numbers of eager mode."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from nets import SHAPE, circular_net, net
from oracle import exact, exact_output, gradient_error, oracle, relative_error
from support import folds, samples


def inputs(batch: int = 5, seed: int = 0) -> Tensor:
    return samples(SHAPE, torch.float32, batch, seed).abs()


@pytest.fixture
def dynamo() -> Iterator[None]:
    """Start from an empty compiler, and count anew."""
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


# torch's own compiler warns about itself.
compiles = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning",
    "ignore::FutureWarning",
    "ignore:The .grad attribute",
    "ignore:Dynamo detected a call",
)


@compiles
@pytest.mark.slow
@pytest.mark.usefixtures("dynamo")
@pytest.mark.parametrize("build", [lambda: circular_net("learned"), lambda: net("stages")[0]])
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


@compiles
@pytest.mark.usefixtures("dynamo")
@pytest.mark.slow
def test_compiled_training_advances_spectral_norms() -> None:
    model, plain = circular_net("spectral"), circular_net("spectral")
    compiled = torch.compile(model, backend="aot_eager")
    for step in range(2):
        y = compiled(inputs(4, step))
        assert relative_error(y, plain(inputs(4, step))) <= 5e-6
        assert torch.allclose(model[1].norm, plain[1].norm, rtol=1e-5)
        assert model[1].norm > 0


@compiles
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


@compiles
@pytest.mark.slow
@pytest.mark.usefixtures("dynamo")
def test_inductor_trains_and_runs_folds() -> None:
    model, x = circular_net(), inputs(16)
    y = torch.compile(model, fullgraph=True)(x)
    y.square().sum().backward()
    assert relative_error(y, exact_output(model, x)) <= 5e-6
    for folded in folds(model, SHAPE).values():
        assert relative_error(torch.compile(folded, fullgraph=True)(x), y) <= 1e-5
