"""Model → Graph: trace a frozen copy with torch.fx, record shapes, and make every call a module."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from ..errors import SEVERAL, ConformalError, cause_line, refusal, shape_text
from ..nn.bounds import Shape
from ..nn.branches import Composite
from ..nn.functions import Batch, Replacement, call_text, modules_of
from ..nn.registry import shape_after
from ..nn.sequential import ConformalSequential
from .graph import INPUT, CompositeLayers, Graph, Node, NodeList, freeze, kind_of, refuse_hooks
from .symbolic import (
    BATCHES,
    ONE_BY_ONE,
    OneInput,
    Runner,
    path_in_model,
    random_numbers,
    traced,
)

_POSITIONAL = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD


def capture(
    model: nn.Module,
    shape: Shape,
    *,
    where: str = "fold",
    keep_hooks: bool = False,
    share: bool = False,
) -> Graph:
    """Read a model into a graph; neither the model nor its mode is changed.

    Args:
        model: any module that torch.fx can trace, with one input.
        shape: of one input sample.
        where: the function that the errors name.
        keep_hooks: ignore forward hooks instead of refusing them.
        share: let the graph read the weights of the model instead of a copy.
    """
    _check_model(where, model, keep_hooks)
    name = f"{where}({type(model).__name__})"
    with torch.inference_mode(False), torch.no_grad():
        names = (name for name, _ in model.named_parameters(remove_duplicate=False))
        root = OneInput(freeze(model, share=share), names)
        like = next(model.parameters(), torch.empty(0))
        sample = torch.empty(shape, dtype=like.dtype, device=like.device)
        module, fixed = traced(name, root, sample)
        values, moving = _recorded(name, module, sample)
        for part in root.modules():
            if getattr(part, "inplace", False):
                part.inplace = False  # type: ignore[assignment]
        reader = _Reader(where, module, shape, values, moving)
        graph = reader.graph()
        return replace(graph, fixed=fixed or reader.fixed)


def capture_parts(model: nn.Module, shape: Shape, *, where: str, keep_hooks: bool = False) -> Graph:
    """Read a model as :func:`capture` does; refuse one that runs no ConformalLayers."""
    graph = capture(model, shape, where=where, keep_hooks=keep_hooks)
    if not graph.parts:
        expected, got = "a model that runs a cl.ConformalLayers", type(model).__name__
        remedy = "cl.convert makes one of a plain CNN."
        raise refusal(f"{where}(model)", expected, got, remedy)
    return graph


def _check_model(where: str, model: nn.Module, keep_hooks: bool) -> None:
    where = f"{where}(model)"
    if not isinstance(model, nn.Module):
        raise refusal(where, "an nn.Module", type(model).__name__, "Pass the model itself.")
    if hasattr(model, "recipe"):
        remedy = "It is folded already: pass the original model."
        raise refusal(where, "a model with layers", "a Folded", remedy)
    if any(map(is_lazy, model.parameters())):
        remedy = "Run it once on a batch: model(x)."
        raise refusal(where, "a model with weights", "uninitialized parameters", remedy)
    wrappers = torch.jit.ScriptModule, nn.DataParallel, nn.parallel.DistributedDataParallel
    for path, module in model.named_modules():
        if isinstance(module, wrappers) or hasattr(module, "_orig_mod"):  # of torch.compile
            at, got = f"{where} at {path or 'its root'}", type(module).__name__
            raise refusal(at, "a plain nn.Module", got, "Pass the original module.")
        custom = type(module).forward is not ConformalSequential.forward
        if isinstance(module, ConformalSequential) and custom:
            got = f"{type(module).__name__}, which overrides it"
            remedy = "Put what it adds into a module around the ConformalLayers."
            place = f"{where} at {path or 'its root'}"
            raise refusal(place, "the forward of ConformalLayers", got, remedy)
        if not keep_hooks:
            refuse_hooks(path, module)
    inputs = inspect.signature(model.forward).parameters.values()
    needed = [one.name for one in inputs if one.default is one.empty and one.kind in _POSITIONAL]
    if len(needed) > 1:
        raise refusal(where, "a model with one input", ", ".join(needed), ONE_BY_ONE)


# -- shapes --------------------------------------------------------------------------------------------


class _Recorder(Runner):
    """Keep the shape of every tensor, and every other value."""

    def __init__(self, module: fx.GraphModule, *given: Any) -> None:
        super().__init__(module, module.graph, *given)
        self.found: dict[fx.Node, Any] = {}
        self.overwritten: list[tuple[fx.Node, fx.Node]] = []  # a node, and the one that wrote to it
        self.versions: dict[fx.Node, list[int]] = {}

    def run_node(self, n: fx.Node) -> Any:
        inputs, value = n.all_input_nodes, super().run_node(n)
        written = any(self._versions(self.env[one]) != self.versions[one] for one in inputs)
        if written:
            self._check_overwriting(n, value)
        self.versions[n] = self._versions(value)
        known = n in self.constant
        sizes = tree_map(lambda x: _Sizes(x.shape) if isinstance(x, Tensor) else x, value)
        self.found[n] = value if known else sizes
        same = (
            n.op in ("call_function", "call_method") and inputs and value is self.env.get(inputs[0])
        )
        if same and not known and not written:
            self.found[n] = _SAME
        return value

    def _versions(self, value: Any) -> list[int]:
        """Return how often the memory of each tensor of a value was written to, through any of its views."""
        leaves = tree_leaves(value)
        tensors = (leaf for leaf in leaves if isinstance(leaf, Tensor) and not leaf.is_inference())
        return [tensor._version for tensor in tensors]

    def _check_overwriting(self, node: fx.Node, result: Any) -> None:
        """Refuse a node that has changed a value, but not as a whole, which a later node reads."""
        run = {*self.found, node}
        for source, value in self.env.items():
            if value is result:
                self.overwritten.append((source, node))
                self.versions[source] = self._versions(value)
            elif (
                not run.issuperset(source.users) and self._versions(value) != self.versions[source]
            ):
                expected = "a layer that does not overwrite a value that is read again"
                remedy = "Use inplace=False, or a function that returns a new value."
                raise refusal(call_text(node), expected, "an in-place layer", remedy)

    def rename(self) -> None:
        """Redirect later readers of an overwritten value to the node that wrote to it."""
        order = {node: number for number, node in enumerate(self.graph.nodes)}
        for source, node in self.overwritten:
            node.meta["in_place"] = True
            for user in [user for user in source.users if order[user] > order[node]]:
                user.replace_input_with(source, node)


_SWITCHES = "train", "training", "dropout", "dropout_p"  # arguments that turn random numbers on


@cache
def _random_switches(name: str) -> dict[str, int] | None:
    """Return the arguments of a function that turn its random numbers on, with places; None if it draws none."""
    packet = getattr(torch.ops.aten, name, None)
    if not isinstance(packet, torch._ops.OpOverloadPacket):
        return None
    for overload in (getattr(packet, one) for one in packet.overloads()):
        if torch.Tag.nondeterministic_seeded in overload.tags or "dropout" in name:
            names = [argument.name for argument in overload._schema.arguments]
            return {one: names.index(one) for one in _SWITCHES if one in names}
    return None


class _Deterministic(TorchFunctionMode):
    """Refuse functions that draw random numbers."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given, name = kwargs or {}, getattr(func, "__name__", "")
        switches = _random_switches(name)
        if switches is not None and all(
            given.get("training", args[place] if place < len(args) else given.get(key))
            for key, place in switches.items()
        ):
            raise random_numbers(name)
        return func(*args, **given)


class _Sizes(tuple[int, ...]):
    """The shape of a tensor."""


class _Mixed:
    """A tensor whose first axis is not the batch, or whose other axes depend on it."""

    def __init__(self, row: Shape | None) -> None:
        self.row = row


def _recorded(
    where: str, module: fx.GraphModule, sample: Tensor
) -> tuple[dict[fx.Node, Any], set[fx.Node]]:
    """Return what is known of each node, and the sizes that move with that of the input.

    Known is a Batch, _Mixed or a constant; nothing of numbers of samples.
    """
    runs: list[_Recorder] = []
    for device in ("meta", sample.device):
        try:
            for size in BATCHES[len(runs) :]:
                copied = runs[-1].copied if runs and device == "meta" else None
                recorder = _Recorder(module, (size, *sample.shape), sample, device, copied)
                with _Deterministic() if where.startswith("fold") else nullcontext():
                    recorder.run(recorder.input)
                runs.append(recorder)
        except ConformalError:
            raise
        except Exception as error:
            if device == "meta":  # code that reads values
                continue
            shape = tuple(sample.shape)
            expected = f"a model that takes any number of samples of shape {shape_text(shape)} in {sample.dtype}"
            remedy = "Check input_shape, and that model(x) runs."
            if len(shape) == 4 and shape[0] == 1:
                remedy += f" Leave out the batch axis: {shape_text(shape[1:])}?"
            if len(shape) > 2 and shape[-1] < min(shape[:-1]):
                remedy += f" Channels are the first axis: {shape_text((shape[-1], *shape[:-1]))}?"
            raise refusal(where, expected, cause_line(error), remedy) from error
    values: dict[fx.Node, Any] = {}
    for node in module.graph.nodes:
        found = _merged(runs[0].found[node], runs[1].found[node])
        if found is not _UNKNOWN:
            values[node] = found
    moving = _moving(module, sample, runs[0])
    runs[0].rename()
    return values, moving


def _moving(module: fx.GraphModule, sample: Tensor, run: _Recorder) -> set[fx.Node]:
    """Return the nodes that are sizes, not tensors, and depend on the spatial size of the input."""

    def is_size(node: fx.Node) -> bool:
        kinds = {_Sizes, object, type(None)}  # tensors, the identity, writes
        return node not in run.constant and kinds.isdisjoint(
            map(type, tree_leaves(run.found[node]))
        )

    sizes = set(filter(is_size, run.found))
    if not sizes:
        return sizes
    larger = [(2 + axis) * size for axis, size in enumerate(sample.shape[1:])]  # sides that differ
    try:
        other = _Recorder(module, (BATCHES[0], *sample.shape[:1], *larger), sample)
        other.run(other.input)
    except Exception:  # the model may take one size only
        return sizes
    return {node for node in sizes if other.found[node] != run.found[node]}


_UNKNOWN = object()
_SAME = object()  # a call that has returned its first input: the identity


def _merged(one: Any, other: Any) -> Any:
    """Return what is the same in two runs with different numbers of samples."""
    if isinstance(one, _Sizes) and isinstance(other, _Sizes):
        row = tuple(one[1:]) if one[1:] == other[1:] else None
        apart = (one[:1], other[:1]) == tuple((size,) for size in BATCHES)
        return Batch(row) if apart and row is not None else _Mixed(row)
    if isinstance(one, Tensor):
        return one
    if type(one) in (tuple, list) and type(other) is type(one) and len(one) == len(other):
        return tuple(_merged(*pair) for pair in zip(one, other, strict=True))
    return one if type(one) is type(other) and one == other else _UNKNOWN


# -- nodes --------------------------------------------------------------------------------------------------


class _Reader:
    """Turn torch.fx nodes into nodes of a Graph."""

    def __init__(
        self,
        where: str,
        module: fx.GraphModule,
        shape: Shape,
        values: dict[fx.Node, Any],
        moving: set[fx.Node],
    ) -> None:
        self.where, self.module, self.values = where, module, values
        self.moving, self.fixed = moving, False
        self.nodes = NodeList(shape, (path_in_model(name) for name, _ in module.named_modules()))
        self.numbers: dict[fx.Node, int] = {}
        self.constant: set[fx.Node] = set()

    def graph(self) -> Graph:
        output = INPUT
        for node in self.module.graph.nodes:
            if node.op == "placeholder":
                self.numbers[node] = INPUT
            elif node.op == "output":
                result = node.args[0]
                single = isinstance(result, fx.Node) and result in self.numbers
                output = self.numbers[result] if single else self._collect(node, result)
            elif self.constant.issuperset(node.all_input_nodes):
                self.constant.add(node)
            else:
                self.numbers[node] = self._read(node)
        return _without_unread(Graph(self.nodes.input_shape, tuple(self.nodes.nodes), output))

    def _read(self, node: fx.Node) -> int:
        value, inputs = self.values.get(node), node.all_input_nodes
        if value is _SAME:
            self.values[node] = self.values[inputs[0]]
            return self.numbers[inputs[0]]
        if node.op == "call_module":
            return self._module(node)
        chain = modules_of(node, self.values) if isinstance(value, Batch) else None
        moving = not self.moving.isdisjoint(inputs)
        if chain is None or (moving and not self._set_scale(node, *chain[0])):
            return self._call(node)
        self.fixed |= moving  # a module holds sizes; a call computes them for every input
        reads = tuple(dict.fromkeys(path_in_model(n.target) for n in inputs if n.op == "get_attr"))
        return self._chain(node, chain, reads)

    def _set_scale(self, node: fx.Node, module: nn.Module, reads: tuple[Any, ...]) -> bool:
        """Let an interpolation to a size of another value hold its scale, as runtimes do; False if that is no integer."""
        if not isinstance(module, nn.Upsample):
            return True
        before, after = self.nodes.shape(self.numbers[reads[0]]) or (), self.values[node].shape
        scales = tuple(n / m for n, m in zip(after[1:], before[1:], strict=True))
        module.size, module.scale_factor = None, scales
        return module.mode == "nearest" and all(scale == int(scale) for scale in scales)

    def _chain(self, node: fx.Node, chain: Replacement, constants: tuple[str, ...]) -> int:
        """Append the modules of a function; an identity is no node."""
        numbers: list[int] = []
        for module, reads in chain:
            sources = tuple(
                self.numbers[source] if isinstance(source, fx.Node) else numbers[source]
                for source in reads
            )
            if isinstance(module, nn.Identity):
                numbers.append(sources[0])
                continue
            last = module is chain[-1][0]
            before = self.nodes.shape(sources[0])
            shape = self.values[node].shape
            if not last:
                shape = tuple(shape_after(module, before or ())[1:])
            name, text = self.nodes.of_function(node.name), call_text(node)
            module.eval()
            item = Node(name, kind_of(module, before), module, sources, shape, shape, "", text, constants)  # fmt: skip
            numbers.append(self.nodes.append(item))
        return numbers[-1]

    def _module(self, node: fx.Node) -> int:
        module, path = self.module.get_submodule(str(node.target)), path_in_model(node.target)
        given = [*node.args, *(node.kwargs[name] for name in ("input", "x") if name in node.kwargs)]
        alone = len(given) == len(node.args) + len(node.kwargs) == 1
        source = given[0] if alone else None
        before = self.values.get(source) if isinstance(source, fx.Node) else None
        value = self.values.get(node)
        if isinstance(source, fx.Node) and isinstance(module, ConformalSequential):
            # Rows that are not samples, such as the frames of videos, are embedded by themselves.
            row = before.row if isinstance(before, _Mixed) else getattr(before, "shape", None)
            if row is None:
                expected, got = "a batch of samples", "a value without a batch axis"
                remedy = "Keep the batch axis first."
                raise refusal(f"ConformalLayers at {path}", expected, got, remedy)
            return self.nodes.add_container(path, module, self.numbers[source], row)
        if not isinstance(source, fx.Node) or not isinstance(before, Batch):
            return self._call(node)
        number, shape = self.numbers[source], before.shape or ()
        if isinstance(module, Composite):
            return CompositeLayers(self.nodes).run(path, module, number)
        if not isinstance(value, Batch):
            return self._call(node)
        kind, name = kind_of(module, shape), self.nodes.of_module(path)
        shapes, text = (value.shape, value.shape), type(module).__name__
        return self.nodes.append(Node(name, kind, module, (number,), *shapes, path, text))

    def _call(self, node: fx.Node) -> int:
        """Append a call that stays what it is, as a module with the batches that it reads as inputs."""
        value = self.values.get(node)
        shape = value.shape if isinstance(value, Batch) else None
        row = value.row if isinstance(value, _Mixed) else shape

        def build(graph: fx.Graph, copied: Callable[[fx.Node], fx.Node]) -> fx.Node:
            def own(source: fx.Node) -> fx.Node:  # what works in place gets a copy
                found, writes = copied(source), source is node.args[0] and "in_place" in node.meta
                return graph.call_method("clone", (found,)) if writes else found

            return graph.node_copy(node, own)

        module, sources = self._single(node, build)
        path = path_in_model(node.target) if node.op == "call_module" else ""
        name, text = self.nodes.of_function(node.name), call_text(node)
        if node.op == "call_module":
            name = self.nodes.of_module(path)
            text = type(self.module.get_submodule(str(node.target))).__name__
        return self.nodes.append(Node(name, "other", module, sources, shape, row, path, text))

    def _collect(self, node: fx.Node, result: Any) -> int:
        """Append the last node of a model with several outputs: what it returns."""
        module, sources = self._single(node, lambda _, copied: fx.node.map_arg(result, copied))
        if not sources:
            expected, got = "a model whose outputs depend on its input", type(result).__name__
            raise refusal(f"{self.where}(model)", expected, got, ONE_BY_ONE)
        name = self.nodes.of_function("output")
        text = SEVERAL + ("a dict" if isinstance(result, dict) else f"{len(result)} outputs")
        return self.nodes.append(Node(name, "other", module, sources, None, None, "", text))

    def _single(
        self, node: fx.Node, build: Callable[[fx.Graph, Callable[[fx.Node], fx.Node]], Any]
    ) -> tuple[nn.Module, tuple[int, ...]]:
        """Return a module that computes one node from batches, and their numbers."""
        graph = fx.Graph()
        inputs = [source for source in node.all_input_nodes if source not in self.constant]
        copies = {source: graph.placeholder(source.name) for source in inputs}

        def copied(source: fx.Node) -> fx.Node:
            if source not in copies:
                copies[source] = graph.node_copy(source, copied)
            return copies[source]

        graph.output(build(graph, copied))
        return fx.GraphModule(self.module, graph), tuple(self.numbers[n] for n in inputs)


def _without_unread(graph: Graph) -> Graph:
    """Drop nodes that the result does not need, such as sizes; a ConformalLayers goes as a whole."""
    needed, inside = {graph.output}, dict[int, int]()
    for part in graph.parts:
        inside.update(dict.fromkeys(range(part.embed, part.leave), part.leave))
    for number in range(len(graph.nodes) - 1, -1, -1):
        if number in needed or inside.get(number) in needed:
            needed.update((number, *graph.nodes[number].sources))
    place, kept = {INPUT: INPUT}, list[Node]()
    for number, node in enumerate(graph.nodes):
        if number in needed:
            place[number] = len(kept)
            sources = tuple(place[source] for source in node.sources)
            kept.append(replace(node, sources=sources))
    return Graph(graph.input_shape, tuple(kept), place[graph.output])
