"""Strategy "conv": composed convolutions, only as many as the energies and the result need.

``routes.py`` finds the route: which layers compose, and which energies need no feature map.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from ...recipe import layer_operations as layer
from ...recipe import point_operations as point
from ..cost import Cost
from ..forms import dense_matrix
from ..lower import Lowering
from ..problem import Problem
from . import base
from .base import Evaluation, Strategy, Values
from .layers import add_operators
from .routes import Move, RouteMap, best_route, kernel_of


class ComposedConv(Strategy):
    """Follow a route: convolve, sum squares, end with the last layers or with one matrix."""

    name = "conv"
    in_stages = "always"
    exact_cost = True

    def refuses(self, problem: Problem) -> str | None:
        """Refuse networks whose first layers do not compose, or whose maps could leave the range."""
        reason = base.no_axes(problem)
        if reason is not None:
            return reason
        if not problem.keeps_range():
            return "values between its layers could leave the range of the dtype"
        places = RouteMap(problem.stage.chain)
        if not places.operators:
            return "there is no layer with weights"
        first = places.ends[0] if places.ends else len(places.operators)
        if all(places.window(0, stop) is None for stop in range(1, max(first, 1) + 1)):
            first_layer: Any = places.operators[0].module
            mode, name = getattr(first_layer, "padding_mode", "zeros"), type(first_layer).__name__
            fault = "is no convolution" if mode == "zeros" else f"has padding_mode={mode!r}"
            return f"{name}, the first layer, {fault}"
        return base.out_of_range(problem)

    def cost(self, problem: Problem, *, built: bool) -> Cost:
        """Return the cost of the best route, including the conversion to channels last."""
        _, cost = _route(problem)
        return cost + Cost(stream=2 * math.prod(problem.stage.input_shape), calls=1)

    def effort(self, problem: Problem) -> float:
        """Bound the work of the matrix of the input, if the route ends with it; kernels are small."""
        moves, _ = _route(problem)
        whole = moves[-1].how == "matrix" and moves[-1].start == 0
        return problem.effort_of_matrix() if whole else 0.0

    def evaluate(self, problem: Problem, values: Values) -> Evaluation:
        """Append the steps of the route."""
        moves, _ = _route(problem)
        follower = _RouteFollower(problem, values)
        if problem.stage.direct and moves[-1].how != "matrix":
            follower.shift_input()
        for move in moves:
            follower.follow(move)
        energies = tuple(tuple(group) for group in follower.energies)
        return Evaluation(follower.z, energies, follower.gain)


class _RouteFollower:
    """Append the operations of a route, step by step."""

    def __init__(self, problem: Problem, values: Values) -> None:
        self.problem, self.values = problem, values
        self.chain = problem.stage.chain
        self.places = RouteMap(self.chain)
        self.energies: list[list[str]] = [[] for _ in self.chain.groups]
        self.z, self.gain = values.unit, 1.0
        self.pending = 1.0  # a factor that the current map still lacks

    def shift_input(self) -> None:
        """Add biases to the input where they are fewer numbers than behind the convolution."""
        found = self.problem.stage.entry_bias
        if found is not None:
            shift, self.values.bias = found
            held = self.values.constant("shift", shift)
            self.z = self.values.builder.add(layer.AddConstant, self.z, value=held)

    def follow(self, move: Move) -> None:
        """Append one step."""
        builder = self.values.builder
        if move.how == "matrix":
            self._multiply(move)
            return
        weight = 1.0 if move.energy is None else self.chain.segments[move.energy].weight
        if move.how == "layers":
            operators = self.places.operators[move.start : move.stop]
            factor = self.pending * self.places.factor(move.levels)
            own = self.values.take_bias(1.0) if move.ends(self.places) else None
            y = add_operators(Lowering(builder), self.z, operators, factor, own)
        else:
            kernel = self.pending * kernel_of(self.places, move)
            if not move.keep and move.energy is not None:
                # Nothing else reads this map, so the kernel can take the weight of its energy.
                kernel, weight = kernel * math.sqrt(weight), 1.0
            y = self._convolve(move, kernel)
        if move.energy is not None:
            n = builder.add(point.SumSquares, y, name="n", weight=weight)
            self.energies[self.chain.segments[move.energy].group].append(n)
        if move.keep:
            pooled = move.how == "pooled"
            self.pending = move.phase ** (-self.places.axes / 2) if pooled else 1.0
            # The channels of a pooled map come first, times phase^(axes/2); see ``kernel_of``.
            kept = self.places.shape(move.stop)[0]
            self.z = builder.add(layer.Slice, y, axis=0, start=0, stop=kept) if pooled else y

    def _convolve(self, move: Move, kernel: Tensor) -> str:
        seen = self.places.window(move.start, move.stop)
        if seen is None:
            raise TypeError("a route over layers that do not compose")
        stride = tuple(move.phase * s for s in seen.stride)
        options: dict[str, Any] = {
            "stride": stride,
            "padding": seen.padding,
            "dilation": (1,) * len(stride),
            "weight": self.values.constant("kernel", kernel),
        }
        own = self.values.take_bias(1.0) if move.ends(self.places) else None
        to = Lowering(self.values.builder, bias=own)
        options["bias"], rest = to.channel_bias(None)
        return rest.add(layer.Conv, self.z, **options)

    def _multiply(self, move: Move) -> None:
        """Append the matrix that ends the route: of the layers behind the current map, or of the input."""
        builder = self.values.builder
        if move.start == 0:
            matrix, source = self.problem.matrix, self.values.unit
        else:
            stage, operators = self.problem.stage, self.places.operators[move.start :]
            shapes = self.places.shape(move.start), stage.output_shape
            matrix = dense_matrix(*shapes, operators, stage.device)
            matrix, source = self.pending * (matrix * self.places.factor(move.levels)), self.z
        matrix, self.gain = base.normalised(matrix)
        shape = builder.shape(source)
        if len(shape) == 3:
            # Maps of images are channels last in memory: reordering the matrix saves a copy.
            source = builder.add(layer.Permute, source, name="rows", order=(1, 2, 0))
            matrix = matrix.unflatten(1, shape).movedim(1, -1).flatten(1)
        rows = base.add_reshape(builder, source, (math.prod(shape),))
        self.z = base.add_product(self.values, rows, matrix.contiguous(), self.gain)


def _route(problem: Problem) -> tuple[tuple[Move, ...], Cost]:
    """Return the best route of a problem, searched once."""
    stage = problem.stage
    key = "route", stage.output_shape, len(stage.chain.trailing)
    lean = problem.conditions.staged
    return problem.once(key, lambda: best_route(stage.chain, problem.itemsize, lean))
