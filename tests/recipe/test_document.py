"""Recipes as JSON, and the golden files."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import conformallayers as cl
import conformallayers.numpy as cln
from conformallayers.folding.folded import Folded
from conformallayers.folding.strategies import STRATEGIES
from conformallayers.recipe.document import describe, read_recipe, typed
from conformallayers.recipe.operation import Positive, Size
from conformallayers.recipe.recipe import OPERATIONS
from oracle import relative_error
from recipe_cases import RECIPE_CASES, RecipeCase
from stored import JUNK, places
from support import samples

ROOT = Path(__file__).parents[2]
GOLDEN = sorted((ROOT / "tests" / "data" / "golden").glob("*.safetensors"))
every_case = pytest.mark.parametrize("case", RECIPE_CASES, ids=lambda case: case.name)


@every_case
def test_recipes_come_back(case: RecipeCase, tmp_path: Path) -> None:
    recipe = case.build()
    document = json.loads(json.dumps(describe(recipe)))
    again = read_recipe(document, recipe.constants)
    assert again.operations == recipe.operations
    assert describe(again) == describe(recipe)
    path = tmp_path / "net.safetensors"
    folded = Folded(recipe, torch.float64, {})
    cl.save(folded, path)
    x = samples(recipe.input_shape, torch.float64, batch=2)
    assert torch.equal(cl.load(path)(x), folded(x))
    assert relative_error(torch.from_numpy(cln.load(path)(x.numpy())), folded(x)) < 1e-12


def test_a_description_without_sense_raises_value_errors() -> None:
    choice = random.Random(0)
    for case in RECIPE_CASES[::7]:
        recipe = case.build()
        for _ in range(20):
            document = json.loads(json.dumps(describe(recipe)))
            container, key = choice.choice(places(document))
            container[key] = choice.choice(JUNK)
            with suppress(ValueError, OverflowError):
                read_recipe(document, recipe.constants).shapes()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(more=1), "other entries"),
        (lambda d: d.update(operations={}), "without a list of operations"),
        (lambda d: d.update(output="none"), "the output is None"),
        (lambda d: d.update(wide=["none"]), "constants that no operation reads"),
        (lambda d: d.update(input_shape=[True]), "True is no int"),
        (lambda d: d["operations"][0].update(operation="?"), "no operation"),
        (lambda d: d["operations"][0].update(more=1), "an operation with other entries"),
        (lambda d: d["operations"][0]["settings"].update(more=1), "conv with other settings"),
        (lambda d: d["operations"][0]["settings"].clear(), "lacks a setting"),
        (lambda d: d["operations"][0]["constants"].clear(), "conv lacks a setting or a constant"),
        (lambda d: d["operations"][0]["constants"].update(more="x"), "conv with other constants"),
        (lambda d: d["operations"][0].update(reads=["y"]), "not there yet"),
        (lambda d: d["operations"][0].update(writes=["x"]), "written twice"),
        (lambda d: d["operations"][0].update(writes=["y", "z"]), "writes 1 values"),
    ],
)
def test_faults_are_named(change: Callable[[Any], None], message: str) -> None:
    (case,) = (case for case in RECIPE_CASES if case.name == "conv 2d plain")
    recipe = case.build()
    document = json.loads(json.dumps(describe(recipe)))
    change(document)
    with pytest.raises(ValueError, match=message):
        read_recipe(document, recipe.constants)


def test_values_have_the_types_of_hints() -> None:
    for hint, good, bad in (
        (float, (2, -1e300), (True, None, "1", math.nan, math.inf, [1.0], 10**400)),
        (bool, (True,), (0, None, "true")),
        (Positive, (1, 2**31), (0, -1, 1.0, True, None, "1", [1], 2**60)),
        (Positive | None, (None, 3), (0, "3", True)),
        (tuple[Size, ...], ([], [0, 2]), ([-1], None, 1, "12", {1: 2}, [[1]])),
        (tuple[tuple[int, int], ...], ([[-1, 2]],), ([1], [["1", 2]], [[1, 2, 3]])),
    ):
        for value in good:
            assert json.loads(json.dumps(typed(value, hint))) == value
        for value in bad:
            with pytest.raises(ValueError, match=r" is no | least| length"):
                typed(value, hint)


# -- golden files -------------------------------------------------------------------------------


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_golden_files_stay_readable(path: Path) -> None:
    """Half precision is widened: what is stored is tested, not the arithmetic."""
    folded: Any = cl.load(path)
    limit = 1e-12 if folded.dtype == torch.float64 else 1e-6
    x = torch.tensor(folded.about["input"], dtype=torch.float64)
    expected = torch.tensor(folded.about["output"], dtype=torch.float64)
    working = torch.promote_types(folded.dtype, torch.float32)
    assert relative_error(folded.to(working)(x.to(working)), expected) < limit
    assert relative_error(torch.from_numpy(cln.load(path)(x.numpy())), expected) < limit


def test_every_operation_and_strategy_has_a_golden_file() -> None:
    folds = [cl.load(path) for path in GOLDEN]
    kinds = {operation.kind for folded in folds for operation in folded.recipe.operations}
    assert kinds == set(OPERATIONS) - {"call"}
    assert {f"operation-{kind}" for kind in kinds} <= {path.stem for path in GOLDEN}
    assert {folded.strategy for folded in folds} >= set(STRATEGIES)
    assert {folded.dtype for folded in folds} >= {torch.float64, torch.float16, torch.bfloat16}
    assert sum(path.stat().st_size for path in GOLDEN) < 320_000
