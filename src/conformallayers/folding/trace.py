"""Modules → Trace: fix every shape, bound and α of a network for one input shape."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from ..errors import ConformalError, first_line, refusal_at, shape_text
from ..functional import Scalar, norm_unit
from ..nn.activations import ALPHA_LIMITS, RadialActivation
from ..nn.bounds import Shape
from ..nn.branches import Composite, Flow, Join, joined_bound
from ..nn.container import ConformalSequential
from ..nn.input_checks import check_batch_axis, check_input
from ..nn.registry import (
    branches,
    flatten_modules,
    is_homogeneous,
    modules_in,
    shape_after,
    spec_of,
    warn_if_eps_dominates,
)
from ..nn.specs import LayerSpec
from ..utils.html import Block, Printed, Table
from .operators import freeze


@dataclass(frozen=True)
class Step:
    """One module of the network on samples of a fixed shape.

    ``bound`` is an upper bound of the operator norm: of the module if it is a layer or a homogeneous map,
    of all of them since the previous activation if it is an activation, whose ``alpha`` is set. ``sources`` are the numbers
    of the steps that feed it; -1 is the input of its ConformalLayers.
    """

    path: str
    module: nn.Module
    input_shape: Shape
    output_shape: Shape
    bound: float
    alpha: float | None = None
    sources: tuple[int, ...] = (-1,)


@dataclass(frozen=True, repr=False)
class Trace(Printed):
    """The steps of a network; prints as a table of path, op, shapes, alpha and bound.

    ``offset`` (0 for none) and ``unit`` are those of the embedding. With the unit "rms", α and the bounds of
    activations and joins are those of root mean squares.
    """

    input_shape: Shape
    steps: tuple[Step, ...]
    offset: float = 0.0
    unit: str = "norm"

    @property
    def chain(self) -> bool:
        """Whether every step is fed by the previous step."""
        return all(step.sources == (index - 1,) for index, step in enumerate(self.steps))

    @property
    def staged(self) -> bool:
        """Whether homogeneous maps cut the network into several stages."""
        return any(is_homogeneous(step.module) for step in self.steps)

    @property
    def output_shape(self) -> Shape:
        """The shape of one output sample."""
        return self.steps[-1].output_shape if self.steps else self.input_shape

    @property
    def alphas(self) -> tuple[float, ...]:
        """The radii of the activations, in order."""
        return tuple(step.alpha for step in self.steps if step.alpha is not None)

    def _blocks(self) -> Iterator[Block]:
        header = ["path", "op", "input", "output", "alpha", "bound"]
        rows = [
            [
                step.path,
                _operation(step.module),
                shape_text(step.input_shape),
                shape_text(step.output_shape),
                "" if step.alpha is None else f"{step.alpha:.4g}",
                f"{step.bound:.4g}",
            ]
            for step in self.steps
        ]
        if not self.chain:
            header.append("from")
            names = [*(step.path for step in self.steps), "input"]
            for row, step in zip(rows, self.steps, strict=True):
                row.append(", ".join(names[source] for source in step.sources))
        yield Table(header, rows)
        if self.offset != 0 or self.unit != "norm":
            yield f"offset {self.offset:.4g}, unit {self.unit}"


@dataclass(frozen=True)
class _Place:
    """A value between two steps: the step that wrote it, its shape, and the bounds of norms that set α."""

    step: int
    shape: Shape
    bound: float
    base: float  # the bound right behind the last activation, map or join
    coordinate: int = -1  # equal for values that have passed the same activations


class _Tracing(Flow[_Place]):
    """Record a step for every module on the way."""

    def __init__(self, rms: bool) -> None:
        self.steps: list[Step] = []
        self.rms = rms

    def run(self, path: str, module: nn.Module, value: _Place) -> _Place:
        for name, child in modules_in(path, module):
            value = self.step(name, child, value)
        return value

    def join(self, path: str, values: list[_Place], join: Join) -> _Place:
        if len(values) == 1:
            return values[0]
        try:
            shape = join.shape([value.shape for value in values])
        except ConformalError as error:
            raise ConformalError(f"{path}: {error}") from error
        coordinates = {value.coordinate for value in values}
        bound = float(joined_bound([v.bound for v in values], join, len(coordinates) == 1))
        own, sources = bound / norm_unit(shape, self.rms), tuple(value.step for value in values)
        number = len(self.steps)
        self.steps.append(Step(path, join, values[0].shape, shape, own, None, sources))
        coordinate = coordinates.pop() if len(coordinates) == 1 else number
        return _Place(number, shape, bound, bound, coordinate)

    def step(self, path: str, module: nn.Module, value: _Place) -> _Place:
        """Record a layer, an activation, or the steps inside a composite."""
        if isinstance(module, Composite) and branches(module):
            return module.flow(path, value, self)
        if isinstance(module, RadialActivation):
            shape, coordinate = value.shape, len(self.steps)
            bound = base = norm_unit(shape, self.rms)
            own = value.bound / bound
            alpha = _number(module.resolve(own, value.base / bound), path, module)
            if not ALPHA_LIMITS[0] <= alpha <= ALPHA_LIMITS[1]:
                expected = f"alpha in [{ALPHA_LIMITS[0]:g}, {ALPHA_LIMITS[1]:g}]"
                remedy = "Scale the weights before it, or look for a huge log_factor."
                raise refusal_at(path, module, expected, f"{alpha:g}", remedy)
        else:
            kind = spec_of(path, module)
            shape, alpha = _output_shape(path, module, kind, value.shape), None
            own = _number(kind.bound(module, value.shape), path, module)
            bound, coordinate = value.bound * own, value.coordinate
            base = bound if kind.homogeneous else value.base
        self.steps.append(Step(path, module, value.shape, shape, own, alpha, (value.step,)))
        return _Place(len(self.steps) - 1, shape, bound, base, coordinate)


def trace_modules(
    modules: Iterable[tuple[str, nn.Module]],
    input_shape: Shape,
    offset: float = 0.0,
    unit: str = "norm",
) -> Trace:
    """Follow a sample of ``input_shape`` through (path, module) pairs that were checked before.

    Nothing is computed on data: shapes come from the meta device, bounds from the weights. The
    modules are frozen copies, so that the trace does not change when the model does.
    """
    tracing, start = _Tracing(unit == "rms"), norm_unit(input_shape, unit == "rms")
    place = _Place(-1, input_shape, start, start)
    with torch.no_grad():
        for path, module in warn_if_eps_dominates(modules):
            place = tracing.step(path, module, place)
    return Trace(input_shape, tuple(tracing.steps), offset, unit)


def trace_layers(container: ConformalSequential, input_shape: Shape) -> Trace:
    """Return the steps of a container for a shape of one sample."""
    frozen = [(path, freeze(module)) for path, module in flatten_modules(container)]
    return trace_modules(frozen, input_shape, *container.embedding)


def _output_shape(path: str, module: nn.Module, kind: LayerSpec, shape: Shape) -> Shape:
    """Return the shape of one output sample, or refuse the input by name and position."""
    batch = 2  # more than 1, so that a module that merges the batch axis is seen
    check_input(path, module, kind, (batch, *shape), traced=True)
    try:
        result = shape_after(module, shape, batch)
        if isinstance(module, nn.Upsample) and 0 in result:  # torch sees it only in a run
            raise ValueError(f"the output would be {shape_text(tuple(result[1:]))}")
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        got = f"samples of shape {shape_text(shape)} ({first_line(error)})"
        remedy = "Change the layer's sizes or the input shape."
        raise refusal_at(path, module, "an input it can process", got, remedy) from error
    check_batch_axis(path, module, result, batch)
    return tuple(result[1:])


def _number(value: Scalar, path: str, module: nn.Module) -> float:
    number = float(value)
    if not math.isfinite(number) or number < 0:
        remedy = "Look for NaN, infinity or a huge log_factor among its weights."
        raise refusal_at(path, module, "a finite bound >= 0", f"{number}", remedy)
    return number


def _operation(module: nn.Module) -> str:
    text = repr(module)
    return text if "\n" not in text and len(text) <= 90 else f"{type(module).__name__}(…)"
