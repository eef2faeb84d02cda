"""Strategy "conv": composed convolutions, only as many as the energies and the result need.

Which layers compose, and where an energy is had without its feature map, is the route; see there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor, nn

from ...functional import transformed
from ..machine import machine
from ..operators import CONVOLUTIONS, POOLINGS, apply_all, impulses, is_plain
from ..stages import Program
from .base import Core, Cost, Request, exact_certificate, no_image, normalised, wide
from .layers import stage_of
from .routes import CONVOLVE, Chain, Move, best_route, kernel_of


class ComposedCore(Core):
    """Follow a route: convolve, take norms, end with the last layers or with one matrix."""

    name = "conv"
    settings = (*Core.settings, "groups", "moves", "geometry", "weights", "factors")
    foreseen = True

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        program = request.program
        self.groups = program.groups
        self.moves, _ = _route(request)
        chain = Chain(program)
        self.geometry = Geometry.of(chain, self.moves)
        self.layers = nn.ModuleList()
        weights = [segment.weight for segment in program.segments]
        factors = []
        pending = 1.0  # what the map at hand still has to be multiplied with
        for index, move in enumerate(self.moves):
            layers, factor = nn.Sequential(), 1.0
            if move.how == "layers":
                operators = chain.operators[move.start : move.stop]
                layers, factor = stage_of(operators, pending * chain.factor(move.levels))
            elif move.how == "matrix of x":
                matrix, self.gain = normalised(request.matrix)
                self._keep(f"step{index}", _rows_last(matrix, program.input_shape), request)
            elif move.how == "matrix":
                matrix, self.gain = normalised(pending * _matrix(chain, move))
                self._keep(f"step{index}", _rows_last(matrix, chain.shape(move.start)), request)
            else:
                kernel = pending * kernel_of(chain, move)
                if not move.keep and move.energy is not None:
                    kernel = kernel * math.sqrt(weights[move.energy])
                    weights[move.energy] = 1.0
                self._keep(f"step{index}", kernel, request)
            if move.keep:
                pending = move.phase ** (-chain.axes / 2) if move.how == "pooled" else 1.0
            self.layers.append(layers)
            factors.append(factor)
        self.weights, self.factors = tuple(weights), tuple(factors)
        self.layers.to(request.device, request.dtype)
        for module in self.layers.modules():
            for name, array in module._buffers.items():
                if array is not None and array.dim() == 4:
                    module._buffers[name] = array.contiguous(memory_format=torch.channels_last)
        self.certificate = exact_certificate(request)

    @classmethod
    def refuses(cls, program: Program) -> str | None:
        """Refuse a network in which nothing can be composed."""
        if (reason := no_image(program)) is not None:
            return reason
        chain = Chain(program)
        if chain.window(0, 1) is None and chain.window(0, chain.ends[0]) is None:
            return "the first layers are no convolution with zero padding or none"
        return None

    @classmethod
    def cost(cls, request: Request, *, built: bool) -> Cost:
        """Return the cost of the best route, and of the change to channels last."""
        _, cost = _route(request)
        return cost + Cost(stream=2 * math.prod(request.program.input_shape), calls=1)

    @classmethod
    def effort(cls, request: Request) -> float:
        """Count the matrix of the input, if the route ends with it; kernels are small."""
        moves, _ = _route(request)
        return request.effort_of_matrix() if moves[-1].how == "matrix of x" else 0.0

    def scratch(self) -> int:
        """Count the two largest maps of the route."""
        return 2 * self.geometry.largest

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return M x̂ / gain, and the value of each form."""
        axes = self.geometry.axes
        images = axes == 2 and not transformed()  # a transform cannot be asked for its layout
        first = x.contiguous(memory_format=torch.channels_last) if images else x
        z = first
        norms: list[Tensor] = []
        for index, (move, layers) in enumerate(zip(self.moves, self.layers, strict=True)):
            factor = self.factors[index]
            if move.how == "layers":
                if not self.geometry.plain[index]:  # a module of one's own may call view
                    z = z.contiguous()
                y = layers(z) if factor == 1.0 else layers(z) * factor
            elif move.multiplies:
                flat = _rows_first(first if move.how == "matrix of x" else z)
                z = (flat @ getattr(self, f"step{index}").T).view(-1, *self.output_shape)
                break
            else:
                stride, padding = self.geometry.steps[index]
                kernel = getattr(self, f"step{index}")
                y = CONVOLVE[axes](z, kernel, stride=stride, padding=padding)
            if move.energy is not None:
                dtype = torch.promote_types(y.dtype, torch.float32)
                norms.append(torch.linalg.vector_norm(y, dim=tuple(range(1, y.dim())), dtype=dtype))
            if move.how == "pooled":
                z = y[:, : self.geometry.kept[index]]
            elif move.keep:
                z = y
        energies = wide(torch.stack(norms)).square()
        values = tuple(self._sum(energies, group) for group in self.groups)
        return z.contiguous(), values

    def _sum(self, energies: Tensor, group: tuple[int, ...]) -> Tensor:
        terms = (energies[i] * w if (w := self.weights[i]) != 1.0 else energies[i] for i in group)
        return reduce(torch.add, terms)

    def _keep(self, name: str, array: Tensor, request: Request) -> None:
        array = array.to(request.device, request.dtype)
        if array.dim() == 4:
            array = array.contiguous(memory_format=torch.channels_last)
        self.register_buffer(name, array)


@dataclass(frozen=True)
class Geometry:
    """The plain numbers of a route: strides and paddings, kept channels, what may be left as is."""

    axes: int
    steps: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    kept: tuple[int, ...]
    plain: tuple[bool, ...]
    largest: int  # elements of a map

    @classmethod
    def of(cls, chain: Chain, moves: tuple[Move, ...]) -> Geometry:
        """Read them from the layers."""
        steps: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        kept: list[int] = []
        plain: list[bool] = []
        sizes = [math.prod(chain.shape(0))]
        for move in moves:
            shape = chain.shape(move.stop)
            window = chain.window(move.start, move.stop)
            modules = [op.module for op in chain.operators[move.start : move.stop]]
            plain.append(all(is_plain(m, (*CONVOLUTIONS, *POOLINGS)) for m in modules))
            if window is None or move.how == "layers" or move.multiplies:
                steps.append(((), ()))
                inner = range(move.start, move.stop + 1)
                sizes += [math.prod(chain.shape(position)) for position in inner]
            else:
                stride = tuple(move.phase * s for s in window.stride)
                steps.append((stride, window.padding))
                positions = math.prod(shape[1:]) // move.phase**chain.axes
                sizes.append(chain.patches(move) * positions)
            kept.append(shape[0])
        return cls(chain.axes, tuple(steps), tuple(kept), tuple(plain), max(sizes))


def _route(request: Request) -> tuple[tuple[Move, ...], Cost]:
    """Return the best route of a request, searched once."""
    key = "route", request.program.output_shape, len(request.program.trailing), machine()
    if key not in request.memo:
        request.memo[key] = best_route(request.program, machine(), request.dtype.itemsize)
    route: tuple[tuple[Move, ...], Cost] = request.memo[key]
    return route


def _matrix(chain: Chain, move: Move) -> Tensor:
    """Return the layers behind a map as one matrix, (d_out, d_map), in float64."""
    operators = chain.operators[move.start :]
    like = torch.empty(0, dtype=torch.float64, device=chain.program.device)
    batches = impulses(chain.shape(move.start), 256, like)
    columns = torch.cat([apply_all(operators, batch).flatten(1) for batch in batches])
    return columns.T * chain.factor(move.levels)


def _rows_last(matrix: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Order the columns of a matrix as channels-last memory has the coefficients."""
    if len(shape) != 3:
        return matrix.contiguous()
    ordered: Tensor = matrix.unflatten(1, shape).movedim(1, -1).flatten(1)
    return ordered.contiguous()


def _rows_first(z: Tensor) -> Tensor:
    """Flatten a map in the order of its memory: channels last for images."""
    return z.movedim(1, -1).flatten(1) if z.dim() == 4 else z.flatten(1)
