"""Strategy "conv": compute the energies and the result of a chain of layers along the cheapest route.

Layers that slide a window compose into one convolution. The energy of a map does not need the map:
several neighbouring outputs are one patch of the input times one matrix. An orthogonal change of basis
keeps the energy. It may give a matrix with fewer rows, or one whose first rows are the average-pooled map.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from ...nn.bounds import Shape
from ...nn.layers import RepeatChannels
from ...recipe import layer_operations as layer
from ...recipe import point_operations as point
from ...recipe.recipe import INPUT, RecipeBuilder
from ..convolution import Convolution, compose, diagonal, dilated, pointwise, regrouped
from ..forms import dense_matrix
from ..lower import Lowering, add_flatten, add_operators, add_product
from ..merge import AffineOperations
from ..plan import LANES, Cost, Evaluation, Problem, Strategy, layer_cost
from ..stages import POOLINGS, Operator, RadialStage, is_plain

_WINDOW = 4096  # coefficients that a composed kernel may read
_MATRIX = 2**22  # entries of a matrix after the last activation
_SPAN = 5  # activations whose energies may be computed from one map
_PHASES = (2, 3, 4)  # neighbouring outputs, per axis, that share a patch
How = Literal["layers", "conv", "pooled", "matrix"]


@dataclass(frozen=True)
class Move:
    """One step of a route: read the map at ``start``, compute the energy or the map at ``stop``.

    ``levels`` is the range of activations whose factors the step multiplies by; ``energy`` is the number of
    the activation whose energy it computes. With ``keep`` the map at ``stop`` becomes the current map;
    without it the map at ``start`` stays current. ``phase`` neighbouring outputs per axis share a patch.
    A "matrix" ends the route; with ``start`` 0 it is M and reads the input, whatever map is current.
    """

    how: How
    start: int
    stop: int
    levels: tuple[int, int]
    energy: int | None = None
    keep: bool = True
    phase: int = 1

    def ends(self, places: RouteMap) -> bool:
        """Check whether the step reaches the end of the chain."""
        return self.stop == len(places.operators)


class RouteMap:
    """The operators of a stage in one line, with the positions of its activations."""

    def __init__(self, stage: RadialStage) -> None:
        self.stage = stage
        self.operators = stage.operators
        self.axes = len(stage.input_shape) - 1
        self._windows: dict[tuple[int, int], Convolution | None] = {}
        self._forms = [_form(operator) for operator in self.operators]
        self.ends: list[int] = []
        position = 0
        for segment in stage.segments:
            position += len(segment.operators)
            self.ends.append(position)

    def shape(self, position: int) -> Shape:
        """Return the shape of the map at a position."""
        return self.operators[position - 1].output_shape if position else self.stage.input_shape

    def factor(self, levels: tuple[int, int]) -> float:
        """Return the product of the factors of a range of activations."""
        return math.prod(segment.factor for segment in self.stage.segments[slice(*levels)])

    def window(self, start: int, stop: int) -> Convolution | None:
        """Return a part of the layers as one convolution that pads with zeros, or None."""
        if (start, stop) not in self._windows:
            self._windows[start, stop] = self._window(start, stop)
        return self._windows[start, stop]

    def composed(self, move: Move) -> Convolution:
        """Return the layers of a step as one convolution."""
        found = self.window(move.start, move.stop)
        if found is None:
            raise TypeError(f"the layers {move.start} to {move.stop} do not compose")
        return found

    def _window(self, start: int, stop: int) -> Convolution | None:
        found: Convolution | str | None = self._forms[stop - 1] if stop > start else None
        if stop > start + 1 and isinstance(found, Convolution):
            before = self.window(start, stop - 1)
            found = None if before is None else compose(before, found, self.shape(start))
        fits = isinstance(found, Convolution) and _patch(found, 1) <= _WINDOW
        return found if isinstance(found, Convolution) and fits else None

    def pools(self, position: int, phase: int) -> bool:
        """Check whether the layer at a position averages disjoint windows of ``phase`` places per axis."""
        form = self._forms[position] if position < len(self.operators) else None
        if form is None or form.kernel != (phase,) * self.axes or form.kernel != form.stride:
            return False
        module = self.operators[position].module
        whole = not any(form.padding) and getattr(module, "divisor_override", None) is None
        return whole and is_plain(module, POOLINGS)

    def patches(self, move: Move) -> int:
        """Return the channels of a step that computes several outputs from one patch."""
        channels = self.shape(move.stop)[0]
        if move.phase == 1:
            return channels
        patch = _patch(self.composed(move), move.phase)
        # An orthogonal change of basis leaves no more rows than a patch has coefficients; see ``fewest``.
        outputs: int = channels * move.phase**self.axes
        if move.how == "pooled":
            return channels + min(outputs - channels, patch)
        return min(outputs, patch)


_NOTHING: tuple[float, Cost, tuple[Move, ...]] = (0.0, Cost(), ())


def best_route(stage: RadialStage, itemsize: int) -> tuple[tuple[Move, ...], Cost]:
    """Return the fastest route and its cost, by dynamic programming.

    A state is the position of the current map, the number of activations whose factors it contains
    (``level``), and the number of energies that are computed (``energy``).
    """
    places = RouteMap(stage)
    last, costs = len(places.ends), [layer_cost(layer, itemsize) for layer in places.operators]

    @cache
    def best(position: int, level: int, energy: int) -> tuple[float, Cost, tuple[Move, ...]]:
        found: list[tuple[float, Cost, tuple[Move, ...]]] = []
        for move in _moves(places, position, level, energy):
            if move.energy is None and move.ends(places):
                rest = _NOTHING
            elif move.energy is None:
                rest = best(move.stop, energy, energy)
            elif move.keep:
                # A pooled map is the output of the layer after the activation.
                rest = best(move.stop + (move.how == "pooled"), energy + 1, energy + 1)
            else:
                rest = best(position, level, energy + 1)
            cost = _cost(places, move, itemsize, costs)
            seconds = cost.seconds()
            found.append((seconds + rest[0], cost + rest[1], (move, *rest[2])))
        return min(found, key=lambda item: item[0])

    # Bottom up: recursion from the start would exceed Python's limit in a deep network.
    for energy in reversed(range(last)):
        best(places.ends[energy], energy + 1, energy + 1)
    _, cost, moves = best(0, 0, 0)
    return moves, cost


def _moves(places: RouteMap, position: int, level: int, energy: int) -> Iterator[Move]:
    """Yield the possible next steps from the current map."""
    total = len(places.operators)
    if energy == len(places.ends):
        levels = level, energy
        yield Move("layers", position, total, levels)
        for stop in range(position + 1, total + 1):
            if places.window(position, stop) is not None:
                yield Move("conv", position, stop, levels)
        outputs = math.prod(places.shape(total))
        for start in dict.fromkeys((position, 0)):
            entries = math.prod(places.shape(start)) * outputs
            if position < total and entries <= _MATRIX:
                yield Move("matrix", start, total, levels)
        return
    stop, levels = places.ends[energy], (level, energy + 1)
    yield Move("layers", position, stop, levels, energy)
    if places.window(position, stop) is None:
        return
    yield Move("conv", position, stop, levels, energy)
    if energy - level >= _SPAN:
        return
    yield Move("conv", position, stop, levels, energy, keep=False)
    for phase in _PHASES:
        if any(n % phase for n in places.shape(stop)[1:]):
            continue
        yield Move("conv", position, stop, levels, energy, keep=False, phase=phase)
        if places.pools(stop, phase):
            yield Move("pooled", position, stop, levels, energy, phase=phase)


def _cost(places: RouteMap, move: Move, itemsize: int, costs: Sequence[Cost]) -> Cost:
    """Return the cost of one step, from those of the layers."""
    inputs, outputs = places.shape(move.start), places.shape(move.stop)
    if move.how == "matrix":
        size = math.prod(inputs) * math.prod(outputs)
        return Cost(gemm=size, stream=math.prod(inputs), calls=3, bytes=size * itemsize)
    energy = Cost(stream=math.prod(outputs), calls=4) if move.energy is not None else Cost()
    if move.how == "layers":
        return sum(costs[move.start : move.stop], energy)
    channels = places.patches(move)
    patch = _patch(places.composed(move), move.phase)
    positions = math.prod(outputs[1:]) // move.phase**places.axes
    idle = (-channels % LANES) * patch * positions
    return Cost(
        conv=channels * patch * positions,
        idle=idle,
        stream=3 * channels * positions,
        calls=6,
        bytes=channels * patch * itemsize,
    )


def kernel_of(places: RouteMap, move: Move) -> Tensor:
    """Return the kernel of a step in float64, (channels, C_in, *window), all factors included.

    A step with a phase p computes p neighbouring outputs per axis from one larger patch: its kernel stacks
    the composed kernel at all p^axes shifts. ``fewest`` then reduces the rows without changing the energy.
    A pooled step first rotates the shifts so that the first group of rows is their mean times p^(axes/2):
    that is the average-pooled map, and only the other rows may be reduced.
    """
    seen = places.composed(move)
    weight = regrouped(seen.numbers()[0], seen.groups, 1)
    kernel = dilated(weight, seen.dilation) * places.factor(move.levels)
    if move.phase == 1:
        return kernel
    shifted = []
    for offsets in product(range(move.phase), repeat=places.axes):
        pads: list[int] = []
        for offset, stride in zip(reversed(offsets), reversed(seen.stride), strict=True):
            pads += [offset * stride, (move.phase - 1 - offset) * stride]
        shifted.append(F.pad(kernel, pads))
    stacked = torch.stack(shifted)  # (phases, C, C_in, *window)
    if move.how == "conv":
        return fewest(stacked.flatten(0, 1))
    turned = torch.tensordot(_means_first(len(shifted)).to(stacked), stacked, dims=1)
    return torch.cat([turned[0], fewest(turned[1:].flatten(0, 1))])


def fewest(kernel: Tensor) -> Tensor:
    """Return a kernel of the same energy with no more channels than coefficients.

    With W = QR and QᵀQ = I, ``‖W x‖ = ‖R x‖``, and R has at most as many rows as W has columns.
    """
    rows = kernel.flatten(1)
    if rows.shape[0] <= rows.shape[1]:
        return kernel
    reduced: Tensor = torch.linalg.qr(rows, mode="r").R
    return reduced.view(-1, *kernel.shape[1:])


def _means_first(count: int) -> Tensor:
    """Return an orthogonal matrix whose first row is constant."""
    basis = torch.eye(count, dtype=torch.float64)
    basis[:, 0] = 1
    turned: Tensor = torch.linalg.qr(basis).Q.T.contiguous()
    return turned * torch.sign(turned[:, :1])


def _patch(form: Convolution, phase: int) -> int:
    """Return the number of coefficients that ``phase`` neighbouring outputs per axis read together."""
    sides = (w + (phase - 1) * s for w, s in zip(form.spans, form.stride, strict=True))
    return form.channels[0] * math.prod(sides)


def _form(operator: Operator) -> Convolution | None:
    """Return an operator as a convolution that pads with zeros, or None."""
    shapes = operator.input_shape, operator.output_shape
    channels, axes = shapes[0][0], len(shapes[0]) - 1
    if isinstance(operator.module, RepeatChannels):
        eye = torch.eye(channels, dtype=torch.float64).repeat(operator.module.times, 1)
        numbers = eye.view(*eye.shape, *[1] * axes), None
        return pointwise(lambda: numbers, (channels, len(eye)), axes)
    builder = RecipeBuilder(shapes[0])
    output = Lowering(builder).module(INPUT, operator.module, shapes[1])
    if output == INPUT:
        return diagonal(torch.ones(channels, dtype=torch.float64), None, axes)
    (first, *others), recipe = builder.operations, builder.recipe(output)
    link = None if others else AffineOperations(recipe).link(first, 0, *shapes)
    form = None if link is None or link.rows else link.form
    if form is None or not form.kernel or form.mode != "zeros" or form.output_padding is not None:
        return None
    return form


class ComposedConv(Strategy):
    """Follow a route: convolve, sum squares, end with the last layers or with one matrix."""

    name = "conv"

    def refuses(self, problem: Problem) -> str | None:
        """Refuse networks whose first layers do not compose, or whose maps could leave the range."""
        if not 2 <= len(problem.stage.input_shape) <= 4:
            return "a sample has no spatial axes"
        if not problem.keeps_range():
            return "values between its layers could leave the range of the dtype"
        places = RouteMap(problem.stage)
        if not places.operators:
            return "there is no layer with weights"
        first = range(1, max(places.ends[0], 1) + 1)
        if all(places.window(0, stop) is None for stop in first):
            first_layer: Any = places.operators[0].module
            mode, name = getattr(first_layer, "padding_mode", "zeros"), type(first_layer).__name__
            fault = "is not a convolution" if mode == "zeros" else f"has padding_mode={mode!r}"
            return f"{name}, the first layer, {fault}"
        return None

    def cost(self, problem: Problem) -> Cost:
        """Return the cost of the best route, including the conversion to channels last."""
        _, cost = _route(problem)
        return cost + Cost(stream=2 * math.prod(problem.stage.input_shape), calls=1)

    def effort(self, problem: Problem) -> float:
        """Bound the work of the matrix of the input, if the route ends with it; kernels are small."""
        moves, _ = _route(problem)
        whole = moves[-1].how == "matrix" and moves[-1].start == 0
        return problem.effort_of_matrix() if whole else 0.0

    def evaluate(self, problem: Problem, builder: RecipeBuilder, x: str) -> Evaluation:
        """Append the steps of the route."""
        moves, _ = _route(problem)
        follower = _RouteFollower(problem, builder, x)
        for move in moves:
            follower.follow(move)
        energies = tuple(tuple(group) for group in follower.energies)
        return Evaluation(follower.z, energies, follower.gain)


class _RouteFollower:
    """Append the operations of a route, step by step."""

    def __init__(self, problem: Problem, builder: RecipeBuilder, x: str) -> None:
        self.problem, self.builder, self.x = problem, builder, x
        self.stage = problem.stage
        self.places = RouteMap(self.stage)
        self.energies: list[list[str]] = [[] for _ in self.stage.groups]
        self.z, self.gain = x, 1.0
        self.pending = 1.0  # a factor that the current map still lacks

    def follow(self, move: Move) -> None:
        """Append one step."""
        if move.how == "matrix":
            self._multiply(move)
            return
        weight = 1.0 if move.energy is None else self.stage.segments[move.energy].weight
        if move.how == "layers":
            operators = self.places.operators[move.start : move.stop]
            factor = self.pending * self.places.factor(move.levels)
            y = add_operators(self.builder, self.z, operators, factor)
        else:
            kernel = self.pending * kernel_of(self.places, move)
            if not move.keep and move.energy is not None:
                # Nothing else reads this map, so the kernel can take the weight of its energy.
                kernel, weight = kernel * math.sqrt(weight), 1.0
            y = self._convolve(move, kernel)
        if move.energy is not None:
            n = self.builder.add(point.SumSquares, y, name="n", weight=weight)
            self.energies[self.stage.segments[move.energy].group].append(n)
        if move.keep:
            pooled = move.how == "pooled"
            self.pending = move.phase ** (-self.places.axes / 2) if pooled else 1.0
            # The channels of a pooled map come first, times phase^(axes/2); see ``kernel_of``.
            kept = self.places.shape(move.stop)[0]
            self.z = self.builder.add(layer.Slice, y, axis=0, start=0, stop=kept) if pooled else y

    def _convolve(self, move: Move, kernel: Tensor) -> str:
        seen = self.places.composed(move)
        return self.builder.add(
            layer.Conv,
            self.z,
            weight=self.builder.constant("kernel", kernel),
            stride=tuple(move.phase * s for s in seen.stride),
            padding=seen.padding,
            dilation=(1,) * len(seen.stride),
        )

    def _multiply(self, move: Move) -> None:
        """Append the matrix that ends the route: of the layers after the current map, or of the input."""
        if move.start == 0:
            matrix, source = self.problem.matrix, self.x
        else:
            operators, stage = self.places.operators[move.start :], self.stage
            shapes = self.places.shape(move.start), stage.output_shape
            matrix = dense_matrix(*shapes, operators, stage.device)
            matrix, source = self.pending * (matrix * self.places.factor(move.levels)), self.z
        shape = self.builder.shape(source)
        if len(shape) == 3:
            # Maps of images are channels last in memory: reordering the matrix saves a copy.
            source = self.builder.add(layer.Permute, source, name="rows", order=(1, 2, 0))
            matrix = matrix.unflatten(1, shape).movedim(1, -1).flatten(1)
        self.z, self.gain = add_product(self.builder, add_flatten(self.builder, source), matrix)


def _route(problem: Problem) -> tuple[tuple[Move, ...], Cost]:
    """Return the best route of a problem, searched once."""
    return problem.once("route", lambda: best_route(problem.stage, problem.itemsize))
