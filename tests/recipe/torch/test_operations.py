"""Operations in torch: integers against those of Python, long sums, samples that keep their own range."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from torch import nn

import conformallayers as cl
from conformallayers.recipe import integer_operations as integer
from conformallayers.recipe.recipe import INPUT, RecipeBuilder
from conformallayers.recipe.torch.module import RecipeModule
from conformallayers.recipe.torch.operations import RUN, _root
from integer_numbers import all_values
from oracle import exact_output, relative_error

pytestmark = pytest.mark.usefixtures("seeded")


def shifted(p: int, shift: int) -> int:
    return round(Fraction(p, 2**shift))  # to the even one of two


def feature(p: int, shift: int, tau: float | None, addend: int | None, low: int = -127) -> int:
    parts = shifted(p, shift)
    if tau is not None:
        factor = min(round(Fraction(2**23) / Fraction(tau)), 2**24 - 1)
        parts = shifted(parts * factor, 23)
    if addend is not None:
        parts += addend
    if tau is not None or addend is not None:
        parts = shifted(parts, 6)
    return max(low, min(127, parts))


def test_products_with_a_coordinate_and_an_addend() -> None:
    generator = torch.Generator().manual_seed(0)
    builder = RecipeBuilder((20,))
    q, _, tau = builder.add_many(
        integer.QuantizePoint, INPUT, names=("q", "m", "tau"), levels=90.0, offset=0.3
    )
    rows = torch.randint(-127, 128, (7, 20), generator=generator)
    bias = torch.randint(-5000, 5000, (7,), generator=generator)
    factors = torch.randint(2**22, 2**24, (7,), generator=generator)
    more = torch.randint(-3000, 3000, (7,), generator=generator)
    constants = {
        "weight": builder.constant("weight", rows.to(torch.int8)),
        "bias": builder.constant("bias", bias.int()),
        "multiplier": builder.constant("multiplier", factors.int()),
    }
    addend = builder.constant("addend", more.int())
    plain = builder.add(integer.IntegerMatmul, q, name="plain", **constants, shift=33, low=0)
    extra = {**constants, "addend": addend, "shift": 25}
    moved = builder.add(integer.IntegerMatmul, q, name="moved", **extra)
    over = builder.add(integer.IntegerMatmul, q, tau, name="over", **extra)
    recipe = builder.recipe(builder.add(integer.Dequantize, over, name="y", scale=0.5))
    recipe.check_values()
    x = torch.randn(40, 20, generator=generator)
    values = all_values(RUN, RecipeModule(recipe, torch.float32), x)
    for sample in range(len(x)):
        features = [int(n) for n in values[q][sample]]
        t = float(values[tau][sample])
        share = 0.3 / float(values["m"][sample])
        total = sum(n * n for n in features) * (1.0 / 8100.0) + share * share
        assert t == math.sqrt(total)
        for row in range(7):
            p = sum(int(w) * n for w, n in zip(rows[row], features, strict=True)) + int(bias[row])
            p, a = p * int(factors[row]), int(more[row])
            assert values[plain][sample, row] == feature(p, 33, None, None, 0)
            assert values[moved][sample, row] == feature(p, 25, None, a)
            assert values[over][sample, row] == feature(p, 25, t, a)


def test_norms_are_roots_rounded_down() -> None:
    builder = RecipeBuilder((1, 40))
    q = builder.add(integer.Quantize, INPUT, name="q", factor=1.0)
    options = {"kernel": (3,), "stride": (1,), "padding": (1,), "function": "norm"}
    z = builder.add(integer.IntegerPool, q, name="z", **options, multiplier=9_000_001, shift=31)
    recipe = builder.recipe(builder.add(integer.Dequantize, z, name="y", scale=1.0))
    x = torch.randint(-140, 141, (9, 1, 40), generator=torch.Generator().manual_seed(0)).float()
    values = all_values(RUN, RecipeModule(recipe, torch.float32), x)
    bits = integer.root_bits((3,))
    assert 3 * 127**2 * 4**bits < 2**24 <= 3 * 127**2 * 4 ** (bits + 1)
    for line, found in zip(values["q"][:, 0], values["z"][:, 0], strict=True):
        padded = [0, *(int(n) for n in line), 0]
        for place, got in enumerate(found):
            total = sum(n * n for n in padded[place : place + 3])
            root = math.isqrt(total * 4**bits)
            assert got == feature(root * 9_000_001, 31, None, None)


def test_roots_are_rounded_as_ieee_754_says() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(20_000, generator=generator, dtype=torch.float64)
    x = torch.cat([x, 1e9 * x, 1e300 * x, 1e-300 * x, torch.tensor([0.0, 1.0, 4.0, math.inf])])
    assert _root(x).tolist() == [math.sqrt(n) for n in x.tolist()]
    whole = torch.arange(0, 2**16, dtype=torch.float64)
    whole = torch.cat([whole * whole, whole * whole + 1, (whole * whole - 1).clamp_min(0)])
    assert (_root(whole) // 1).tolist() == [math.isqrt(int(n)) for n in whole.tolist()]


def test_halves_go_to_the_even_neighbour() -> None:
    builder = RecipeBuilder((6,))
    q = builder.add(integer.Quantize, INPUT, name="q", factor=1.0)
    z = builder.add(integer.Requantize, q, name="z", multipliers=(1,), shift=1)
    recipe = builder.recipe(builder.add(integer.Dequantize, z, name="y", scale=1.0))
    x = torch.tensor([[1.0, 3.0, 5.0, -1.0, -3.0, -5.0]])
    assert RecipeModule(recipe, torch.float32)(x).tolist() == [[0, 2, 2, 0, -2, -2]]


@pytest.mark.parametrize("axes", [2, 3])
def test_upsampling_does_not_depend_on_the_layout(axes: int) -> None:
    conv = {2: cl.Conv2d, 3: cl.Conv3d}[axes]
    model = cl.ConformalLayers(
        nn.Upsample(scale_factor=2), conv(5, 2, 2), cl.ReSPro(0.5), cl.ReSPro()
    )
    x = torch.randn(2, 5, *[4] * axes)
    layout = {2: torch.channels_last, 3: torch.channels_last_3d}[axes]
    expected = exact_output(model, x)
    folded = cl.fold(model, tuple(x.shape[1:]), strategy="layers")
    for run in (folded, model.train()):
        assert relative_error(run(x.contiguous(memory_format=layout)), expected) < 5e-6
