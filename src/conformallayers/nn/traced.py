"""Traced: a composite made from the torch.fx graph of an ordinary module."""

from __future__ import annotations

import operator
from typing import Any, TypeVar

import torch
from torch import fx, nn
from torch.nn import functional as F

from ..errors import refusal
from ..registry.registry import find_spec, is_homogeneous
from ..utils.text import call_text
from .activations import RadialActivation
from .branches import Composite, Flow, Join, below, checked_module
from .container import ConformalLayers
from .homogeneous import Abs

T = TypeVar("T")


class Traced(Composite):
    """Run the graph of an ordinary module: layers, ``+``, ``torch.cat``, ``flatten``, ``relu`` and ``abs``.

    ``a + b`` and ``torch.cat([a, b], 1)`` both have the coordinate of a.

    Args:
        module: traceable by torch.fx, with one input and one output.

    Shape:
        (B, ...) → (B, ...)

    Examples:
        >>> import conformallayers as cl
        >>> class Block(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.first, self.second = cl.Linear(4, 4), cl.Linear(4, 4)
        ...         self.activation = cl.ReSPro(projective=True)
        ...     def forward(self, x):
        ...         return x + self.second(self.activation(self.first(x)))
        >>> cl.ConformalLayers(cl.Traced(Block()), cl.ReSPro())(torch.ones(2, 4)).shape
        torch.Size([2, 4])
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        name = type(checked_module("Traced", module)).__name__
        if isinstance(module, RadialActivation) or find_spec(module) is not None:
            remedy = "Put it into the ConformalLayers as it is."
            raise refusal(f"Traced({name})", "a module with layers inside", "a layer", remedy)
        for path, part in module.named_modules():
            if isinstance(part, ConformalLayers):
                got = f"a ConformalLayers at {path or 'its root'}, which embeds and divides itself"
                remedy = "Put its layers into an nn.Sequential instead."
                raise refusal(f"Traced({name})", "layers and activations", got, remedy)
        try:
            graph = _Tracer().trace(module)
        except Exception as error:
            got = f"{type(error).__name__}: {str(error).splitlines()[0].rstrip('.')}"
            remedy = "Remove control flow that depends on values from its forward."
            raise refusal(f"Traced({name})", "a module torch.fx can trace", got, remedy) from error
        for node in graph.nodes:
            node.type = None  # annotations that are strings do not pickle
        self.body = fx.GraphModule(module, graph)
        self.body.graph.eliminate_dead_code()
        self.body.recompile()  # pickle stores the generated code
        graph = self.body.graph
        for node in graph.nodes:
            _check_node(name, node)
        inputs = [node for node in graph.nodes if node.op == "placeholder"]
        if len(inputs) != 1 or not isinstance(_output(graph), fx.Node):
            remedy = "Take and return one tensor."
            raise refusal(f"Traced({name})", "one input and one output", "others", remedy)

        # Names instead of nodes: torch.compile cannot trace the nodes of a graph.
        self._result = _output(graph).name
        self._steps = [
            (node.name, [before.name for before in _sources(node)], _action(node))
            for node in graph.nodes
            if node.op not in ("placeholder", "output")
        ]
        self._input = inputs[0].name
        # Children, so that all can see that the module is not linear.
        actions = [action for *_, action in self._steps if isinstance(action, nn.Module)]
        self.maps = nn.ModuleList(action for action in actions if is_homogeneous(action))

    def flow(self, path: str, value: T, through: Flow[T]) -> T:
        """Apply the nodes of the graph in order."""
        found = {self._input: value}
        for name, sources, action in self._steps:
            if isinstance(action, Join):
                where = below(path, f"body.{name}")
                found[name] = through.join(where, [found[source] for source in sources], action)
            elif isinstance(action, str):
                where, module = below(path, f"body.{action}"), self.body.get_submodule(action)
                found[name] = through.run(where, module, found[sources[0]])
            else:
                found[name] = through.run(below(path, f"body.{name}"), action, found[sources[0]])
        return found[self._result]


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        known = isinstance(m, RadialActivation) or find_spec(m) is not None
        return known or super().is_leaf_module(m, module_qualified_name)


_SUMS = (operator.add, torch.add)
_MAPS: dict[Any, type[nn.Module]] = {
    **dict.fromkeys((torch.relu, F.relu, "relu"), nn.ReLU),
    **dict.fromkeys((torch.abs, operator.abs, "abs"), Abs),
}


def _check_node(name: str, node: fx.Node) -> None:
    """Refuse a node that is neither a module nor a supported join."""
    nodes = [argument for argument in node.args if isinstance(argument, fx.Node)]
    if node.op in ("placeholder", "output"):
        good = True
    elif node.op == "call_module":
        good = len(node.args) == 1 and len(nodes) == 1 and not node.kwargs
    elif node.target in _SUMS:
        good = len(nodes) == len(node.args) == 2 and not node.kwargs
    elif node.target in _MAPS:
        good = len(nodes) == len(node.args) == 1 and not any(node.kwargs.values())
    elif node.target is torch.cat:
        parts = _cat_parts(node)
        many = isinstance(parts, (list, tuple)) and len(parts) > 0
        many = many and all(isinstance(part, fx.Node) for part in parts)
        good = many and isinstance(_cat_axis(node), int) and _cat_axis(node) != 0
    else:
        flattens = node.target is torch.flatten or (
            node.op == "call_method" and node.target == "flatten"
        )
        start: Any = node.kwargs.get("start_dim", node.args[1] if len(node.args) > 1 else 0)
        good = bool(flattens and len(nodes) == 1 and start != 0)
    if not good:
        raise refusal(
            f"Traced({name}) at {node.name}",
            "modules, sums of two values, torch.cat behind the batch axis, flatten(1), relu, abs",
            call_text(node),
            _remedy(node),
        )


def _sources(node: fx.Node) -> list[Any]:
    """Return the nodes that a node reads, as often as it reads them."""
    if node.target is torch.cat:
        return list(_cat_parts(node))
    return list(node.args) if node.target in _SUMS else node.all_input_nodes


def _action(node: fx.Node) -> str | Join | nn.Module:
    """Return what a node does: the path of a module, a join, a map, or a flattening."""
    if node.op == "call_module":
        return str(node.target)
    if node.target in _SUMS:
        return Join("sum")
    if node.target is torch.cat:
        return Join("concatenate", _cat_axis(node))
    if node.target in _MAPS:
        return _MAPS[node.target]()
    return nn.Flatten(*node.args[1:], **node.kwargs)  # type: ignore[arg-type]


def _remedy(node: fx.Node) -> str:
    if node.op == "get_attr" or (node.target in _SUMS and not node.kwargs):
        return "Give the constant to a layer as its bias: cl.Linear(..., bias=True)."
    if node.target in (*_MAPS, torch.tanh, "tanh", F.gelu, F.max_pool2d):
        return (
            "Use a module: nn.ReLU(), nn.LPPool2d(2, ...) or cl.ReSPro(), or put it into the head."
        )
    return "Write it with cl layers, +, torch.cat and flatten, or put it into the head."


def _cat_parts(node: fx.Node) -> Any:
    return node.args[0] if node.args else node.kwargs.get("tensors", ())


def _cat_axis(node: fx.Node) -> Any:
    return node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else 0)


def _output(graph: fx.Graph) -> Any:
    return next(node.args[0] for node in graph.nodes if node.op == "output")
