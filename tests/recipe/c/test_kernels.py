"""Convolutions, products and windows of random shapes: C computes what torch computes, in bounds of its memory."""

from __future__ import annotations

import tempfile
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import conformallayers as cl
from conformallayers.recipe import integer_operations as integer
from conformallayers.recipe import layer_operations as layer
from conformallayers.recipe.c.kernels import Epilogue, Windows, conv_lines, in_blocks, tile
from conformallayers.recipe.recipe import INPUT, Recipe, RecipeBuilder
from conformallayers.testing import relative_error
from programs import COMPILER, FLAGS, SANITIZED, Fold, export, needs_compiler, run_program

# A failure is not made smaller: each attempt compiles programs.
FEW = settings(
    max_examples=3,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
_CONV, _POOL = (layer.Conv, layer.ConvTranspose), (layer.AvgPool, layer.MaxPool, layer.NormPool)


class Random:
    """Draw the operations of a recipe one by one.

    Args:
        draw: of hypothesis.
        whole: whether features are int8.
    """

    def __init__(self, draw: Any, whole: bool) -> None:
        self.draw, self.whole = draw, whole
        self.axes = draw(st.integers(1, 3))
        most = {1: 20, 2: 9, 3: 5}[self.axes]
        spatial = [draw(st.integers(2, most)) for _ in range(self.axes)]
        self.builder = RecipeBuilder((draw(st.integers(1, 10)), *spatial))
        self.numbers = torch.Generator().manual_seed(draw(st.integers(0, 99)))
        self.names = count()

    def shape(self, value: str) -> tuple[int, ...]:
        return self.builder.shape(value)

    def constant(self, *shape: int, most: int = 0) -> str:
        name = f"c{next(self.names)}"
        if not most:
            array = torch.randn(shape, generator=self.numbers, dtype=torch.float64)
            return self.builder.constant(name, array)
        dtype = torch.int8 if most <= integer.LEVELS else torch.int32
        array = torch.randint(-most, most + 1, shape, generator=self.numbers)
        return self.builder.constant(name, array.to(dtype))

    def several(self, low: int, high: int) -> tuple[int, ...]:
        return tuple(self.draw(st.integers(low, high)) for _ in range(self.axes))

    def product(self, rows: int, *others: int) -> dict[str, Any]:
        """Return the constants of a product with outputs in front."""
        if not self.whole:
            return {"weight": self.constant(rows, *others), "bias": self.constant(rows)}
        factors = torch.randint(2**18, 2**19, (rows,), generator=self.numbers, dtype=torch.int32)
        held: dict[str, Any] = {"weight": self.constant(rows, *others, most=127)}
        held["multiplier"] = self.builder.constant(f"c{next(self.names)}", factors)
        held["shift"] = self.draw(st.integers(24, 28))
        held["low"] = self.draw(st.sampled_from([-127, 0]))
        for name in self.draw(st.sets(st.sampled_from(["bias", "addend"]))):
            held[name] = self.constant(rows, most=3000)
        return held

    def conv(self, x: str) -> str:
        channels, *spatial = self.shape(x)
        groups = self.draw(
            st.sampled_from([n for n in range(1, channels + 1) if channels % n == 0])
        )
        outputs = groups * self.draw(st.integers(1, 12 if groups == 1 else 3))
        transposed = not self.whole and self.draw(st.booleans())
        kernel, dilation, stride = self.several(1, 3), self.several(1, 2), self.several(1, 3)
        options: dict[str, Any] = {"dilation": dilation, "stride": stride, "groups": groups}
        if transposed:
            options["padding"] = (0,) * self.axes
            options["output_padding"] = tuple(
                self.draw(st.integers(0, max(s, d) - 1))
                for s, d in zip(stride, dilation, strict=True)
            )
            held = {"weight": self.constant(channels, outputs // groups, *kernel)}
            return self.builder.add(layer.ConvTranspose, x, **held, **options)
        reach = [d * (k - 1) + 1 for k, d in zip(kernel, dilation, strict=True)]
        options["padding"] = tuple(
            max(self.draw(st.integers(0, 2)), -(-(r - n) // 2))
            for r, n in zip(reach, spatial, strict=True)
        )
        kind = integer.IntegerConv if self.whole else layer.Conv
        held = self.product(outputs, channels // groups, *kernel)
        return self.builder.add(kind, x, **held, **options)

    def pool(self, x: str) -> str:
        spatial = self.shape(x)[1:]
        kernel = tuple(self.draw(st.integers(1, min(3, n))) for n in spatial)
        stride = self.several(1, 2)
        padding = tuple(self.draw(st.integers(0, k // 2)) for k in kernel)
        options: dict[str, Any] = {"kernel": kernel, "stride": stride, "padding": padding}
        if self.draw(st.booleans()):
            return self.builder.add(layer.MaxPool, x, **options, dilation=(1,) * self.axes)
        if self.whole:
            function = self.draw(st.sampled_from(["sum", "norm"]))
            more = {"function": function, "multiplier": 2**20, "shift": 22}
            return self.builder.add(integer.IntegerPool, x, **options, **more)
        return self.builder.add(layer.AvgPool, x, **options)

    def branch(self, x: str) -> str:
        """Slice channels, treat the parts apart, and concatenate them; or add a convolution of 1."""
        channels = self.shape(x)[0]
        if channels > 1 and self.draw(st.booleans()):
            cut = self.draw(st.integers(1, channels - 1))
            first = self.builder.add(layer.Slice, x, axis=0, start=0, stop=cut)
            second = self.builder.add(layer.Slice, x, axis=0, start=cut, stop=channels)
            second = self.builder.add(layer.Elementwise, second, function="relu")
            parts = self.draw(st.permutations([first, second]))
            return self.builder.add(layer.Concatenate, *parts, axis=0)
        ones, zeros = (1,) * self.axes, (0,) * self.axes
        kind = integer.IntegerConv if self.whole else layer.Conv
        held = self.product(channels, channels, *ones)
        z = self.builder.add(kind, x, **held, stride=ones, padding=zeros, dilation=ones)
        if self.whole:
            options = {"multipliers": (2**19, 2**20), "shift": 20, "low": 0}
            return self.builder.add(integer.Requantize, x, z, **options)
        z = self.builder.add(layer.Add, x, z)
        return self.builder.add(layer.Elementwise, z, function="relu")

    def recipe(self) -> Recipe:
        value = INPUT
        if self.whole:
            value = self.builder.add(integer.Quantize, value, factor=60.0)
        for step in self.draw(
            st.lists(st.sampled_from(["conv", "pool", "branch"]), min_size=1, max_size=4)
        ):
            if all(n <= 12 for n in self.shape(value)[1:]) or step != "conv":
                value = getattr(self, step)(value)
        if self.draw(st.booleans()):
            size = int(np.prod(self.shape(value)))
            value = self.builder.add(layer.Reshape, value, shape=(size,))
            kind = integer.IntegerMatmul if self.whole else layer.Matmul
            value = self.builder.add(
                kind, value, **self.product(self.draw(st.integers(1, 20)), size)
            )
        if self.whole:
            value = self.builder.add(integer.Dequantize, value, scale=0.01)
        return self.builder.recipe(value)


@st.composite
def recipes(draw: Any, whole: bool = False) -> Recipe:
    return Random(draw, whole).recipe()


def check_programs(recipes: list[Recipe], *flags: str) -> None:
    """Compare programs of both kinds with torch; sanitizers watch memory."""
    with tempfile.TemporaryDirectory() as name:
        folds = [Fold(recipe) for recipe in recipes for _ in range(2)]
        exports = [
            export(fold, Path(name), name=f"case{i}", optimize=("speed", "size")[i % 2])
            for i, fold in enumerate(folds)
        ]
        inputs = [torch.randn(2, *fold.input_shape) for fold in folds]
        command = [str(COMPILER), *FLAGS, *flags]
        every = run_program(Path(name), exports, inputs, command)
    for (_, found), fold, x in zip(every, folds, inputs, strict=True):
        expected = fold(x).flatten(1)
        if integer.integer_values(fold.recipe.operations):
            assert torch.equal(found, expected), fold.recipe
        else:
            assert relative_error(found, expected) < 1e-5, fold.recipe


@needs_compiler
@FEW
@given(st.lists(recipes(), min_size=4, max_size=4))
def test_random_networks(drawn: list[Recipe]) -> None:
    check_programs(drawn, *SANITIZED)


@needs_compiler
@FEW
@given(st.lists(recipes(whole=True), min_size=4, max_size=4))
def test_random_networks_of_integers(drawn: list[Recipe]) -> None:
    check_programs(drawn, *SANITIZED)


def test_tiles_fit_into_registers() -> None:
    for columns in range(1, 40):
        for blocks in range(1, 20):
            positions, width = tile(columns, blocks)
            assert positions * width <= 12
            assert positions <= columns
            assert blocks % width == 0


@pytest.mark.parametrize("outputs", [3, 8, 13, 20])
def test_weights_are_in_blocks_of_eight_outputs_or_four(outputs: int) -> None:
    weight = np.arange(2 * outputs * 5, dtype=float).reshape(2, outputs, 5)
    found = in_blocks(weight)
    stored = (
        outputs
        if outputs % 4 == 0
        else outputs + (-outputs % 8 if outputs % 8 > 4 else -outputs % 4)
    )
    assert found.shape == (2, 5 * stored)
    assert np.array_equal(found[:, : min(outputs, 4)][:, 0], weight[:, 0, 0])


def test_sizes_are_literals_and_one_function_serves_equal_shapes() -> None:
    axis = (7, 5, 3, 1, 0, 1)
    windows = Windows(((1, 1, 1, 1, 0, 1), axis, axis), 16, 16, 1, 48, (1200, 240, 48))
    text = "\n".join(conv_lines(windows, Epilogue(), "convolution", speed=True))
    assert "for (e = 0; e < 48; e++)" in text
    assert "ADD(8, a00, k, line[j * 112 + e]);" in text


@needs_compiler
def test_a_map_times_a_matrix_is_added_to_a_convolution() -> None:
    class Both(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.rows = torch.nn.Conv2d(3, 3, 3, padding=1), torch.nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.conv(x) + self.rows(x)

    torch.manual_seed(0)
    first = torch.nn.Conv2d(3, 3, 3, padding=1)
    model = torch.nn.Sequential(first, torch.nn.ReLU(), Both(), torch.nn.BatchNorm2d(3)).eval()
    check_programs([cl.fold(model, (3, 4, 4)).recipe], *SANITIZED)


@needs_compiler
def test_a_flattened_map_between_layers_is_quantised_in_order() -> None:
    torch.manual_seed(0)
    layers = cl.ConformalLayers(
        *(cl.Gnomonic(1.0), torch.nn.BatchNorm2d(4), torch.nn.AdaptiveMaxPool2d(3)),
        *(cl.Conv2d(4, 6, 2, bias=False), cl.ReSPro(1.0, projective=True)),
        offset=0.5,
    )
    folded = cl.fold(layers.eval(), (4, 6, 9), strategy="dense")
    recipe = cl.quantize(folded, torch.rand(16, 4, 6, 9)).recipe
    shapes = recipe.shapes()
    quantised = [op for op in recipe.operations if isinstance(op, integer.Quantize)]
    assert [len(shapes[op.inputs[0]]) for op in quantised] == [1]
    check_programs([recipe], *SANITIZED)


@needs_compiler
def test_one_channel_of_the_image_is_convolved() -> None:
    builder = RecipeBuilder((3, 6, 5))
    y = builder.add(layer.Slice, INPUT, axis=0, start=1, stop=2)
    weight = builder.constant("weight", torch.randn(2, 1, 3, 3, dtype=torch.float64))
    ones, zeros = (1, 1), (0, 0)
    y = builder.add(layer.Conv, y, weight=weight, stride=ones, padding=zeros, dilation=ones)
    check_programs([builder.recipe(y)], *SANITIZED)


@needs_compiler
@pytest.mark.parametrize("kernel", [(3, 2), (9, 9)])
def test_every_channel_has_a_kernel_of_its_own(kernel: tuple[int, int]) -> None:
    torch.manual_seed(0)
    each = torch.nn.Conv2d(6, 6, kernel, stride=(1, 2), padding=kernel, groups=6)
    model = torch.nn.Sequential(each, torch.nn.ReLU(), torch.nn.Conv2d(6, 3, 1)).eval()
    folded = cl.fold(model, (6, 7, 5))
    check_programs([folded.recipe, cl.quantize(folded, torch.rand(20, 6, 7, 5)).recipe], *SANITIZED)
