"""Random recipes for the tests of runtimes: windows of every kind, branches, products; floats or integers."""

from __future__ import annotations

import math
from itertools import count
from typing import Any

import torch
from hypothesis import strategies as st

from conformallayers.recipe import integer_operations as integer
from conformallayers.recipe import layer_operations as layer
from conformallayers.recipe.recipe import INPUT, Recipe, RecipeBuilder


class _Random:
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
        divisors = [n for n in range(1, channels + 1) if channels % n == 0]
        groups = self.draw(st.sampled_from(divisors))
        outputs = groups * self.draw(st.integers(1, 12 if groups == 1 else 3))
        kernel, dilation, stride = self.several(1, 3), self.several(1, 2), self.several(1, 3)
        options: dict[str, Any] = {"dilation": dilation, "stride": stride, "groups": groups}
        if not self.whole and self.draw(st.booleans()):
            ends = [max(s, d) - 1 for s, d in zip(stride, dilation, strict=True)]
            extra = tuple(self.draw(st.integers(0, end)) for end in ends)
            sizes = zip(spatial, stride, dilation, kernel, extra, strict=True)
            most = [((n - 1) * s + d * (k - 1) + e) // 2 for n, s, d, k, e in sizes]
            options["padding"] = tuple(self.draw(st.integers(0, min(2, m))) for m in most)
            held = {"weight": self.constant(channels, outputs // groups, *kernel)}
            held |= {"bias": self.constant(outputs)} if self.draw(st.booleans()) else {}
            more = {"output_padding": extra}
            return self.builder.add(layer.ConvTranspose, x, **held, **options, **more)
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
        padding = tuple(self.draw(st.integers(0, k // 2)) for k in kernel)
        options: dict[str, Any] = {"kernel": kernel, "stride": self.several(1, 3)}
        padded, ceil = options | {"padding": padding}, {"ceil_mode": self.draw(st.booleans())}
        if self.draw(st.booleans()):
            return self._max_pool(x, padded, {} if self.whole else ceil)
        if self.whole:
            function = self.draw(st.sampled_from(["sum", "norm"]))
            more = {"function": function, "multiplier": 2**20, "shift": 22}
            return self.builder.add(integer.IntegerPool, x, **padded, **more)
        kind = self.draw(st.sampled_from(["average", "norm", "adaptive"]))
        if kind == "average":
            counted = self.draw(st.booleans())
            return self.builder.add(layer.AvgPool, x, **padded, **ceil, count_include_pad=counted)
        if kind == "norm":
            return self.builder.add(layer.NormPool, x, **options, **ceil)
        adaptive = self.draw(st.sampled_from([layer.AdaptiveAvgPool, layer.AdaptiveMaxPool]))
        return self.builder.add(adaptive, x, size=self.several(1, 9 // self.axes))

    def _max_pool(self, x: str, options: dict[str, Any], ceil: dict[str, bool]) -> str:
        every = zip(self.shape(x)[1:], options["kernel"], options["padding"], strict=True)
        fits = all(n + 2 * p > 2 * (k - 1) and n > 1 for n, k, p in every)
        dilation = self.several(1, 2) if fits else (1,) * self.axes
        return self.builder.add(layer.MaxPool, x, **options, **ceil, dilation=dilation)

    def pad(self, x: str) -> str:
        """Pad, or crop where the pads are zeros."""
        modes = ["zeros", "reflect", "replicate", "circular"]
        large = all(n > 3 for n in self.shape(x)[1:])
        mode = self.draw(st.sampled_from(modes if large else modes[:1]))
        low, most = (-1, 2) if mode == "zeros" else (0, 1)
        ends = st.integers(low if large else 0, most)
        pads = [(self.draw(ends), self.draw(ends)) for _ in range(self.axes)]
        return self.builder.add(layer.Pad, x, pads=tuple(pads), mode=mode)

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
        kinds = ["conv", "pool", "branch", *["pad"] * (not self.whole)]
        for step in self.draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=4)):
            if all(n <= 12 for n in self.shape(value)[1:]) or step != "conv":
                value = getattr(self, step)(value)
        if self.draw(st.booleans()):
            size = math.prod(self.shape(value))
            value = self.builder.add(layer.Reshape, value, shape=(size,))
            kind = integer.IntegerMatmul if self.whole else layer.Matmul
            held = self.product(self.draw(st.integers(1, 20)), size)
            value = self.builder.add(kind, value, **held)
        if self.whole:
            value = self.builder.add(integer.Dequantize, value, scale=0.01)
        return self.builder.recipe(value)


@st.composite
def recipes(draw: Any, whole: bool = False) -> Recipe:
    """Draw a recipe with constants in float64, or int8 and int32."""
    return _Random(draw, whole).recipe()
