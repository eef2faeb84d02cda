"""A stage: a chain of linear operators and activations, with no homogeneous map or join between them.

Its balanced recurrence keeps every number inside float range:

    z₀ = x̂        z_l = factor_l · U_l z_{l-1}        n_l = weight_l · ‖z_l‖²
    τ ← τ + m·n_l  (published)        τ ← τ + n_l/τ  (projective)        y = scale · V z_k / τ + bias

A bias adds ``τ·b`` to z, and needs the coordinate for it: a bias behind an activation starts a new stage.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, groupby
from operator import mul
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from ..errors import shape_text
from ..graph.freeze import device_of
from ..nn.activations import RadialActivation
from ..nn.bounds import Shape
from ..nn.branches import Join
from ..nn.extra_layers import ChannelScale
from ..scaling import Scaling
from .operators import Operator, apply_all, push_constant, same_in_channels

_LARGEST_SHIFT = 1e12  # of a bias that is added to an input


@dataclass(frozen=True)
class ActivationSite:
    """An activation with its α resolved.

    ``unit`` is √d where norms are root mean squares over the d coefficients here, else 1. Then q is
    ``‖p‖²/(α·unit)²``, which is an activation of radius α·unit and slope·unit.
    """

    module: RadialActivation
    alpha: float  # in units of the Euclidean norm
    number: int  # its index among the activations of its stage
    path: str
    unit: float = 1.0

    @property
    def slope(self) -> float:
        """α times the derivative at the origin: a short point is multiplied by slope/α."""
        return self.module.slope * self.unit

    def activate(self, scaling: Scaling) -> float:
        """Advance the scaling past the activation; return the weight of ``‖z‖²`` in τ, for the current z."""
        return float(scaling.activate(self.alpha, self.module.on_points, self.slope))

    def bound_behind(self, size: float) -> float:
        """Bound the norm of a point behind the activation, given a bound of its norm before."""
        limit = self.unit if self.module.bounded else math.inf
        return min(limit, size * self.slope / self.alpha)


Action = TypeVar("Action", covariant=True)


@dataclass(frozen=True)
class Node(Generic[Action]):
    """One step of a graph: an action on the values of its sources; -1 is the input."""

    action: Action
    sources: tuple[int, ...]


StageNode = Node[Operator | ActivationSite]


def shape_at(nodes: Sequence[Node[Any]], source: int, input_shape: Shape) -> Shape:
    """Return the shape of the value of a node."""
    if source < 0:
        return input_shape
    action = nodes[source].action
    if not isinstance(action, (ActivationSite, Join)):
        shape: Shape = action.output_shape
        return shape
    shapes = [shape_at(nodes, before, input_shape) for before in nodes[source].sources]
    return action.shape(shapes) if isinstance(action, Join) else shapes[0]


@dataclass(frozen=True)
class Stage:
    """Linear operators and activations in a row.

    A ``direct`` stage is a chain with biases whose only activation, if any, is its last node. It starts from
    points, and the energy is that of its own output.
    """

    input_shape: Shape  # of one sample
    output_shape: Shape
    nodes: tuple[StageNode, ...]
    direct: bool = False
    start: Scaling = field(default_factory=Scaling)  # of the points that enter
    entry: float = 1.0  # a bound of the norm of the z that enters, in units of the network's input

    @property
    def operators(self) -> tuple[Operator, ...]:
        """All linear operators in order."""
        return tuple(n.action for n in self.nodes if isinstance(n.action, Operator))

    @property
    def sites(self) -> tuple[ActivationSite, ...]:
        """All activations in order."""
        return tuple(n.action for n in self.nodes if isinstance(n.action, ActivationSite))

    @property
    def device(self) -> torch.device:
        """The device of the operators."""
        return device_of(operator.module for operator in self.operators)

    @property
    def biased(self) -> bool:
        """Whether some operator has a bias."""
        return any(op.bias is not None for op in self.operators)

    @property
    def multiply_adds(self) -> int:
        """The multiply-adds of its operators for one sample."""
        return sum(operator.multiply_adds() for operator in self.operators)

    @property
    def moves_only(self) -> bool:
        """Whether it has neither weights nor activations: slices, averages and changes of shape."""
        plain = not any(operator.has_tensors for operator in self.operators)
        return plain and not self.sites and not self.biased

    @cached_property
    def constant(self) -> Tensor | None:
        """The biases of a direct stage, pushed through the operators behind them; float64."""
        return push_constant(self.operators)

    @cached_property
    def entry_bias(self) -> tuple[Tensor, Tensor | None] | None:
        """A shift of the input of a direct stage, (C, 1, …), and the constant of the layers behind it.

        The shift of a BatchNorm before a padded convolution is one number for each channel. Behind the
        convolution it is one for each place, as zeros around the map are not shifted. None where a shift of
        the input saves nothing.
        """
        first, *others = self.operators or (None,)
        if first is None or not isinstance(first.module, ChannelScale) or first.bias is None:
            return None
        factor = first.module.factor.view(-1, *[1] * (first.bias.dim() - 1))
        shift, rest = first.bias / factor, push_constant(others)
        short = same_in_channels(shift) and (rest is None or same_in_channels(rest))
        if not short or self.constant is None or same_in_channels(self.constant):
            return None
        if not shift.abs().max() <= _LARGEST_SHIFT:  # a factor of 0 among them
            return None
        return shift[(slice(None), *[slice(0, 1)] * (shift.dim() - 1))], rest

    @cached_property
    def chain(self) -> Chain:
        """The balanced recurrence: factors keep every z and τ inside float range."""
        shapes = self.input_shape, self.output_shape
        if self.direct:
            bare = tuple(replace(operator, bias=None) for operator in self.operators)
            return Chain(*shapes, (), bare, Scaling())
        segments: list[Segment] = []
        pending: tuple[Operator, ...] = ()
        group, scaling = -1, self.start.copy()
        for node in self.nodes:
            action = node.action
            if isinstance(action, Operator):
                pending = (*pending, action)
            else:
                # The factor goes into the weights of this segment, so its z comes out scaled already, and
                # the weight of ‖z‖² is divided by factor².
                weight = action.activate(scaling)
                factor = float(scaling.take() or 1.0)
                weight /= factor * factor
                # Consecutive activations of a formula that collapses share a form.
                formula = action.module.formula
                alike = bool(segments) and segments[-1].site.module.formula == formula
                group += not (alike and action.module.collapses)
                segments.append(Segment(pending, factor, weight, action, group))
                pending = ()
        return Chain(*shapes, tuple(segments), pending, scaling)

    @property
    def bound(self) -> float:
        """A bound of the norm of every z on the way, in units of the input of the network."""
        return max(self.entry, *self._bounds)

    @property
    def exit(self) -> float:
        """The same bound for the z that leaves."""
        return self._bounds[-1] if self._bounds else self.entry

    @cached_property
    def _bounds(self) -> tuple[float, ...]:
        """A bound of the norm of z behind each segment, or behind each node of a direct stage."""
        if not self.direct:
            chain = self.chain
            last = chain.bounds[-1] if chain.bounds else 1.0
            trailing = last * math.prod(op.norm for op in chain.trailing)
            return tuple(self.entry * bound for bound in (*chain.bounds, trailing))
        found, bound = [], self.entry
        for operator in self.operators:
            bias = operator.bias
            bound *= operator.simple_bound
            bound += 0.0 if bias is None else float(torch.linalg.vector_norm(bias))
            found.append(bound)
        return tuple(found)

    def __str__(self) -> str:
        lines = [f"{shape_text(self.input_shape)} → {shape_text(self.output_shape)}"]
        for index, node in enumerate(self.nodes):
            action = node.action
            if isinstance(action, ActivationSite):
                what = f"{action.path}: {type(action.module).__name__}, α {action.alpha / action.unit:.4g}"
            else:
                what = repr(action.module)
            lines.append(f"  {index}: {what}")
        return "\n".join(lines)

    __repr__ = __str__


@dataclass(frozen=True)
class Segment:
    """The operators up to one activation, ``z ← factor·U z``, and the weight of ``‖z‖²`` in τ.

    ``group`` is the number of the quadratic form that the energy belongs to.
    """

    operators: tuple[Operator, ...]
    factor: float
    weight: float
    site: ActivationSite
    group: int

    def apply(self, z: Tensor) -> Tensor:
        """Return ``factor·U z``."""
        return apply_all(self.operators, z) * self.factor


@dataclass(frozen=True)
class Chain:
    """A stage as one linear map and a recurrence of quadratic forms."""

    input_shape: Shape
    output_shape: Shape
    segments: tuple[Segment, ...]
    trailing: tuple[Operator, ...]  # behind the last activation
    end: Scaling  # of the points that leave

    @property
    def scale(self) -> float:
        """The factor of the point ``scale · z / τ`` that leaves."""
        return float(self.end.rho)

    def rows_of(self, group: int) -> int:
        """Count the outputs of all layers that a form sums up."""
        rows, shape = 0, self.input_shape
        for segment in self.segments:
            shape = segment.operators[-1].output_shape if segment.operators else shape
            rows += math.prod(shape) if segment.group == group else 0
        return rows

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The segments of each quadratic form."""
        numbers = range(len(self.segments))
        return tuple(
            tuple(members) for _, members in groupby(numbers, lambda i: self.segments[i].group)
        )

    @property
    def sites(self) -> tuple[ActivationSite, ...]:
        """The first activation of each group; the others of the group have the same formula."""
        return tuple(self.segments[group[0]].site for group in self.groups)

    @property
    def provable(self) -> bool:
        """Whether an error bound of a simplified form is an error bound of the denominator."""
        return all(site.module.provable for site in self.sites)

    @property
    def unit(self) -> float:
        """1 if the denominator is proportional to the norm of the input, else 0; see ``negligible.py``."""
        return float(bool(self.sites) and all(site.module.on_points for site in self.sites))

    @property
    def operators(self) -> tuple[Operator, ...]:
        """All linear operators in order."""
        inner = tuple(op for segment in self.segments for op in segment.operators)
        return inner + self.trailing

    @cached_property
    def bounds(self) -> tuple[float, ...]:
        """A bound of ``‖z_l‖/‖x̂‖`` at each activation; may be infinite."""
        steps = (s.factor * math.prod(op.norm for op in s.operators) for s in self.segments)
        return tuple(accumulate(steps, mul))
