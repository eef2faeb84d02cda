"""Pruning of forms: what may be left out, and the proof that it may."""

from __future__ import annotations

import math

import pytest
import torch

from conformallayers.folding.certificate import Certificate, ErrorBudget, proven
from conformallayers.recipe import layer_operations as layer
from conformallayers.recipe import point_operations as point
from conformallayers.recipe.c.prune import Proofs, needed, room_each, room_left
from conformallayers.recipe.recipe import INPUT, Recipe, RecipeBuilder


def test_room_and_proofs() -> None:
    assert room_left(Certificate(1e-2, 1.0, 0.0)) == 0
    half = room_left(Certificate(1e-2, 1.0, 0.5))
    assert 0.5e-2 + half * (1 + 0.5e-2) == pytest.approx(1e-2)
    assert room_left(Certificate(5e-8, 1.0, 1.0)) == 0
    off, each = 0.0, room_each(1e-2, 4)
    for _ in range(4):
        off = (off + each) / (1 - off)
    assert off == pytest.approx(1e-2)
    torch.manual_seed(0)
    a = torch.randn(30, 30, dtype=torch.float64)
    q = a.T @ a / 30
    assert proven(q, 1.005 * q, ErrorBudget(1e-2, 5.0))
    assert not proven(q, 1.02 * q, ErrorBudget(1e-2))
    mask = needed(q, ErrorBudget(0.2, 1.0))
    assert proven(q, q.where(mask, 0.0), ErrorBudget(0.2, 1.0))
    assert int(mask.sum()) < 900
    assert needed(q, ErrorBudget(0.0, 1.0)).all()


def forms(rule: str, *, energy: str = "form", source: str = "unit", then: str = "") -> Recipe:
    """Embed, take an energy of a smooth form, advance, pass a homogeneous map, divide."""
    builder = RecipeBuilder((40,))
    names, offset = ("unit", "peak", "tau"), 0.5 if source == "offset" else 0.0
    unit, m, tau = builder.add_many(point.Normalize, INPUT, names=names, offset=offset)
    if source == "padded":
        unit = builder.add(layer.Pad, unit, pads=((0, 2),))
    elif source == "scaled":
        factor = builder.constant("factor", torch.tensor(2.0, dtype=torch.float64))
        unit = builder.add(layer.Multiply, unit, factor=factor)
    places = torch.arange(builder.shape(unit)[0], dtype=torch.float64)
    values = torch.exp(-((places[:, None] - places) ** 2))
    values[40:] = values[:, 40:] = 0
    form = builder.constant("form", values)
    n = builder.add(point.QuadraticForm, unit, name="n", form=form, weight=0.3)
    n = builder.add(layer.Elementwise, n, name="n", function="relu")
    energies = [n] if energy == "form" else [n, builder.add(point.SumSquares, unit, name="n")]
    tau = builder.add(point.Advance, tau, m, *energies, name="tau", rule=rule)
    z = builder.add(layer.Reshape, unit, shape=(1, *builder.shape(unit)))
    z = builder.add(layer.NormPool, z, kernel=(2,), stride=(2,))
    if then == "rebase":
        names, scales = ("z", "peak", "tau"), {"scale": 1.0, "coordinate": 1.0}
        z, m, tau = builder.add_many(point.Rebase, z, m, tau, names=names, **scales)
    elif then == "stage":
        rows = builder.add(layer.Reshape, z, shape=(builder.shape(z)[1],))
        second = builder.constant("second", torch.eye(builder.shape(rows)[0], dtype=torch.float64))
        n = builder.add(point.QuadraticForm, rows, name="n", form=second, weight=0.1)
        tau = builder.add(point.Advance, tau, m, n, name="tau", rule=rule)
    return builder.recipe(builder.add(point.Divide, z, tau, m, name="y", scale=1.0))


def stored_bytes(recipe: Recipe, certificate: Certificate | None, storage: str = "float") -> int:
    proofs = Proofs(recipe, [certificate], storage)
    operation = next(op for op in recipe.operations if isinstance(op, point.QuadraticForm))
    stored = proofs.store("q", operation, recipe.constants["form"].numpy())
    return sum(constant.bytes for constant in stored.constants)


LOOSE = Certificate(1e-2, 20.0, 1.0)


@pytest.mark.parametrize("rule", ["published", "projective", "gnomonic"])
@pytest.mark.parametrize("source", ["unit", "padded", "offset"])
def test_forms_within_a_certificate_get_smaller(rule: str, source: str) -> None:
    recipe = forms(rule, source=source)
    assert stored_bytes(recipe, LOOSE) < 0.6 * stored_bytes(recipe, None)
    proofs = Proofs(recipe, [LOOSE], "float")
    operation = next(op for op in recipe.operations if isinstance(op, point.QuadraticForm))
    proofs.store("q", operation, recipe.constants["form"].numpy())
    assert proofs.weakest() == Certificate(1e-2, 20.0, 0.0)


@pytest.mark.parametrize(
    "recipe",
    [
        forms("published", energy="two"),
        forms("published", source="scaled"),
        forms("published", then="stage"),
        forms("published", then="rebase"),
    ],
    ids=["two energies", "not x̂", "a second stage", "two divisions"],
)
def test_forms_that_the_proof_is_not_about_stay(recipe: Recipe) -> None:
    assert stored_bytes(recipe, LOOSE) == stored_bytes(recipe, None)
    assert stored_bytes(recipe, Certificate(5e-8, math.inf, 1.0)) == stored_bytes(recipe, None)


def test_the_weakest_proof_is_that_of_the_program() -> None:
    recipe = forms("published", energy="two")
    given = Certificate(1e-8, math.inf, 0.5)
    assert Proofs(recipe, [given], "float").weakest() == given
    assert Proofs(recipe, [given], "int8_t").weakest() is None
    assert Proofs(recipe, [], "float").weakest() is None
