"""The interface of strategies, and the operations that all of them share.

A strategy takes the points that enter a stage to those that leave it. Embedding, maps, joins and the
division at the end are in ``part.py``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ...recipe import layer_operations as layer
from ...recipe import point_operations as point
from ...recipe.recipe import RecipeBuilder
from ...scaling import Scaling
from ..cost import Cost
from ..operators import Operator, receptive_field
from ..problem import LARGEST_SQUARED, SQUARED, Problem
from ..stages import ActivationSite, Chain, Stage

_LEAST_BIAS = 1e-6  # a norm beside which the squares of smaller numbers do not count
RESCALED = 2.0  # a bound of the norm of small numbers that were rescaled
_FIRST = 3  # segments whose terms always count in float32


@dataclass(frozen=True)
class Points:
    """Points of a recipe, by the names of their values: ``x = m·κ·z`` and ``t = m·σ·τ``."""

    z: str
    peak: str  # m
    tau: str
    scaling: Scaling  # κ and σ, and a factor that is still to be applied
    bound: float = math.inf  # of the norm of z, in units of the normalised input
    size: float = math.inf  # a bound of the norm of the point
    rebased: bool = False  # z is the point: its squares may underflow beside a large m

    def rebase(self, builder: RecipeBuilder) -> Points:
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
        return Points(z, peak, tau, Scaling(), self.size, self.size, rebased=True)

    def rescale(self, builder: RecipeBuilder, weight: float = 1.0) -> tuple[Points, str]:
        """Append a rescaling of z by a power of two where its squares would leave the range.

        Returns the points and ``weight·‖z‖²``.
        """
        inputs, names = (self.z, self.peak, self.tau), ("z", "peak", "tau", "n")
        z, peak, tau, n = builder.add_many(point.Rescale, *inputs, names=names, weight=weight)
        bound = max(self.bound, RESCALED)
        return replace(self, z=z, peak=peak, tau=tau, bound=bound, rebased=False), n

    def for_squares(self, builder: RecipeBuilder, sites: Iterable[ActivationSite]) -> Points:
        """Append a rescaling where published activations need squares of numbers that may be too small."""
        if not self.rebased or all(site.module.on_points for site in sites):
            return self
        return self.rescale(builder)[0]


class Strategy:
    """The base of all strategies; they hold no state.

    A strategy that computes M x̂ and the values of the forms defines :meth:`evaluate`. A strategy that
    does not separate them defines :meth:`lower`.
    """

    name: ClassVar[str]
    exact_cost: ClassVar[bool] = False  # whether the cost is known before anything is built
    # When "auto" may take it in a network of several stages, which are made for small devices.
    in_stages: ClassVar[Literal["always", "if small", "by name"]] = "by name"

    def refuses(self, problem: Problem) -> str | None:
        """Return why the strategy does not apply to a problem, or None if it does."""
        raise NotImplementedError

    def cost(self, problem: Problem, *, built: bool) -> Cost:
        """Predict the cost: from the arrays if they are ``built``, optimistically otherwise."""
        raise NotImplementedError

    def caution(self, problem: Problem) -> str:
        """Return why "auto" should not take the strategy though it applies; empty if it may."""
        return ""

    def effort(self, problem: Problem) -> float:
        """Bound the multiply-adds of building the constants."""
        return problem.effort()

    def evaluate(self, problem: Problem, values: Values) -> Evaluation:
        """Append the operations that compute ``M x̂ / gain`` and the energies of each form."""
        raise NotImplementedError

    def lower(self, problem: Problem, builder: RecipeBuilder, start: Points) -> Points:
        """Append the operations of a stage; return the points that leave it."""
        stage = problem.stage
        if stage.direct:
            return self._lower_direct(problem, builder, start)
        values = Values(builder, start.z)
        found = self.evaluate(problem, values)
        image = add_reshape(builder, found.image, stage.output_shape)
        points = start
        for site, energies in zip(stage.chain.sites, found.energies, strict=True):
            points = add_advance(builder, site, points, energies)
        end = stage.chain.end.lacking(found.gain)
        size = size_behind(stage, start.size)
        bound = stage.exit / found.gain
        return replace(points, z=image, scaling=end, bound=bound, size=size)

    def _lower_direct(self, problem: Problem, builder: RecipeBuilder, start: Points) -> Points:
        """Append a stage with biases: a linear map of points, then the energy of its own output."""
        stage = problem.stage
        points = start.rebase(builder)
        values = Values(builder, points.z, bias=stage.constant)
        found = self.evaluate(problem, values)
        image = add_reshape(builder, found.image, stage.output_shape)
        if values.bias is not None:
            bias = builder.constant("bias", values.bias / found.gain)
            image = builder.add(layer.AddConstant, image, value=bias)
        scaling = points.scaling.lacking(found.gain)
        size = size_behind(stage, start.size, activations=False)
        points = replace(points, z=image, scaling=scaling, bound=size / found.gain, size=size)
        # The squares of a bias are large enough; a map behind it may leave numbers that are not.
        least = 0.0 if stage.constant is None else float(stage.constant.norm())
        points = replace(points, rebased=least < _LEAST_BIAS)
        for site in stage.sites:
            points = add_activation(builder, site, points)
        return replace(points, rebased=True)


@dataclass
class Values:
    """The recipe under construction, and the value that a strategy starts from."""

    builder: RecipeBuilder
    unit: str  # the z of the points that enter the stage
    bias: Tensor | None = None  # of a direct stage; added to the image unless the strategy takes it

    def take_bias(self, gain: float) -> Tensor | None:
        """Return the bias of ``M x̂ / gain``, which the strategy then adds itself."""
        bias, self.bias = self.bias, None
        return None if bias is None else bias / gain

    def constant(self, name: str, array: Tensor, *, wide: bool = False) -> str:
        """Store an array."""
        return self.builder.constant(name, array, wide=wide)

    @cached_property
    def flat(self) -> str:
        """The input of the stage as one row; the reshape is appended at first use."""
        return add_reshape(self.builder, self.unit, (math.prod(self.builder.shape(self.unit)),))


@dataclass(frozen=True)
class Evaluation:
    """The values that a strategy computes."""

    image: str  # ``M x̂ / gain`` in any shape
    energies: tuple[tuple[str, ...], ...]  # for each form, the values that add up to it
    gain: float  # a factor that the image still lacks


def add_reshape(builder: RecipeBuilder, value: str, shape: tuple[int, ...]) -> str:
    """Append a reshape, unless the value has the shape already."""
    if builder.shape(value) == shape:
        return value
    return builder.add(layer.Reshape, value, name="rows" if len(shape) == 1 else "z", shape=shape)


def add_advance(
    builder: RecipeBuilder, site: ActivationSite, points: Points, energies: tuple[str, ...]
) -> Points:
    """Append the effect of an activation on τ."""
    inputs = points.tau, points.peak, *energies
    formula = str(site.module.formula)
    tau = builder.add(point.Advance, *inputs, name="tau", formula=formula)
    return replace(points, tau=tau)


def add_activation(builder: RecipeBuilder, site: ActivationSite, before: Points) -> Points:
    """Append an activation, with z rescaled where its squares could leave the range."""
    scaling = before.scaling.copy()
    weight = site.activate(scaling)
    size = site.bound_behind(before.size)
    small = before.rebased and not site.module.on_points
    if before.bound <= SQUARED and not small:
        points, n = before, builder.add(point.SumSquares, before.z, name="n", weight=weight)
    else:
        points, n = before.rescale(builder, weight)
    return replace(add_advance(builder, site, points, (n,)), scaling=scaling, size=size)


def size_behind(stage: Stage, size: float, *, activations: bool = True) -> float:
    """Bound the norm of the points that leave a chain, given a bound of those that enter."""
    for node in stage.nodes:
        action = node.action
        if isinstance(action, Operator):
            size *= action.simple_bound
            if action.bias is not None:
                size += float(torch.linalg.vector_norm(action.bias))
        elif isinstance(action, ActivationSite) and activations:
            size = action.bound_behind(size)
    return size


def add_matrix(problem: Problem, values: Values) -> tuple[str, float]:
    """Append the product with M, plus a bias if there is one; return the value and the gain."""
    matrix, gain = normalised(problem.matrix)
    return add_product(values, values.flat, matrix, gain), gain


def add_product(values: Values, rows: str, matrix: Tensor, gain: float) -> str:
    """Append the product with a matrix that gives ``M x̂ / gain``, plus a bias if there is one."""
    weight = values.constant("matrix", matrix)
    own = values.take_bias(gain)
    bias = None if own is None else values.constant("bias", own.flatten())
    return values.builder.add(layer.Matmul, rows, name="image", weight=weight, bias=bias)


# -- checks and costs that several strategies share -------------------------------------------------


def out_of_range(problem: Problem) -> str | None:
    """Return the reason to refuse forms that could leave the range of float64, or None."""
    too_large = problem.stage.bound > LARGEST_SQUARED
    return "its forms could leave the range of float64" if too_large else None


def no_axes(problem: Problem) -> str | None:
    """Return the reason to refuse a stage whose samples have no spatial axes, or None."""
    spatial = 2 <= len(problem.stage.input_shape) <= 4
    return None if spatial else "a sample has no spatial axes"


def first_reach(chain: Chain, axis: int) -> int:
    """Return how far along an axis the first segments couple coefficients, in steps of the input."""
    operators = (op for segment in chain.segments[:_FIRST] for op in segment.operators)
    return receptive_field(operators, axis)[0] - 1


def matrix_cost(problem: Problem) -> Cost:
    """Return the cost of M as one product."""
    size = math.prod(problem.stage.input_shape) * math.prod(problem.stage.output_shape)
    return Cost(gemm=size, calls=2, bytes=size * problem.itemsize)


def normalised(array: Tensor) -> tuple[Tensor, float]:
    """Split an array into one with largest entry 1, and that entry as a float64 number."""
    peak = float(array.abs().max()) if array.numel() else 0.0
    return (array / peak, peak) if peak else (array, 1.0)
