"""Strategy "conv": composed convolutions, only as many as the energies and the result need.

``routes.py`` finds the route: which layers compose, and which energies need no feature map.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from ...recipe import layer_operations as layer
from ...recipe import point_operations as point
from ...recipe.recipe import RecipeBuilder
from ..cost import Cost
from ..forms import dense_matrix
from .base import Evaluation, Problem, Strategy, add_flatten, add_product
from .layers import add_operators
from .routes import Move, RouteMap, best_route, kernel_of


class ComposedConv(Strategy):
    """Follow a route: convolve, sum squares, end with the last layers or with one matrix."""

    name = "conv"
    exact_cost = True

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
            fault = "is no convolution" if mode == "zeros" else f"has padding_mode={mode!r}"
            return f"{name}, the first layer, {fault}"
        return None

    def cost(self, problem: Problem, *, built: bool) -> Cost:
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
        seen = self.places.window(move.start, move.stop)
        if seen is None:
            raise TypeError("a route over layers that do not compose")
        return self.builder.add(
            layer.Conv,
            self.z,
            weight=self.builder.constant("kernel", kernel),
            stride=tuple(move.phase * s for s in seen.stride),
            padding=seen.padding,
            dilation=(1,) * len(seen.stride),
        )

    def _multiply(self, move: Move) -> None:
        """Append the matrix that ends the route: of the layers behind the current map, or of the input."""
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
