"""Modules that branch: residual connections, parallel branches, graphs traced from a module.

Two points are added or concatenated as points: ``x ← x₁ + (t₁/t₂)·x₂`` keeps the coordinate of the
first. A module here says only how its values flow; what a value is, a batch, a shape, a bound or a
symbol, is the business of whoever follows it.
"""

from __future__ import annotations

import operator
from collections import OrderedDict
from typing import Any, Literal, Protocol, TypeVar

import torch
from torch import Tensor, fx, nn

from .activations import RadialActivation
from .errors import refusal
from .functional import Scalar

T = TypeVar("T")
How = Literal["sum", "concatenate"]


class Flow(Protocol[T]):
    """What is done at the modules and joins that values pass."""

    def run(self, path: str, module: nn.Module, value: T) -> T:
        """Pass a module: a layer, an activation, an ``nn.Sequential`` or another composite."""
        ...

    def join(self, path: str, values: list[T], join: Join) -> T:
        """Add or concatenate values; the first one gives the coordinate."""
        ...


class Join(nn.Module):
    """The end of branches: the sum of their points, or the points behind each other on an axis."""

    def __init__(self, how: How, dim: int = 1) -> None:
        super().__init__()
        self.how, self.dim = how, dim

    def merge(self, parts: list[Tensor]) -> Tensor:
        """Return the sum, or the concatenation."""
        if self.how == "concatenate":
            return torch.cat(parts, self.dim)
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total

    def extra_repr(self) -> str:
        """Show how, and the axis."""
        return self.how if self.how == "sum" else f"concatenate, dim={self.dim}"


class Composite(nn.Module):
    """The base of modules that branch."""

    def flow(self, path: str, value: T, through: Flow[T]) -> T:
        """Let a value pass the branches."""
        raise NotImplementedError(f"{type(self).__name__} does not say how values flow")

    def forward(self, input: Tensor) -> Tensor:
        """Map points; activations inside need α as a number."""
        result: Tensor = self.flow("", input, _Plain())
        return result


class _Plain(Flow[Tensor]):
    """Values are batches of points."""

    def run(self, path: str, module: nn.Module, value: Tensor) -> Tensor:
        result: Tensor = module(value)
        return result

    def join(self, path: str, values: list[Tensor], join: Join) -> Tensor:
        return join.merge(values)


def branches(module: nn.Module) -> bool:
    """Tell whether a module branches with activations inside, so that it is no linear layer."""
    return isinstance(module, Composite) and any(
        isinstance(child, RadialActivation) for child in module.modules()
    )


def joined_bound(bounds: list[Scalar], join: Join | None) -> Scalar:
    """Return the bound of a sum or a concatenation; 1 where nothing was joined."""
    if join is None:
        return 1.0
    squares = join.how == "concatenate"
    total: Scalar = 0.0
    for bound in bounds:
        total = total + (bound**2 if squares else bound)
    return total**0.5 if squares else total


class Residual(Composite):
    """Add to a point what a few layers make of it; the coordinate is that of the skip.

    Args:
        *modules: the layers, as in :class:`ConformalLayers`; or one ``OrderedDict`` of them.
        shortcut: what stands in the skip, such as a convolution that changes the number of
            channels; None is nothing.

    Shape:
        (B, ...) → (B, ...)

    Examples:
        >>> import conformallayers as cl
        >>> block = cl.Residual(cl.Conv2d(8, 8, 3, padding=1), cl.ReSPro())
        >>> model = cl.ConformalLayers(cl.Conv2d(1, 8, 3), cl.ReSPro(), block)
        >>> model(torch.rand(2, 1, 6, 6)).shape
        torch.Size([2, 8, 4, 4])
    """

    def __init__(self, *modules: Any, shortcut: nn.Module | None = None) -> None:
        super().__init__()
        self.body = _sequence("Residual", modules)
        self.shortcut = nn.Identity() if shortcut is None else _module("Residual", shortcut)
        self.join = Join("sum")

    def flow(self, path: str, value: T, through: Flow[T]) -> T:
        """Add what the body gives to the skip."""
        skip = through.run(_below(path, "shortcut"), self.shortcut, value)
        return through.join(
            path, [skip, through.run(_below(path, "body"), self.body, value)], self.join
        )


class Parallel(Composite):
    """Send a point through several branches and add or concatenate what they give.

    The coordinate is that of the first branch.

    Args:
        *modules: the branches: layers, composites, or ``nn.Sequential`` of them.
        join: ``"sum"`` or ``"concatenate"``.
        dim: the axis to concatenate on, not that of the batch.

    Shape:
        (B, ...) → (B, ...)

    Examples:
        >>> import conformallayers as cl
        >>> wide = cl.Parallel(cl.Conv2d(1, 4, 1), cl.Conv2d(1, 4, 3, padding=1), join="concatenate")
        >>> cl.ConformalLayers(wide, cl.ReSPro())(torch.rand(2, 1, 6, 6)).shape
        torch.Size([2, 8, 6, 6])
    """

    def __init__(self, *modules: nn.Module, join: How = "sum", dim: int = 1) -> None:
        super().__init__()
        if join not in ("sum", "concatenate"):
            remedy = "Give one of them."
            raise refusal("Parallel(join=...)", '"sum" or "concatenate"', repr(join), remedy)
        if isinstance(dim, bool) or not isinstance(dim, int) or dim == 0:
            remedy = "1 is that of the channels."
            raise refusal(
                "Parallel(dim=...)", "an axis behind that of the batch", repr(dim), remedy
            )
        if not modules:
            raise refusal("Parallel", "at least one branch", "none", "Give modules.")
        self.branches = nn.ModuleList(_module("Parallel", module) for module in modules)
        self.join = Join(join, dim)

    def flow(self, path: str, value: T, through: Flow[T]) -> T:
        """Join what the branches give."""
        values = [
            through.run(_below(path, f"branches.{index}"), branch, value)
            for index, branch in enumerate(self.branches)
        ]
        return through.join(path, values, self.join)


class Traced(Composite):
    """Follow the graph of an ordinary module: layers, ``+``, ``torch.cat`` and ``flatten``.

    ``a + b`` keeps the coordinate of a, ``torch.cat([a, b], 1)`` that of a as well.

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
        name = type(_module("Traced", module)).__name__
        try:
            graph = _Tracer().trace(module)
        except Exception as error:
            got = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            remedy = "Keep its forward free of branches on values."
            raise refusal(f"Traced({name})", "a module torch.fx can trace", got, remedy) from error
        self.body = fx.GraphModule(module, graph)
        self.body.graph.eliminate_dead_code()
        graph = self.body.graph
        for node in graph.nodes:
            _check_node(name, node)
        inputs = [node for node in graph.nodes if node.op == "placeholder"]
        if len(inputs) != 1 or not isinstance(_output(graph), fx.Node):
            remedy = "Let it take and return one tensor."
            raise refusal(f"Traced({name})", "one input and one output", "others", remedy)

    def flow(self, path: str, value: T, through: Flow[T]) -> T:
        """Follow the graph."""
        found: dict[Any, T] = {}
        for node in self.body.graph.nodes:
            where = _below(path, f"body.{node.target if node.op == 'call_module' else node.name}")
            if node.op == "placeholder":
                found[node] = value
            elif node.op == "call_module":
                found[node] = through.run(
                    where, self.body.get_submodule(str(node.target)), found[node.args[0]]
                )
            elif node.target in _SUMS:
                values = [found[argument] for argument in node.args]
                found[node] = through.join(where, values, Join("sum"))
            elif node.target is torch.cat:
                values = [found[argument] for argument in node.args[0]]
                found[node] = through.join(where, values, Join("concatenate", _cat_axis(node)))
            elif node.op != "output":
                found[node] = through.run(
                    where, nn.Flatten(*node.args[1:], **node.kwargs), found[node.args[0]]
                )
        return found[_output(self.body.graph)]


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        ours = isinstance(m, (RadialActivation, Composite))
        return (
            ours
            or m.__module__.startswith("conformallayers.")
            or super().is_leaf_module(m, module_qualified_name)
        )


_SUMS = (operator.add, torch.add)


def _check_node(name: str, node: fx.Node) -> None:
    """Refuse what no point can flow through."""
    nodes = [argument for argument in node.args if isinstance(argument, fx.Node)]
    if node.op in ("placeholder", "output"):
        good = True
    elif node.op == "call_module":
        good = len(node.args) == 1 and len(nodes) == 1 and not node.kwargs
    elif node.target in _SUMS:
        good = len(nodes) == len(node.args) == 2 and not node.kwargs
    elif node.target is torch.cat:
        parts = node.args[0] if node.args else ()
        many = isinstance(parts, (list, tuple)) and all(isinstance(p, fx.Node) for p in parts)
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
            "modules, sums of two values, torch.cat behind the batch axis, flatten(1)",
            str(node.format_node()),
            "Write it with cl layers, +, torch.cat and flatten.",
        )


def _cat_axis(node: fx.Node) -> Any:
    return node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else 0)


def _output(graph: fx.Graph) -> Any:
    return next(node.args[0] for node in graph.nodes if node.op == "output")


def _below(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _module(owner: str, module: Any) -> nn.Module:
    if not isinstance(module, nn.Module):
        raise refusal(owner, "modules", repr(module), "Pass layers, or nn.Sequential of layers.")
    return module


def _sequence(owner: str, modules: tuple[Any, ...]) -> nn.Sequential:
    if len(modules) == 1 and isinstance(modules[0], OrderedDict):
        return nn.Sequential(modules[0])
    return nn.Sequential(*(_module(owner, module) for module in modules))
