"""Conformance cases of operations on integers: a runtime has them only if every number is equal."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from conformallayers.recipe import integer_operations as integer
from conformallayers.recipe import layer_operations as layer
from conformallayers.recipe.recipe import INPUT, Recipe, RecipeBuilder, Shape

FORMULAS = {  # of activations
    "published": "tau + m * n",
    "projective": "tau + n / tau",
    "gnomonic": "tau * sqrt(1 + n / tau / tau)",
}


def _whole(builder: RecipeBuilder, name: str, *shape: int, most: int = 127) -> str:
    """Keep integers: int8 up to 127, int32 above."""
    generator = torch.Generator().manual_seed(sum(shape) + len(name))
    dtype = torch.int8 if most <= integer.LEVELS else torch.int32
    low = -most if name != "multiplier" else most // 2
    array = torch.randint(low, most + 1, shape, generator=generator, dtype=torch.int64)
    return builder.constant(name, array.to(dtype))


def _wide(builder: RecipeBuilder, name: str, *shape: int) -> str:
    generator = torch.Generator().manual_seed(sum(shape))
    array = 1e-3 * (0.5 + torch.rand(shape, generator=generator, dtype=torch.float64))
    return builder.constant(name, array)


def _product(
    builder: RecipeBuilder, *shape: int, bits: int = 13, digits: int = 20
) -> dict[str, Any]:
    """Return the constants of a product whose sums of so many bits become features; float32 has 10 digits exactly."""
    return {
        "weight": _whole(builder, "weight", *shape),
        "multiplier": _whole(builder, "multiplier", shape[0], most=2**digits),
        "shift": digits + bits - 6,
    }


def _classifier(axes: int) -> Recipe:
    """Quantise, convolve, pass ReLU, largest entries and pads, multiply: numbers are the result."""
    spatial: Shape = (6, 5, 4)[:axes]
    builder = RecipeBuilder((4, *spatial))
    addend = _whole(builder, "addend", 4, *[1] * axes)
    q = builder.add(integer.Quantize, INPUT, name="q", factor=40.0, addend=addend, exponent=7)
    ones, twos, zeros = (1,) * axes, (2,) * axes, (0,) * axes
    conv = _product(builder, 6, 2, *[3] * axes) | {"bias": _whole(builder, "bias", 6, most=9000)}
    windows: dict[str, Any] = {
        "stride": (1, 2, 1)[:axes],
        "padding": ones,
        "dilation": (1, 1, 2)[:axes],
    }
    z = builder.add(integer.IntegerConv, q, **conv, **windows, groups=2)
    z = builder.add(layer.Elementwise, z, function="relu")
    z = builder.add(layer.Pad, z, pads=((1, 0),) * axes)
    pool: dict[str, Any] = {"kernel": twos, "stride": ones, "padding": zeros, "dilation": ones}
    z = builder.add(layer.MaxPool, z, **pool)
    plain: dict[str, Any] = {"stride": ones, "padding": zeros, "dilation": ones}
    for low in (0, -127):
        conv = _product(builder, 6, 6, *ones, digits=10) | {"low": low}
        conv["bias"] = _whole(builder, "bias", 6, most=9000)
        z = builder.add(integer.IntegerConv, z, **conv, **plain)
    conv = {"weight": _whole(builder, "weight", 3, 6, *ones), "scale": _wide(builder, "scale", 3)}
    conv |= plain
    y = builder.add(integer.IntegerConv, z, name="y", **conv)
    return builder.recipe(y)


def _points(rule: str, offset: float) -> Recipe:
    """Embed, then twice: convolve, run an activation, pool; add, divide."""
    builder = RecipeBuilder((2, 5, 4))
    names = "q", "peak", "tau"
    options: dict[str, Any] = {"levels": 127.0, "offset": offset, "exponent": 6}
    options["addend"] = _whole(builder, "addend", 2, 5, 4, most=30)
    q, m, tau = builder.add_many(integer.QuantizePoint, INPUT, names=names, **options)
    ones: dict[str, Any] = {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1)}
    twos: dict[str, Any] = {"kernel": (2, 2), "stride": (2, 2), "padding": (0, 0)}
    z = builder.add(integer.IntegerConv, q, **_product(builder, 4, 2, 3, 3), **ones)
    n = builder.add(integer.IntegerEnergy, z, name="n", weight=3e-5)
    more = builder.add(integer.IntegerEnergy, q, name="n", weight=2e-5)
    tau = builder.add(integer.IntegerAdvance, tau, m, n, more, name="tau", formula=FORMULAS[rule])
    signed = builder.add(layer.Slice, z, axis=0, start=0, stop=1)
    sums: dict[str, Any] = {"function": "sum", "multiplier": 12_345_678, "shift": 25}
    signed = builder.add(integer.IntegerPool, signed, **twos, **sums)
    norms = builder.add(layer.Slice, z, axis=0, start=1, stop=4)
    roots: dict[str, Any] = {"function": "norm", "multiplier": 9_876_543, "shift": 32}
    norms = builder.add(integer.IntegerPool, norms, **twos, **roots)
    z = builder.add(layer.Concatenate, signed, norms, axis=0)
    scalars = "peak", "tau"
    rebased = builder.add_many(integer.IntegerRebase, m, tau, names=scalars, coordinate=1.4)
    conv = _product(builder, 2, 4, 3, 3, bits=7) | {"addend": _whole(builder, "more", 2, most=999)}
    z = builder.add(integer.IntegerConv, z, tau, **conv, **ones)
    n = builder.add(integer.IntegerEnergy, z, name="n", weight=4e-5)
    m, tau = (
        rebased[0],
        builder.add(
            integer.IntegerAdvance, rebased[1], rebased[0], n, name="tau", formula=FORMULAS[rule]
        ),
    )
    both: dict[str, Any] = {"multipliers": (5_000_000, 11_000_000), "shift": 24}
    low = builder.add(layer.Elementwise, z, function="abs")
    total = builder.add(integer.Requantize, z, low, name="sum", **both, low=0)
    extra = _whole(builder, "extra", 2, 1, 1, most=500)
    options = {"multipliers": (9_000_000,), "shift": 16, "addend": extra}
    point = builder.add(integer.Requantize, total, tau, name="point", **options)
    y = builder.add(integer.Dequantize, point, tau, name="y", scale=0.01)
    return builder.recipe(y)


def _pooled(kinds: tuple[str, ...], low: int) -> Recipe:
    """Convolve, pool slices by their sums or norms over τ, and convolve again, in steps that float32 holds."""
    builder = RecipeBuilder((2, 7, 9))
    names = "q", "peak", "tau"
    q, _, tau = builder.add_many(integer.QuantizePoint, INPUT, names=names, levels=127.0)
    ones: dict[str, Any] = {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1)}
    twos: dict[str, Any] = {"kernel": (2, 2), "stride": (2, 2), "padding": (0, 0)}
    count = 3 * len(kinds)
    z = builder.add(integer.IntegerConv, q, **_product(builder, count, 2, 3, 3, digits=8), **ones)
    parts = []
    for start, function in zip(range(0, count, 3), kinds, strict=True):
        part = builder.add(layer.Slice, z, axis=0, start=start, stop=start + 3)
        steps = {"multiplier": 90_001, "shift": 15 if function == "sum" else 17}
        part = builder.add(
            integer.IntegerPool, part, tau, **twos, **steps, function=function, name="z"
        )
        parts.append(part)
    z = builder.add(layer.Concatenate, *parts, axis=0)
    conv = _product(builder, 4, count, 3, 3, bits=10, digits=8) | {"low": low}
    z = builder.add(integer.IntegerConv, z, **conv, **ones)
    return builder.recipe(builder.add(integer.Dequantize, z, tau, name="y", scale=0.01))


def _rows(*, tau: bool, count: int, bits: int) -> Recipe:
    """Embed rows and multiply them twice; features of many entries have sums of more than 24 bits."""
    builder = RecipeBuilder((2, count))
    names = "q", "peak", "tau"
    q, _, t = builder.add_many(integer.QuantizePoint, INPUT, names=names, levels=60.0)
    first = _product(builder, 6, count, bits=bits) | {"low": 0}
    z = builder.add(integer.IntegerMatmul, q, *[t] * tau, name="z", **first)
    z = builder.add(layer.Permute, z, order=(1, 0))
    z = builder.add(layer.Reshape, z, shape=(12,))
    last: dict[str, Any] = {
        "weight": _whole(builder, "weight", 3, 12),
        "scale": _wide(builder, "scale", 3),
    }
    last |= {"bias": _whole(builder, "bias", 3, most=5000), "offset": _wide(builder, "offset", 3)}
    return builder.recipe(builder.add(integer.IntegerMatmul, z, *[t] * tau, name="y", **last))


def integer_builders() -> Iterator[tuple[str, Any]]:
    """Yield the names of all cases, and functions that make their recipes."""
    for axes in (1, 2, 3):
        yield f"integers {axes}d", partial(_classifier, axes)
    for rule in FORMULAS:
        for offset in (0.0, 1.5):
            yield f"integer points {rule} {offset}", partial(_points, rule, offset)
    for kinds in (("sum", "norm"), ("norm", "sum", "norm"), ("sum", "norm", "sum"), ("norm",)):
        for low in (0, -127):
            yield f"integer pools {kinds} {low}", partial(_pooled, kinds, low)
    yield "integer rows", partial(_rows, tau=False, count=5, bits=11)
    yield "integer rows over tau", partial(_rows, tau=True, count=5, bits=6)
    yield "integer rows of many", partial(_rows, tau=False, count=1500, bits=14)
