"""Convert a plain CNN into its conformal twin: chosen rectifiers of its graph become ReSPro."""

from __future__ import annotations

import copy
import operator
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import fx, nn

from .container import ConformalLayers
from .errors import ConformalError, checked_shape, refusal
from .graph.capture import capture
from .graph.graph import INPUT, Graph, Node, between
from .nn.activations import ReSPro
from .nn.branches import Join
from .nn.layers import Abs, Permute, Product
from .nn.registry import by_axis, find_spec, suggestion
from .nn.traced import Traced
from .utils.text import Block, Printed, Table, suggest

Keep = str | Sequence[str]
_CHOICES = ("all", "pooling", "none")
_RECTIFIERS = (nn.ReLU, nn.LeakyReLU, nn.PReLU, Abs)
_TAKEN = ConformalLayers()  # whose attributes cannot be names of layers


@dataclass(frozen=True)
class Change:
    """One call of a model and its action: ``kept …``, ``replaced by …``, ``dropped`` or ``refused``."""

    path: str
    type: str
    action: str
    reason: str


@dataclass(frozen=True, repr=False)
class Conversion(Printed):
    """The changes of :func:`conformallayers.convert`; prints as a table with a row for every layer."""

    changes: tuple[Change, ...] = ()

    def _blocks(self) -> Iterator[Block]:
        yield Table(("path", "type", "what", "why"), [astuple(one) for one in self.changes])


class Converted(nn.Sequential):
    """The result of :func:`conformallayers.convert`: ``features``, a :class:`conformallayers.ConformalLayers`, and mostly a plain ``head``.

    Attributes:
        conversion: the :class:`Conversion`.
    """

    conversion = Conversion()


def convert(model: nn.Module, input_shape: tuple[int, ...], *, keep: Keep = "pooling") -> Converted:
    """Return the conformal twin of a plain CNN, with its weights; the model is not changed.

    Linear layers, normalization, pooling, sums and concatenations are kept, in a
    :class:`ConformalLayers` with ``offset="learned"`` and ``unit="rms"``. ``keep`` chooses the rectifiers that stay and end
    stages; the others become ``cl.ReSPro(1.0, projective=True)``, which folds. The head, from the layer
    where samples become vectors or the first that a ConformalLayers cannot hold, stays a plain ``nn.Sequential``.

    The weights are copied, but outputs change. A point is x/t with ``t = √(mean x² + offset²)``. Biases and BatchNorms act
    on the point, and rectifiers and pooling commute with the division, so with ``keep="all"`` the twin computes
    ``twin(x) = model(x / t)``. A ReSPro rescales the whole sample instead of rectifying: fine-tune.

    Args:
        model: an ``nn.Sequential`` or any module that torch.fx can trace, with one input and one output, in any mode.
            Its twin has the graph of evaluation mode, and the mode, dtype and device of the model.
        input_shape: of one sample, without the batch axis.
        keep: the rectifiers that stay: ``"all"``; ``"pooling"``, those next to a pooling or a layer with stride, before or after
            it, with only normalization or dropout between; ``"none"``; or a list of paths of modules. Functions and second calls
            of a module have the name that ``conversion`` shows.

    Returns:
        A :class:`~conformallayers.conversion.Converted` model. ``print(twin.conversion)`` lists every layer and its replacement.

    Raises:
        ConformalError: one error with a table of everything that cannot be converted.

    Examples:
        >>> model = nn.Sequential(
        ...     nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.MaxPool2d(2),
        ...     nn.Flatten(), nn.Linear(32, 10),
        ... )
        >>> twin = convert(model, (3, 8, 8))
        >>> print(twin.conversion)
        path  type       what                why
        ----  ---------  ------------------  -------------------------------
        0     Conv2d     kept                affine
        1     ReLU       replaced by ReSPro  not next to a pooling or stride
        2     Conv2d     kept                affine
        3     ReLU       kept                before MaxPool2d 4
        4     MaxPool2d  kept                homogeneous
        5     Flatten    kept in the head    after the division
        6     Linear     kept in the head    after the division
    """
    where = f"convert({type(model).__name__})"
    shape = checked_shape(input_shape, "convert(input_shape=...)")
    with torch.inference_mode(False):  # parameters made in it cannot be trained
        graph = capture(model, shape, where="convert")
        if graph.parts:
            remedy = "Convert the plain part alone, or train it as it is."
            raise refusal(where, "a plain model", "a model with ConformalLayers", remedy)
        return _Twin(where, model, graph, keep).build()


class _Twin:
    """The modules of a twin: those of a copy of the model, or of its graph where it calls functions."""

    def __init__(self, where: str, model: nn.Module, graph: Graph, keep: Keep) -> None:
        if graph.output == INPUT or graph.nodes[graph.output].shape is None:
            expected = "a model with layers that returns one batch"
            remedy = "Return the scores alone, or convert the part of the model that computes them."
            got = "no layers" if graph.output == INPUT else "an output that is not one batch"
            raise refusal(where, expected, got, remedy)
        self.model, self.graph = model, graph
        copied = dict(copy.deepcopy(model).named_modules())
        self.modules = [_trainable(node, copied, model.training) for node in graph.nodes]
        self.head = _head(graph)
        outside = (number for number in range(len(graph.nodes)) if number < self.head)
        refused = {n: why for n in outside if (why := _problem(graph.nodes[n])) is not None}
        if refused:
            raise _refusal(where, graph, refused)
        self.chosen = _chosen(graph, _checked_keep(keep, graph), self.head)

    def build(self) -> Converted:
        """Return the twin."""
        modes = {part: part.training for module in self.modules for part in module.modules()}
        # α = 1 keeps points after a BatchNorm, of root mean square 1, as long as they are.
        replaced = [
            module if self.chosen.get(number, (True, ""))[0] else ReSPro(1.0, projective=True)
            for number, module in enumerate(self.modules)
        ]
        chain = [(_key(self.graph, n), m, n >= self.head) for n, m in _chain(self.graph, replaced)]
        features, head = (
            OrderedDict((key, m) for key, m, in_head in chain if in_head == side)
            for side in (False, True)
        )
        twin = Converted()
        twin.add_module("features", ConformalLayers(features, offset="learned", unit="rms"))
        if head:
            twin.add_module("head", nn.Sequential(head))
        like = next(self.model.parameters(), None)
        if like is not None:
            twin.to(like.device, like.dtype)
        twin.conversion = Conversion(tuple(self._changes()))
        twin.train(self.model.training)
        for part, mode in modes.items():
            part.training = mode
        return twin

    def _changes(self) -> Iterator[Change]:
        used = set()
        for number, node in enumerate(self.graph.nodes):
            used.add(node.path)
            kind = _kind(node)
            action, reason = "kept", str(node.kind)
            if number >= self.head:
                action, reason = "kept in the head", "after the division"
            elif number in self.chosen:
                kept, reason = self.chosen[number]
                action = "kept" if kept else "replaced by ReSPro"
                if not kept and isinstance(node.module, nn.PReLU):
                    reason += "; its weight is dropped"
            function = not node.path and not isinstance(node.module, Join)
            if function and action != "replaced by ReSPro":
                action += f" as {type(node.module).__name__}"
            yield Change(node.name or "model", kind, action, reason)
        for path, module in self.model.named_modules():
            leaf = path and path not in used and not [*module.children()]
            if leaf and [*module.parameters()]:
                kind = type(module).__name__
                yield Change(path, kind, "dropped", "not called at evaluation")


def _trainable(node: Node, copied: Mapping[str, nn.Module], training: bool) -> nn.Module:
    """Return the module of a node in the twin."""
    if node.kind == "other" and isinstance(node.module, fx.GraphModule):
        return node.module
    module = copied.get(node.path) if node.path or node.call == type(node.module).__name__ else None
    if module is None or isinstance(node.module, Join):
        return node.module.train(training)
    if getattr(module, "inplace", False):
        module.inplace = False  # type: ignore[assignment]
    return module


def _head(graph: Graph) -> int:
    """Return the first node after the division, or the number of nodes if there is no head.

    The head begins after the last layer of maps: at the first vector, or at the first module that a
    ConformalLayers cannot hold. In a model of vectors every layer with weights counts as a layer of maps.
    """
    nodes = graph.nodes
    specs = [find_spec(node.module) for node in nodes]
    spatial = [n for n, spec in enumerate(specs) if spec is not None and (spec.rank or 0) > 2]
    weighted = [n for n, node in enumerate(nodes) if node.path and [*node.module.buffers()]]
    for number in range(max(spatial or weighted, default=len(nodes)) + 1, len(nodes)):
        node = nodes[number]
        vector = bool(spatial) and node.shape is not None and len(node.shape) == 1
        later = (source for other in nodes[number + 1 :] for source in other.sources)
        cuts = len(node.sources) == 1 and all(source >= number for source in later)
        if (vector or node.kind == "other") and cuts:
            return number
    return len(nodes)


def _problem(node: Node) -> str | None:
    """Return why a node cannot stand in a ConformalLayers and what to do, or None."""
    module = node.module
    if hasattr(module, "recipe"):
        return "It is folded already: convert the model with its layers, then fold."
    if any(path for path in node.constants) and node.kind != "other":
        return f"{node.call} reads {node.constants[0]}. Use the module that has it, or cl.Scale."
    if node.kind != "other":
        return None
    if isinstance(module, (fx.GraphModule, Permute, Product)):
        return f"{node.call} does not fold. Write it with modules, or put it into the head."
    spec = find_spec(module)
    found = None if spec is None else spec.problem(module)
    return found or suggestion(type(module))


def _refusal(where: str, graph: Graph, refused: Mapping[int, str]) -> ConformalError:
    """Return one error with a table of all nodes that cannot be converted."""
    changes = tuple(
        Change(graph.nodes[number].name, _kind(graph.nodes[number]), "refused", why)
        for number, why in refused.items()
    )
    expected = "layers that are linear, homogeneous or radial before the head"
    got, remedy = f"{len(refused)} that cannot be converted", "Change these and convert again:"
    return ConformalError(f"{refusal(where, expected, got, remedy)}\n{Conversion(changes)}")


def _kind(node: Node) -> str:
    """Return the type of a module, or the name of a function."""
    return (
        node.call
        if node.path or node.call == type(node.module).__name__
        else node.name.rstrip("_0123456789")
    )


# -- the rectifiers that stay ----------------------------------------------------------------------------


def _checked_keep(keep: Any, graph: Graph) -> str | tuple[str, ...]:
    """Return ``keep`` if it is a choice or names rectifiers of the model, or refuse it."""
    where = "convert(keep=...)"
    expected = f"{', '.join(repr(choice) for choice in _CHOICES)} or a list of paths of rectifiers"
    if isinstance(keep, str):
        if keep in _CHOICES:
            return keep
        remedy = f"Put a single path into a list: keep=[{keep!r}].{suggest(keep, _CHOICES)}"
        raise refusal(where, expected, repr(keep), remedy)
    paths = tuple(keep) if isinstance(keep, (list, tuple, set)) else (keep,)
    rectifiers = [node for node in graph.nodes if isinstance(node.module, _RECTIFIERS)]
    known = {name for node in rectifiers for name in (node.path, node.name) if name}
    for path in paths:
        if path not in known:
            remedy = f"The rectifiers of the model are {', '.join(sorted(known)) or 'none'}."
            raise refusal(where, expected, repr(path), remedy)
    return paths


def _chosen(graph: Graph, keep: str | tuple[str, ...], head: int) -> dict[int, tuple[bool, str]]:
    """Return, for every rectifier before the head, whether it stays, and why."""
    found = {}
    for number, node in enumerate(graph.nodes[:head]):
        if not isinstance(node.module, _RECTIFIERS):
            continue
        if keep == "pooling":
            beside = _beside(graph, number)
            found[number] = beside is not None, beside or "not next to a pooling or stride"
        elif isinstance(keep, str):
            found[number] = keep == "all", f'keep="{keep}"'
        else:
            kept = node.name in keep or (node.path or node.name) in keep
            found[number] = kept, "named in keep" if kept else "not named in keep"
    return found


def _beside(graph: Graph, number: int) -> str | None:
    """Return the pooling or stride next to a rectifier, seen through normalization and dropout."""
    nodes = graph.nodes
    after = _reached(graph, number, lambda n: [m for m in graph.readers[n] if m < len(nodes)])
    before = _reached(graph, number, lambda n: [m for m in nodes[n].sources if m != INPUT])
    for word, found in (("before", after), ("after", before)):
        if found is not None:
            kind = f"{found.call} " if found.path else ""
            return f"{word} {kind}{found.name}"
    return None


def _reached(graph: Graph, number: int, next_to: Callable[[int], list[int]]) -> Node | None:
    """Return the first node in one direction that pools or has a stride."""
    for one in next_to(number):
        module: Any = graph.nodes[one].module
        strided = isinstance(module, nn.modules.conv._ConvNd) and max(module.stride) > 1
        if strided or isinstance(module, _POOLS):
            return graph.nodes[one]
        if isinstance(module, _TRANSPARENT):
            found = _reached(graph, one, next_to)
            if found is not None:
                return found
    return None


_TRANSPARENT = (nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd, nn.Identity)
_POOLS = by_axis("MaxPool", "AvgPool", "AdaptiveMaxPool", "AdaptiveAvgPool", "LPPool")


# -- branches -------------------------------------------------------------------------------------------


def _chain(graph: Graph, modules: Sequence[nn.Module]) -> list[tuple[int, nn.Module]]:
    """Return the modules of a graph in a row with their nodes, branches as :class:`Traced` up to their join.

    Every path from the input to a node passes its dominators. Between two neighbouring dominators of the output
    there is one layer, or branches that end in a join.
    """
    dominators: dict[int, set[int]] = {INPUT: {INPUT}}
    for number, node in enumerate(graph.nodes):
        dominators[number] = {number}.union(
            set.intersection(*(dominators[source] for source in node.sources))
        )
    row = sorted(dominators[graph.output])
    return [
        (
            end,
            _traced(graph, modules, begin, end) if isinstance(modules[end], Join) else modules[end],
        )
        for begin, end in pairwise(row)
    ]


def _traced(graph: Graph, modules: Sequence[nn.Module], start: int, end: int) -> Traced:
    """Return the branches from a value to their join."""
    drawn, root = fx.Graph(), nn.Module()
    nodes = {start: drawn.placeholder("x")}
    for number in sorted(between(graph, start, end)):
        values = [nodes[source] for source in graph.nodes[number].sources]
        module, name = modules[number], _key(graph, number)
        if not isinstance(module, Join):
            root.add_module(name, module)
            nodes[number] = drawn.call_module(name, tuple(values))
        elif module.how == "sum":
            nodes[number] = drawn.call_function(operator.add, tuple(values))
        else:
            nodes[number] = drawn.call_function(torch.cat, (values, module.dim))
    drawn.output(nodes[end])
    return Traced(fx.GraphModule(root, drawn))


def _key(graph: Graph, number: int) -> str:
    """Return the name of a layer in its container."""
    name = (graph.nodes[number].name or "model").replace(".", "_")
    name = name.replace(" (", "_").removesuffix(")")  # of a second call
    return name + "_" * hasattr(_TAKEN, name)
