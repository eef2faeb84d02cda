"""Follow CONTRIBUTING literally: add a layer, an activation, a strategy and an operation.

Every addition is a toy that lives here. What the library knows of it is undone after each test.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import conformallayers as cl
import conformallayers.numpy as cln
from conformallayers.folding.folded import Folded
from conformallayers.folding.forms import triangular_factor
from conformallayers.folding.lower import LOWER, Lowering, add_flatten, lowers, normalized
from conformallayers.folding.plan import Cost, Evaluation, Problem, Strategy
from conformallayers.folding.strategies import STRATEGIES
from conformallayers.nn.registry import SPECS, LayerSpec
from conformallayers.recipe import layer_operations as layer
from conformallayers.recipe import point_operations as point
from conformallayers.recipe.numpy import network as numpy_runtime
from conformallayers.recipe.recipe import (
    INPUT,
    OPERATIONS,
    Operation,
    RecipeBuilder,
    Shape,
    ShapeOf,
    Size,
    expect,
    operation,
)
from conformallayers.recipe.torch import module as torch_runtime
from conformallayers.testing import TOLERANCES, assert_linear, fold_error
from node import document_of
from oracle import relative_error
from programs import needs_compiler
from runtimes import ALL, run
from support import assert_says, folds, samples

pytest.importorskip("onnxruntime", reason="the extra onnx is not installed")
ROOT = Path(__file__).parents[2]
SHAPE = 2, 6, 6
CLOSE = 1e-5  # runtimes against torch, in float32


def assert_learns(model: nn.Module) -> None:
    """Check that a gradient reaches every parameter."""
    model(samples(SHAPE, torch.float32)).square().sum().backward()
    assert all(bool(parameter.grad.any()) for parameter in model.parameters())


def assert_folds_exactly(model: nn.Module, folded: Folded) -> None:
    x = samples(SHAPE, folded.dtype)
    assert fold_error(model, folded, x) <= TOLERANCES[folded.dtype]


def assert_runs(folded: Folded, folder: Path, *names: str) -> Path:
    """Save a fold and run it in the runtimes that are named, or in all; return the file."""
    path, x = folder / "net.safetensors", samples(folded.input_shape, folded.dtype)
    cl.save(folded, path)
    with torch.no_grad():
        assert torch.equal(cl.load(path)(x), folded(x))
        for name in names or ALL:
            assert relative_error(run(name, folded, folder, x), folded(x)) < CLOSE, name
    return path


def ways_out(folded: Folded, folder: Path) -> list[Callable[[], object]]:
    """Return the ways of a fold out of torch: a file, numpy, ONNX, C and JavaScript."""
    about: dict[str, Any] = {"strategy": "", "origin": None, "labels": None, "about": None}
    arrays = folded.recipe.with_constants(lambda name, array: array.numpy())
    return [
        lambda: cl.save(folded, folder / "net.safetensors"),
        lambda: numpy_runtime.Network(arrays, np.dtype("float32"), **about),
        lambda: cl.export_onnx(folded, folder / "net.onnx"),
        lambda: cl.export_c(folded, folder),
        lambda: document_of(folded.recipe, folded.dtype),
    ]


# -- a layer ------------------------------------------------------------------------------------


class Diagonal(nn.Module):
    """Multiply each channel by a learned number."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.channels = channels
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, channels))

    def forward(self, input: Tensor) -> Tensor:
        return input * self.weight.view(-1, 1, 1)


def diagonal_bound(module: Any, shape: Shape) -> Tensor:
    largest: Tensor = module.weight.abs().max()
    return largest


def lower_diagonal(to: Lowering, value: str, module: Any, shape: Shape) -> str:
    scale = to.constant("scale", module.weight.view(-1, 1, 1))
    return to.add(layer.Multiply, value, factor=scale)


ROW = LayerSpec(diagonal_bound, rank=4)


@pytest.fixture(params=["row", "register_linear"])
def layered(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    """Return a model with the layer, registered as one of the package or as a user does it."""
    monkeypatch.setitem(SPECS, Diagonal, ROW)
    if request.param == "register_linear":
        cl.register_linear(Diagonal, diagonal_bound, rank=4)
    torch.manual_seed(0)
    blocks = [cl.Conv2d(2, 3, 3), Diagonal(3), cl.ReSPro(), cl.Conv2d(3, 2, 3), cl.ReSPro()]
    return cl.ConformalLayers(*blocks)


@pytest.fixture
def lowered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LOWER, Diagonal, lower_diagonal)
    lowers(Diagonal)(lower_diagonal)


@pytest.mark.usefixtures("lowered")
def test_a_layer_trains_folds_and_gives_the_numbers_of_torch(layered: nn.Module) -> None:
    assert_linear(Diagonal(2), SHAPE)
    assert_learns(layered)
    found = folds(layered, SHAPE)
    assert {"dense", "banded", "conv", "layers"} <= set(found)
    for name, folded in found.items():
        assert_folds_exactly(layered, folded)
        assert_folds_exactly(layered, cl.fold(layered, SHAPE, strategy=name, dtype=torch.float64))


@needs_compiler
@pytest.mark.usefixtures("lowered")
def test_a_layer_with_a_lowering_row_runs_in_every_runtime(
    layered: nn.Module, tmp_path: Path
) -> None:
    for folded in folds(layered, SHAPE).values():
        assert_runs(folded, tmp_path)


def test_a_layer_without_a_lowering_row_runs_in_torch_alone(
    layered: nn.Module, tmp_path: Path
) -> None:
    folded = cl.fold(layered, SHAPE, strategy="layers")
    assert_folds_exactly(layered, folded)
    for leave in ways_out(folded, tmp_path):
        assert_says(leave, "Diagonal", "Fold only the layers before it")
    assert list(tmp_path.iterdir()) == []
    assert_runs(cl.fold(layered, SHAPE, strategy="dense"), tmp_path)


# -- an activation ------------------------------------------------------------------------------


class Cauchy(cl.RadialActivation):
    """Scale a point by 1/(1 + q/4)."""

    def growth(self, q: Tensor) -> Tensor:
        return 1 + q / 4


def activated() -> cl.ConformalLayers:
    torch.manual_seed(0)
    convolutions = cl.Conv2d(2, 3, 3), cl.Conv2d(3, 2, 3)
    return cl.ConformalLayers(convolutions[0], Cauchy(0.8), convolutions[1], Cauchy(0.3))


def by_hand(model: cl.ConformalLayers, x: Tensor) -> Tensor:
    """Compute points p = x/‖x‖, U p, (p/α)/(1 + ‖p‖²/4α²) in float64."""
    p = x.double() / x.double().flatten(1).norm(dim=1).view(-1, 1, 1, 1)
    for convolution, activation in zip([*model][::2], [*model][1::2], strict=True):
        p = nn.functional.conv2d(p, convolution.weight.double()) / activation.alpha
        p = p / (1 + p.flatten(1).square().sum(1) / 4).view(-1, 1, 1, 1)
    return p


def test_an_activation_trains_and_folds() -> None:
    model = activated()
    assert_learns(model)
    found = folds(model, SHAPE)
    assert {"dense", "layers", "conv"} <= set(found)
    for name in found:
        for dtype in (torch.float32, torch.float64):
            folded, x = cl.fold(model, SHAPE, strategy=name, dtype=dtype), samples(SHAPE, dtype)
            with torch.no_grad():
                assert relative_error(folded(x), by_hand(model, x)) <= TOLERANCES[dtype]


@pytest.mark.parametrize("strategy", ["dense", "layers", "conv"])
def test_an_activation_needs_no_code_in_runtimes(strategy: str, tmp_path: Path) -> None:
    folded = cl.fold(activated(), SHAPE, strategy=strategy)
    assert_runs(folded, tmp_path)


# -- a strategy ---------------------------------------------------------------------------------


class Halves(Strategy):
    """Write out M in two halves, and each Q."""

    name = "halves"

    def refuses(self, problem: Problem) -> str | None:
        return problem.cannot_write_out()

    def cost(self, problem: Problem) -> Cost:
        d_in, count = math.prod(problem.stage.input_shape), problem.form_count
        size = count * d_in**2
        return problem.matrix_cost() + Cost(gemm=size, calls=3, bytes=size * problem.itemsize)

    def evaluate(self, problem: Problem, builder: RecipeBuilder, x: str) -> Evaluation:
        rows, energies, images = add_flatten(builder, x), [], []
        for form in problem.forms:
            factor, peak = normalized(triangular_factor(form))
            z = builder.add(layer.Matmul, rows, weight=builder.constant("factor", factor))
            energies.append((builder.add(point.SumSquares, z, name="n", weight=peak**2),))
        matrix, gain = normalized(problem.matrix)
        for half in matrix.tensor_split(2):
            weight_of = {"weight": builder.constant("half", half)}
            images.append(builder.add(layer.Matmul, rows, name="half", **weight_of))
        image = builder.add(layer.Concatenate, *images, name="image", axis=0)
        return Evaluation(image, tuple(energies), gain)


@pytest.fixture
def halves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(STRATEGIES, Halves.name, Halves())


def plain() -> nn.Module:
    torch.manual_seed(0)
    return cl.ConformalLayers(cl.Conv2d(2, 3, 3), cl.ReSPro(), cl.Conv2d(3, 2, 3), cl.ReSPro())


@pytest.mark.usefixtures("halves")
def test_a_strategy_is_offered_and_folds_exactly() -> None:
    model = plain()
    for dtype in (torch.float32, torch.float64):
        folded = cl.fold(model, SHAPE, strategy="halves", dtype=dtype)
        assert folded.strategy == "halves"
        assert_folds_exactly(model, folded)
        assert "→ halves" in str(folded.explain())
    assert "  halves" in str(cl.fold(model, SHAPE, strategy="dense").explain())


@needs_compiler
@pytest.mark.usefixtures("halves")
def test_a_strategy_runs_in_every_runtime_and_is_not_needed_to_read_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folded = cl.fold(plain(), SHAPE, strategy="halves")
    monkeypatch.delitem(STRATEGIES, "halves")
    assert_says(lambda: cl.fold(plain(), SHAPE, strategy="halves"), "'halves'", '"dense"')
    assert_runs(folded, tmp_path)


# -- an operation -------------------------------------------------------------------------------


@pytest.fixture
def flip(monkeypatch: pytest.MonkeyPatch) -> type[Operation]:
    """Declare an operation, and implement it for torch and numpy."""
    monkeypatch.setitem(OPERATIONS, "flip", Operation)  # so that the declaration is undone

    @operation("flip")
    class Flip(Operation):
        """Reverse an axis."""

        axis: Size

        def shapes(self, inputs: Sequence[Shape], constant: ShapeOf) -> tuple[Shape, ...]:
            (x,) = inputs
            expect(self.axis < len(x), f"axis {self.axis} of {x}")
            return (x,)

    def in_torch(op: Flip, module: Any, x: Tensor) -> Tensor:
        return x.flip(op.axis + 1)

    def in_numpy(op: Flip, net: Any, x: Any) -> Any:
        return np.flip(x, op.axis + 1)

    monkeypatch.setitem(torch_runtime.RUN, Flip, in_torch)
    monkeypatch.setitem(numpy_runtime.RUN, Flip, in_numpy)
    return Flip


def flipped(kind: type[Operation], axis: int = 1) -> Folded:
    builder = RecipeBuilder((3, 4))
    z = builder.add(kind, INPUT, axis=axis)
    weight = builder.constant("weight", samples((4,), torch.float32, 5))
    y = builder.add(layer.Matmul, z, name="y", weight=weight)
    return Folded(builder.recipe(y), torch.float32, {})


def test_an_operation_runs_saves_and_loads(flip: type[Operation], tmp_path: Path) -> None:
    folded, x = flipped(flip), samples((3, 4), torch.float32)
    expected = torch.stack([x[:, :, 3 - i] for i in range(4)], 2) @ folded.constant("weight").T
    assert relative_error(folded(x), expected) < 1e-6
    assert "z = flip(x; axis 1)" in str(folded.recipe)
    assert_runs(folded, tmp_path, "numpy")
    with pytest.raises(ValueError, match="axis 2"):
        flipped(flip, axis=2)


def test_an_operation_is_refused_by_name_where_a_runtime_lacks_it(
    flip: type[Operation], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folded = flipped(flip)
    assert_says(lambda: cl.export_onnx(folded, tmp_path / "net.onnx"), "flip", "ONNX")
    assert_says(lambda: cl.export_c(folded, tmp_path), "flip", "operations supported by C")
    assert list(tmp_path.iterdir()) == []
    path = assert_runs(folded, tmp_path, "numpy")
    monkeypatch.delitem(numpy_runtime.RUN, flip)
    assert_says(lambda: cln.load(path), "flip", "numpy")
    monkeypatch.delitem(OPERATIONS, "flip")
    assert_says(lambda: cl.load(path), "no operation 'flip'")


# -- the text itself ----------------------------------------------------------------------------


def test_every_name_that_a_step_gives_is_in_its_file() -> None:
    """A step is ``1. `file`: text``; the names in it that look like Python stand in that file."""
    text = re.sub(r"\n {3,}", " ", (ROOT / "CONTRIBUTING.md").read_text())
    steps = re.findall(r"^\d+\. `((?:src|tests)/[\w/]+\.py)`: (.*)$", text, re.M)
    assert len(steps) > 12
    for path, rest in steps:
        content = (ROOT / path).read_text()
        for name in re.findall(r"`@?([A-Za-z_]\w*)`", rest):
            assert re.search(rf"\b{name}\b", content), f"{path} has no {name}"
