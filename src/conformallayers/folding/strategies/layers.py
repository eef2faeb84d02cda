"""Strategy "layers": the layers themselves, every α resolved, every factor merged into a weight.

Where great depth could take numbers out of range, the recipe rescales values.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import replace

from ...nn.extra_layers import Scale
from ...nn.registry import find_spec
from ...recipe import point_operations as point
from ...recipe.recipe import RecipeBuilder
from ..lower import Lowering
from ..operators import Operator
from ..stages import ActivationSite
from .base import Cost, Evaluation, PointValues, Problem, Strategy, layer_cost


class Layers(Strategy):
    """Run the layers and sum the energies that share a form."""

    name = "layers"
    exact_cost = True

    def refuses(self, problem: Problem) -> str | None:
        """Refuse nothing."""
        return None

    def cost(self, problem: Problem, *, built: bool) -> Cost:
        """Count the layers as they are, and a pass over each map whose energy is taken."""
        stage, item = problem.stage, problem.itemsize
        shapes = (s.operators[-1].output_shape if s.operators else () for s in stage.segments)
        energies = Cost(stream=sum(map(math.prod, shapes)), calls=3 * len(stage.segments))
        return sum((layer_cost(operator, item) for operator in stage.operators), energies)

    def effort(self, problem: Problem) -> float:
        """Nothing is built."""
        return 0.0

    def lower(self, problem: Problem, builder: RecipeBuilder, start: PointValues) -> PointValues:
        """Append the layers, rescaled where bounds do not keep them in range."""
        if problem.keeps_range():
            return super().lower(problem, builder, start)
        points = start
        for layer in problem.stage.layers:
            if isinstance(layer, ActivationSite):
                # Bounds say nothing of numbers that are too small.
                points = replace(points, bound=math.inf).activate(builder, layer)
            else:
                points = add_layer(builder, layer, points)
        return points

    def evaluate(self, problem: Problem, builder: RecipeBuilder, x: str) -> Evaluation:
        """Append the layers and the energy behind each segment."""
        stage, z = problem.stage, x
        energies: list[list[str]] = [[] for _ in stage.groups]
        for segment in stage.segments:
            z = add_operators(builder, z, segment.operators, segment.factor)
            n = builder.add(point.SumSquares, z, name="n", weight=segment.weight)
            energies[segment.group].append(n)
        image = add_operators(builder, z, stage.trailing, 1.0)
        return Evaluation(image, tuple(map(tuple, energies)))


def add_operators(
    builder: RecipeBuilder, z: str, operators: Sequence[Operator], factor: float
) -> str:
    """Append operators one after the other, with the factor in the last weight."""
    if not operators and factor != 1.0:
        return Lowering(builder).multiply(z, factor)
    takes = [index for index, operator in enumerate(operators) if _has_weight(operator)]
    last = takes[-1] if takes else len(operators) - 1
    for index, operator in enumerate(operators):
        z = _add_scaled(builder, z, operator, factor if index == last else 1.0)
    return z


def add_layer(builder: RecipeBuilder, operator: Operator, before: PointValues) -> PointValues:
    """Append a layer without its bias, and the pending factor of z."""
    scaling = before.scaling.copy()
    # A layer without a weight leaves the factor to a later layer, which merges it for free.
    factor = (scaling.take() or 1.0) if _has_weight(operator) else 1.0
    norm = operator.simple_bound
    z = _add_scaled(builder, before.z, operator, factor)
    bound, size = before.bound * norm * factor, before.size * norm
    return replace(before, z=z, scaling=scaling, bound=bound, size=size)


def _has_weight(operator: Operator) -> bool:
    spec = find_spec(operator.module)
    return spec is not None and spec.weighted


def _add_scaled(builder: RecipeBuilder, z: str, operator: Operator, factor: float) -> str:
    """Append ``factor·U z``."""
    to, module = Lowering(builder), operator.module
    if factor != 1.0 and _has_weight(operator):
        module, name = copy.deepcopy(module), "gain" if isinstance(module, Scale) else "weight"
        setattr(module, name, getattr(module, name) * factor)
        factor = 1.0
    z = to.module(z, module, operator.output_shape)
    return z if factor == 1.0 else to.multiply(z, factor)
