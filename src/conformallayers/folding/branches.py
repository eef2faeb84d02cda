"""Trace → Web: a network whose branches pass activations, as a sum of paths.

Every path from the input is linear, with a coefficient of its own (``recurrence.py``). A sum of two
branches has the paths of both; where both have passed the same activations they are one. So n
residual blocks in a row can have 2ⁿ paths, and every activation needs a form for each pair.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from ..nn.activations import RadialActivation, Rule
from ..nn.branches import Join
from ..registry.bounds import Shape
from ..utils.progress import progress
from .forms import CHUNK_BYTES
from .operators import Operator, impulses, operator_of
from .recurrence import Key, Recurrence, Site, pairs
from .trace import Source, Trace

Parts = dict[Key, Tensor]  # what a value consists of: (B, *shape) by the sites passed


@dataclass(frozen=True)
class Activation:
    """An activation with its α resolved; ``site`` is its number among them."""

    rule: Rule
    alpha: float
    slope: float
    site: int
    path: str


@dataclass(frozen=True)
class Node:
    """One step: what is done to the values of the sources (-1 is the input)."""

    action: Operator | Activation | Join
    sources: tuple[int, ...]


@dataclass(frozen=True)
class Web:
    """A network as a graph of operators, activations and joins; the last node is the output."""

    input_shape: Shape
    output_shape: Shape
    nodes: tuple[Node, ...]
    source: Source
    bias: Tensor | None = None  # float64, of a head that was absorbed

    @property
    def operators(self) -> tuple[Operator, ...]:
        """All linear operators."""
        return tuple(n.action for n in self.nodes if isinstance(n.action, Operator))

    @property
    def device(self) -> torch.device:
        """Where the operators are."""
        buffers = (b for operator in self.operators for b in operator.module.buffers())
        return next((buffer.device for buffer in buffers), torch.device("cpu"))

    @cached_property
    def keys(self) -> tuple[tuple[Key, ...], ...]:
        """The keys of the paths at every node."""
        found: list[tuple[Key, ...]] = []
        for node in self.nodes:
            merged: dict[Key, None] = {}
            for source in node.sources:
                merged.update(dict.fromkeys(((),) if source < 0 else found[source]))
            keys = tuple(merged)
            if isinstance(node.action, Activation):
                keys = tuple((*key, node.action.site) for key in keys)
            found.append(keys)
        return tuple(found)

    @property
    def paths(self) -> int:
        """The largest number of paths that meet."""
        return max((len(keys) for keys in self.keys), default=1)

    @property
    def forms(self) -> int:
        """The number of quadratic forms."""
        sizes = zip(self.nodes, self.keys, strict=True)
        return sum(pairs(len(keys)) for node, keys in sizes if isinstance(node.action, Activation))

    def follow(self, start: Parts, biased: bool) -> Iterator[tuple[Node, Parts, Parts]]:
        """Yield every node with the parts that enter it (of its first source) and that leave it."""
        values: list[Parts] = []
        for node in self.nodes:
            sources = [start if source < 0 else values[source] for source in node.sources]
            action, before = node.action, sources[0]
            if isinstance(action, Operator):
                after = {key: action.apply(value) for key, value in before.items()}
                if biased and action.bias is not None:
                    known = after.get(())
                    bias = action.bias.unsqueeze(0)
                    after[()] = bias if known is None else known + bias
            elif isinstance(action, Activation):
                factor = action.slope / action.alpha
                after = {(*key, action.site): value * factor for key, value in before.items()}
            else:
                shapes = [self._shape(source) for source in node.sources]
                after = _joined(action, sources, shapes)
            values.append(after)
            yield node, before, after

    def _shape(self, source: int) -> Shape:
        """Return the shape of the value that a node gives."""
        if source < 0:
            return self.input_shape
        node = self.nodes[source]
        if isinstance(node.action, Operator):
            return node.action.output_shape
        shapes = [self._shape(before) for before in node.sources]
        if isinstance(node.action, Activation):
            return shapes[0]
        return node.action.shape(shapes)


def _joined(join: Join, sources: list[Parts], shapes: list[Shape]) -> Parts:
    found: Parts = {}
    for key in dict.fromkeys(key for parts in sources for key in parts):
        like = next(parts[key] for parts in sources if key in parts)
        values = [
            parts[key] if key in parts else like.new_zeros(len(like), *shape)
            for parts, shape in zip(sources, shapes, strict=True)
        ]
        found[key] = join.merge(values)
    return found


def web_of(trace: Trace, source: Source) -> Web:
    """Turn the steps of a network into nodes."""
    nodes: list[Node] = []
    sites = 0
    for step in trace.steps:
        action: Operator | Activation | Join
        if isinstance(step.module, RadialActivation) and step.alpha is not None:
            module = step.module
            action = Activation(module.rule, step.alpha, module.slope, sites, step.path)
            sites += 1
        elif isinstance(step.module, Join):
            action = step.module
        else:
            action = operator_of(step.module, step.input_shape, step.output_shape)
        nodes.append(Node(action, step.sources))
    return Web(trace.input_shape, trace.output_shape, tuple(nodes), source)


def absorbed(web: Web, module: nn.Module, output_shape: Shape) -> Web:
    """Append an affine module; its bias is added at the very end, also where the input is 0."""
    operator = operator_of(module, web.output_shape, output_shape)
    bias = operator.bias
    if web.bias is not None:
        pushed = operator.apply(web.bias.unsqueeze(0))[0]
        bias = pushed if bias is None else pushed + bias
    node = Node(replace(operator, bias=None), (len(web.nodes) - 1,))
    source = replace(web.source, behind=(*web.source.behind, module))
    nodes = (*web.nodes, node)
    return replace(web, output_shape=output_shape, nodes=nodes, bias=bias, source=source)


@dataclass(frozen=True)
class Arrays:
    """A web written out, in float64.

    Args:
        matrix: (paths of the output · d_out, d_in).
        forms: (forms, d_in, d_in), in the order of the recurrence.
        recurrence: the scalars.
    """

    matrix: Tensor
    forms: Tensor
    recurrence: Recurrence


def write_out(web: Web) -> Arrays:
    """Push the identity through all paths: a column of a form is the gradient of an inner product."""
    device, d_in = web.device, math.prod(web.input_shape)
    like = torch.empty(0, dtype=torch.float64, device=device)
    shifts = _constants(web, like)
    forms = torch.zeros(web.forms, d_in, d_in, dtype=torch.float64, device=device)
    rows = [torch.zeros(len(s.shifts), len(s.parts), d_in).to(like) for s in shifts.sites]
    columns: list[Tensor] = []
    largest = max((math.prod(op.output_shape) for op in web.operators), default=1)
    chunk = max(1, CHUNK_BYTES // (8 * 4 * max(1, web.paths) * max(largest, d_in)))
    start = 0
    batches = impulses(web.input_shape, chunk, like)
    for batch in progress(batches, -(-d_in // chunk), "folding paths"):
        x = batch.requires_grad_()
        stop = start + len(x)
        form = 0
        output: Parts = {(): x}
        with torch.enable_grad():
            for node, before, after in web.follow({(): x}, biased=False):
                output = after
                if not isinstance(node.action, Activation):
                    continue
                weight = node.action.alpha**-2
                values = list(before.values())
                for a, left in enumerate(values):
                    for right in values[a:]:
                        inner = (left * right.detach()).sum()
                        forms[form, start:stop] = weight * _gradient(inner, x).flatten(1)
                        form += 1
                for shift, c in enumerate(shifts.vectors[node.action.site]):
                    for a, left in enumerate(values):
                        dots = (left.detach() * c).flatten(1).sum(1)
                        rows[node.action.site][shift, a, start:stop] = weight * dots
        columns.append(torch.cat([part.detach().flatten(1) for part in output.values()], 1))
        start = stop
    forms = (forms + forms.transpose(1, 2)) / 2
    matrix = torch.cat(columns).T.contiguous()
    # The order of a site's rows is parts first, then shifts.
    sites = tuple(
        replace(site, rows=row.transpose(0, 1).reshape(-1, d_in))
        for site, row in zip(shifts.sites, rows, strict=True)
    )
    return Arrays(matrix, forms, replace(shifts.recurrence, sites=sites))


def _gradient(value: Tensor, x: Tensor) -> Tensor:
    (result,) = torch.autograd.grad(value, x, retain_graph=True, allow_unused=True)
    return torch.zeros_like(x) if result is None else result


@dataclass(frozen=True)
class _Constants:
    sites: tuple[Site, ...]
    vectors: tuple[tuple[Tensor, ...], ...]  # the constant parts at each site
    recurrence: Recurrence


def _constants(web: Web, like: Tensor) -> _Constants:
    """Push the biases through the web, and describe all sites but their rows."""
    sites: list[Site] = []
    vectors: list[tuple[Tensor, ...]] = []
    coordinates: list[tuple[Key, float]] = []  # of the value that each node gives
    parts: Parts = {}
    with torch.no_grad():
        for index, (node, before, after) in enumerate(web.follow({}, biased=True)):
            source = node.sources[0]
            key, factor = ((), 1.0) if source < 0 else coordinates[source]
            parts = after
            if isinstance(node.action, Activation):
                action = node.action
                flat = [value.flatten() for value in before.values()]
                c = torch.stack(flat) if flat else like.new_zeros(0, 1)
                linear = tuple(k[:-1] for k in web.keys[index])
                gram = c @ c.T / action.alpha**2
                rows = like.new_zeros(0, 1)
                sites.append(Site(action.rule, linear, tuple(before), rows, gram, key, factor))
                vectors.append(tuple(before.values()))
                key, factor = (*key, action.site), factor * action.alpha / action.slope
            coordinates.append((key, factor))
    shape = web.output_shape
    stacked = torch.cat(list(parts.values())) if parts else like.new_zeros(0, *shape)
    outputs = web.keys[-1] if web.nodes else ((),)
    recurrence = Recurrence(tuple(sites), outputs, tuple(parts), stacked)
    return _Constants(tuple(sites), tuple(vectors), recurrence)
