"""Read a plain model: its torch.fx graph as a list of items, each with the module that computes it."""

from __future__ import annotations

import copy
import operator
import re
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from .. import errors
from ..container import ConformalLayers
from ..errors import cause_line, refusal, shape_text
from ..nn.activations import RadialActivation
from ..nn.branches import Join, below
from ..nn.registry import find_spec, flatten_modules, has_hooks, suggestion
from .functions import CONSTANT, SAMPLES, Replacement, Values, dropout_mode, is_map, module_for

INPUT = ""  # the name of the model's input, which no item has
_STATIC = "Write its forward without control flow or other code that needs values."
_CHECKED = "Check inputs before the model is called, not in its forward."
_OUTSIDE = tuple(str(Path(str(module.__file__)).parent) for module in (torch, errors))
_LISTS = (nn.ModuleList, nn.ModuleDict)
_TAKEN = ConformalLayers()  # whose attributes cannot be names of layers


@dataclass(frozen=True)
class Item:
    """One call in the graph of a model.

    Args:
        name: unique, with ``_`` for the dots of its path.
        path: of the module, or the name of the node of a function.
        kind: the type of the module, or the function.
        module: computes it; a Join of several values, or None if there is no such module.
        sources: the names of the items that it reads.
        output_shape: of one sample.
        problem: why it cannot stand in a ConformalLayers and what to do, or None.
        function: whether the model calls a function and no module.
        unused: why the twin does not need it, or empty.
    """

    name: str
    path: str
    kind: str
    module: nn.Module | None = None
    sources: tuple[str, ...] = ()
    output_shape: tuple[int, ...] = ()
    problem: str | None = None
    function: bool = False
    unused: str = ""

    @property
    def label(self) -> str:
        """The path, with the name for a second call of the same module."""
        return self.path if self.name == _key(self.path) else f"{self.path} ({self.name})"

    @property
    def spatial(self) -> bool:
        """Whether it is a layer of maps alone: a convolution, a pooling, a normalisation of images."""
        parts = [] if self.module is None else [self.module]
        if type(self.module) is nn.Sequential:
            parts = [part for _, part in flatten_modules(self.module)]
        specs = [find_spec(part) for part in parts]
        return any(spec is not None and (spec.rank or 0) > 2 for spec in specs)


def read(model: nn.Module, shape: tuple[int, ...]) -> list[Item]:
    """Return the calls of a model in order; the items hold the modules of the model itself.

    The graph is that of evaluation mode. Of a model that torch.fx cannot trace, return the parts at fault.
    """
    modes = {module: module.training for module in model.modules()}
    model.eval()
    root = _OneInput(model)
    try:
        graph = _Tracer().trace(root)
    except Exception as error:
        whole = Item("model", "model", type(model).__name__, problem=cause_line(error))
        return [*_faults("", model)] or [whole]
    _mark_constant(graph, root)
    module = fx.GraphModule(root, graph)
    overwriting = _overwriting(module)
    # An in-place call whose result is not read counts as dead, but must stay to be refused.
    if not overwriting:
        module.graph.eliminate_dead_code()
    values = _values(module, model, shape)
    for part, mode in modes.items():
        part.training = mode
    items = list(_items(module, values, overwriting, model.training))
    return items + list(_not_called("", model, {item.path for item in items}))


def _mark_constant(graph: fx.Graph, root: nn.Module) -> None:
    """Mark functions of dropout that drop nothing in training mode either: they do not follow the mode."""
    before = [node for node in graph.nodes if dropout_mode(node) is not None]
    if not before:
        return
    try:
        with torch.random.fork_rng(devices=[]):
            training = _Tracer().trace(copy.deepcopy(root).train())
    except Exception:
        return  # the mode is read then
    after = [node for node in training.nodes if dropout_mode(node) is not None]
    if len(before) == len(after):
        for node, other in zip(before, after, strict=True):
            node.meta[CONSTANT] = not dropout_mode(other)


def _not_called(path: str, module: nn.Module, called: set[str]) -> Iterator[Item]:
    """Yield the layers below a module that the graph does not call."""
    if (path or "model") in called:
        return
    if _Tracer().is_leaf_module(module, path):
        yield Item(_key(path), path, type(module).__name__, unused="not called at evaluation")
        return
    for key, child in module.named_children():
        yield from _not_called(below(path, key), child, called)


class _OneInput(nn.Module):
    """Call a model with one input, so that its other arguments have their defaults."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Any:
        return self.model(x)


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if isinstance(m, _LISTS):
            return False
        known = isinstance(m, RadialActivation) or find_spec(m) is not None
        return known or super().is_leaf_module(m, module_qualified_name)


class _Recorder(fx.Interpreter):
    """Run a batch and keep the value of every node; of a tensor only its shape, as a meta tensor."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.extra_traceback = False
        self.values: dict[fx.Node, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        tensor = isinstance(value, Tensor)
        self.values[n] = torch.empty(value.shape, device="meta") if tensor else value
        return value


def _values(module: fx.GraphModule, model: nn.Module, shape: tuple[int, ...]) -> Values:
    parameter = next(model.parameters(), torch.empty(()))
    zeros = torch.zeros(SAMPLES, *shape, dtype=parameter.dtype, device=parameter.device)
    recorder = _Recorder(module)
    try:
        with torch.no_grad():
            recorder.run(zeros)
    except Exception as error:
        raise refusal(
            f"convert({type(model).__name__})",
            f"a model that takes a batch of samples of shape {shape_text(shape)}",
            cause_line(error),
            "Give input_shape without the batch axis, and check that model(x) runs.",
        ) from error
    (output,) = (node for node in module.graph.nodes if node.op == "output")
    if not isinstance(output.args[0], fx.Node) or not is_map(output, recorder.values):
        got = type(recorder.values[output]).__name__
        remedy = "Return the scores alone, or convert the part of the model that computes them."
        raise refusal(f"convert({type(model).__name__})", "one tensor as output", got, remedy)
    return recorder.values


def _overwriting(module: fx.GraphModule) -> dict[fx.Node, str]:
    """Return, with a reason to refuse it, every call that changes a map in place before it is read again."""
    found: dict[fx.Node, str] = {}
    nodes = list(module.graph.nodes)
    for index, node in enumerate(nodes):
        if node.op == "call_module":
            in_place = getattr(module.get_submodule(str(node.target)), "inplace", False)
        else:
            name = getattr(node.target, "__name__", str(node.target))
            underscore = name.endswith("_") and not name.endswith("__")
            in_place = underscore or node.target is operator.iadd or node.kwargs.get("inplace")
        if in_place and node.all_input_nodes:
            later = [user for user in node.all_input_nodes[0].users if user in nodes[index + 1 :]]
            if later:
                remedy = "Compute a new one: inplace=False, or x = x + y."
                found[node] = f"it changes a map in place that {later[0]} reads later. {remedy}"
    return found


def _items(
    module: fx.GraphModule, values: Values, overwriting: dict[fx.Node, str], training: bool
) -> Iterator[Item]:
    names, paths = _names(module.graph)
    for node, name in names.items():
        if node.op == "placeholder":
            continue
        function = node.op != "call_module"
        found: Replacement
        if function:
            kind, found = re.sub(r"_\d+$", "", node.name), module_for(node, values)
        else:
            part = module.get_submodule(str(node.target))
            kind, found = type(part).__name__, _called(node, part, values)
        item = Item(name, paths[node], kind, function=function)
        found = overwriting.get(node, found)
        if not isinstance(found, str):
            part, nodes = found
            if function:
                part.train(training)
            sources, after = tuple(names[one] for one in nodes), tuple(values[node].shape[1:])
            problem = _problem(part)
            yield replace(item, module=part, sources=sources, output_shape=after, problem=problem)
        elif function and _is_size(values[node]):
            yield replace(item, unused="only a size")
        else:
            yield replace(item, problem=found)


def _names(graph: fx.Graph) -> tuple[dict[fx.Node, str], dict[fx.Node, str]]:
    """Return a unique name for every call, and its path; the path of a function is its name.

    First calls of modules come first, so that no function and no second call has the name of another module.
    """
    nodes = [node for node in graph.nodes if node.op not in ("get_attr", "output")]
    paths = {node: node.name for node in nodes}
    for node in nodes:
        if node.op == "call_module":
            paths[node] = str(node.target).partition(".")[2] or "model"
    first = {paths[node]: node for node in reversed(nodes) if node.op == "call_module"}
    names: dict[fx.Node, str] = {}
    for node in sorted(nodes, key=lambda node: first.get(paths[node]) is not node):
        enters = node.op == "placeholder"
        names[node] = INPUT if enters else _unused(_key(paths[node]), set(names.values()))
        if node.op != "call_module" and names[node] != _key(paths[node]):
            paths[node] = names[node]
    return {node: names[node] for node in nodes}, paths


def _called(node: fx.Node, module: nn.Module, values: Values) -> Replacement:
    """Return a module of the model with the node that it reads, or why it cannot be used."""
    if any(map(has_hooks, module.modules())):
        return "it has hooks, which a fold would not run. Remove them."
    nodes = node.all_input_nodes
    one = len(nodes) == len(node.args) == 1 and not node.kwargs and is_map(nodes[0], values)
    if not one or not is_map(node, values):
        if find_spec(module) is None:
            return suggestion(type(module))
        return "it takes or returns more than one map. Call it with one tensor."
    if getattr(module, "inplace", False):
        module.inplace = False  # type: ignore[assignment]
    return module, nodes


def _problem(module: nn.Module) -> str | None:
    if isinstance(module, (RadialActivation, Join)) or type(module) is nn.Sequential:
        return None
    spec = find_spec(module)
    return suggestion(type(module)) if spec is None else spec.problem(module)


def _is_size(value: Any) -> bool:
    many = isinstance(value, (tuple, list))
    return isinstance(value, int) or (many and all(isinstance(one, int) for one in value))


def _faults(path: str, module: nn.Module) -> Iterator[Item]:
    """Yield the innermost modules that torch.fx cannot trace, and the layers that do not convert."""
    name, kind = path or "model", type(module).__name__
    if _Tracer().is_leaf_module(module, path):
        problem = _problem(module)
        if problem is not None:
            yield Item(_key(name), name, kind, problem=problem)
        return
    inner = [
        item for key, child in module.named_children() for item in _faults(below(path, key), child)
    ]
    yield from inner
    if isinstance(module, _LISTS):
        return
    if not any(item.problem and item.problem.endswith((_STATIC, _CHECKED)) for item in inner):
        try:
            _Tracer().trace(module)
        except Exception as error:
            yield Item(_key(name), name, kind, problem=_fault(error))


def _fault(error: Exception) -> str:
    """Return why torch.fx cannot trace a forward, with the line at fault and what to do."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.line for frame in frames if not frame.filename.startswith(_OUTSIDE)]
    line = (lines[-1] if lines else "") or ""
    checks = line.startswith("assert") or ".shape" in line or ".size(" in line
    place = f" in `{line}`" if line else ""
    return f"{cause_line(error)}{place}. {_CHECKED if checks else _STATIC}"


def _key(path: str) -> str:
    """Return the name of a layer in its container."""
    name = path.replace(".", "_")
    return name + "_" * hasattr(_TAKEN, name)


def _unused(name: str, used: set[str]) -> str:
    count, found = 0, name
    while found in used:
        count += 1
        found = f"{name}_{count}"
    return found
