"""The strategies as steps of a C program: forms and matrices written out, or maps one by one."""

from __future__ import annotations

import copy
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import refusal
from ..folding.operators import CONVOLUTIONS, POOLINGS, impulses, is_plain
from ..folding.strategies.banded import BandedCore
from ..folding.strategies.composed import ComposedCore
from ..folding.strategies.dense import DenseCore
from ..folding.strategies.layers import LayersCore
from ..folding.strategies.sparse import SparseCore
from ..nn.layers import Flatten, Identity, Linear
from .c99_arrays import LARGEST_PLACE, Array, Constant, kernel, matrix
from .c99_ops import Convolve, Energy, Geometry, Scaled

if TYPE_CHECKING:
    from .c99_read import Reader

_ENTRIES = 2**24  # of a layer that is written out as a matrix
_RESHAPES = (nn.Flatten, Flatten, nn.Unflatten, nn.Identity, Identity)
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)


def _numpy(tensor: Tensor) -> Array:
    return np.asarray(tensor.detach().cpu().double().numpy())


def dense_matrix(core: DenseCore | BandedCore | SparseCore) -> Array:
    """Return M / gain, (d_out, d_in)."""
    if isinstance(core, SparseCore):
        return _rows(core, "matrix")
    return _numpy(core.matrix)


def dense_form(
    core: DenseCore | BandedCore | SparseCore, index: int, input_shape: tuple[int, ...]
) -> Array:
    """Return a form without its weight, (d_in, d_in), symmetric, to the last bit as it is stored."""
    if isinstance(core, DenseCore):
        half = _numpy(core.forms[index])
    elif isinstance(core, SparseCore):
        half = _rows(core, f"form{index}")
    else:
        half = _band(core, index, prod(input_shape))
    # A form is what its two halves are together; where both are equal, this is exact.
    return np.asarray((half + half.T) / 2)


def _rows(core: SparseCore, name: str) -> Array:
    """Write a matrix in compressed rows out."""
    crow, column, value = (
        _numpy(getattr(core, f"{name}_{part}")) for part in ("crow", "column", "value")
    )
    result = np.zeros((len(crow) - 1, core.largest))
    rows = np.repeat(np.arange(len(crow) - 1), np.diff(crow.astype(int)))
    result[rows, column.astype(int)] = value
    return result


def _band(core: BandedCore, index: int, d_in: int) -> Array:
    """Write the bilinear form of a band out, in the order of the input."""
    size, width = core.layout.size, core.widths[index]
    band, last = (_numpy(getattr(core, f"{name}{index}")) for name in ("band", "last"))
    total = core.layout.blocks * size
    ordered = np.zeros((total, total))
    for i, block in enumerate(band):
        start = i * size
        ordered[start : start + (width + 1) * size, start : start + size] += block
    if width:
        ordered[-width * size :, -width * size :] += last
    order = core.layout.order().numpy()
    result = np.zeros((d_in, d_in))
    result[np.ix_(order, order)] = ordered[:d_in, :d_in]
    return result


class Maps:
    """Append the steps of a strategy that keeps feature maps.

    Args:
        reader: collects the steps; its value at hand is x̂.
        name: of the part.
        core: what to read.
    """

    def __init__(self, reader: Reader, name: str, core: ComposedCore | LayersCore) -> None:
        self.reader, self.name, self.core = reader, name, core
        self.count = 0
        self.group_of = {i: g for g, members in enumerate(core.groups) for i in members}

    def read(self) -> None:
        """Append all steps."""
        if isinstance(self.core, LayersCore):
            for index, stage in enumerate(self.core.stages):
                self._layers(stage, self.core.factors[index])
                if index < len(self.core.weights):
                    self._energy(index)
            return
        self._route(self.core)

    def _route(self, core: ComposedCore) -> None:
        """Follow the moves of composed convolutions."""
        reader, geometry = self.reader, core.geometry
        first, first_shape = reader.last, reader.shape
        for index, move in enumerate(core.moves):
            before, shape = reader.last, reader.shape
            if move.multiplies:
                if move.how == "matrix of x":
                    reader.last, reader.shape = first, first_shape
                weights = _channels_first(_numpy(getattr(core, f"step{index}")), reader.shape)
                reader.times(matrix(f"{self.name}_matrix", weights, reader.storage))
                return
            if move.how == "layers":
                self._layers(core.layers[index], core.factors[index])
            else:
                stride, padding = geometry.steps[index]
                weight = _numpy(getattr(core, f"step{index}"))
                self._convolve(weight, stride, padding)
            if move.energy is not None:
                self._energy(move.energy)
            if move.how == "pooled":  # the channels that are kept come first
                reader.shape = (geometry.kept[index], *reader.shape[1:])
            elif not move.keep:
                reader.last, reader.shape = before, shape

    def _energy(self, index: int) -> None:
        reader = self.reader
        step = Energy(
            source=reader.last,
            target=reader.last,
            size=0,
            multiply_adds=reader.size,
            count=reader.size,
            group=self.group_of[index],
            weight=self.core.weights[index],
        )
        reader.add(step)

    def _layers(self, modules: Any, factor: float) -> None:
        """Append layers, and a factor that no weight could take."""
        for module in modules:
            self._layer(module)
        reader = self.reader
        if factor != 1.0:
            # x̂ itself may still be needed, where there was no layer.
            target = reader.last if len(modules) else reader.new()
            reader.add(Scaled(source=reader.last, target=target, size=reader.size, factor=factor))

    def _layer(self, module: Any) -> None:
        reader = self.reader
        if type(module) in _DROPOUTS:
            return
        with torch.no_grad():
            like = next(iter(module.buffers()), torch.zeros(0))
            zeros = torch.zeros(1, *reader.shape, dtype=like.dtype, device=like.device)
            shape = tuple(module(zeros).shape[1:])
        if type(module) in _RESHAPES:
            reader.shape = shape
        elif type(module) in (nn.Linear, Linear):
            *outer, _ = reader.shape
            weights = matrix(self._next(), _numpy(module.weight), reader.storage)
            reader.times(weights, prod(outer))
            reader.shape = shape
        elif is_plain(module, CONVOLUTIONS) and self._zeros(module):
            axes = len(module.kernel_size)
            self._convolve(
                _numpy(module.weight),
                module.stride,
                _padding(module),
                module.dilation,
                module.groups,
                shape[-axes:],
            )
        elif is_plain(module, POOLINGS) and _plain_pool(module):
            self._pool(module, shape)
        else:
            self._written_out(module, shape)

    @staticmethod
    def _zeros(module: Any) -> bool:
        return bool(module.padding_mode == "zeros" or not any(_padding(module)))

    def _pool(self, module: Any, shape: tuple[int, ...]) -> None:
        """Append a mean over windows as a convolution of each channel."""
        axes = len(shape) - 1
        window, stride, padding = (
            _each(getattr(module, name), axes) for name in ("kernel_size", "stride", "padding")
        )
        divisor = getattr(module, "divisor_override", None) or prod(window)
        weight = np.full((shape[0], 1, *window), 1 / divisor)
        self._convolve(weight, stride, padding, groups=shape[0], out=shape[1:])

    def _convolve(
        self,
        weight: Array,
        stride: tuple[int, ...],
        padding: tuple[int, ...],
        dilation: tuple[int, ...] = (1,),
        groups: int = 1,
        out: tuple[int, ...] | None = None,
    ) -> None:
        """Append a convolution; fewer than three axes get leading ones of size 1."""
        reader, name = self.reader, self._next()
        axes = weight.ndim - 2
        ones, zeros = (1,) * (3 - axes), (0,) * (3 - axes)
        size, window = (*ones, *reader.shape[1:]), (*ones, *weight.shape[2:])
        steps, gaps = (*ones, *_each(stride, axes)), (*ones, *_each(dilation, axes))
        before = (*zeros, *_each(padding, axes))
        if out is None:
            every = zip(size, window, steps, before, strict=True)
            out = tuple((n + 2 * p - k) // s + 1 for n, k, s, p in every)[-axes:]
        channels = reader.shape[0], len(weight)
        geometry = Geometry(channels, groups, size, (*ones, *out), window, steps, gaps, before)
        values, constants = kernel(name, weight, reader.storage)
        numbers = Constant(f"{name}_geometry", "int32_t", np.array(geometry.numbers))
        total = len(weight) * prod(out)
        reader.add(
            Convolve(
                source=reader.last,
                target=reader.new(),
                size=total,
                constants=(*constants, numbers),
                multiply_adds=total * weight[0].size,
                kernel=values.reshape(*weight.shape[:2], *window),
                storage=reader.storage,
                geometry=geometry,
            )
        )
        reader.shape = (len(weight), *out)

    def _written_out(self, module: nn.Module, shape: tuple[int, ...]) -> None:
        """Append any other linear layer as a matrix with the entries that are not zero."""
        reader, d_out = self.reader, prod(shape)
        if reader.size * d_out > _ENTRIES or reader.size > LARGEST_PLACE:
            raise refusal(
                "export_c(folded)",
                f"a layer whose matrix has at most {_ENTRIES} entries",
                f"{type(module).__name__} with {d_out} × {reader.size}",
                'Fold with strategy="dense".',
            )
        exact = copy.deepcopy(module).double().cpu()
        like = torch.empty(0, dtype=torch.float64)
        with torch.no_grad():
            columns = [exact(x).flatten(1) for x in impulses(reader.shape, 256, like)]
        values = np.ascontiguousarray(_numpy(torch.cat(columns)).T)
        reader.times(matrix(self._next(), values, reader.storage))
        reader.shape = shape

    def _next(self) -> str:
        self.count += 1
        return f"{self.name}_layer{self.count - 1}"


def _channels_first(weights: Array, shape: tuple[int, ...]) -> Array:
    """Order the columns of a matrix as the maps are here; those of images were channels last."""
    if len(shape) != 3:
        return weights
    channels, *spatial = shape
    return np.moveaxis(weights.reshape(-1, *spatial, channels), -1, 1).reshape(len(weights), -1)


def _padding(module: Any) -> tuple[int, ...]:
    """Return the zeros before each axis."""
    if module.padding == "same":
        spans = zip(module.dilation, module.kernel_size, strict=True)
        return tuple(d * (k - 1) // 2 for d, k in spans)
    axes = len(module.kernel_size)
    return _each(0 if module.padding == "valid" else module.padding, axes)


def _plain_pool(module: Any) -> bool:
    """Tell whether every window has the same divisor and lies inside, zeros counted."""
    axes = 3
    padded = any(_each(module.padding, axes))
    return not module.ceil_mode and (not padded or module.count_include_pad)


def _each(value: Any, axes: int) -> tuple[int, ...]:
    values = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    return values * axes if len(values) == 1 else values
