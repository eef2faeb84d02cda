"""Strategy "layers": the layers themselves, every α resolved, every factor merged into a weight.

Where biases, branches or great depth could take numbers out of range, the recipe rescales values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ...functional import Scaling
from ...nn.branches import Join
from ...recipe import point_operations as point
from ...recipe.recipe import RecipeBuilder
from ...registry.registry import find_spec
from ..certificate import Certificate
from ..cost import Cost
from ..lower import Lowering, add_join
from ..operators import Operator
from ..problem import Problem
from ..stages import ActivationSite
from .base import Evaluation, Strategy, Values, add_advance, add_output_bias
from .routes import layer_cost


class Layers(Strategy):
    """Run the layers and sum the energies that share a form."""

    name = "layers"
    foreseen = True
    wide_slowdown = 1.0  # values are rescaled, not widened

    def refuses(self, problem: Problem) -> str | None:
        """Refuse nothing."""
        return None

    def cost(self, problem: Problem, *, built: bool) -> Cost:
        """Count the layers as they are, and a pass over each map whose energy is taken."""
        stage, item = problem.stage, problem.dtype.itemsize
        if stage.branched:
            maps = sum(math.prod(operator.output_shape) for operator in stage.operators)
            energies = Cost(stream=3 * maps, calls=12 * len(stage.sites))
        else:
            segments = stage.chain.segments
            shapes = (s.operators[-1].output_shape if s.operators else () for s in segments)
            energies = Cost(stream=sum(map(math.prod, shapes)), calls=3 * len(segments))
        return sum((layer_cost(operator, item) for operator in stage.operators), energies)

    def effort(self, problem: Problem) -> float:
        """Nothing is built."""
        return 0.0

    def lower(
        self, problem: Problem, builder: RecipeBuilder, x: str
    ) -> tuple[str, Certificate | None]:
        """Append the layers, rescaled where bounds do not keep them in range."""
        if not problem.stage.affine and problem.keeps_range():
            return super().lower(problem, builder, x)
        return _lower_rescaled(problem, builder, x), _certificate(problem)

    def evaluate(self, problem: Problem, values: Values) -> Evaluation:
        """Append the layers and the energy behind each segment."""
        chain = problem.stage.chain
        to = Lowering(values.builder)
        energies: list[list[str]] = [[] for _ in chain.groups]
        z = values.unit
        for segment in chain.segments:
            z = add_operators(to, z, segment.operators, segment.factor)
            weight = segment.weight
            n = values.builder.add(point.SumSquares, z, name="n", weight=weight)
            energies[segment.group].append(n)
        image = add_operators(to, z, chain.trailing, 1.0)
        return Evaluation(image, tuple(map(tuple, energies)), 1.0, _certificate(problem))


def _certificate(problem: Problem) -> Certificate | None:
    """Prove that rounding keeps a tolerance; each layer adds the errors of its sums to those before."""
    operators = problem.stage.operators
    sums = [op.multiply_adds() / math.prod(op.output_shape) for op in operators]
    rounding = problem.rounding(len(sums) * sum(sums), dtype=problem.dtype)
    return problem.certificate(rounding, margin=1.0)


def add_operators(to: Lowering, z: str, operators: Sequence[Operator], factor: float) -> str:
    """Append operators one after the other, with the factor on the last weight."""
    takes = [index for index, operator in enumerate(operators) if _has_weight(operator)]
    last = takes[-1] if takes else len(operators) - 1
    for index, operator in enumerate(operators):
        own = factor if index == last else 1.0
        z = to.module(z, operator.module, operator.output_shape, own)
    if not operators and factor != 1.0:
        z = Lowering(to.builder, to.wide, factor).finish(z)
    return z


def _has_weight(operator: Operator) -> bool:
    spec = find_spec(operator.module)
    return spec is not None and spec.parameter is not None


@dataclass
class _Points:
    """A value of the recipe as a pair: ``x = m·κ·z`` and ``t = m·σ·τ``; ``scaling`` holds κ and σ."""

    z: str
    peak: str
    tau: str
    scaling: Scaling

    def rebased(self, builder: RecipeBuilder) -> _Points:
        """Append the change to z = the point itself, m = its coordinate and τ = 1 (0 for x = 0)."""
        z, peak, tau = builder.add_many(
            point.Rebase,
            self.z,
            self.peak,
            self.tau,
            names=("z", "peak", "tau"),
            scale=float(self.scaling.rho),
            coordinate=float(self.scaling.sigma),
        )
        return _Points(z, peak, tau, Scaling())


def _lower_rescaled(problem: Problem, builder: RecipeBuilder, x: str) -> str:
    """Append the nodes of a stage one by one; every value has scalars of its own."""
    stage, to = problem.stage, Lowering(builder)
    names = "unit", "peak", "tau"
    unit, peak, tau = builder.add_many(point.Normalize, x, names=names)
    start = _Points(unit, peak, tau, Scaling(stage.norm_factor))
    values: list[_Points] = []
    for node in stage.nodes:
        sources = [start if source < 0 else values[source] for source in node.sources]
        if isinstance(node.action, Operator):
            values.append(_passed(to, node.action, sources[0]))
        elif isinstance(node.action, ActivationSite):
            values.append(_activated(builder, node.action, sources[0]))
        else:
            values.append(_joined(builder, node.action, sources))
    last = values[-1] if values else start
    scale = float(last.scaling.rho)
    y = builder.add(point.Divide, last.z, last.tau, last.peak, name="y", scale=scale)
    return add_output_bias(builder, y, stage.bias)


def _passed(to: Lowering, operator: Operator, before: _Points) -> _Points:
    """Append a layer: on points if it has a bias, else with the pending factor of z."""
    spec, shape = find_spec(operator.module), operator.output_shape
    if operator.bias is not None:
        points = before.rebased(to.builder)
        points.z = to.module(points.z, operator.module, shape, bias=operator.bias)
        return points
    scaling = before.scaling.copy()
    # A layer without a weight leaves the factor to a later layer, which merges it for free.
    factor = scaling.take() if spec is not None and spec.scaled is not None else None
    z = to.module(before.z, operator.module, shape, 1.0 if factor is None else float(factor))
    return _Points(z, before.peak, before.tau, scaling)


def _activated(builder: RecipeBuilder, site: ActivationSite, before: _Points) -> _Points:
    """Append an activation, with z rescaled where its squares would leave the range."""
    scaling = before.scaling.copy()
    weight = float(scaling.activate(site.alpha, site.rule.on_points, site.slope))
    names = "z", "peak", "tau", "n"
    inputs = before.z, before.peak, before.tau
    z, peak, tau, n = builder.add_many(point.Rescale, *inputs, names=names, weight=weight)
    return _Points(z, peak, add_advance(builder, site, tau, peak, (n,)), scaling)


def _joined(builder: RecipeBuilder, join: Join, sources: list[_Points]) -> _Points:
    """Append a sum or a concatenation of points; the coordinate is that of the first."""
    points = [source.rebased(builder) for source in sources]
    points[0].z = add_join(builder, [point.z for point in points], join)
    return points[0]
