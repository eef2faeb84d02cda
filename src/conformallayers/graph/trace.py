"""Graph → Trace: every shape, bound and α of a ConformalLayers for one input shape."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import nn

from ..errors import checked_shape, refusal_at, shape_text
from ..functional import Scalar, norm_unit
from ..nn.activations import ALPHA_LIMITS, RadialActivation
from ..nn.bounds import Shape
from ..nn.branches import Join, joined_bound
from ..nn.registry import spec_of
from ..nn.sequential import ConformalSequential
from ..utils.text import Block, Printed, Table
from .capture import capture_parts
from .graph import Graph, Node, Part, frozen_wide, layers_graph


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
    alpha: float | None
    sources: tuple[int, ...]


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


def trace(model: nn.Module, input_shape: tuple[int, ...]) -> Trace:
    """Return the steps of a model's ConformalLayers: path, op, shapes, alpha and bound.

    Args:
        model: a :class:`ConformalLayers`, or a traceable module with some inside.
        input_shape: of one sample, without the batch axis.

    Examples:
        >>> import conformallayers as cl
        >>> model = cl.ConformalLayers(cl.AvgPool2d(2), cl.ReSPro(alpha=3.0), cl.Flatten())
        >>> print(cl.trace(model, (3, 8, 8)))
        path  op                                             input      output     alpha  bound
        ----  ---------------------------------------------  ---------  ---------  -----  -----
        0     AvgPool2d(kernel_size=2, stride=2, padding=0)  (3, 8, 8)  (3, 4, 4)             1
        1     ReSPro(alpha=3)                                (3, 4, 4)  (3, 4, 4)      3      1
        2     Flatten(start_dim=1, end_dim=-1)               (3, 4, 4)  (48,)                 1
    """
    shape = checked_shape(input_shape, "trace(input_shape=...)")
    if isinstance(model, ConformalSequential):
        return trace_layers(model, shape)
    graph = capture_parts(model, shape, where="trace", keep_hooks=True)
    traces = [trace_part(graph, part) for part in graph.parts]
    steps: list[Step] = []
    for found in traces:
        offset = len(steps)
        for step in found.steps:
            sources = tuple(source if source < 0 else source + offset for source in step.sources)
            steps.append(replace(step, sources=sources))
    embeddings = {(found.offset, found.unit) for found in traces}
    return Trace(shape, tuple(steps), *(embeddings.pop() if len(embeddings) == 1 else ()))


@dataclass(frozen=True)
class _Place:
    """The bounds of norms after a step, which set α."""

    bound: float
    base: float  # the bound right after the last activation, map or join
    coordinate: int = -1  # equal for values that have passed the same activations


def trace_part(graph: Graph, part: Part) -> Trace:
    """Return the steps of a ConformalLayers in a graph, in float64; nothing is computed on data."""
    embed, inner = graph.nodes[part.embed], graph.nodes[part.embed + 1 : part.leave]
    nodes = [replace(node, module=frozen_wide(node.module)) for node in inner]
    rms, shape = embed.module.unit == "rms", embed.shape or ()
    start = norm_unit(shape, rms)
    places, steps = {-1: _Place(start, start)}, list[Step]()
    with torch.no_grad():
        for number, node in enumerate(nodes):
            sources = tuple(source - part.embed - 1 for source in node.sources)
            before = [places[source] for source in sources]
            entering = shape if sources[0] < 0 else nodes[sources[0]].shape or ()
            own, alpha, places[number] = _passed(node, entering, before, number, rms)
            path, leaving = node.path or node.name, node.shape or ()
            steps.append(Step(path, node.module, entering, leaving, own, alpha, sources))
    return Trace(shape, tuple(steps), float(embed.module.offset), str(embed.module.unit))  # type: ignore[arg-type]


def _passed(
    node: Node, shape: Shape, before: list[_Place], number: int, rms: bool
) -> tuple[float, float | None, _Place]:
    """Return the bound of a node, its α, and the bounds after it."""
    module, path, (first, *_) = node.module, node.path or node.name, before
    if isinstance(module, Join):
        one = len({place.coordinate for place in before}) == 1
        bound = float(joined_bound([place.bound for place in before], module, one))
        place = _Place(bound, bound, first.coordinate if one else number)
        return bound / norm_unit(node.shape or (), rms), None, place
    if isinstance(module, RadialActivation):
        unit = norm_unit(shape, rms)
        own = first.bound / unit
        alpha = _number(module.resolve(own, first.base / unit), path, module)
        if not ALPHA_LIMITS[0] <= alpha <= ALPHA_LIMITS[1]:
            expected = f"alpha in [{ALPHA_LIMITS[0]:g}, {ALPHA_LIMITS[1]:g}]"
            remedy = "Scale the weights before it, or check log_factor."
            raise refusal_at(path, module, expected, f"{alpha:g}", remedy)
        return own, alpha, _Place(unit, unit, number)
    own = _number(spec_of(path, module).bound(module, shape), path, module)
    bound = first.bound * own
    base = bound if node.kind == "homogeneous" else first.base
    return own, None, _Place(bound, base, first.coordinate)


def trace_layers(container: ConformalSequential, input_shape: Shape) -> Trace:
    """Return the steps of a container for a shape of one sample."""
    graph = layers_graph(container, input_shape)
    return trace_part(graph, graph.parts[0])


def _number(value: Scalar, path: str, module: nn.Module) -> float:
    number = float(value)
    if not math.isfinite(number) or number < 0:
        remedy = "Check its weights for NaN, infinity or a huge log_factor."
        raise refusal_at(path, module, "a finite bound >= 0", f"{number}", remedy)
    return number


def _operation(module: nn.Module) -> str:
    text = repr(module)
    return text if "\n" not in text and len(text) <= 90 else f"{type(module).__name__}(…)"
