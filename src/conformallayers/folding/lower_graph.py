"""Graph → Recipe: splice the folded parts between the operations of all other layers."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..conversion.functions import modules_of_call
from ..nn.registry import shape_after
from ..recipe import layer_operations as layer
from ..recipe.operation import Shape
from ..recipe.recipe import INPUT, Recipe, RecipeBuilder
from ..utils.text import call_text
from .graph import Graph, flattens, reshapes
from .lower import Lowering, by_sample, find_lowering
from .operators import frozen_wide
from .plan import Plan

_SUBTRACTS = (operator.sub, operator.isub, torch.sub, "sub")
_SUMS = (operator.add, operator.iadd, torch.add, "add", "add_", *_SUBTRACTS)
_DIVIDES = (operator.truediv, operator.itruediv, torch.div, "div")
_PRODUCTS = (operator.mul, operator.imul, torch.mul, "mul", "mul_", *_DIVIDES)


@dataclass(frozen=True)
class LoweredPart:
    """The recipe of a folded part, the node that feeds it, and the plans of its stages by label."""

    recipe: Recipe
    feed: fx.Node
    plans: Mapping[str, Plan]

    def nodes(self, end: fx.Node) -> Iterator[fx.Node]:
        """Yield the nodes after ``feed`` up to ``end``, the last one first."""
        while end is not self.feed:
            yield end
            end = end.all_input_nodes[0]


class GraphLowering:
    """Lower the nodes of a graph in their order.

    Args:
        graph: the model.
        input_shape: of one sample.
        parts: by the last node of each.
    """

    def __init__(
        self, graph: Graph, input_shape: Shape, parts: Mapping[fx.Node, LoweredPart]
    ) -> None:
        self.graph, self.parts = graph, parts
        self.builder = RecipeBuilder(input_shape)
        self.values: dict[fx.Node, str] = {}

    def lower(self) -> tuple[Recipe, dict[str, Plan]]:
        """Return the recipe of the whole model, and the plans with the positions of their operations."""
        inside = {node for end, part in self.parts.items() for node in part.nodes(end)}
        plans: dict[str, Plan] = {}
        output = INPUT
        for node in self.graph.module.graph.nodes:
            if node.op == "placeholder":
                self.values[node] = INPUT
            elif node in self.parts:
                part, start = self.parts[node], len(self.builder.operations)
                plans |= {label: plan.moved(start) for label, plan in part.plans.items()}
                self.values[node] = self.builder.splice(part.recipe, self.values[part.feed])
            elif node.op == "output":
                output = self.values[node.args[0]]
            elif node not in inside and node.op != "get_attr" and not self._only_for_shapes(node):
                self.values[node] = self._node(node)
        return self.builder.recipe(output), plans

    def _only_for_shapes(self, node: fx.Node) -> bool:
        """Tell whether a node is a size that only calls read which give samples another shape."""
        readers = (reshapes(user) or self._only_for_shapes(user) for user in node.users)
        return node not in self.graph.rows and bool(node.users) and all(readers)

    def _node(self, node: fx.Node) -> str:
        """Append a node as an operation, or as a call of a module that computes it."""
        inputs = [n for n in node.all_input_nodes if n.op != "get_attr"]
        inputs = [n for n in inputs if not self._only_for_shapes(n)]
        values = [self.values[before] for before in inputs]
        steady = all(n in self.graph.shapes for n in (node, *inputs))
        alone = list(node.args) == inputs and len(inputs) == 1 and not node.kwargs
        if node.op == "call_module" and alone:
            module = self.graph.module.get_submodule(str(node.target))
            what, apart = type(module).__name__, steady and by_sample(module)
            if apart and find_lowering(module) is not None:
                wide = frozen_wide(module)
                return Lowering(self.builder).module(values[0], wide, self.graph.shapes[node])
        else:
            function = steady and node.op != "call_module"
            found = self._function(node, values) if function else None
            if found is not None:
                return found
            module, what, apart = _single_node(self.graph.module, node), call_text(node), False
        return self.builder.add(
            layer.Call,
            *values,
            module=self.builder.module("module", module),
            what=what[:200],
            result=self.graph.rows.get(node),
            by_sample=apart,
        )

    def _function(self, node: fx.Node, values: list[str]) -> str | None:
        """Lower a function that has an operation; None for others."""
        shape = self.graph.shapes[node]
        if flattens(node) or reshapes(node):
            return self.builder.add(layer.Reshape, *values, shape=shape)
        source = self.graph.shapes.get(node.all_input_nodes[0], ())  # none of a parameter
        modules = modules_of_call(node, len(source) + 1) if source else []
        if modules and all(by_sample(m) and find_lowering(m) is not None for m in modules):
            value = values[0]
            for module in modules:
                after = tuple(shape_after(module, self.builder.shape(value))[1:])
                value = Lowering(self.builder).module(value, module, after)
            return value
        if node.target is torch.cat:
            return self._concatenation(node)
        if node.target in (*_SUMS, *_PRODUCTS) and not node.kwargs:
            return self._arithmetic(node, values, shape)
        return None

    def _concatenation(self, node: fx.Node) -> str | None:
        parts: Any = node.args[0] if node.args else node.kwargs.get("tensors", ())
        axis: Any = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else 0)
        nodes = isinstance(parts, (list, tuple)) and all(n in self.values for n in parts)
        rank = len(self.graph.shapes[node]) + 1
        if not nodes or not isinstance(axis, int) or axis % rank == 0:
            return None
        values = [self.values[part] for part in parts]
        return self.builder.add(layer.Concatenate, *values, axis=axis % rank - 1)

    def _arithmetic(self, node: fx.Node, values: list[str], shape: Shape) -> str | None:
        """Lower a sum or difference of two values, or arithmetic of a value and a constant."""
        if len(node.args) != 2:
            return None
        left, right = node.args
        both = [n for n in node.args if isinstance(n, fx.Node) and n.op != "get_attr"]
        if len(both) == 2:
            fits = node.target in _SUMS and all(self.graph.shapes.get(n) == shape for n in both)
            if not fits:
                return None
            first, second = (self.values[n] for n in both)
            if node.target in _SUBTRACTS:
                second = self._multiplied(second, torch.tensor(-1.0))
            return self.builder.add(layer.Add, first, second)
        if len(both) != 1 or self.graph.shapes.get(both[0]) != shape:
            return None
        constant = self._constant(right if left is both[0] else left, shape)
        if constant is None or (left is not both[0] and node.target in _DIVIDES):
            return None
        value = values[0]
        if node.target in _SUMS:
            if node.target in _SUBTRACTS and left is both[0]:
                constant = -constant
            elif node.target in _SUBTRACTS:
                value = self._multiplied(value, torch.tensor(-1.0))
            if not constant.any():
                return value
            held = self.builder.constant("shift", constant)
            return self.builder.add(layer.AddConstant, value, value=held)
        return self._multiplied(value, 1 / constant if node.target in _DIVIDES else constant)

    def _multiplied(self, value: str, factor: Tensor) -> str:
        held = self.builder.constant("factor", factor.double())
        return self.builder.add(layer.Multiply, value, factor=held)

    def _constant(self, value: Any, shape: Shape) -> Tensor | None:
        """Return a constant that broadcasts to one sample, in float64; None if it has a batch axis."""
        if isinstance(value, fx.Node):
            value = operator.attrgetter(str(value.target))(self.graph.module)
        if not isinstance(value, (int, float, Tensor)):
            return None
        tensor = torch.as_tensor(value).detach().double()
        while tensor.dim() > len(shape) and tensor.shape[0] == 1:
            tensor = tensor[0]
        try:
            fits = torch.broadcast_shapes(tensor.shape, shape) == shape
        except RuntimeError:
            return None
        return tensor if fits and tensor.dim() <= len(shape) else None


def _single_node(root: fx.GraphModule, node: fx.Node) -> nn.Module:
    """Return a module that computes one node of a graph from its inputs."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for before in sorted(node.all_input_nodes, key=lambda n: n.op != "get_attr"):
        if before.op == "get_attr":
            copies[before] = graph.get_attr(str(before.target))
        else:
            copies[before] = graph.placeholder(before.name)
    graph.output(graph.node_copy(node, lambda before: copies[before]))
    module = fx.GraphModule(root, graph)
    for item in module.graph.nodes:
        item.type = None  # pickle refuses annotations that are strings
    return module
