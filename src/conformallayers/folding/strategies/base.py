"""The interface of strategies, their cost, the operations on points that all stages share, and "layers".

A strategy takes the points that enter a radial stage to those that leave it. Costs are predicted from counts of work
with fixed rates, so that every machine makes the same choice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, TypeVar, cast

import torch
from torch import Tensor, nn

from ...recipe import layer_operations as layer
from ...recipe import point_operations as point
from ...recipe.recipe import RecipeBuilder
from ..forms import forms_of, matrix_of, rounding, stacked_layers, too_many_entries
from ..lower import Lowering
from ..operators import CONVOLUTIONS, Operator, is_plain
from ..stages import ActivationSite, Layer, RadialStage, Scaling

BATCH = 64  # the batch size that costs are compared at
LANES = 16  # output channels that a convolution computes at a time


@dataclass(frozen=True)
class Rates:
    """Work per second at float32.

    ``gemm``, ``blocks`` and ``conv`` are multiply-adds a second in one large product, in many small ones
    and in a convolution; ``stream`` is elements a second in a pass over memory; ``call`` is seconds for any
    call at all.
    """

    gemm: float
    blocks: float
    conv: float
    stream: float
    call: float


RATES = Rates(57e9, 60e9, 85e9, 10e9, 3e-6)  # measured on two cores of a server CPU


@dataclass(frozen=True)
class Cost:
    """The work of one sample by kind, and the bytes of all constants."""

    gemm: float = 0  # multiply-adds in large products
    blocks: float = 0  # multiply-adds in many small products
    conv: float = 0  # multiply-adds in convolutions and poolings
    idle: float = 0  # multiply-adds of lanes that a convolution has no channels for
    stream: float = 0  # elements that a pass over memory touches
    calls: int = 0  # per batch
    bytes: int = 0

    @property
    def multiply_adds(self) -> float:
        """All multiply-adds of one sample."""
        return self.gemm + self.blocks + self.conv

    def seconds(self, rates: Rates = RATES) -> float:
        """Return the expected time of one batch of 64."""
        names = "gemm", "blocks", "conv", "stream"
        work: float = sum(getattr(self, name) / getattr(rates, name) for name in names)
        work += self.idle / rates.conv
        return BATCH * work + self.calls * rates.call

    def __add__(self, other: Cost) -> Cost:
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return Cost(*(a + b for a, b in pairs))


def layer_cost(operator: Operator, itemsize: int) -> Cost:
    """Return what a layer takes as it is."""
    work = operator.multiply_adds()
    stream = math.prod(operator.output_shape)
    size = sum(t.numel() * itemsize for t in operator.module.buffers())
    if isinstance(operator.module, nn.Linear):
        return Cost(gemm=work, stream=stream, calls=2, bytes=size)
    if is_plain(operator.module, CONVOLUTIONS):
        channels = operator.output_shape[0]
        idle = work / channels * (-channels % LANES)
        return Cost(conv=work, idle=idle, stream=2 * stream, calls=2, bytes=size)
    return Cost(conv=work, stream=2 * stream, calls=2, bytes=size)


T = TypeVar("T")
SQUARED = 1e15  # numbers whose square fits into float32 with room
LARGEST_SQUARED = 1e140  # the same for float64, summed over layers
RESCALED = 2.0  # a bound of the norm of small numbers that were rescaled
TERMS = (
    0.25  # the share of the rounding error that terms left out may take; a narrow band has the rest
)
_FACTOR_EFFORT = 2**31  # multiply-adds of a QR factorisation: about a second


@dataclass(frozen=True)
class PointValues:
    """Points of a recipe, by the names of their values: ``x = m·κ·z`` and ``t = m·σ·τ``."""

    z: str
    peak: str  # m
    tau: str
    scaling: Scaling  # κ and σ, and a factor that is still to be applied
    bound: float = math.inf  # of the norm of z, in units of the input of the network
    size: float = math.inf  # a bound of the norm of the point

    def rebase(self, builder: RecipeBuilder) -> PointValues:
        """Append the change to z = the point itself, m = its coordinate and τ = 1 (0 for x = 0)."""
        z, peak, tau = builder.add_many(
            point.Rebase,
            *(self.z, self.peak, self.tau),
            names=("z", "peak", "tau"),
            scale=float(self.scaling.rho),
            coordinate=float(self.scaling.sigma),
        )
        return PointValues(z, peak, tau, Scaling(), self.size, self.size)

    def rescale(self, builder: RecipeBuilder, weight: float = 1.0) -> tuple[PointValues, str]:
        """Append a rescaling of z by a power of two where its squares would leave the range.

        Returns the points and ``weight·‖z‖²``.
        """
        inputs, names = (self.z, self.peak, self.tau), ("z", "peak", "tau", "n")
        z, peak, tau, n = builder.add_many(point.Rescale, *inputs, names=names, weight=weight)
        bound = max(self.bound, RESCALED)
        return replace(self, z=z, peak=peak, tau=tau, bound=bound), n

    def advance(
        self, builder: RecipeBuilder, site: ActivationSite, energies: tuple[str, ...]
    ) -> PointValues:
        """Append the effect of an activation on τ."""
        inputs = self.tau, self.peak, *energies
        formula = str(site.module.formula)
        tau = builder.add(point.Advance, *inputs, name="tau", formula=formula)
        return replace(self, tau=tau)

    def activate(self, builder: RecipeBuilder, site: ActivationSite) -> PointValues:
        """Append an activation, with z rescaled where its squares could leave the range."""
        scaling = self.scaling.copy()
        weight = site.activate(scaling)
        if self.bound <= SQUARED:
            points, n = self, builder.add(point.SumSquares, self.z, name="n", weight=weight)
        else:
            points, n = self.rescale(builder, weight)
        size = site.bound_behind(self.size)
        return replace(points.advance(builder, site, (n,)), scaling=scaling, size=size)


def size_behind(layers: tuple[Layer, ...], size: float) -> float:
    """Bound the norm of the points behind layers, given a bound of those that enter."""
    for action in layers:
        if isinstance(action, ActivationSite):
            size = action.bound_behind(size)
            continue
        size *= action.simple_bound
        if action.bias is not None:
            size += float(torch.linalg.vector_norm(action.bias))
    return size


class Problem:
    """A radial stage, and the dtype to fold it to; arrays are built at first use."""

    def __init__(self, stage: RadialStage, dtype: torch.dtype) -> None:
        self.stage, self.dtype = stage, dtype
        # What changes the denominator by less than this, relatively, may be left out.
        self.epsilon = rounding(dtype) if stage.provable else 0.0
        self._built: dict[object, Any] = {}

    def once(self, key: object, build: Callable[[], T]) -> T:
        """Return the value of a key, built at first use."""
        if key not in self._built:
            self._built[key] = build()
        return cast(T, self._built[key])

    @property
    def itemsize(self) -> int:
        """The bytes of one entry of M or Q."""
        return self.dtype.itemsize

    @property
    def form_count(self) -> int:
        """The number of quadratic forms."""
        return len(self.stage.groups)

    @cached_property
    def matrix(self) -> Tensor:
        """M in float64, (d_out, d_in)."""
        return matrix_of(self.stage)

    @cached_property
    def forms(self) -> Tensor:
        """Every Q in float64, (groups, d_in, d_in)."""
        return forms_of(self.stage, TERMS * self.epsilon)

    def factor(self, group: int) -> Tensor | None:
        """Return L with ``LᵀL = Q`` of a form from the rows of its layers; None where Q must be summed up.

        Q has the square of the condition number of the rows, so summing it up loses digits. Rows are stacked
        where they are few, or where no terms may be left out and a QR factorisation is quick.
        """
        rows, columns = self.stage.rows_of(group), math.prod(self.stage.input_shape)
        exact = self.dtype == torch.float64
        if rows > columns and not (exact and rows * columns * columns <= _FACTOR_EFFORT):
            return None

        def build() -> Tensor:
            stack = stacked_layers(self.stage, group)
            return stack if rows <= columns else torch.linalg.qr(stack, mode="r").R

        return self.once(("factor", group), build)

    def keeps_range(self) -> bool:
        """Tell whether bounds prove that feature maps and their squares stay in the range of the dtype."""
        limit = {torch.float16: 1e3, torch.float64: LARGEST_SQUARED}.get(self.dtype, SQUARED)
        return self.stage.bound <= limit

    def cannot_write_out(self) -> str | None:
        """Return why M and the forms cannot be written out, or None if they can."""
        if self.stage.bound > LARGEST_SQUARED:
            return "its forms could leave the range of float64"
        return too_many_entries(
            math.prod(self.stage.input_shape), math.prod(self.stage.output_shape)
        )

    def effort_of_matrix(self) -> float:
        """Bound the multiply-adds of building M: there and back."""
        sizes = math.prod(self.stage.input_shape), math.prod(self.stage.output_shape)
        return 2.0 * self.stage.multiply_adds * min(sizes)

    def matrix_cost(self) -> Cost:
        """Return the cost of M as one product."""
        size = math.prod(self.stage.input_shape) * math.prod(self.stage.output_shape)
        return Cost(gemm=size, calls=2, bytes=size * self.itemsize)


@dataclass(frozen=True)
class Evaluation:
    """The values that a strategy computes."""

    image: str  # ``M x̂ / gain`` in any shape
    energies: tuple[tuple[str, ...], ...]  # for each form, the values that add up to it
    gain: float = 1.0  # a factor that the image still lacks


class Strategy:
    """The base of all strategies; they hold no state.

    A strategy that computes M x̂ and the values of the forms defines :meth:`evaluate`. A strategy that
    does not separate them defines :meth:`lower`.
    """

    name: ClassVar[str]
    exact_cost: ClassVar[bool] = False  # whether the cost is known before anything is built

    def refuses(self, problem: Problem) -> str | None:
        """Return why the strategy does not apply to a problem, or None if it does."""
        raise NotImplementedError

    def cost(self, problem: Problem, *, built: bool) -> Cost:
        """Predict the cost: from the arrays if they are ``built``, optimistically otherwise."""
        raise NotImplementedError

    def effort(self, problem: Problem) -> float:
        """Bound the multiply-adds of building the constants: by default M and the forms."""
        inputs = math.prod(problem.stage.input_shape)
        return problem.stage.multiply_adds * 2 * inputs + problem.effort_of_matrix()

    def evaluate(self, problem: Problem, builder: RecipeBuilder, x: str) -> Evaluation:
        """Append the operations that compute ``M x̂ / gain`` and the energies of each form."""
        raise NotImplementedError

    def lower(self, problem: Problem, builder: RecipeBuilder, start: PointValues) -> PointValues:
        """Append the operations of a stage; return the points that leave it."""
        stage = problem.stage
        found = self.evaluate(problem, builder, start.z)
        image = add_reshape(builder, found.image, stage.output_shape)
        points = start
        for group, energies in zip(stage.groups, found.energies, strict=True):
            points = points.advance(builder, group[0].site, energies)
        end, size = stage.end.lacking(found.gain), size_behind(stage.layers, start.size)
        return replace(points, z=image, scaling=end, bound=stage.exit / found.gain, size=size)


def add_reshape(builder: RecipeBuilder, value: str, shape: tuple[int, ...]) -> str:
    """Append a reshape, unless the value has the shape already."""
    if builder.shape(value) == shape:
        return value
    return builder.add(layer.Reshape, value, name="rows" if len(shape) == 1 else "z", shape=shape)


def add_flatten(builder: RecipeBuilder, value: str) -> str:
    """Append a reshape to one row."""
    return add_reshape(builder, value, (math.prod(builder.shape(value)),))


def add_product(builder: RecipeBuilder, rows: str, matrix: Tensor) -> tuple[str, float]:
    """Append ``M x̂ / gain`` of a flat value; return its name and the gain."""
    scaled, gain = normalised(matrix)
    weight = builder.constant("matrix", scaled.contiguous())
    return builder.add(layer.Matmul, rows, name="image", weight=weight), gain


def normalised(array: Tensor) -> tuple[Tensor, float]:
    """Split an array into one with largest entry 1, and that entry as a float64 number."""
    peak = float(array.abs().max()) if array.numel() else 0.0
    return (array / peak, peak) if peak else (array, 1.0)


class Layers(Strategy):
    """Run the layers, every α resolved, every factor merged into a weight, and sum the energies that share a form."""

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
        for action in problem.stage.layers:
            if isinstance(action, ActivationSite):
                # Bounds say nothing of numbers that are too small.
                points = replace(points, bound=math.inf).activate(builder, action)
            else:
                points = add_layer(builder, action, points)
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
    """Append operators, and a factor behind the last weight, into which the merge pass puts it."""
    to, last = Lowering(builder), len(operators)
    last = max((i for i, op in enumerate(operators, 1) if op.has_tensors), default=last)
    for operator in operators[:last]:
        z = to.module(z, operator.module, operator.output_shape)
    z = z if factor == 1.0 else to.multiply(z, factor)
    for operator in operators[last:]:
        z = to.module(z, operator.module, operator.output_shape)
    return z


def add_layer(builder: RecipeBuilder, operator: Operator, before: PointValues) -> PointValues:
    """Append a layer without its bias, and the pending factor of z."""
    scaling = before.scaling.copy()
    # A layer without a weight leaves the factor to a later layer, which merges it for free.
    factor = (scaling.take() or 1.0) if operator.has_tensors else 1.0
    norm = operator.simple_bound
    z = add_operators(builder, before.z, (operator,), factor)
    bound, size = before.bound * norm * factor, before.size * norm
    return replace(before, z=z, scaling=scaling, bound=bound, size=size)
