"""The graph of a model: values (x, t), and nodes that are affine, homogeneous, radial, joins, or kept as they are."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, cast

import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.nn.utils.prune import BasePruningMethod

from ..errors import ConformalError, first_line, refusal, refusal_at, shape_text
from ..functional import wide_dtype
from ..nn.activations import RadialActivation
from ..nn.bounds import Shape
from ..nn.branches import Composite, Flow, Join, branches
from ..nn.expanded import Expanded
from ..nn.registry import (
    check_input,
    find_spec,
    flatten_modules,
    held_tensors,
    shape_after,
    spec_of,
)
from ..nn.sequential import ConformalSequential
from ..utils.text import Block, Printed, Table

Kind = Literal["affine", "homogeneous", "radial", "join", "embed", "leave", "other"]
INPUT = -1  # the source that is the input of the model


class Embed(nn.Module):
    """Enter a ConformalLayers: give x the coordinate ``t = √(‖x‖² + offset²)``, in a unit of lengths."""

    def __init__(self, offset: float, unit: str) -> None:
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
    row: Shape | None
    path: str
    call: str
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
                node.call,
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
    """Return the kind of a module for samples of a shape."""
    if isinstance(module, Join):
        return "join"
    if isinstance(module, RadialActivation):
        return "radial"
    spec = find_spec(module)
    if spec is None or shape is None or not spec.takes(shape) or spec.problem(module):
        return "other"
    return "homogeneous" if spec.homogeneous else "affine"


# -- the nodes of a ConformalLayers and of branches ---------------------------------------------------


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


class CompositeLayers(_Layers):
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
    check_input(path, module, spec_of(path, module), (2, *shape), traced=True)
    try:
        result = shape_after(module, shape)
        if isinstance(module, nn.Upsample) and 0 in result:  # torch sees it only in a run
            raise ValueError(f"the output would be {shape_text(tuple(result[1:]))}")
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        got = f"samples of shape {shape_text(shape)} ({first_line(error)})"
        remedy = "Change the layer's sizes or the input shape."
        raise refusal_at(path, module, "an input it can process", got, remedy) from error
    if len(result) < 2 or result[0] != 2:
        got = f"an output of shape {tuple(result)} for a batch of 2"
        remedy = "Keep axis 0 out of the layer."
        raise refusal_at(path, module, "the batch axis to stay first", got, remedy)
    return tuple(result[1:])


# -- frozen copies: evaluation semantics, no parameters, no hooks, no tie to the model ------------------

# Hooks that compute the weight before each forward; their work is done once, at freezing.
_WEIGHT_HOOKS = ("WeightNorm", "SpectralNorm")


def freeze(module: nn.Module, *, share: bool = False) -> nn.Module:
    """Copy a module for evaluation, without parameters, parametrizations or hooks.

    Hooks that compute a weight (weight norm, spectral norm, pruning) have done their work in the
    copy; other hooks are left behind, see :func:`refuse_hooks`. With ``share`` the copy reads the memory of the module.
    """
    # Computed tensors, of functional_call or as attributes, cannot be copied.
    held = (value for value in held_tensors(module) if share or not value.is_leaf)
    memo: dict[int, Any] = {id(t): t.detach() if share else t.detach().clone() for t in held}
    with torch.no_grad():
        frozen = collapsed(copy.deepcopy(module, memo)).eval()  # weights may differ in training
        for child in list(frozen.modules()):
            _store_weights(child)
        for child in frozen.modules():
            for name, parameter in list(child._parameters.items()):
                if parameter is not None:
                    del child._parameters[name]
                    child.register_buffer(name, parameter.detach())
    return frozen


def frozen_wide(module: nn.Module) -> nn.Module:
    """Freeze a module in float64, on a device that has it."""
    frozen = freeze(module)
    if wide_dtype(device_of([frozen])) is not torch.float64:
        frozen = frozen.to("cpu")
    return frozen.to(torch.float64)


def device_of(modules: Iterable[nn.Module]) -> torch.device:
    """Return the device of the first tensor of frozen modules; without any the CPU."""
    buffers = (buffer for module in modules for buffer in module.buffers())
    return next((buffer.device for buffer in buffers), torch.device("cpu"))


def refuse_hooks(path: str, module: nn.Module) -> None:
    """Refuse a module whose hooks may change its output: a folded copy would lose them."""
    hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
    lost = sum(not _computes_weight(hook) for hook in hooks)
    if lost:
        where = type(module).__name__ + f" at position {path}" * bool(path)
        expected, remedy = "a module without forward hooks", "Remove them first: handle.remove()."
        raise refusal(where, expected, f"{lost} of them, which a folded copy would lose", remedy)


def _computes_weight(hook: Any) -> bool:
    return isinstance(hook, BasePruningMethod) or type(hook).__name__ in _WEIGHT_HOOKS


def _store_weights(module: nn.Module) -> None:
    """Replace parametrized and hooked weights by buffers, and drop all hooks."""
    if parametrize.is_parametrized(module):
        # Not remove_parametrizations: it deletes properties of the class, which the copy shares
        # with the model itself.
        names: Any = module.parametrizations
        values = {name: getattr(module, name).detach().clone() for name in names}
        module.__class__ = parametrize.type_before_parametrizations(module)
        del module._modules["parametrizations"]
        for name, value in values.items():
            module.register_buffer(name, value)
    hooks: list[Any] = list(module._forward_pre_hooks.values())
    for hook in hooks:
        if _computes_weight(hook):
            hook(module, ())
            name = getattr(hook, "_tensor_name", None) or hook.name
            weight = module.__dict__.pop(name).detach()
            for table in (module._parameters, module._buffers):
                for part in [part for part in table if part.startswith(name + "_")]:
                    del table[part]
            module.register_buffer(name, weight)
    module._forward_pre_hooks.clear()
    module._forward_hooks.clear()


def collapsed(module: nn.Module) -> nn.Module:
    """Replace the expanded layers of a module by plain ones, in place; tied weights stay tied."""
    plain: dict[int, nn.Module] = {}
    weights: dict[int, nn.Parameter] = {}

    def replace(layer: nn.Module) -> nn.Module:
        if not isinstance(layer, Expanded):
            return layer
        if id(layer) not in plain:
            found = plain[id(layer)] = layer.plain()
            found.weight = weights.setdefault(id(layer.terms), cast(nn.Parameter, found.weight))
        return plain[id(layer)]

    for parent in list(module.modules()):
        for name, child in parent._modules.items():
            if child is not None:
                parent._modules[name] = replace(child)
    return replace(module)
