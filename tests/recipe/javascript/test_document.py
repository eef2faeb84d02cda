"""The JavaScript runtime in node: every operation and strategy against torch."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import conformallayers as cl
from conformallayers.networks import D3ModNetCL, DkNetCL, LeNetCL, StageNet
from conformallayers.recipe import layer_operations as layer
from conformallayers.recipe.integer_operations import KINDS as INTEGER
from conformallayers.recipe.integer_operations import Dequantize, Quantize
from conformallayers.recipe.javascript.document import _LACKS, WRITE
from conformallayers.recipe.recipe import INPUT, Recipe, RecipeBuilder
from conformallayers.recipe.torch.module import RecipeModule
from nets import NETS, folds
from node import document_of, needs_node, outputs, run_node
from oracle import randomise, relative_error
from programs import Fold
from recipe_cases import RECIPE_CASES
from support import assert_says

LIMITS = {torch.float64: 1e-12, torch.float32: 5e-6}


def has(recipe: Recipe) -> bool:
    return all(type(operation) in WRITE for operation in recipe.operations)


def samples(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return samples of every size, a zero one, and two with NaN."""
    x = torch.randn(9, *shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    x[1] = 0
    x[2].view(-1)[-1], x[3] = float("nan"), float("nan")
    for index, size in enumerate((1e-12, 1e-3, 1e3, 1e11), 4):
        x[index] *= size
    return x.to(dtype)


def compare(
    folder: Path, modules: list[RecipeModule], sample: Callable[..., Tensor] = samples
) -> list[float]:
    """Return the error of JavaScript relative to torch for each of several networks."""
    xs = [sample(module.recipe.input_shape, module.dtype) for module in modules]
    documents = [document_of(module.recipe, module.dtype) for module in modules]
    with torch.no_grad():
        expected = [module(x) for module, x in zip(modules, xs, strict=True)]
    found = outputs(folder, list(zip(documents, xs, strict=True)))
    return [relative_error(y, e) for y, e in zip(found, expected, strict=True)]


@needs_node
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_every_option_of_every_operation_gives_the_numbers_of_torch(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    cases = {case.name: Fold(case.build(), dtype) for case in RECIPE_CASES if has(case.build())}
    errors = dict(zip(cases, compare(tmp_path, list(cases.values())), strict=True))
    assert {name: error for name, error in errors.items() if not error < LIMITS[dtype]} == {}
    kinds = {type(op) for fold in cases.values() for op in fold.recipe.operations}
    assert kinds == set(WRITE)


@needs_node
@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_every_strategy_that_it_takes(dtype: torch.dtype, tmp_path: Path) -> None:
    found = [(name, fold) for name in NETS for fold in folds(name, dtype) if has(fold.recipe)]
    assert {fold.strategy for _, fold in found} >= {"dense", "banded", "conv", "layers"}
    errors = compare(tmp_path, [fold for _, fold in found])
    wrong = [pair for pair in zip(found, errors, strict=True) if not pair[1] < LIMITS[dtype]]
    assert wrong == []


@needs_node
def test_networks_of_the_paper_and_stage_nets(tmp_path: Path) -> None:
    torch.manual_seed(0)
    models: list[nn.Module] = [LeNetCL(), D3ModNetCL(projective=True), DkNetCL(2)]
    models += [StageNet(preset) for preset in ("micro", "small", "base", "large")]
    models += [StageNet("micro", rectifier="max"), StageNet("micro", rectifier="abs")]
    made = [cl.fold(randomise(m).eval(), (3, 32, 32), strategy="conv") for m in models]
    made += [cl.fold(LeNetCL().eval(), (3, 32, 32), strategy=s) for s in ("layers", "auto")]
    few = {"sample": lambda shape, dtype: samples(shape, dtype)[:3]}
    assert max(compare(tmp_path, made, **few)) < 1e-5


@needs_node
def test_both_sides_have_the_same_operations(tmp_path: Path) -> None:
    program = 'console.log(JSON.stringify(Object.keys(require("./runtime.js").OPERATIONS)))'
    assert {kind.kind for kind in WRITE} == set(json.loads(run_node(tmp_path, program)))
    assert {kind.kind for kind in _LACKS} == {"call"} | {kind.kind for kind in INTEGER}


def test_what_it_lacks_is_refused_by_name() -> None:
    builder = RecipeBuilder((3,))
    whole = builder.add(Quantize, INPUT, factor=9.0)
    whole = builder.recipe(builder.add(Dequantize, whole, name="y", scale=0.1))
    assert_says(
        lambda: document_of(whole, torch.float32),
        "got one in int8",
        "Pass the fold from before cl.quantize.",
    )
    builder = RecipeBuilder((3,))
    called = builder.module("attention", nn.Identity())
    y = builder.add(layer.Call, INPUT, module=called, what="MultiheadAttention", result=(3,))
    own = builder.recipe(y)
    assert_says(
        lambda: document_of(own, torch.float32), "supported by JavaScript", "got MultiheadAttention"
    )


@needs_node
@pytest.mark.parametrize(
    ("change", "numbers", "message"),
    [
        (lambda d: d["operations"][0].update(operation="fft"), 60, "got fft. Fold with strategy"),
        (lambda d: d["operations"][0].update(operation="toString"), 60, "got toString"),
        (lambda d: None, 59, "expected 60 numbers, got 59"),
    ],
)
def test_javascript_refuses_too(
    change: Callable[[Any], None], numbers: int, message: str, tmp_path: Path
) -> None:
    (case,) = (case for case in RECIPE_CASES if case.name == "slice")
    document = document_of(case.build(), torch.float64)
    change(document)
    program = 'const { Network } = require("./runtime.js");'
    program += f"new Network({json.dumps(document)}).run(new Array({numbers}).fill(1));"
    assert message in run_node(tmp_path, program, check=False)


def test_documents_need_no_torch() -> None:
    code = "import conformallayers.recipe.javascript.document, sys; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
