"""Traced: a composite made from the torch.fx graph of an ordinary module."""

from __future__ import annotations

from typing import TypeVar

from torch import fx, nn

from ..errors import cause_line, refusal
from .activations import RadialActivation
from .branches import Composite, Flow, Join, below, checked_module
from .functions import Batch, Values, call_text, modules_of
from .registry import find_spec
from .sequential import ConformalSequential

T = TypeVar("T")
_Step = tuple[str, list[str], str | Join | nn.Module]


class Traced(Composite):
    """Run the graph of an ordinary module: layers, and functions such as ``+``, ``torch.cat`` and ``relu``.

    ``a + b`` and ``torch.cat([a, b], 1)`` both have the coordinate of a.

    Args:
        module: traceable by torch.fx, with one input and one output.

    Shape:
        (B, ...) → (B, ...)

    Examples:
        >>> import torch
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
        nodes = list(self.body.graph.nodes)
        inputs = [node for node in nodes if node.op == "placeholder"]
        (result,) = (node.args[0] for node in nodes if node.op == "output")
        if len(inputs) != 1 or not isinstance(result, fx.Node):
            remedy = "Take and return one tensor."
            got = f"{len(inputs)} inputs" if len(inputs) != 1 else f"the output {result}"
            raise refusal(f"Traced({name})", "one input and one output", got, remedy)
        self._input, self._result = inputs[0].name, result.name
        values = {node: Batch() for node in nodes if node.op not in ("get_attr", "output")}
        calls = (node for node in nodes if node.op not in ("placeholder", "output"))
        self._steps = [step for node in calls for step in _steps(name, node, values)]
        # Children, so that all can see that the module is not linear.
        actions = [action for *_, action in self._steps if isinstance(action, nn.Module)]
        self.maps = nn.ModuleList(one for one in actions if not isinstance(one, Join))

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


def _steps(owner: str, node: fx.Node, values: Values) -> list[_Step]:
    """Return the steps of a node: a name, the names of what it reads, and a path, a join or a module.

    Names instead of nodes: torch.compile cannot trace the nodes of a graph. Other nodes are refused.
    """
    if node.op == "call_module" and len(node.args) == 1 and not node.kwargs:
        return [(node.name, [str(source) for source in node.args], str(node.target))]
    chain = modules_of(node, values) or []
    folds = all(isinstance(one, Join) or find_spec(one) is not None for one, _ in chain)
    if not chain or not folds or any(node.kwargs.get(key) for key in ("inplace", "input")):
        expected = "modules, and functions that are affine or homogeneous"
        remedy = "Use nn.ReLU(), nn.LPPool2d(2, ...), cl.ReSPro() or a layer with a bias, or put it into the head."
        raise refusal(f"Traced({owner}) at {node.name}", expected, call_text(node), remedy)
    names = [*(f"{node.name}_{number}" for number in range(len(chain) - 1)), node.name]
    return [
        (name, [names[one] if isinstance(one, int) else one.name for one in reads], module)
        for name, (module, reads) in zip(names, chain, strict=True)
    ]
