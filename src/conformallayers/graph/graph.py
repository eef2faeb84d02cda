"""The graph of a model: values (x, t), and nodes that are affine, homogeneous, radial, joins, or kept as they are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from torch import nn

from ..errors import shape_text
from ..nn.activations import RadialActivation
from ..nn.bounds import Shape
from ..nn.branches import Join
from ..nn.registry import find_spec
from ..utils.text import Block, Printed, Table

Kind = Literal["affine", "homogeneous", "radial", "join", "embed", "leave", "other"]
INPUT = -1  # the source that is the input of the model


class Embed(nn.Module):
    """Enter a ConformalLayers: give x the coordinate ``t = √(‖x‖² + offset²)``, in a unit of lengths."""

    def __init__(self, offset: float = 0.0, unit: str = "norm") -> None:
        super().__init__()
        self.offset, self.unit = offset, unit

    def extra_repr(self) -> str:
        """Return the offset and the unit."""
        return f"offset={self.offset:.4g}, unit={self.unit}"


class Leave(nn.Module):
    """Leave a ConformalLayers: ``x ← x / t``."""


@dataclass(frozen=True, eq=False)
class Node:
    """One step of a model.

    Args:
        name: unique; the path of a module, or the name that torch.fx gives a call.
        kind: what it does to (x, t).
        module: frozen, in the dtype of the model; maps the values of the sources to the value of the node.
        sources: numbers of nodes; INPUT is the input of the model.
        shape: of one sample of the result; None where samples are not the first axis of a tensor.
        row: of ``result[0]``, whatever the first axis is; None if it is no tensor, or depends on the batch.
        path: of the module in the model; empty for functions.
        call: the call as Python code, or the type of the module.
        constants: paths of the parameters and buffers that a function reads.
    """

    name: str
    kind: Kind
    module: nn.Module
    sources: tuple[int, ...]
    shape: Shape | None
    row: Shape | None = None
    path: str = ""
    call: str = ""
    constants: tuple[str, ...] = ()


@dataclass(frozen=True)
class Part:
    """One call of a ConformalLayers: the nodes from ``embed`` to ``leave``."""

    label: str  # its path; of a second call with the name of that call
    embed: int
    leave: int


@dataclass(frozen=True, repr=False)
class Graph(Printed):
    """A frozen model as nodes in order; ``output`` is the number of the result.

    A ``fixed`` one was read with sizes of its values as numbers: it is for its input shape alone.
    """

    input_shape: Shape
    nodes: tuple[Node, ...]
    output: int
    fixed: bool = False

    @cached_property
    def readers(self) -> dict[int, tuple[int, ...]]:
        """The nodes that read each value; the result of the model has one more, ``len(nodes)``."""
        found: dict[int, list[int]] = {number: [] for number in range(INPUT, len(self.nodes))}
        for number, node in enumerate(self.nodes):
            for source in dict.fromkeys(node.sources):
                found[source].append(number)
        found[self.output].append(len(self.nodes))
        return {number: tuple(readers) for number, readers in found.items()}

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """Every call of a ConformalLayers."""
        found, start = [], 0
        for number, node in enumerate(self.nodes):
            if node.kind == "embed":
                start = number
            elif node.kind == "leave":
                found.append(Part(self.nodes[start].name, start, number))
        return tuple(found)

    def shape(self, number: int) -> Shape | None:
        """Return the shape of one sample of a value."""
        return self.input_shape if number == INPUT else self.nodes[number].shape

    def _blocks(self) -> Iterator[Block]:
        names = [*(node.name for node in self.nodes), "input"]
        rows = [
            [
                node.name,
                node.kind,
                node.call or type(node.module).__name__,
                ", ".join(names[source] for source in node.sources),
                "" if node.shape is None else shape_text(node.shape),
            ]
            for node in self.nodes
        ]
        yield Table(["name", "kind", "call", "from", "output"], rows)


def between(graph: Graph, start: int, end: int) -> set[int]:
    """Return the nodes on all ways from a value to another, without the first."""
    found, ends = set[int](), [end]
    while ends:
        number = ends.pop()
        if number != start and number not in found:
            found.add(number)
            ends += graph.nodes[number].sources
    return found


def kind_of(module: nn.Module, shape: Shape | None) -> Kind:
    """Return what a module does to samples of a shape."""
    if isinstance(module, Join):
        return "join"
    if isinstance(module, RadialActivation):
        return "radial"
    spec = find_spec(module)
    if spec is None or shape is None or not spec.takes(shape) or spec.problem(module):
        return "other"
    return "homogeneous" if spec.homogeneous else "affine"
