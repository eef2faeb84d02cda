"""Folds made of products, sums and slices alone, which every runtime for graphs has.

Sparse products, strided views and Fourier transforms are not among them: matrices are written out, views
become slices side by side, and a transform becomes one product with cosines and sines per axis.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..folding.folded import Conformal, Folded
from ..folding.strategies.banded import BandedCore
from ..folding.strategies.base import wide
from ..folding.strategies.circular import CircularCore
from ..folding.strategies.dense import DenseCore
from ..folding.strategies.sparse import SparseCore
from ..folding.strategies.torus import TorusCore
from ..functional import wide_dtype

Values = tuple[Tensor, tuple[Tensor, ...]]


def plain(folded: Folded) -> Folded:
    """Return a fold on the CPU with the same numbers up to rounding; arrays are shared.

    Args:
        folded: in float32 or float64.
    """
    shared: dict[int, Any] = {id(t): t for t in (*folded.buffers(), *folded.parameters())}
    copied = copy.deepcopy(folded, shared).cpu()
    for module in list(copied.modules()):
        if isinstance(module, Conformal):
            make = _PLAIN.get(type(module.core))
            if make is not None:
                module.core = make(module.core)  # type: ignore[assignment]
    return copied


class Written(nn.Module):
    """Strategy "dense" or "sparse" with every matrix written out and apart."""

    matrix: Tensor

    def __init__(self, core: DenseCore | SparseCore) -> None:
        super().__init__()
        self.output_shape, self.weights = core.output_shape, core.weights
        if isinstance(core, SparseCore):
            matrix = core.written_out("matrix")
            forms = [core.written_out(f"form{index}") for index in range(len(self.weights))]
        else:
            matrix, forms = core.matrix, list(core.forms)
        self.register_buffer("matrix", matrix.T.contiguous())
        for index, form in enumerate(forms):
            self.register_buffer(f"form{index}", form)

    def forward(self, x: Tensor) -> Values:
        """Return M x̂ / gain, and the value of each form."""
        flat = x.flatten(1)
        forms = [getattr(self, f"form{index}") for index in range(len(self.weights))]
        values = tuple(
            wide((flat @ form * flat).sum(1)) * weight
            for form, weight in zip(forms, self.weights, strict=True)
        )
        return (flat @ self.matrix).view(-1, *self.output_shape), values


class Slices(nn.Module):
    """Strategy "banded" with its windows side by side in memory."""

    matrix: Tensor

    def __init__(self, core: BandedCore) -> None:
        super().__init__()
        self.output_shape, self.layout = core.output_shape, core.layout
        self.weights, self.widths = core.weights, core.widths
        self.register_buffer("matrix", core.matrix)
        for name, array in core.named_buffers():
            if name.startswith(("band", "last")):
                self.register_buffer(name, array)

    def forward(self, x: Tensor) -> Values:
        """Return M x̂ / gain, and the value of each form."""
        v = (x.flatten(1) @ self.matrix.T).view(-1, *self.output_shape)
        blocks, size = self.layout.blocks, self.layout.size
        rows = x.movedim(2, 1).flatten(1)
        if rows.shape[1] < blocks * size:
            rows = F.pad(rows, (0, blocks * size - rows.shape[1]))
        grid = rows.view(-1, blocks, size)
        values = []
        for index, (weight, width) in enumerate(zip(self.weights, self.widths, strict=True)):
            band, last = getattr(self, f"band{index}"), getattr(self, f"last{index}")
            full = blocks - width
            places = [first + i for first in range(full) for i in range(width + 1)]
            windows = grid[:, places].view(-1, full, (width + 1) * size)
            images = windows.transpose(0, 1) @ band
            total = _sum(images * grid[:, :full].transpose(0, 1))
            if width:
                end = rows[:, full * size :]
                total = total + wide((end @ last * end).sum(1))
            values.append(total * weight)
        return v, tuple(values)


class Fourier(nn.Module):
    """The transform of real images and its inverse, by products.

    A half spectrum is (F, B, 2C): frequencies first, then real parts of all channels and imaginary ones.

    Args:
        spatial: sizes of the axes.
        dtype: of the arithmetic.
    """

    last: Tensor
    last_back: Tensor

    def __init__(self, spatial: tuple[int, ...], dtype: torch.dtype) -> None:
        super().__init__()
        self.spatial, self.kept = spatial, spatial[-1] // 2 + 1  # frequencies of the last axis
        cos, sin = _waves(spatial[-1])
        cos, sin = cos[:, : self.kept], sin[:, : self.kept]
        self.register_buffer("last", torch.cat([cos, -sin], 1).to(dtype))
        double = torch.full((self.kept, 1), 2.0 / spatial[-1], dtype=torch.float64)
        double[0] /= 2
        if spatial[-1] % 2 == 0:
            double[-1] /= 2
        self.register_buffer("last_back", torch.cat([cos.T * double, -sin.T * double]).to(dtype))
        for axis, n in enumerate(spatial[:-1]):
            cos, sin = _waves(n)
            there = torch.cat([torch.cat([cos, -sin], 1), torch.cat([sin, cos], 1)])
            self.register_buffer(f"axis{axis}", there.to(dtype))
            self.register_buffer(f"axis{axis}_back", (there.T / n).to(dtype))

    def forward(self, x: Tensor) -> Tensor:
        """Transform (B, C, *spatial) → (F, B, 2C)."""
        part = x.dim() - 1
        z = (x @ self.last).unflatten(-1, (2, self.kept))  # (B, C, …, 2, kept)
        for axis in range(len(self.spatial) - 1):
            z = self._along(axis, z, getattr(self, f"axis{axis}"))
        frequencies = prod(self.spatial[:-1]) * self.kept
        moved: Tensor = z.movedim((0, part, 1), (-3, -2, -1))
        return moved.reshape(frequencies, -1, 2 * x.shape[1])

    def back(self, u: Tensor) -> Tensor:
        """Transform (F, B, 2C) → (B, C, *spatial)."""
        part = len(self.spatial) + 1
        z = u.view(*self.spatial[:-1], self.kept, -1, 2, u.shape[2] // 2)
        z = z.movedim((-3, -2, -1), (0, part, 1))
        for axis in range(len(self.spatial) - 1):
            z = self._along(axis, z, getattr(self, f"axis{axis}_back"))
        image: Tensor = z.flatten(-2) @ self.last_back
        return image

    def _along(self, axis: int, z: Tensor, waves: Tensor) -> Tensor:
        """Multiply real and imaginary parts along one axis of (B, C, …, 2, kept)."""
        places = z.dim() - 2, axis + 2
        moved = z.movedim(places, (-2, -1))
        parts: Tensor = (moved.flatten(-2) @ waves).unflatten(-1, (2, self.spatial[axis]))
        return parts.movedim((-2, -1), places)


def _sum(products: Tensor) -> Tensor:
    """Sum (…, B, …) to (B,); runtimes add one by one, so the long axis is wide."""
    return wide(products.sum(2)).sum(0)


def _waves(n: int) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of 2π·j·k/n in float64, from angles below one turn."""
    index = torch.arange(n)
    turns = (index[:, None] * index % n).double() / n
    angle = 2 * torch.pi * turns
    sin = torch.where(2 * turns % 1 == 0, 0.0, angle.sin())  # of half a turn: exactly 0
    return angle.cos(), sin


def _blocks(symbol: Tensor) -> Tensor:
    """Return complex (C_out, C_in, F) as real matrices of rows, (F, 2·C_in, 2·C_out)."""
    real, imaginary = symbol.real.permute(2, 1, 0), symbol.imag.permute(2, 1, 0)
    upper = torch.cat([real, imaginary], 2)
    return torch.cat([upper, torch.cat([-imaginary, real], 2)], 1).contiguous()


class Circular(nn.Module):
    """Strategy "spectral" on a torus."""

    matrix: Tensor | None
    transfer: Tensor  # only without a matrix

    def __init__(self, core: CircularCore) -> None:
        super().__init__()
        self.output_shape, self.weights = core.output_shape, core.weights
        self.fourier = Fourier(core.spatial, core.symbols.dtype)
        for index, symbol in enumerate(torch.view_as_complex(core.symbols)):
            self.register_buffer(f"form{index}", _blocks(symbol))
        self.register_buffer("matrix", core.matrix)
        if core.transfer is not None:
            self.register_buffer("transfer", _blocks(torch.view_as_complex(core.transfer)))

    def forward(self, x: Tensor) -> Values:
        """Return M x̂ / gain, and the value of each form."""
        u = self.fourier(x)
        values = []
        for index, weight in enumerate(self.weights):
            values.append(_sum(u @ getattr(self, f"form{index}") * u) * weight)
        if self.matrix is None:
            return self.fourier.back(u @ self.transfer), tuple(values)
        return (x.flatten(1) @ self.matrix.T).view(-1, *self.output_shape), tuple(values)


class Torus(nn.Module):
    """Strategy "spectral" without circular padding."""

    def __init__(self, core: TorusCore) -> None:
        super().__init__()
        self.core = core
        self.dtype = torch.promote_types(wide_dtype(core.high.device), core.high.dtype)
        self.fourier = Fourier(core.spatial, self.dtype)
        symbols = torch.view_as_complex(core.high.to(self.dtype) + core.low.to(self.dtype))
        for index, symbol in enumerate(symbols):
            self.register_buffer(f"form{index}", _blocks(symbol))
        core.register_buffer("high", None)
        core.register_buffer("low", None)

    def forward(self, x: Tensor) -> Values:
        """Return M x̂ / gain, and the value of each form."""
        core = self.core
        pads = [p for p in reversed(core.padding) for _ in range(2)]
        exact = F.pad(x.to(self.dtype), pads) if any(pads) else x.to(self.dtype)
        u = self.fourier(exact)
        values = [_sum(u @ getattr(self, f"form{index}") * u) for index in range(core.forms)]
        found: Values = core.finished(x, exact, values)
        return found


_PLAIN: dict[type[nn.Module], Callable[[Any], nn.Module]] = {
    DenseCore: Written,
    SparseCore: Written,
    BandedCore: Slices,
    CircularCore: Circular,
    TorusCore: Torus,
}
