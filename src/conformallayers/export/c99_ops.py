"""The steps of a C program. A step writes itself down in C, and computes the same in numpy.

The second is what errors are measured with where there is no compiler: the same constants, after
rounding to int8 and after what was left out, with sums in float32 and scalars in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch
from torch.nn import functional as F

from .c99_arrays import Array, Constant, Form, Matrix, number
from .c99_text import SUFFIX

INPUT = 0  # the number of the value that the image is
Place = Callable[[int], str]
GROWTHS = {  # functions in C
    "projective": "growth_projective",
    "gnomonic": "growth_gnomonic",
    "radial_tanh": "growth_radial_tanh",
}


def grow(rule: str, q: Array) -> Array:
    """Return what a coordinate is multiplied with, for the squared length q in units of α."""
    if rule == "projective":
        return np.asarray(1 + q)
    if rule == "gnomonic":
        return np.asarray(np.sqrt(1 + q))
    short = q < 1e-4
    u = np.sqrt(np.where(short, 1.0, q))
    return np.where(short, 1 + q / 3 - q**2 / 45, u / np.tanh(u))


@dataclass
class State:
    """A batch on its way through the steps: values by number, scalars of the part at hand."""

    values: dict[int, Array]
    n: dict[int, Array] = field(default_factory=dict)
    m: Array = field(default_factory=lambda: np.ones(0))
    tau: Array = field(default_factory=lambda: np.ones(0))
    denominators: list[Array] = field(default_factory=list)


@dataclass(frozen=True, eq=False, kw_only=True)
class Step:
    """One step: reads the value ``source``, writes the value ``target``."""

    source: int
    target: int
    size: int  # floats that are written, 0 for none
    constants: tuple[Constant, ...] = ()
    multiply_adds: int = 0

    calls: ClassVar[tuple[str, ...]] = ()  # functions in C

    def helpers(self) -> tuple[str, ...]:
        """Return the functions in C that are called."""
        return self.calls

    def lines(self, at: Place) -> list[str]:
        """Return the statements."""
        raise NotImplementedError

    def run(self, state: State) -> None:
        """Compute the same."""
        raise NotImplementedError


class Subtract(Step):
    """y = x − constant."""

    calls = ("subtract",)

    def lines(self, at: Place) -> list[str]:
        """Return the statements."""
        name = self.constants[0].name
        return [f"subtract({at(self.source)}, {name}, {at(self.target)}, {self.size});"]

    def run(self, state: State) -> None:
        """Compute the same."""
        state.values[self.target] = state.values[self.source] - self.constants[0].values


class Relu(Step):
    """y = max(x, 0)."""

    calls = ("relu",)

    def lines(self, at: Place) -> list[str]:
        """Return the statements."""
        return [f"relu({at(self.source)}, {at(self.target)}, {self.size});"]

    def run(self, state: State) -> None:
        """Compute the same."""
        state.values[self.target] = np.maximum(state.values[self.source], 0)


class Copy(Step):
    """y = x, or its beginning."""

    calls = ("copy",)

    def lines(self, at: Place) -> list[str]:
        """Return the statements."""
        return [f"copy({at(self.source)}, {at(self.target)}, {self.size});"]

    def run(self, state: State) -> None:
        """Compute the same."""
        state.values[self.target] = state.values[self.source][:, : self.size]


@dataclass(frozen=True, eq=False, kw_only=True)
class Times(Step):
    """y = W x + b, for one vector or for several, one behind the other."""

    matrix: Matrix
    count: int = 1
    bias: Constant | None = None

    def helpers(self) -> tuple[str, ...]:
        """Return the functions in C that are called."""
        more = ("add",) if self.bias is not None else ()
        return (self._function, *more)

    @property
    def _function(self) -> str:
        return ("times_runs" if self.matrix.runs else "times") + SUFFIX[self.matrix.storage]

    def lines(self, at: Place) -> list[str]:
        """Return the statements."""
        rows, columns = self.matrix.values.shape
        sizes = f"{rows}" if self.matrix.runs else f"{rows}, {columns}"
        lines = []
        for index in range(self.count):
            x, y = _plus(at(self.source), index * columns), _plus(at(self.target), index * rows)
            lines.append(f"{self._function}({self.matrix.arguments}, {x}, {y}, {sizes});")
            if self.bias is not None:
                lines.append(f"add({y}, {self.bias.name}, {rows});")
        return lines

    def run(self, state: State) -> None:
        """Compute the same."""
        x = state.values[self.source]
        rows, columns = self.matrix.values.shape
        y = x[:, : self.count * columns].reshape(len(x), self.count, columns)
        y = y @ self.matrix.values.T.astype(np.float32)
        y = y if self.bias is None else y + self.bias.values
        state.values[self.target] = y.reshape(len(x), self.count * rows)


@dataclass(frozen=True)
class Geometry:
    """A convolution over three axes: sizes, kernel, stride, dilation, zeros before the image."""

    channels: tuple[int, int]
    groups: int
    size: tuple[int, ...]
    out: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    before: tuple[int, ...]

    @property
    def numbers(self) -> list[int]:
        """In the order in which the function in C reads them."""
        parts = self.size, self.out, self.kernel, self.stride, self.dilation, self.before
        return [*self.channels, self.groups, *(n for part in parts for n in part)]

    @property
    def after(self) -> tuple[int, ...]:
        """What the windows read behind the image; negative where they do not reach its end."""
        every = zip(
            *(self.size, self.out, self.kernel, self.stride, self.dilation, self.before),
            strict=True,
        )
        return tuple((o - 1) * s + d * (k - 1) + 1 - n - p for n, o, k, s, d, p in every)


@dataclass(frozen=True, eq=False, kw_only=True)
class Convolve(Step):
    """y = K ∗ x."""

    kernel: Array  # (channels, channels / groups, k, k, k), after rounding
    storage: str
    geometry: Geometry

    @property
    def _function(self) -> str:
        return "convolve" + SUFFIX[self.storage]

    def helpers(self) -> tuple[str, ...]:
        """Return the functions in C that are called."""
        return (self._function,)

    def lines(self, at: Place) -> list[str]:
        """Return the statements."""
        *arrays, geometry = (constant.name for constant in self.constants)
        arguments = ", ".join([*arrays, at(self.source), at(self.target), geometry])
        return [f"{self._function}({arguments});"]

    def run(self, state: State) -> None:
        """Compute the same."""
        g, x = self.geometry, state.values[self.source]
        x = x[:, : g.channels[0] * math.prod(g.size)].reshape(len(x), g.channels[0], *g.size)
        margins = [n for pair in zip(g.before, g.after, strict=True) for n in reversed(pair)]
        image = F.pad(torch.from_numpy(np.ascontiguousarray(x)), margins[::-1])
        kernel = torch.from_numpy(self.kernel)
        y = F.conv3d(image, kernel, None, g.stride, 0, g.dilation, g.groups)
        state.values[self.target] = y.reshape(len(x), -1).numpy()


@dataclass(frozen=True, eq=False, kw_only=True)
class Scaled(Step):
    """y = factor · x."""

    factor: float
    calls = ("multiply",)

    def lines(self, at: Place) -> list[str]:
        """Return the statements."""
        x, y, factor = at(self.source), at(self.target), number(self.factor, "float")
        return [f"multiply({x}, {factor}, {y}, {self.size});"]

    def run(self, state: State) -> None:
        """Compute the same."""
        state.values[self.target] = state.values[self.source] * np.float32(self.factor)


@dataclass(frozen=True, eq=False, kw_only=True)
class Enter(Step):
    """Begin a part: x̂ = x / m with the largest magnitude 1, and τ = ‖x̂‖."""

    groups: int
    calls = ("peak", "divide", "dot_f")

    def lines(self, at: Place) -> list[str]:
        """Return the statements."""
        x, u, size = at(self.source), at(self.target), self.size
        scalars = "".join(f", n{index} = 0" for index in range(self.groups))
        return [
            "{",
            f"const float m = peak({x}, {size});",
            f"double t = 0{scalars};",
            f"divide({x}, m, {u}, {size});",
            f"t = sqrt((double)dot_f({u}, {u}, {size}));",
        ]

    def run(self, state: State) -> None:
        """Compute the same."""
        x = state.values[self.source]
        peak = np.abs(x).max(1, initial=0)
        peak = peak + (peak == 0).astype(np.float32)
        state.values[self.target] = unit = x / peak[:, None]
        state.m, state.n = peak.astype(np.float64), {}
        state.tau = np.sqrt((unit * unit).sum(1).astype(np.float64))


@dataclass(frozen=True, eq=False, kw_only=True)
class Value(Step):
    """n = weight · x̂ᵀ Q x̂."""

    form: Form
    group: int
    weight: float

    def helpers(self) -> tuple[str, ...]:
        """Return the functions in C that are called."""
        return (self._function,)

    @property
    def _function(self) -> str:
        return ("form_runs" if self.form.runs else "form") + SUFFIX[self.form.storage]

    def lines(self, at: Place) -> list[str]:
        """Return the statements."""
        call = (
            f"{self._function}({self.form.arguments}, {at(self.source)}, {len(self.form.values)})"
        )
        n = f"n{self.group}"
        return [f"{n} = {number(self.weight)} * {call};", f"{n} = {n} < 0 ? 0 : {n};"]

    def run(self, state: State) -> None:
        """Compute the same."""
        x = state.values[self.source]
        product = x @ self.form.values.astype(np.float32)
        value = self.weight * (product * x).sum(1, dtype=np.float64)
        state.n[self.group] = np.maximum(value, 0)


@dataclass(frozen=True, eq=False, kw_only=True)
class Energy(Step):
    """n = n + weight · ‖z‖²."""

    count: int
    group: int
    weight: float
    calls = ("dot_f",)

    def lines(self, at: Place) -> list[str]:
        """Return the statements."""
        z = at(self.source)
        call = f"(double)dot_f({z}, {z}, {self.count})"
        return [f"n{self.group} += {number(self.weight)} * {call};"]

    def run(self, state: State) -> None:
        """Compute the same."""
        z = state.values[self.source][:, : self.count]
        value = self.weight * (z * z).sum(1).astype(np.float64)
        state.n[self.group] = state.n.get(self.group, 0) + value


@dataclass(frozen=True, eq=False, kw_only=True)
class Leave(Step):
    """End a part: the coordinate grows by every rule, and y = scale · v / τ + bias."""

    rules: tuple[str, ...]
    scale: float
    bias: Constant | None

    def helpers(self) -> tuple[str, ...]:
        """Return the functions in C that are called."""
        growths = [GROWTHS[rule] for rule in self.rules if rule in ("gnomonic", "radial_tanh")]
        return ("multiply", "ratio", *growths, *(("add",) if self.bias is not None else ()))

    def lines(self, at: Place) -> list[str]:
        """Return the statements."""
        lines = []
        for index, rule in enumerate(self.rules):
            if rule == "published":
                lines.append(f"t += (double)m * n{index};")
            elif rule == "projective":
                lines.append(f"t += ratio(n{index}, t);")
            else:
                lines.append(f"t *= {GROWTHS[rule]}(ratio(ratio(n{index}, t), t));")
        y = at(self.target)
        factor = f"(float)ratio({number(self.scale)}, t)"
        lines.append(f"multiply({at(self.source)}, {factor}, {y}, {self.size});")
        if self.bias is not None:
            lines.append(f"add({y}, {self.bias.name}, {self.size});")
        return [*(["(void)m;"] if "published" not in self.rules else []), *lines, "}"]

    def run(self, state: State) -> None:
        """Compute the same."""
        tau = state.tau
        for index, rule in enumerate(self.rules):
            n, inverse = state.n[index], _inverse(tau)
            growth = 1.0 if rule == "published" else grow(rule, n * inverse * inverse)
            tau = tau + state.m * n if rule == "published" else tau * growth
        state.denominators.append(tau)
        factor = (self.scale * _inverse(tau)).astype(np.float32)
        y = state.values[self.source][:, : self.size] * factor[:, None]
        state.values[self.target] = y if self.bias is None else y + self.bias.values


def _inverse(tau: Array) -> Array:
    return np.divide(1.0, tau, where=tau != 0, out=np.zeros_like(tau))


def _plus(place: str, offset: int) -> str:
    return f"{place} + {offset}" if offset else place
