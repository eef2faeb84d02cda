"""Conformance cases of integers: every runtime has the numbers of torch, all of them equal."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from conformallayers.folding.folded import Folded
from conformallayers.recipe.integer_operations import KINDS
from conformallayers.recipe.torch.operations import RUN
from integer_cases import integer_builders
from integer_numbers import all_values, assert_same_everywhere, same, torch_numbers, whole_values
from programs import hard

BUILDERS = dict(integer_builders())


@pytest.mark.parametrize("name", BUILDERS)
def test_every_runtime_has_the_same_numbers(name: str, tmp_path: Path) -> None:
    recipe = BUILDERS[name]()
    recipe.check_values()
    fold = Folded(recipe, torch.float32, {})
    generator = torch.Generator().manual_seed(2)
    x = torch.cat(
        [torch.randn(30, *recipe.input_shape, generator=generator), hard(recipe.input_shape)]
    )
    assert_same_everywhere(fold, x, tmp_path)
    values = all_values(RUN, fold, x[:30])
    for value in whole_values(recipe):
        q = values[value]
        assert q.dtype == torch.float32
        assert torch.equal(q, q.round())
        assert 0 < q.abs().max() <= 127


def test_the_cases_have_every_operation() -> None:
    found = {type(op) for build in BUILDERS.values() for op in build().operations}
    assert found >= set(KINDS)


def test_a_fold_in_float64_has_the_same_integers() -> None:
    recipe = BUILDERS["integer points projective 1.5"]()
    x = torch.randn(20, *recipe.input_shape)
    single, wide = (Folded(recipe, dtype, {}) for dtype in (torch.float32, torch.float64))
    a = all_values(RUN, single, x)
    b = all_values(RUN, wide, x.double())
    for name in whole_values(recipe):
        assert same(a[name], b[name])
    assert same(torch_numbers(single, x), torch_numbers(wide, x.double()).float())


def test_autocast_changes_nothing() -> None:
    recipe = BUILDERS["integers 2d"]()
    fold, x = Folded(recipe, torch.float32, {}), torch.randn(5, *recipe.input_shape)
    expected = torch_numbers(fold, x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert same(torch_numbers(fold, x), expected)
