"""Conformance cases of recipes: one row for every option of every operation.

A runtime that gives the numbers of torch for all of them implements every operation. The project's own
tests of files and runtimes run over these rows, and so may those of a new runtime.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from conformallayers.recipe import layer_operations as layer
from conformallayers.recipe import point_operations as point
from conformallayers.recipe.recipe import INPUT, Operation, Recipe, RecipeBuilder, Shape
from integer_cases import FORMULAS as EXACT
from integer_cases import integer_builders

_SPATIAL: dict[int, Shape] = {1: (9,), 2: (7, 6), 3: (5, 4, 6)}  # by the number of axes


@dataclass(frozen=True)
class RecipeCase:
    """One recipe with random constants in float64.

    Args:
        name: the operation and its option, unique.
        build: makes the recipe; ``recipe.with_constants`` casts its constants.
    """

    name: str
    build: Callable[[], Recipe]


def _constant(builder: RecipeBuilder, name: str, *shape: int) -> str:
    generator = torch.Generator().manual_seed(sum(shape) + len(name))
    array = torch.randn(shape, generator=generator, dtype=torch.float64)
    return builder.constant(name, array)


FORMULAS = EXACT | {
    "own": "tau * (1 + log(1 + tanh(n / tau / tau)) * exp(0 - 0.25 * (n / tau / tau)))"
}
Cases = Iterator[RecipeCase]


def _case(
    name: str, kind: type[Operation], shape: Shape, arrays: dict[str, Shape], /, **settings: Any
) -> RecipeCase:
    """Return the case of a single operation on the input."""

    def build() -> Recipe:
        builder = RecipeBuilder(shape)
        constants = {field: _constant(builder, field, *size) for field, size in arrays.items()}
        return builder.recipe(builder.add(kind, INPUT, name="y", **constants, **settings))

    return RecipeCase(name, build)


def _windows(axes: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield options of sliding windows."""
    base = {"stride": (1,) * axes, "padding": (0,) * axes}
    yield "plain", base
    yield "stride", {**base, "stride": (2, 1, 3)[:axes]}
    yield "padding", {**base, "padding": (1, 0, 1)[:axes]}
    yield "stride and padding", {"stride": (2,) * axes, "padding": (1,) * axes}


def _conv_cases(axes: int) -> Cases:
    shape, kernel = (4, *_SPATIAL[axes]), (3, 2, 2)[:axes]
    for name, options in _windows(axes):
        for dilation, groups in (((1,) * axes, 1), ((2, 1, 1)[:axes], 2)):
            more = {**options, "dilation": dilation, "groups": groups}
            suffix = f"{axes}d {name}" + (" dilation and groups" if groups > 1 else "")
            arrays: dict[str, Shape] = {"weight": (6, 4 // groups, *kernel), "bias": (6,)}
            yield _case(f"conv {suffix}", layer.Conv, shape, arrays, **more)
            arrays = {"weight": (4, 6 // groups, *kernel), "bias": (6,)}
            most = tuple(max(s, d) - 1 for s, d in zip(options["stride"], dilation, strict=True))
            for extra in {(0,) * axes, most}:
                label = f"conv_transpose {suffix} {extra}"
                both = {**more, "output_padding": extra}
                yield _case(label, layer.ConvTranspose, shape, arrays, **both)


def _pool_cases(axes: int) -> Cases:
    shape, ones = (4, *_SPATIAL[axes]), (1,) * axes
    averages: list[dict[str, Any]] = [
        {},
        {"ceil_mode": True},
        {"count_include_pad": False},
        {"ceil_mode": True, "count_include_pad": False},
    ]
    for name, options in _windows(axes):
        pool = {**options, "kernel": (3, 2, 2)[:axes]}
        for option in averages:
            label = " ".join(["avg_pool", f"{axes}d", name, *option])
            yield _case(label, layer.AvgPool, shape, {}, **pool, **option)
        for ceil in (False, True):
            most = {**pool, "dilation": ones, "ceil_mode": ceil}
            yield _case(f"max_pool {axes}d {name} {ceil}", layer.MaxPool, shape, {}, **most)
            if not any(options["padding"]):
                norm = {"kernel": pool["kernel"], "stride": options["stride"], "ceil_mode": ceil}
                yield _case(f"norm_pool {axes}d {name} {ceil}", layer.NormPool, shape, {}, **norm)
    twos = (2,) * axes
    wide = {"kernel": twos, "stride": ones, "padding": ones, "dilation": twos}
    yield _case(f"max_pool {axes}d dilation", layer.MaxPool, shape, {}, **wide)
    size = (4, 3, 5)[:axes]
    for adaptive in (layer.AdaptiveAvgPool, layer.AdaptiveMaxPool):
        yield _case(f"{adaptive.kind} {axes}d", adaptive, shape, {}, size=size)
        even = {1: (3,), 2: (7, 3), 3: (5, 2, 3)}[axes]
        yield _case(f"{adaptive.kind} {axes}d even", adaptive, shape, {}, size=even)


def _resampling_cases(axes: int) -> Cases:
    size = _SPATIAL[axes]
    shape = (4, *size)
    pads = ((1, 2), (0, 1), (2, 0))[:axes]
    for mode in ("zeros", "reflect", "replicate", "circular"):
        yield _case(f"pad {axes}d {mode}", layer.Pad, shape, {}, pads=pads, mode=mode)
    mixed = ((-1, 2), (1, -1), (-1, -1))[:axes]
    yield _case(f"pad {axes}d crop", layer.Pad, shape, {}, pads=mixed)
    yield _case(f"upsample {axes}d", layer.Upsample, shape, {}, scales=(2, 1, 3)[:axes])


def _layer_cases() -> Cases:
    yield _case("matmul", layer.Matmul, (5,), {"weight": (3, 5)})
    yield _case("matmul with bias", layer.Matmul, (5,), {"weight": (3, 5), "bias": (3,)})
    yield _case("matmul of rows", layer.Matmul, (2, 4, 5), {"weight": (3, 5), "bias": (3,)})
    for axes in _SPATIAL:
        yield from _conv_cases(axes)
        yield from _pool_cases(axes)
        yield from _resampling_cases(axes)
        image, slope = (4, *_SPATIAL[axes]), (4, *[1] * axes)
        yield _case(f"prelu {axes}d", layer.PRelu, image, {"slope": slope})
        yield _case(f"slice {axes}d", layer.Slice, image, {}, axis=0, start=1, stop=3)
    shape = (4, 3, 5)
    yield _case("pad with a value", layer.Pad, shape, {}, pads=((1, 0),), value=0.5)
    arrays: list[Shape] = [(), (4, 1, 1), (4, 3, 5), (5,)]
    for array in arrays:
        yield _case(f"multiply {array}", layer.Multiply, shape, {"factor": array})
        yield _case(f"add_constant {array}", layer.AddConstant, shape, {"value": array})
        yield _case(f"prelu {array}", layer.PRelu, shape, {"slope": array})
    for one in ((), (1,), (4,)):
        yield _case(f"prelu of rows {one}", layer.PRelu, (4,), {"slope": one})
    yield _case("slice", layer.Slice, shape, {}, axis=1, start=1, stop=3)
    yield _case("reshape", layer.Reshape, shape, {}, shape=(6, 10))
    yield _case("permute", layer.Permute, shape, {}, order=(2, 0, 1))
    for name, count in layer.FUNCTIONS.items():
        options: dict[str, Any] = {"function": name, "parameters": (0.3,) * count}
        yield _case(f"elementwise {name}", layer.Elementwise, shape, {}, **options)
    for axis in (0, 2):
        for log in (False, True):
            yield _case(f"softmax {axis} {log}", layer.Softmax, shape, {}, axis=axis, log=log)
    yield RecipeCase("add and concatenate", _branches)
    for size in ((4, 1, 1), (1, 3, 1), (4, 3, 5)):
        yield RecipeCase(f"product {size}", partial(_gate, size))


def _branches() -> Recipe:
    builder = RecipeBuilder((2, 3))
    weight = _constant(builder, "weight", 3, 3)
    a = builder.add(layer.Matmul, INPUT, name="a", weight=weight)
    total = builder.add(layer.Add, INPUT, a, a, name="sum")
    return builder.recipe(builder.add(layer.Concatenate, total, INPUT, name="y", axis=0))


def _gate(size: Shape) -> Recipe:
    builder = RecipeBuilder((4, 3, 5))
    gate = INPUT
    for axis, stop in enumerate(size):
        gate = builder.add(layer.Slice, gate, name="gate", axis=axis, start=0, stop=stop)
    return builder.recipe(builder.add(layer.Product, INPUT, gate, name="y"))


def _points(rule: str, *, offset: float = 0.0) -> Recipe:
    """Embed, convolve, take an energy twice, advance, divide."""
    builder = RecipeBuilder((2, 6, 5))
    names = ("unit", "peak", "tau")
    unit, m, tau = builder.add_many(point.Normalize, INPUT, names=names, offset=offset)
    weight = _constant(builder, "weight", 3, 2, 3, 3)
    ones: dict[str, Any] = {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1)}
    z = builder.add(layer.Conv, unit, weight=weight, **ones)
    n = builder.add(point.SumSquares, z, name="n", weight=0.3)
    more = builder.add(point.SumSquares, unit, name="n")
    tau = builder.add(point.Advance, tau, m, n, more, name="tau", formula=FORMULAS[rule])
    tau = builder.add(point.Advance, tau, m, n, name="tau", formula=FORMULAS[rule])
    return builder.recipe(builder.add(point.Divide, z, tau, m, name="y", scale=0.7))


def _banded(size: int, width: int) -> Recipe:
    """Embed, evaluate a form of the input, advance, divide."""
    builder = RecipeBuilder((2, 6))
    unit, m, tau = builder.add_many(point.Normalize, INPUT, names=("unit", "peak", "tau"))
    rows = builder.add(layer.Reshape, unit, name="rows", shape=(12,))
    full, rest = 12 // size - width, width * size
    fields: dict[str, Any] = {"size": size, "width": width, "weight": 0.4}
    fields["band"] = _constant(builder, "band", full, (width + 1) * size, size)
    fields["last"] = _constant(builder, "last", rest, rest)
    n = builder.add(point.BandedForm, rows, name="n", **fields)
    tau = builder.add(point.Advance, tau, m, n, name="tau", formula=FORMULAS["published"])
    return builder.recipe(builder.add(point.Divide, unit, tau, m, name="y", scale=0.7))


def _rebased(rule: str) -> Recipe:
    """Take the point, add a bias, run another activation on it."""
    builder = RecipeBuilder((5,))
    unit, m, tau = builder.add_many(point.Normalize, INPUT, names=("unit", "peak", "tau"))
    n = builder.add(point.SumSquares, unit, name="n", weight=0.5)
    tau = builder.add(point.Advance, tau, m, n, name="tau", formula=FORMULAS[rule])
    z, m, tau = builder.add_many(
        point.Rebase, unit, m, tau, names=("z", "peak", "tau"), scale=0.6, coordinate=1.4
    )
    z = builder.add(layer.AddConstant, z, value=_constant(builder, "bias", 5))
    n = builder.add(point.SumSquares, z, name="n", weight=0.5)
    tau = builder.add(point.Advance, tau, m, n, name="tau", formula=FORMULAS[rule])
    return builder.recipe(builder.add(point.Divide, z, tau, m, name="y", scale=0.7))


def _stages(rule: str, *, offset: float) -> Recipe:
    """Embed, then twice: convolve, run an activation, pass homogeneous maps; divide."""
    builder = RecipeBuilder((2, 8, 7))
    names = "unit", "peak", "tau"
    unit, m, tau = builder.add_many(point.Normalize, INPUT, names=names, offset=offset)
    ones: dict[str, Any] = {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1)}
    twos: dict[str, Any] = {"kernel": (2, 2), "stride": (2, 2)}
    z = builder.add(layer.Conv, unit, weight=_constant(builder, "weight", 5, 2, 3, 3), **ones)
    n = builder.add(point.SumSquares, z, name="n", weight=0.3)
    tau = builder.add(point.Advance, tau, m, n, name="tau", formula=FORMULAS[rule])
    signed = builder.add(layer.Slice, z, axis=0, start=0, stop=2)
    signed = builder.add(layer.AvgPool, signed, padding=(0, 0), **twos)
    norms = builder.add(layer.Slice, z, axis=0, start=2, stop=5)
    norms = builder.add(layer.NormPool, norms, **twos)
    z = builder.add(layer.Concatenate, signed, norms, axis=0)
    z = builder.add(layer.PRelu, z, slope=_constant(builder, "slope", 5, 1, 1))
    names = "z", "peak", "tau"
    options = {"scale": 0.6, "coordinate": 1.4}
    z, m, tau = builder.add_many(point.Rebase, z, m, tau, names=names, **options)
    constants = {"weight": _constant(builder, "weight", 4, 5, 3, 3)}
    constants["bias"] = _constant(builder, "bias", 4)
    z = builder.add(layer.Conv, z, **constants, **ones)
    z = builder.add(layer.Elementwise, z, function="leaky_relu", parameters=(0.2,))
    n = builder.add(point.SumSquares, z, name="n", weight=0.3)
    tau = builder.add(point.Advance, tau, m, n, name="tau", formula=FORMULAS[rule])
    low = builder.add(layer.Elementwise, z, function="relu")
    low = builder.add(layer.AdaptiveMaxPool, low, size=(2, 2))
    z = builder.add(layer.Elementwise, z, function="abs")
    z = builder.add(layer.MaxPool, z, padding=(1, 0), dilation=(1, 1), **twos)
    z = builder.add(layer.AdaptiveMaxPool, z, size=(2, 2))
    z = builder.add(layer.Concatenate, low, z, axis=0)
    return builder.recipe(builder.add(point.Divide, z, tau, m, name="y", scale=0.7))


def _point_cases() -> Cases:
    for rule in FORMULAS:
        yield RecipeCase(f"points {rule}", partial(_points, rule))
        yield RecipeCase(f"rebase and bias {rule}", partial(_rebased, rule))
    for rule in ("published", "projective"):
        yield RecipeCase(f"points {rule} offset", partial(_points, rule, offset=2.0))
        for offset in (0.0, 1.5):
            yield RecipeCase(f"stages {rule} {offset}", partial(_stages, rule, offset=offset))
    for sizes in ((3, 1), (4, 2), (3, 0), (2, 5)):
        yield RecipeCase(f"banded_form {sizes}", partial(_banded, *sizes))


RECIPE_CASES: tuple[RecipeCase, ...] = (
    *_layer_cases(),
    *_point_cases(),
    *(RecipeCase(name, build) for name, build in integer_builders()),
)
