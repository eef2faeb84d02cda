"""Traced: a composite made from the torch.fx graph of an ordinary module."""

from __future__ import annotations

import operator
from typing import Any, TypeVar

import torch
from torch import fx, nn
from torch.nn import functional as F

from ..errors import cause_line, refusal
from ..utils.text import call_text
from .activations import RadialActivation
from .branches import Composite, Flow, Join, below, checked_module
from .container import ConformalSequential
from .homogeneous import Abs
from .registry import find_spec, is_homogeneous

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
            if isinstance(part, ConformalSequential):
                got = f"a ConformalLayers at {path or 'its root'}, which embeds and divides itself"
                remedy = "Put its layers into an nn.Sequential instead."
                raise refusal(f"Traced({name})", "layers and activations", got, remedy)
        try:
            graph = _Tracer().trace(module)
        except Exception as error:
            expected, got = "a module torch.fx can trace", cause_line(error)
            remedy = "Remove control flow that depends on values from its forward."
            raise refusal(f"Traced({name})", expected, got, remedy) from error
        for node in graph.nodes:
            node.type = None  # annotations that are strings do not pickle
        self.body = fx.GraphModule(module, graph)
        self.body.graph.eliminate_dead_code()
        self.body.recompile()  # pickle stores the generated code
        graph = self.body.graph
        calls = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
        self._steps = [_step(name, node) for node in calls]
        inputs = [node for node in graph.nodes if node.op == "placeholder"]
        (result,) = (node.args[0] for node in graph.nodes if node.op == "output")
        if len(inputs) != 1 or not isinstance(result, fx.Node):
            remedy = "Take and return one tensor."
            raise refusal(f"Traced({name})", "one input and one output", "others", remedy)
        self._input, self._result = inputs[0].name, result.name
        # Children, so that all can see that the module is not linear.
        actions = [action for *_, action in self._steps if isinstance(action, nn.Module)]
        self.maps = nn.ModuleList(action for action in actions if is_homogeneous(action))

    def flow(self, path: str, value: T, through: Flow[T]) -> T:
        """Apply the nodes of the graph in order."""
        found = {self._input: value}
        for name, sources, action in self._steps:
            values = [found[source] for source in sources]
            where = below(path, f"body.{action if isinstance(action, str) else name}")
            if isinstance(action, Join):
                found[name] = through.join(where, values, action)
            else:
                module = self.body.get_submodule(action) if isinstance(action, str) else action
                found[name] = through.run(where, module, values[0])
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


def _step(name: str, node: fx.Node) -> tuple[str, list[str], str | Join | nn.Module]:
    """Return the name of a node, those of the nodes it reads, and the path of a module, a join or a module.

    Names instead of nodes: torch.compile cannot trace the nodes of a graph. Other nodes are refused.
    """
    given, kwargs = node.args, node.kwargs
    sources: Any = given
    action: str | Join | nn.Module | None = None
    if node.op == "call_module":
        action = str(node.target) if len(given) == 1 and not kwargs else None
    elif node.target in _SUMS:
        action = Join("sum") if len(given) == 2 and not kwargs else None
    elif node.target in _MAPS:
        action = _MAPS[node.target]() if len(given) == 1 and not any(kwargs.values()) else None
    elif node.target is torch.cat:
        sources = given[0] if given else kwargs.get("tensors", ())
        axis = kwargs.get("dim", given[1] if len(given) > 1 else 0)
        action = Join("concatenate", axis) if isinstance(axis, int) and axis != 0 else None
    elif node.target is torch.flatten or (node.op, node.target) == ("call_method", "flatten"):
        sources, sizes = given[:1], given[1:]
        start = kwargs.get("start_dim", sizes[0] if sizes else 0)
        known = kwargs.keys() <= {"start_dim", "end_dim"}
        if known and start != 0 and not any(isinstance(size, fx.Node) for size in sizes):
            action = nn.Flatten(*sizes, **kwargs)  # type: ignore[arg-type]
    many = isinstance(sources, (list, tuple)) and len(sources) > 0
    if action is None or not many or not all(isinstance(source, fx.Node) for source in sources):
        raise refusal(
            f"Traced({name}) at {node.name}",
            "modules, sums of two values, torch.cat behind the batch axis, flatten(1), relu, abs",
            call_text(node),
            _remedy(node),
        )
    return node.name, [source.name for source in sources], action


def _remedy(node: fx.Node) -> str:
    if node.op == "get_attr" or (node.target in _SUMS and not node.kwargs):
        return "Give the constant to a layer as its bias: cl.Linear(..., bias=True)."
    if node.target in (*_MAPS, torch.tanh, "tanh", F.gelu, F.max_pool2d):
        return (
            "Use a module: nn.ReLU(), nn.LPPool2d(2, ...) or cl.ReSPro(), or put it into the head."
        )
    return "Write it with cl layers, +, torch.cat and flatten, or put it into the head."
