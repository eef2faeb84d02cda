"""The step of a part with biases or branches; see ``recurrence.py`` for what is computed.

An energy may be a small difference of its parts, so that all constants are double. In double no
square of a float leaves the range: the image is read as it is, and ``1/‖x‖`` takes the place of
``1/(m·τ)``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ..folding.recurrence import Key
from ..nn.activations import LARGEST
from .c99_arrays import Array, Constant, Form, number
from .c99_ops import GROWTHS, Place, State, Step, grow


@dataclass(frozen=True, eq=False)
class Site:
    """One activation: its rule, the keys of the parts of its point, and what their energy needs."""

    rule: str
    parts: tuple[Key, ...]
    shifts: tuple[Key, ...]
    coordinate: Key
    factor: float
    gram: Constant | None


@dataclass(frozen=True, eq=False, kw_only=True)
class Recur(Step):
    """y = Σ k·(M x) + Σ k·v + bias, with coefficients that the sites divide one after the other."""

    count: int  # coefficients of an image
    matrix: Constant  # (parts, size, count)
    forms: tuple[Form, ...]
    weights: tuple[float, ...]
    rows: Constant | None  # (dots, count)
    sites: tuple[Site, ...]
    parts: tuple[Key, ...]
    shifts: tuple[Key, ...]
    vectors: Constant | None  # (shifts, size)
    scale: float
    bias: Constant | None

    def helpers(self) -> tuple[str, ...]:
        """Return the functions in C that are called."""
        found = ["norm", "ratio", "dot_d"]
        found += [_function(form) for form in self.forms]
        keys = [*self.parts, *self.shifts]
        for site in self.sites:
            keys += [*site.parts, *site.shifts]
            found += [] if site.rule == "published" else [GROWTHS[site.rule]]
            found += ["pairing", "gram"] if site.gram is not None else []
            found += ["grown"] if site.rule == "published" and site.coordinate else []
        return (*found, *(("over",) if any(keys) else ()))

    def lines(self, at: Place) -> list[str]:
        """Return the statements."""
        x, y, n = at(self.source), at(self.target), self.count
        growths, values = max(1, len(self.sites)), max(1, len(self.forms))
        lines = [
            "{",
            f"const double length = norm({x}, {n}), inverse = ratio(1, length);",
            "const double alive = length == 0 ? 0 : 1;",
            f"double growth[{growths}] = {{0}}, value[{values}] = {{0}}, energy, t;",
            "int32_t i, j;",
            "(void)alive; (void)growth; (void)value; (void)energy; (void)t; (void)j;",
        ]
        for index, (form, weight) in enumerate(zip(self.forms, self.weights, strict=True)):
            call = f"{_function(form)}({form.arguments}, {x}, {n})"
            lines.append(f"value[{index}] = {number(weight)} * {call};")
        used = row = 0
        for index, site in enumerate(self.sites):
            lines += ["{", *self._site(index, site, x, used, row), "}"]
            used += len(site.parts) * (len(site.parts) + 1) // 2
            row += len(site.parts) * len(site.shifts)
        lines += _list("k", [f"{number(self.scale)} * {_over('inverse', p)}" for p in self.parts])
        lines += _list("c", [_over("alive", key) for key in self.shifts])
        lines += [
            f"for (i = 0; i < {self.size}; i++) {{",
            "double sum = 0;",
            f"for (j = 0; j < {len(self.parts)}; j++)",
            f"    sum += k[j] * dot_d({self.matrix.name} + (j * {self.size} + i) * {n}, {x}, {n});",
        ]
        if self.vectors is not None:
            lines.append(f"for (j = 0; j < {len(self.shifts)}; j++)")
            lines.append(f"    sum += c[j] * {self.vectors.name}[j * {self.size} + i];")
        more = "" if self.bias is None else f" + {self.bias.name}[i]"
        return [*lines, f"({y})[i] = (float)sum{more};", "}", "}"]

    def _site(self, index: int, site: Site, x: str, used: int, row: int) -> Iterator[str]:
        """Yield the statements of one activation."""
        yield from _list("k", [_over("inverse", key) for key in site.parts])
        yield "energy = 0;"
        for a in range(len(site.parts)):
            for b in range(a, len(site.parts)):
                twice = "" if a == b else "2 * "
                yield f"energy += {twice}k[{a}] * k[{b}] * value[{used}];"
                used += 1
        if site.gram is not None and self.rows is not None:
            shifts = len(site.shifts)
            yield from _list("c", [_over("alive", key) for key in site.shifts])
            yield f"energy += gram(c, {site.gram.name}, {shifts});"
            for a in range(len(site.parts)):
                yield f"for (j = 0; j < {shifts}; j++)"
                dots = f"{self.rows.name} + ({row + a * shifts} + j) * {self.count}"
                yield f"    energy += 2 * k[{a}] * c[j] * dot_d({dots}, {x}, {self.count});"
        yield "energy = energy < 0 ? 0 : energy;"
        if site.rule == "published":
            t = f"length * {number(site.factor)}"
            for first, last in _spans(site.coordinate):
                t = f"grown({t}, growth, {first}, {last})"
            yield f"t = {t};"
            yield "t = 1 + t * energy;"
        else:
            yield f"t = {GROWTHS[site.rule]}(energy);"
        yield f"growth[{index}] = t > {number(LARGEST)} ? {number(LARGEST)} : t;"

    def run(self, state: State) -> None:
        """Compute the same."""
        x = state.values[self.source].astype(np.float64)
        length = np.sqrt((x * x).sum(1))
        alive = (length != 0).astype(np.float64)
        inverse = np.divide(1.0, length, where=length != 0, out=np.zeros_like(length))
        growths: list[Array] = []

        def along(key: Key, first: Array) -> Array:
            for site in key:
                first = first / growths[site]
            return first

        values = iter(
            weight * ((x @ form.values) * x).sum(1)
            for form, weight in zip(self.forms, self.weights, strict=True)
        )
        dots = np.zeros((len(x), 0))
        if self.rows is not None:
            dots = x @ self.rows.values.reshape(-1, self.count).T
        row = 0
        for site in self.sites:
            linear = [along(key, inverse) for key in site.parts]
            energy = np.zeros(len(x))
            for a, first in enumerate(linear):
                for b, second in enumerate(linear[a:]):
                    energy = energy + (2 if b else 1) * first * second * next(values)
            if site.gram is not None:
                c = np.stack([along(key, alive) for key in site.shifts], 1)
                products = site.gram.values.reshape(c.shape[1], -1)
                energy = energy + ((c @ products) * c).sum(1)
                for k in linear:
                    mixed = (dots[:, row : row + c.shape[1]] * c).sum(1)
                    energy, row = energy + 2 * k * mixed, row + c.shape[1]
            t = length * site.factor
            for before in site.coordinate:
                t = np.minimum(t * growths[before], LARGEST)
            q = np.maximum(energy, 0)
            grown = 1 + t * q if site.rule == "published" else grow(site.rule, q)
            growths.append(np.minimum(grown, LARGEST))
        matrices = self.matrix.values.reshape(len(self.parts), self.size, self.count)
        y = np.zeros((len(x), self.size))
        for key, matrix in zip(self.parts, matrices, strict=True):
            y = y + (self.scale * along(key, inverse))[:, None] * (x @ matrix.T)
        if self.vectors is not None:
            for key, vector in zip(
                self.shifts, self.vectors.values.reshape(-1, self.size), strict=True
            ):
                y = y + along(key, alive)[:, None] * vector
        result = y.astype(np.float32)
        state.values[self.target] = result if self.bias is None else result + self.bias.values


def _function(form: Form) -> str:
    return "form_runs_d" if form.runs else "form_d"


def _list(name: str, items: Sequence[str]) -> list[str]:
    """Declare an array of scalars, if there are any."""
    if not items:
        return []
    listed = [f"{item}," for item in items]
    return [f"const double {name}[{len(items)}] = {{", *listed, "};"]


def _spans(key: Key) -> Iterator[tuple[int, int]]:
    """Yield the stretches of a key that follow each other.

    Examples:
        >>> list(_spans((0, 1, 2, 5)))
        [(0, 3), (5, 6)]
    """
    start = 0
    for index in range(1, len(key) + 1):
        if index == len(key) or key[index] != key[index - 1] + 1:
            yield key[start], key[index - 1] + 1
            start = index


def _over(first: str, key: Key) -> str:
    for start, stop in _spans(key):
        first = f"over({first}, growth, {start}, {stop})"
    return first
