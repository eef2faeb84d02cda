"""Whole models: trace any module, and find the layers of each ConformalLayers in it."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from ..errors import ConformalError, cause_line, refusal, shape_text
from ..nn.bounds import Shape
from ..nn.container import ConformalSequential
from ..nn.extra_layers import Centre
from ..nn.registry import branches, find_spec
from ..utils.text import call_text
from .folded import Folded
from .operators import (
    Operator,
    freeze,
    frozen_layers,
    frozen_wide,
    is_plain,
    operator_of,
    refuse_hooks,
)
from .split import StageGraph, stages_of, takes_prefix, with_head, with_prefix
from .trace import Trace, trace_modules

_SAMPLES = 2  # of the run that records shapes; with 1, any axis of size 1 could be the batch
_ROOT = "conformal_layers"  # the name of a ConformalLayers that is folded by itself
_ONE_BY_ONE = "Fold a part of it: model.part = cl.fold(model.part, shape)."


@dataclass(frozen=True)
class Graph:
    """A frozen model as a graph of torch.fx."""

    module: fx.GraphModule
    shapes: dict[fx.Node, Shape]  # of a sample, at each node whose first axis is that of the batch
    rows: dict[fx.Node, Shape]  # of one row of every tensor, whatever its first axis is
    traces: dict[fx.Node, Trace]  # of each ConformalLayers

    def labels(self) -> dict[fx.Node, str]:
        """Return a name for each call of a ConformalLayers: its path, with the node for a second call."""
        found: dict[fx.Node, str] = {}
        for node in self.traces:
            path = _path(node)
            found[node] = f"{path} ({node.name})" if path in found.values() else path
        return found


def _path(node: fx.Node) -> str:
    """Return the path of a ConformalLayers in its model."""
    return "" if node.target == _ROOT else str(node.target)


def capture(
    model: nn.Module, shape: Shape, *, keep_hooks: bool = False, conformal: bool = False
) -> Graph:
    """Trace a frozen copy of the model and record the shape of every value in it.

    With ``conformal`` a model without a ConformalLayers is refused.
    """
    _check_model(model, keep_hooks)
    root: nn.Module = freeze(model)
    if isinstance(model, ConformalSequential):
        container = nn.Sequential()
        container.add_module(_ROOT, root)
        root = container
    where, random = f"fold({type(model).__name__})", torch.get_rng_state()
    try:
        module = fx.GraphModule(root, _Tracer().trace(root))
    except Exception as error:
        expected = "a model that torch.fx can trace"
        raise refusal(where, expected, cause_line(error), _ONE_BY_ONE) from error
    if not torch.equal(torch.get_rng_state(), random):
        expected, got = "a model without chance", "random numbers drawn in forward"
        remedy = "Draw them like the input, as in torch.randn_like(x), or leave them out."
        raise refusal(where, expected, got, remedy)
    like = next(model.parameters(), torch.empty(0))
    zeros = torch.zeros(_SAMPLES, *shape, dtype=like.dtype, device=like.device)
    recorder = _ShapeRecorder(module)
    try:
        recorder.run(zeros)
    except ConformalError:
        raise
    except Exception as error:
        raise refusal(
            f"fold({type(model).__name__})",
            f"a model that takes one batch of samples of shape {shape_text(shape)}",
            f"{type(error).__name__}: {str(error).splitlines()[0]}",
            "Check input_shape, and that model(x) runs.",
        ) from error
    if conformal and not recorder.traces:
        expected = "a cl.ConformalLayers, or a module with some inside"
        raise refusal(where, expected, type(model).__name__, "Only their steps have α and bounds.")
    return Graph(module, recorder.shapes, recorder.rows, recorder.traces)


def _check_model(model: nn.Module, keep_hooks: bool) -> None:
    if not isinstance(model, nn.Module):
        raise refusal("fold(model)", "an nn.Module", type(model).__name__, "Pass the model itself.")
    if isinstance(model, Folded):
        raise refusal("fold(model)", "a model with layers", "a Folded", "It is folded already.")
    for path, module in model.named_modules():
        custom = type(module).forward is not ConformalSequential.forward
        if isinstance(module, ConformalSequential) and custom:
            raise refusal(
                f"fold({path or 'model'})",
                "the forward of ConformalLayers",
                f"{type(module).__name__}, which overrides it",
                "Put what it adds into a module around the ConformalLayers.",
            )
        if not keep_hooks:
            refuse_hooks(path, module)


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        known = (
            isinstance(m, ConformalSequential) or is_plain(m, (Centre,)) or find_spec(m) is not None
        )
        return known or super().is_leaf_module(m, module_qualified_name)


class _ShapeRecorder(fx.Interpreter):
    """Run zeros through the graph to record shapes; ConformalLayers are traced, not run."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.extra_traceback = False  # or fx would write its own lines into our messages
        self.traces: dict[fx.Node, Trace] = {}
        self.shapes: dict[fx.Node, Shape] = {}
        self.rows: dict[fx.Node, Shape] = {}
        self.done: set[fx.Node] = set()

    def run_node(self, n: fx.Node) -> Any:
        self.done.add(n)
        module = self.fetch_attr(str(n.target)) if n.op == "call_module" else None
        if isinstance(module, ConformalSequential):
            x: Tensor = self.env[n.all_input_nodes[0]]
            layers = frozen_layers(module, _path(n))
            self.traces[n] = trace_modules(layers, tuple(x.shape[1:]), *module.embedding)
            value: Any = x.new_zeros(x.shape[0], *self.traces[n].output_shape)
        else:
            versions = {source: self._version(source) for source in self.env}
            value = super().run_node(n)
            self._refuse_overwriting(n, versions)
        if isinstance(value, Tensor) and n.op != "get_attr":
            self.rows[n] = tuple(value.shape[1:])
            if value.shape[:1] == (_SAMPLES,):
                self.shapes[n] = self.rows[n]
        if n.op == "output" and not isinstance(value, Tensor):
            raise refusal(
                "fold(model)", "a model that returns one tensor", type(value).__name__, _ONE_BY_ONE
            )
        return value

    def _version(self, node: fx.Node) -> list[int]:
        """Return how often the memory of each tensor of a value was written to, through any of its views."""
        leaves = tree_leaves(self.env[node])
        tensors = (leaf for leaf in leaves if isinstance(leaf, Tensor) and not leaf.is_inference())
        return [tensor._version for tensor in tensors]

    def _refuse_overwriting(self, node: fx.Node, versions: dict[fx.Node, list[int]]) -> None:
        """Refuse a node that has changed a value which a later node reads: a recipe keeps values."""
        for source, version in versions.items():
            if self._version(source) != version and not self.done.issuperset(source.users):
                raise refusal(
                    call_text(node),
                    "a layer that changes no value which is read again",
                    "one that works in place",
                    "Use inplace=False, or a function that returns a new value.",
                )


def stages_at(graph: Graph, node: fx.Node, *, prefix: bool = True) -> tuple[StageGraph, fx.Node]:
    """Return the stages of a ConformalLayers, prefixed with the layers that only scale the norm.

    A margin of zeros or repeated channels multiply the norm of every sample by one number, so they
    fold away. Returns the stages and the node that feeds them.
    """
    stages, feed = stages_of(graph.traces[node]), node.all_input_nodes[0]
    if not prefix or not takes_prefix(stages):
        return stages, feed
    operators: list[Operator] = []
    norm_factor, first = 1.0, feed
    while first.op == "call_module" and len(first.users) == 1 and len(first.all_input_nodes) == 1:
        module, before = graph.module.get_submodule(str(first.target)), first.all_input_nodes[0]
        spec = find_spec(module)
        known = {before, first} <= graph.shapes.keys()
        if not known or spec is None or spec.norm_factor is None or spec.problem(module):
            break
        shapes = graph.shapes[before], graph.shapes[first]
        factor = spec.norm_factor(module, shapes[0])
        if factor is None:
            break
        operators.insert(0, operator_of(frozen_wide(module), *shapes))
        norm_factor, first = norm_factor * factor, before
    if not operators or not _is_input(graph, first):  # behind another part, that part absorbs them
        return stages, feed
    return with_prefix(stages, tuple(operators), norm_factor), first


def _is_input(graph: Graph, node: fx.Node) -> bool:
    """Tell whether a node is the input of the model, possibly minus a mean image."""
    while node.op == "call_module" and len(node.all_input_nodes) == 1:
        if not is_plain(graph.module.get_submodule(str(node.target)), (Centre,)):
            return False
        node = node.all_input_nodes[0]
    return node.op == "placeholder"


def with_followers(
    graph: Graph, node: fx.Node, stages: StageGraph
) -> list[tuple[fx.Node, StageGraph]]:
    """Return stages with none, one, … following affine modules absorbed, and their last node."""
    found = [(node, stages)]
    while len(node.users) == 1:
        (node,) = node.users
        module = _affine_module(graph, node)
        if module is None or node not in graph.shapes or len(node.all_input_nodes) != 1:
            break
        found.append((node, with_head(found[-1][1], frozen_wide(module), graph.shapes[node])))
    return found


def _affine_module(graph: Graph, node: fx.Node) -> nn.Module | None:
    if node.op == "call_module":
        if len(node.args) > 1 or not set(node.kwargs) <= {"input"}:  # such as output_size
            return None
        module = graph.module.get_submodule(str(node.target))
        spec = find_spec(module)
        if spec is None or spec.homogeneous or branches(module):
            return None
        # A layer with NaN stays outside: its outputs are NaN, as in the model, and not those of the whole part.
        tensors = (*module.parameters(), *module.buffers())
        finite = all(bool(tensor.isfinite().all()) for tensor in tensors)
        return module if finite and spec.problem(module) is None else None
    return nn.Flatten() if flattens(node) else None


def flattens(node: fx.Node) -> bool:
    """Tell whether a node flattens all axes but the first."""
    is_flatten = node.op == "call_function" and node.target is torch.flatten
    is_flatten = is_flatten or (node.op == "call_method" and node.target == "flatten")
    given = dict(zip(("start_dim", "end_dim"), node.args[1:], strict=False)) | node.kwargs
    return is_flatten and given in ({"start_dim": 1}, {"start_dim": 1, "end_dim": -1})


def reshapes(node: fx.Node) -> bool:
    """Tell whether a node gives every sample another shape, as ``x.view(x.size(0), -1)``.

    A first size of -1 leaves the batch as it is if the other sizes do not hang on it; the shape that was recorded
    tells whether it does.
    """
    method = node.op == "call_method" and node.target in ("view", "reshape")
    if not (method or node.target is torch.reshape) or len(node.args) < 2 or node.kwargs:
        return False
    sizes: Any = node.args[1] if isinstance(node.args[1], (tuple, list)) else node.args[1:]
    if not sizes or not (sizes[0] == -1 or _size_axis(sizes[0]) == 0):
        return False
    return all(isinstance(size, int) or (_size_axis(size) or 0) > 0 for size in sizes[1:])


def _size_axis(value: Any) -> int | None:
    """Return the axis of ``x.size(axis)`` or ``x.shape[axis]``, None for other values."""
    if not isinstance(value, fx.Node):
        return None
    source, axis = (*value.args, None, None)[:2]
    if value.target is operator.getitem and isinstance(source, fx.Node):
        shape = source.target is getattr and source.args[1:] == ("shape",)
        whole = shape or (source.target == "size" and len(source.args) == 1)
    else:
        whole = value.op == "call_method" and value.target == "size"
    return axis if whole and isinstance(axis, int) else None
