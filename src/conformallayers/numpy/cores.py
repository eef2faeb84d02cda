"""The strategies in numpy: x̂ (B, *input_shape) → M x̂ / gain, and the value of each form."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from .arrays import Array, convolve, flat, reshaped
from .layers import Run

Values = tuple[Array, list[Array]]
CoreRun = Callable[[Array], Values]


class Parts(NamedTuple):
    """What a file says of a core: settings, arrays, and the layers in it as functions."""

    settings: dict[str, Any]
    arrays: dict[str, Array]
    layers: list[Run]


def energy(z: Array) -> Array:
    """Return ‖z‖² of each sample in float64."""
    wide = flat(z).astype(np.float64, copy=False)
    return np.asarray(np.einsum("bi,bi->b", wide, wide))


def _matrix(x: Array, matrix: Array, shape: Sequence[int]) -> Array:
    return reshaped(flat(x) @ matrix.T, *shape)


def _dots(a: Array, b: Array) -> Array:
    return np.asarray(flat(a * b).sum(1, dtype=np.float64))


def dense(parts: Parts) -> CoreRun:
    """Multiply by M; for each form take the dot product of x̂ and Q x̂."""
    s, t, _ = parts
    matrix, forms = t["matrix"], t["forms"]

    def run(x: Array) -> Values:
        rows, pairs = flat(x), zip(forms, s["weights"], strict=True)
        return _matrix(x, matrix, s["output_shape"]), [_dots(rows @ q, rows) * w for q, w in pairs]

    return run


def banded(parts: Parts) -> CoreRun:
    """Multiply windows of image rows by the band of each form."""
    s, t, _ = parts
    blocks, size = s["layout"].blocks, s["layout"].size

    def form(rows: Array, index: int, width: int) -> Array:
        windows = sliding_window_view(rows, (width + 1) * size, axis=1)[:, ::size]
        windows = windows.transpose(1, 0, 2)  # (blocks - width, B, …)
        images = np.matmul(windows, t[f"band{index}"]) * windows[..., :size]
        total = images.sum((0, 2), dtype=np.float64)
        end = rows[:, rows.shape[1] - width * size :]
        return np.asarray(total + _dots(end @ t[f"last{index}"], end)) if width else total

    def run(x: Array) -> Values:
        rows = flat(np.moveaxis(x, 2, 1))
        rows = np.pad(rows, ((0, 0), (0, blocks * size - rows.shape[1])))
        weights = enumerate(zip(s["weights"], s["widths"], strict=True))
        values = [form(rows, index, width) * weight for index, (weight, width) in weights]
        return _matrix(x, t["matrix"], s["output_shape"]), values

    return run


def sparse(parts: Parts) -> CoreRun:
    """Multiply by the entries that are not zero, one sample at a time."""
    s, t, _ = parts
    names = ["matrix", *(f"form{index}" for index in range(len(s["weights"])))]
    matrices = [_Rows(*(t[f"{n}_{part}"] for part in ("crow", "column", "value"))) for n in names]
    for matrix in matrices:
        matrix.check(s["largest"])

    def run(x: Array) -> Values:
        rows = flat(x)
        if rows.shape[1] != s["largest"]:  # the indices were checked against it
            raise ValueError(f"{rows.shape[1]} coefficients instead of {s['largest']}")
        images = [matrix.times(rows) for matrix in matrices]
        v = reshaped(images[0].astype(x.dtype), *s["output_shape"])
        forms = zip(images[1:], s["weights"], strict=True)
        return v, [_dots(image, rows) * weight for image, weight in forms]

    return run


class _Rows(NamedTuple):
    """A matrix in compressed rows."""

    crow: Array
    column: Array
    value: Array

    def check(self, columns: int) -> None:
        inside = self.column.size == 0 or 0 <= self.column.min() <= self.column.max() < columns
        counted = self.crow[0] == 0 and self.crow[-1] == len(self.column) == len(self.value)
        if not (inside and counted and np.all(np.diff(self.crow) >= 0)):
            raise ValueError("indices outside of a matrix")

    def times(self, x: Array) -> Array:
        """Return the products (B, rows) with samples (B, n), in float64."""
        result = np.zeros((len(x), len(self.crow) - 1))
        filled = np.diff(self.crow) > 0  # reduceat has no empty sums
        starts = self.crow[:-1][filled]
        for sample, row in zip(x, result, strict=True):
            if starts.size:
                row[filled] = np.add.reduceat(
                    self.value * sample[self.column], starts, dtype=np.float64
                )
        return result


def composed(parts: Parts) -> CoreRun:
    """Follow a route: convolve, take energies, end with the last layers or with one matrix."""
    s, t, layers = parts
    moves, geometry = s["moves"], s["geometry"]

    def run(x: Array) -> Values:
        z, energies = x, []
        for index, move in enumerate(moves):
            if move.how in ("matrix", "matrix of x"):
                y = x if move.how == "matrix of x" else z
                y = np.moveaxis(y, 1, -1) if y.ndim == 4 else y
                z = _matrix(y, t[f"step{index}"], s["output_shape"])
                break
            if move.how == "layers":
                y = layers[index](z) * x.dtype.type(s["factors"][index])
            else:
                stride, padding = geometry.steps[index]
                y = convolve(z, t[f"step{index}"], stride, padding=padding)
            if move.energy is not None:
                energies.append(energy(y))
            if move.how == "pooled":
                z = y[:, : geometry.kept[index]]
            elif move.keep:
                z = y
        return z, _sums(energies, s)

    return run


def layered(parts: Parts) -> CoreRun:
    """Run the layers and sum the energies that share a form."""
    s, _, stages = parts

    def run(x: Array) -> Values:
        z, energies = x, []
        for index, (stage, factor) in enumerate(zip(stages, s["factors"], strict=True)):
            z = stage(z) * x.dtype.type(factor)
            if index < len(s["weights"]):
                energies.append(energy(z))
        return z, _sums(energies, s)

    return run


def _sums(energies: list[Array], s: dict[str, Any]) -> list[Array]:
    """Sum the weighted energies of each group."""
    weights = s["weights"]
    return [np.sum([energies[i] * weights[i] for i in group], 0) for group in s["groups"]]


def _spectrum(x: Array) -> Array:
    spectrum = np.fft.rfftn(x, axes=tuple(range(2, x.ndim)))
    return spectrum.reshape(*x.shape[:2], math.prod(spectrum.shape[2:]))


def _complex(pairs: Array) -> Array:
    """Return (…, 2) as complex numbers."""
    return np.asarray(pairs[..., 0] + 1j * pairs[..., 1])


def _form(symbol: Array, spectrum: Array) -> Array:
    """Return the sum of ``X(f)* G(f) X(f)`` over the frequencies."""
    image = np.einsum("oif,bif->bof", symbol, spectrum)
    return np.asarray((image * spectrum.conj()).real.sum((1, 2), dtype=np.float64))


def circular(parts: Parts) -> CoreRun:
    """Sum over the frequencies of a torus; M apart or the same way."""
    s, t, _ = parts
    symbols, spatial = _complex(t["symbols"]), s["spatial"]

    def run(x: Array) -> Values:
        spectrum = _spectrum(x)
        forms = zip(symbols, s["weights"], strict=True)
        values = [_form(symbol, spectrum) * weight for symbol, weight in forms]
        if "matrix" in t:
            return _matrix(x, t["matrix"], s["output_shape"]), values
        v = np.einsum("oif,bif->bof", _complex(t["transfer"]), spectrum)
        v = reshaped(v, v.shape[1], *spatial[:-1], spatial[-1] // 2 + 1)
        image = np.fft.irfftn(v, s=spatial, axes=tuple(range(2, x.ndim)))
        return image.astype(x.dtype), values

    return run


def _cut(x: Array, axis: int, start: int, stop: int) -> Array:
    return x[(slice(None),) * axis + (slice(start, stop),)]


def torus(parts: Parts) -> CoreRun:
    """Sum over the frequencies in float64, and subtract the outputs whose window wraps around."""
    s, t, _ = parts
    symbols = _complex(t["high"].astype(np.float64) + t["low"])
    pads = [(0, 0), (0, 0), *((p, p) for p in s["padding"])]

    def wrapped(x: Array, index: int) -> Array:
        kernel, wraps = t[f"kernel{index}"].astype(np.float64), s["wraps"][index]
        if tuple(k - 1 for k in kernel.shape[2:]) != wraps:
            raise ValueError("windows of another size")
        total = np.zeros(len(x))
        for axis, wrap in enumerate(wraps, 2):
            if wrap == 0:
                continue
            n = x.shape[axis]
            strip = np.concatenate([_cut(x, axis, n - wrap, n), _cut(x, axis, 0, wrap)], axis)
            for later, more in enumerate(wraps[axis - 1 :], axis + 1):
                strip = np.concatenate([strip, _cut(strip, later, 0, more)], later)
            total += energy(convolve(strip, kernel))
        return total

    def run(x: Array) -> Values:
        exact = np.pad(x.astype(np.float64), pads)
        spectrum = _spectrum(exact)
        values = [_form(symbol, spectrum) for symbol in symbols]
        for index, group in enumerate(s["group_of"]):
            values[group] = values[group] - wrapped(exact, index)
        forms = [np.maximum(value, 0) for value in values]
        if "matrix" in t:
            return _matrix(x, t["matrix"], s["output_shape"]), forms
        return convolve(x, t["last"], padding=s["padding"]), forms

    return run


CORES: dict[str, Callable[[Parts], CoreRun]] = {
    "dense": dense,
    "banded": banded,
    "sparse": sparse,
    "conv": composed,
    "layers": layered,
    "circular": circular,
    "torus": torus,
}
