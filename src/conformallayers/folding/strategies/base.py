"""The interface of strategies, and the operations that all folds share: embed, advance, divide."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ...nn.activations import Rule
from ...recipe import layer_operations as layer
from ...recipe import point_operations as point
from ...recipe.recipe import RecipeBuilder
from ...recipe.torch.points import RULES
from ..affine import Recurrence
from ..certificate import Certificate
from ..cost import Cost
from ..operators import window
from ..problem import LARGEST_SQUARED, SQUARED, Problem
from ..stages import ActivationSite, Chain

_LARGEST = 2**27  # entries of M that are written out: 512 MiB in float32
_FIRST = 3  # segments whose terms always count in float32
_MODERATE = 1e-3, 1e5  # norms of samples that need no division, at most


class Strategy:
    """The base of all strategies; they hold no state.

    A strategy that computes M x̂ and the values of the forms defines :meth:`evaluate`. A strategy that
    does not separate them defines :meth:`lower`.
    """

    name: ClassVar[str]
    foreseen: ClassVar[bool] = False  # whether the cost is known before anything is built
    wide_slowdown: ClassVar[float] = (
        2.0  # how much slower float64 is, which biases and branches need
    )

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

    def lower(
        self, problem: Problem, builder: RecipeBuilder, x: str
    ) -> tuple[str, Certificate | None]:
        """Append the operations from the input to the output; return the output and the certificate."""
        stage = problem.stage
        wide = stage.affine
        start = builder.add(layer.Cast, x, name="exact", to=layer.WIDE) if wide else x
        values = Values(builder, start, wide)
        names = "unit", "peak", "tau"
        unit, peak, tau = builder.add_many(point.Normalize, start, names=names)
        values.unit = unit
        found = self.evaluate(problem, values)
        recurrence = problem.recurrence
        if recurrence is None:
            for site, energies in zip(stage.chain.sites, found.energies, strict=True):
                tau = add_advance(builder, site, tau, peak, energies)
            scale = stage.chain.scale * found.gain
            builder.amend(unit, limits=_moderate_limits(stage.chain, scale))
            y = builder.add(point.Divide, found.image, tau, peak, name="y", scale=scale)
        else:
            scale = (1.0 if stage.branched else stage.chain.scale) * found.gain
            y = _combine(problem, builder, values, (peak, tau), recurrence, found, scale)
        return add_output_bias(builder, y, stage.bias), found.certificate


@dataclass
class Values:
    """The recipe under construction, and the normalised input that a strategy starts from."""

    builder: RecipeBuilder
    unit: str
    wide: bool
    _flat: str | None = None

    def constant(self, name: str, array: Tensor, *, wide: bool = False) -> str:
        """Store an array in the dtype that the stage needs."""
        return self.builder.constant(name, array, wide=wide or self.wide)

    @property
    def flat(self) -> str:
        """The normalised input as one row."""
        if self._flat is None:
            self._flat = add_reshape(
                self.builder, self.unit, (math.prod(self.builder.shape(self.unit)),)
            )
        return self._flat


@dataclass(frozen=True)
class Evaluation:
    """The values that a strategy computes.

    Args:
        image: the value ``M x̂ / gain``, one output for each linear part if there are several.
        energies: for each form, the values that add up to it.
        gain: a factor that the image still lacks.
        certificate: the proven error of the denominator.
    """

    image: str
    energies: tuple[tuple[str, ...], ...]
    gain: float
    certificate: Certificate | None


def add_reshape(builder: RecipeBuilder, value: str, shape: tuple[int, ...]) -> str:
    """Append a reshape, unless the value has the shape already."""
    if builder.shape(value) == shape:
        return value
    return builder.add(layer.Reshape, value, name="rows" if len(shape) == 1 else "z", shape=shape)


def add_advance(
    builder: RecipeBuilder, site: ActivationSite, tau: str, peak: str, energies: tuple[str, ...]
) -> str:
    """Append the effect of an activation on τ."""
    fields = rule_fields(builder, site)
    return builder.add(point.Advance, tau, peak, *energies, name="tau", **fields)


def rule_fields(builder: RecipeBuilder, site: ActivationSite) -> dict[str, str]:
    """Return the rule of an activation as an operation has it; one of a user's own keeps its module."""
    for name, rule in RULES.items():
        if type(rule) is type(site.rule) and _function(rule) is _function(site.rule):
            return {"rule": name}
    return {"rule": site.rule.name, "module": builder.module(site.rule.name, site.module)}


def _function(rule: Rule) -> object:
    """Return the function behind a growth; a method is another object for every module."""
    return getattr(rule.growth, "__func__", rule.growth)


def add_output_bias(builder: RecipeBuilder, y: str, bias: Tensor | None) -> str:
    """Add the bias of an absorbed head."""
    if bias is None:
        return y
    return builder.add(layer.AddConstant, y, name="y", value=builder.constant("bias", bias))


def add_matrix(problem: Problem, values: Values, matrix: Tensor | None = None) -> tuple[str, float]:
    """Append the product with M; return the value and the gain."""
    matrix, gain = normalised(problem.matrix if matrix is None else matrix)
    weight = values.constant("matrix", matrix)
    image = values.builder.add(layer.Matmul, values.flat, name="image", weight=weight)
    return add_reshape(values.builder, image, image_shape(problem)), gain


def image_shape(problem: Problem) -> tuple[int, ...]:
    """Return the shape of M x̂: with an axis of parts where a point has several."""
    shape = problem.stage.output_shape
    return (problem.output_parts, *shape) if problem.stage.affine else shape


def _moderate_limits(chain: Chain, scale: float) -> tuple[float, float] | None:
    """Return the least and largest norm of samples whose values stay in the range of float32."""
    pairs = zip(chain.segments, chain.bounds, strict=True)
    form = sum(segment.weight * bound * bound for segment, bound in pairs)
    low, high = _MODERATE[0], min(_MODERATE[1], SQUARED / chain.bound)
    if not low < high:
        return None
    denominator = high + form * high * max(1.0, high)
    fits = SQUARED**-2 * denominator < abs(scale) < low * SQUARED**2
    return (low, high) if fits else None


def _combine(
    problem: Problem,
    builder: RecipeBuilder,
    values: Values,
    scalars: tuple[str, str],
    recurrence: Recurrence,
    found: Evaluation,
    scale: float,
) -> str:
    """Append the scalars of a stage with biases or branches, and the sum of the parts."""
    peak, tau = scalars
    energies = iter(found.energies)
    growths: list[str] = []
    for terms in recurrence.sites:
        forms = []
        for _ in range(len(terms.linear) * (len(terms.linear) + 1) // 2):
            parts = next(energies)
            forms.append(parts[0] if len(parts) == 1 else builder.add(layer.Add, *parts, name="n"))
        fields: dict[str, object] = dict(rule_fields(builder, terms.site))
        inputs = [peak, tau]
        if terms.constant:
            rows = values.constant("rows", terms.rows)
            inputs.append(builder.add(layer.Matmul, values.flat, name="dots", weight=rows))
            fields["gram"] = values.constant("gram", terms.gram)
        growth = builder.add(
            point.Grow,
            *inputs,
            *forms,
            *growths,
            name="growth",
            linear=terms.linear,
            constant_parts=terms.constant,
            coordinate=terms.coordinate,
            factor=terms.factor,
            **fields,
        )
        growths.append(growth)
    chain_scale = 1.0 if problem.stage.branched else problem.stage.chain.scale
    vectors = None
    if recurrence.constant:
        vectors = values.constant("vectors", chain_scale * recurrence.vectors)
    image = add_reshape(builder, found.image, image_shape(problem))
    y = builder.add(
        point.Combine,
        image,
        tau,
        *growths,
        name="y",
        linear=recurrence.linear,
        constant_parts=recurrence.constant,
        scale=scale,
        vectors=vectors,
    )
    return builder.add(layer.Cast, y, name="y", to=layer.WORKING)


# -- checks and costs that several strategies share -------------------------------------------------


def not_a_chain(problem: Problem) -> str | None:
    """Return the reason to refuse a stage with branches, or None."""
    return "branches pass activations" if problem.stage.branched else None


def out_of_range(problem: Problem) -> str | None:
    """Return the reason to refuse forms that could leave the range of float64, or None."""
    too_large = problem.stage.bound > LARGEST_SQUARED
    return "its forms could leave the range of float64" if too_large else None


def no_image(problem: Problem) -> str | None:
    """Return the reason to refuse a stage without activations or spatial axes, or None."""
    if not problem.stage.sites:
        return "there is no activation"
    spatial = 2 <= len(problem.stage.input_shape) <= 4
    return None if spatial else "a sample has no spatial axes"


def too_many_entries(problem: Problem) -> str | None:
    """Return the reason to refuse a matrix that is too large to be written out, or None."""
    stage = problem.stage
    size = math.prod(stage.input_shape) * math.prod(stage.output_shape)
    return f"M would have {size} entries" if stage.chain.trailing and size > _LARGEST else None


def reach(chain: Chain, axis: int) -> int:
    """Return how far along an axis the first segments couple coefficients, in steps of the input."""
    total, step = 0, 1
    for segment in chain.segments[:_FIRST]:
        for operator in segment.operators:
            kernel, stride, dilation = window(operator, axis)
            total += (kernel - 1) * dilation * step
            step *= stride
    return total


def matrix_cost(problem: Problem) -> Cost:
    """Return the cost of M as one product."""
    size = math.prod(problem.stage.input_shape) * math.prod(image_shape(problem))
    return Cost(gemm=size, calls=2, bytes=size * problem.itemsize)


def normalised(array: Tensor) -> tuple[Tensor, float]:
    """Split an array into one with largest entry 1, and that entry as a float64 number."""
    peak = float(array.abs().max()) if array.numel() else 0.0
    return (array / peak, peak) if peak else (array, 1.0)
