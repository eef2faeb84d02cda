"""The nodes of a ConformalLayers and of branches: every module with its frozen copy and its shapes."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from ..errors import ConformalError, first_line, refusal_at, shape_text
from ..nn.activations import RadialActivation
from ..nn.bounds import Shape
from ..nn.branches import Composite, Flow, Join
from ..nn.registry import (
    branches,
    check_input,
    flatten_modules,
    modules_in,
    shape_after,
    spec_of,
)
from ..nn.sequential import ConformalSequential
from .freeze import freeze
from .graph import INPUT, Embed, Graph, Leave, Node, kind_of


class NodeList:
    """The nodes of a graph under construction."""

    def __init__(self, input_shape: Shape, paths: Iterable[str] = ()) -> None:
        self.input_shape, self.nodes = input_shape, list[Node]()
        self._names: set[str] = set()
        self._paths = frozenset(paths)  # of modules, which are no names of functions

    def shape(self, number: int) -> Shape | None:
        """Return the shape of one sample of a value."""
        return self.input_shape if number == INPUT else self.nodes[number].shape

    def append(self, node: Node) -> int:
        """Append a node; return its number."""
        self._names.add(node.name)
        self.nodes.append(node)
        return len(self.nodes) - 1

    def add(
        self, name: str, module: nn.Module, sources: Iterable[int], shape: Shape, path: str = ""
    ) -> int:
        """Append a node of a module that treats samples one by one."""
        sources = tuple(sources)
        kind = kind_of(module, self.shape(sources[0]))
        text = type(module).__name__
        return self.append(Node(name, kind, module, sources, shape, shape, path, text))

    def of_module(self, path: str) -> str:
        """Return the name of a call of a module: its path, and "path (2)" for the second one."""
        count, found = 1, path
        while found in self._names:
            count += 1
            found = f"{path} ({count})".strip()
        return found

    def of_function(self, name: str) -> str:
        """Return a free name for a call of a function."""
        count, found = 1, name
        while found in self._names or found in self._paths:
            count += 1
            found = f"{name}_{count}"
        return found

    def add_container(
        self, path: str, container: ConformalSequential, source: int, shape: Shape
    ) -> int:
        """Append the nodes of a ConformalLayers whose modules are frozen; return the last."""
        label, embed = self.of_module(path), Embed(*container.embedding)
        kind = type(container).__name__
        value = self.append(Node(label, "embed", embed, (source,), shape, shape, path, kind))
        layers = _Layers(self)
        for name, module in flatten_modules(container, path):
            value = layers.step(name, module, value)
        after = self.shape(value)
        name = self.of_function(f"{label} leave".strip())
        return self.append(Node(name, "leave", Leave(), (value,), after, after, "", "divide"))


class _Layers(Flow[int]):
    """Append the modules of a ConformalLayers; a composite of affine layers is one affine node."""

    def __init__(self, graph: NodeList) -> None:
        self.graph = graph

    def run(self, path: str, module: nn.Module, value: int) -> int:
        for name, child in modules_in(path, module):
            value = self.step(name, child, value)
        return value

    def join(self, path: str, values: list[int], join: Join) -> int:
        if len(values) == 1:
            return values[0]
        shapes = [self.graph.shape(value) or () for value in values]
        try:
            shape = join.shape(shapes)
        except ConformalError as error:
            raise ConformalError(f"{path}: {error}") from error
        return self.graph.add(path, join, values, shape)

    def step(self, path: str, module: nn.Module, value: int) -> int:
        """Append a layer, an activation, or the nodes inside a composite."""
        if isinstance(module, Composite) and branches(module):
            return module.flow(path, value, self)
        before = self.graph.shape(value) or ()
        after = before if isinstance(module, RadialActivation) else _shape(path, module, before)
        return self.graph.add(path, module, (value,), after, path)


class Branches(_Layers):
    """Append the modules of a composite outside of a ConformalLayers, where t = 1."""

    def step(self, path: str, module: nn.Module, value: int) -> int:
        """Append a module, or the nodes inside a composite."""
        if isinstance(module, Composite):
            return module.flow(path, value, self)
        shape = tuple(shape_after(module, self.graph.shape(value) or ())[1:])
        return self.graph.add(self.graph.of_module(path), module, (value,), shape, path)


def layers_graph(container: ConformalSequential, input_shape: Shape) -> Graph:
    """Return the graph of a ConformalLayers alone."""
    nodes = NodeList(input_shape)
    output = nodes.add_container("", freeze(container), INPUT, input_shape)  # type: ignore[arg-type]
    return Graph(input_shape, tuple(nodes.nodes), output)


def _shape(path: str, module: nn.Module, shape: Shape) -> Shape:
    """Return the shape of one output sample, or refuse the input by name and position."""
    batch = 2  # more than 1, so that a module that merges the batch axis is seen
    check_input(path, module, spec_of(path, module), (batch, *shape), traced=True)
    try:
        result = shape_after(module, shape, batch)
        if isinstance(module, nn.Upsample) and 0 in result:  # torch sees it only in a run
            raise ValueError(f"the output would be {shape_text(tuple(result[1:]))}")
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        got = f"samples of shape {shape_text(shape)} ({first_line(error)})"
        remedy = "Change the layer's sizes or the input shape."
        raise refusal_at(path, module, "an input it can process", got, remedy) from error
    if len(result) < 2 or result[0] != batch:
        got = f"an output of shape {tuple(result)} for a batch of {batch}"
        remedy = "Keep axis 0 out of the layer."
        raise refusal_at(path, module, "the batch axis to stay first", got, remedy)
    return tuple(result[1:])
