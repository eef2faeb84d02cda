"""Model → torch.fx graph, with symbols for sizes, or with numbers where forward computes with them in Python."""

from __future__ import annotations

import operator
import traceback
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_map

from ..errors import ConformalError, cause_line, refusal
from ..nn.activations import RadialActivation
from ..nn.bounds import Shape
from ..nn.branches import Composite
from ..nn.functions import assigned
from ..nn.layers import Centre
from ..nn.registry import find_spec, on_meta
from ..nn.sequential import ConformalSequential
from .graph import INPUT, NodeList

BATCHES = 2, 4  # sizes of the two runs that record shapes: an axis that differs is the batch
ONE_BY_ONE = "Fold a part of it: model.part = cl.fold(model.part, shape)."


class OneInput(nn.Module):
    """Call a frozen model with one input, so that its other arguments have their defaults.

    Args:
        model: frozen, so that its parameters are buffers.
        parameters: the names of those buffers.
    """

    def __init__(self, model: nn.Module, parameters: Iterable[str]) -> None:
        super().__init__()
        self.model, self.parameter_names = model, {f"model.{name}" for name in parameters}

    def forward(self, x: Tensor) -> Any:
        """Call the model."""
        return self.model(x)


def path_in_model(target: object) -> str:
    """Return the path in the model of a module or attribute of the traced root."""
    return str(target).removeprefix("model").removeprefix(".")


def traced(where: str, root: OneInput, sample: Tensor) -> tuple[fx.GraphModule, bool]:
    """Trace a model; the second result tells whether a number that depends on the size of the input was read."""
    random, fixed = torch.get_rng_state(), False
    try:
        try:
            graph = _Tracer().trace(root)
        except Exception:
            tracer = _SizedTracer(sample)
            graph, fixed = tracer.trace(root), tracer.fixed
    except Exception as error:
        expected, line = "a model that torch.fx can trace", ""
        for frame in traceback.extract_tb(error.__traceback__):
            if "/torch/" not in frame.filename and "/conformallayers/" not in frame.filename:
                line = f" at line {frame.lineno} of {Path(frame.filename).name}, {frame.line}"
        raise refusal(where, expected, cause_line(error) + line, ONE_BY_ONE) from error
    if not torch.equal(torch.get_rng_state(), random):
        raise random_numbers("torch.rand or the like")
    for node in graph.nodes:
        node.type = None  # pickle refuses annotations that are strings
    return fx.GraphModule(root, graph), fixed


def random_numbers(drawn: str) -> ConformalError:
    """Build the error of a model whose outputs are random in evaluation, too."""
    got = f"random numbers drawn in forward ({drawn})"
    remedy = (
        "Use nn.Dropout, or F.dropout(x, p, self.training), and fold the layers after other noise."
    )
    return refusal("fold(model)", "a model that is deterministic in evaluation", got, remedy)


class _Value(fx.Proxy):
    """A value that keeps the operators that work in place, which torch.fx takes for others."""

    def __setitem__(self, index: Any, value: Any) -> None:
        self.tracer.create_proxy("call_function", assigned, (self, index, value), {})

    def _in_place(function: Any) -> Any:  # noqa: N805
        return lambda x, y: x.tracer.create_proxy("call_function", function, (x, y), {})

    __iadd__, __isub__ = _in_place(operator.iadd), _in_place(operator.isub)
    __imul__, __itruediv__ = _in_place(operator.imul), _in_place(operator.itruediv)


class _Tracer(fx.Tracer):
    running = False  # a model, for the shapes of its values

    def trace(self, root: Any, concrete_args: Any = None) -> fx.Graph:
        # torch.fx would walk through all modules for each of them, and for each tensor.
        self.own = set(map(id, root.modules()))
        self.buffers = {id(value): name for name, value in root.named_buffers()}
        self.parameters: set[str] = root.parameter_names
        return super().trace(root, concrete_args)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Value(node, self)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        name = self.buffers.get(id(attr_val))
        if self.running or name not in self.parameters:
            return attr_val
        if name not in parameter_proxy_cache:
            parameter_proxy_cache[name] = self.create_proxy("get_attr", name, (), {})
        return parameter_proxy_cache[name]

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, Tensor) and id(a) in self.buffers:
            return self.create_node("get_attr", self.buffers[id(a)], (), {})
        if type(a) is not OrderedDict:
            return super().create_arg(a)
        pairs = [(key, super(_Tracer, self).create_arg(value)) for key, value in a.items()]
        return self.create_node("call_function", OrderedDict, (pairs,), {})

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if isinstance(m, (nn.ModuleList, nn.ModuleDict)):
            return False
        own = isinstance(m, (ConformalSequential, Composite, RadialActivation, Centre))
        own = own or hasattr(m, "recipe")  # folded already
        return own or find_spec(m) is not None or super().is_leaf_module(m, module_qualified_name)

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        if id(m) not in self.own:  # made in forward
            return forward(*args, **kwargs)
        return super().call_module(m, forward, args, kwargs)


# -- sizes as numbers ---------------------------------------------------------------------------------


class Runner(fx.Interpreter):
    """Run a graph for the shapes of its values; the layers of a ConformalLayers are read, not run.

    Values that do not depend on the input are computed. All others are on a device: on "meta" they take neither
    memory nor time.
    """

    def __init__(
        self,
        module: nn.Module,
        graph: fx.Graph,
        shape: Shape,
        like: Tensor,
        device: Any = "meta",
        copied: nn.Module | None = None,  # on "meta", of an earlier run
    ) -> None:
        super().__init__(module, garbage_collect_values=device != "meta", graph=graph)
        self.extra_traceback = False  # or fx would write its own lines into our messages
        self.device, self.real, self.copied = device, module, copied or module
        if device == "meta" and copied is None:
            self.copied = on_meta(module)
        self.input = torch.zeros(shape, dtype=like.dtype, device=device)
        self.args_iter = iter((self.input,))
        self.constant: set[fx.Node] = set()  # nodes that do not depend on the input

    def run_node(self, n: fx.Node) -> Any:
        """Return the value of a node."""
        if n.op not in ("placeholder", "output") and self.constant.issuperset(n.all_input_nodes):
            self.constant.add(n)
        self.module: Any = self.real if n in self.constant else self.copied
        module = self.fetch_attr(str(n.target)) if n.op == "call_module" else None
        if not isinstance(module, ConformalSequential):
            return super().run_node(n)
        x: Tensor = self.env[n.all_input_nodes[0]]
        shape, nodes = tuple(x.shape[1:]), NodeList(tuple(x.shape[1:]))
        layers: Any = self.real.get_submodule(str(n.target))
        last = nodes.add_container(path_in_model(n.target), layers, INPUT, shape)
        return x.new_zeros(x.shape[0], *(nodes.shape(last) or ()))

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> Any:
        """Return the arguments of a node, on its device."""
        given = super().fetch_args_kwargs_from_env(n)
        if n in self.constant or self.device != "meta":
            return given
        return tree_map(lambda x: x.to("meta") if isinstance(x, Tensor) else x, given)

    def shape(self, node: fx.Node) -> Shape | None:
        """Return the shape of a tensor, after running what leads to it; None if that fails."""
        try:
            for one in self.graph.nodes:
                if one not in self.env:
                    self.env[one] = self.run_node(one)
            return tuple(self.env[node].shape)
        except Exception:  # code of the user
            return None


class _SizedTracer(_Tracer):
    """Trace with numbers for all sizes but the number of samples.

    ``fixed`` tells whether a number that depends on the spatial size of the input was read.
    """

    def __init__(self, sample: Tensor) -> None:
        super().__init__()
        self.sample, self.fixed = sample, False
        self.runs: list[Runner] = []
        self.batch: fx.Proxy | None = None

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Sized(node, self)

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        if self.running:
            return forward(*args, **kwargs)
        return super().call_module(m, forward, args, kwargs)

    def shape(self, node: fx.Node) -> _Shape | None:
        """Return the shape of a value, or None if it is unknown before the model runs."""
        shape = tuple(self.sample.shape)
        larger = (*shape[:1], *(2 * n for n in shape[1:]))
        if not self.runs:
            sizes = [(count, *shape) for count in BATCHES] + [(BATCHES[0], *larger)]
            for size in sizes:
                copied = self.runs[0].copied if self.runs else None
                run = Runner(self.root, self.graph, size, self.sample, copied=copied)
                self.runs.append(run)
        self.running = True
        first, second, third = (run.shape(node) for run in self.runs)
        self.running = False
        if first is None or second is None or len(first) != len(second):
            return None
        found: list[Any] = list(first)
        for axis, pair in enumerate(zip(first, second, strict=True)):
            if pair == BATCHES:  # one value wherever it is read, so that shapes can be compared
                if self.batch is None:
                    self.batch = self._size(next(iter(self.graph.nodes)), 0)
                found[axis] = self.batch
            elif pair[0] != pair[1]:
                found[axis] = self._size(node, axis)
        result = _Shape(found)
        known = third is not None and len(third) == len(first)
        result.moving = {i for i, n in enumerate(first) if not known or n != (third or ())[i]}
        result.tracer = self
        return result

    def _size(self, node: fx.Node, axis: int) -> fx.Proxy:
        return self.create_proxy("call_method", "size", (fx.Proxy(node, self), axis), {})


class _Sized(_Value):
    """A value whose sizes are numbers."""

    tracer: _SizedTracer

    def __iter__(self) -> Iterator[Any]:
        self.tracer.shape(self.node)
        parts: list[Any] = [run.env.get(self.node) for run in self.tracer.runs]
        counts = [len(part) if isinstance(part, (tuple, list)) else 0 for part in parts]
        if 0 in counts[:2]:  # the last run, of another size, may have failed
            return super().__iter__()
        self.tracer.fixed |= len(set(counts)) > 1
        return iter([operator.getitem(self, index) for index in range(counts[0])])

    @property
    def shape(self) -> Any:
        found = self.tracer.shape(self.node)
        return fx.proxy.Attribute(self, "shape") if found is None else found

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return len(self.shape)

    ndim = property(dim)
    device = property(lambda self: self.tracer.sample.device)


class _Shape(tuple[Any, ...]):
    """The sizes of a value; a tracer is told when one that moves with the size of the input is read."""

    moving: set[int]
    tracer: _SizedTracer

    def __getitem__(self, index: Any) -> Any:
        read = range(len(self))[index]
        if self.moving.intersection(read if isinstance(read, range) else (read,)):
            self.tracer.fixed = True
        return super().__getitem__(index)

    def __iter__(self) -> Iterator[Any]:
        return iter(self[:])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, tuple) and self[:] == other[:]

    __hash__ = None  # type: ignore[assignment]
