"""Operations on integers: what a recipe may ask of them, in memory and in files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import conformallayers as cl
from conformallayers.folding.folded import Folded
from conformallayers.recipe import integer_operations as integer
from conformallayers.recipe.recipe import INPUT, Recipe, RecipeBuilder
from support import assert_says


def product(weight: int = 127, multiplier: int = 2**23, **settings: Any) -> Recipe:
    """Return a product of 4 entries with one row of equal weights."""
    builder = RecipeBuilder((4,))
    tau = settings.pop("tau", False)
    q, _, t = builder.add_many(integer.QuantizePoint, INPUT, names=("q", "m", "tau"), levels=127.0)
    constants = {
        "weight": builder.constant("weight", torch.full((1, 4), weight, dtype=torch.int8)),
        "multiplier": builder.constant("multiplier", torch.tensor([multiplier], dtype=torch.int32)),
    }
    if "bias" in settings:
        bias = torch.tensor([settings.pop("bias")], dtype=torch.int32)
        constants["bias"] = builder.constant("bias", bias)
    z = builder.add(integer.IntegerMatmul, q, *[t] * tau, name="z", **constants, **settings)
    return builder.recipe(builder.add(integer.Dequantize, z, name="y", scale=1.0))


WINDOWS = {"stride": (1,), "padding": (0,), "function": "norm"}


def test_sums_and_multipliers_are_bounded() -> None:
    product(shift=30).check_values()
    for recipe, words in (
        (product(multiplier=2**24), "a multiplier of 16777216"),
        (product(multiplier=-1), "a multiplier of -1"),
        (product(bias=2**31 - 1), "sums of more than 32 bits"),
        (product(bias=2**30), "a multiplier of 8388608"),  # a sum of 30 bits times 23 bits
        (product(shift=5, tau=True), "parts of too many bits"),
    ):
        with pytest.raises(ValueError, match=words):
            recipe.check_values()
    for settings in ({"shift": 62}, {"low": 1}):
        with pytest.raises(ValueError, match="shift"):
            product(**settings)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (integer.Quantize, {"factor": 0.0}),
        (integer.Quantize, {"factor": 1.0, "exponent": 101}),
        (integer.QuantizePoint, {"levels": 0.5}),
        (integer.QuantizePoint, {"levels": 127.0, "offset": -1.0}),
        (integer.Requantize, {"multipliers": ()}),
        (integer.Requantize, {"multipliers": (2**24,)}),
        (integer.Requantize, {"multipliers": (1,), "shift": 62}),
        (integer.IntegerPool, {"kernel": (1025,), "multiplier": 1, **WINDOWS}),
        (integer.IntegerPool, {"kernel": (3,), "multiplier": 2**24, **WINDOWS}),
    ],
)
def test_settings_out_of_range(kind: Any, settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        kind(inputs=("x",), outputs=("y",), **settings).shapes([(1, 2000)], lambda name: ())


def test_files_with_weights_of_another_type(tmp_path: Path) -> None:
    recipe = product(shift=30)
    floats = recipe.with_constants(lambda _, array: array.float())
    fold = Folded(floats, torch.float32, {})
    assert_says(lambda: cl.save(fold, tmp_path / "net.safetensors"), "of dtype float32")
