"""Recipe → Recipe: merge every run of affine operations into the cheapest exact ones.

A run is a chain of operations with one reader each, or a sum of chains that start at one value. Chains are cut where
that takes the fewest multiply-adds; where two operations are not exactly one convolution, they stay two.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ..recipe import layer_operations as layer
from ..recipe.operation import Operation, Shape
from ..recipe.recipe import INPUT, Recipe, RecipeBuilder
from .convolution import Convolution, add, compose, concatenate, diagonal, regrouped

_LONGEST = 16  # links that are considered as one convolution
_MOST_PASSES = 8
Cost = tuple[int, int]  # multiply-adds, numbers that are stored


@dataclass(frozen=True, eq=False)
class Link:
    """One operation of a chain, or several that were merged into a convolution.

    ``form`` is None for an operation that no convolution computes; then it stays as it is.
    """

    form: Convolution | None
    input_shape: Shape
    output_shape: Shape
    cost: Cost
    operations: tuple[Operation, ...] = ()  # as they were, in order; empty if merged
    transposed: Convolution | None = (
        None  # weight and bias of a transposed convolution that was scaled
    )


@dataclass(frozen=True, eq=False)
class Chain:
    """Links that are not written yet, behind a value that is."""

    source: str  # a value of the new recipe
    shape: Shape  # of the source
    links: tuple[Link, ...] = ()

    @property
    def output_shape(self) -> Shape:
        """The shape behind the last link."""
        return self.links[-1].output_shape if self.links else self.shape

    def then(self, *links: Link) -> Chain:
        """Return the chain with more links."""
        return replace(self, links=(*self.links, *links))


def merge(recipe: Recipe) -> Recipe:
    """Merge affine operations until nothing changes; the numbers stay the same but for rounding."""
    for _ in range(_MOST_PASSES):
        merged = _Pass(recipe).run()
        if len(merged.operations) == len(recipe.operations):
            break
        recipe = merged
    return recipe


class _Pass:
    """One walk over a recipe."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe, self.shapes = recipe, recipe.shapes()
        self.readers = Counter(name for op in recipe.operations for name in op.inputs)
        self.readers[recipe.output] += 1
        self.adds = {n for op in recipe.operations if isinstance(op, layer.Add) for n in op.inputs}
        self.builder = RecipeBuilder(recipe.input_shape)
        self.constants: dict[str, str] = {}
        self.values: dict[str, str | Chain | list[Chain]] = {INPUT: INPUT}

    def run(self) -> Recipe:
        for op in self.recipe.operations:
            if isinstance(op, layer.Add):
                self._sum(op)
            elif isinstance(op, layer.Concatenate) and op.axis == 0:
                self._concatenation(op)
            elif (link := self._link(op)) is not None:
                self.values[op.outputs[0]] = self._append(self._chain(op.inputs[0]), link)
            else:
                self._copy(op)
        return self.builder.recipe(self._value(self.recipe.output))

    # -- values ---------------------------------------------------------------------------------

    def _chain(self, name: str) -> Chain:
        """Return what leads to a value that one operation reads; a value that several read is written first."""
        held = self.values[name]
        if isinstance(held, Chain) and self.readers[name] == 1:
            return held
        return Chain(self._value(name), self.shapes[name])

    def _value(self, name: str) -> str:
        """Return the name of a value in the new recipe, and write it where that was put off."""
        held = self.values[name]
        if isinstance(held, list):
            held = self.values[name] = self._resolve(held, self.shapes[name])
        if isinstance(held, Chain):
            held = self.values[name] = self._write(held)
        return held

    def _copy(self, op: Operation) -> None:
        inputs = [self._value(name) for name in op.inputs]
        outputs = self._rewrite(op, inputs)
        self.values.update(zip(op.outputs, outputs, strict=True))

    def _rewrite(self, op: Operation, inputs: Sequence[str]) -> tuple[str, ...]:
        """Append an operation of the old recipe with other inputs."""
        settings: dict[str, Any] = {}
        for item in fields(op):
            held = getattr(op, item.name)
            if item.name in ("inputs", "outputs"):
                continue
            if "constant" in item.metadata and held is not None:
                if held not in self.constants:
                    wide = held in self.recipe.wide
                    array = self.recipe.constants[held]
                    self.constants[held] = self.builder.constant(held, array, wide=wide)
                held = self.constants[held]
            elif item.name == "module" and held is not None:
                held = self.builder.module(held, self.recipe.modules[held])
            settings[item.name] = held
        return self.builder.add_many(type(op), *inputs, names=op.outputs, **settings)

    # -- operations as links ----------------------------------------------------------------------

    def _link(self, op: Operation) -> Link | None:
        if len(op.inputs) != 1 or len(op.outputs) != 1:
            return None
        if any(name in self.recipe.wide for _, name in op.constants()):
            return None
        before, after = self.shapes[op.inputs[0]], self.shapes[op.outputs[0]]
        form = self._form(op, before)
        flattens = isinstance(op, layer.Reshape) and len(after) == 1 and len(before) > 1
        if form is None and not flattens and not isinstance(op, layer.ConvTranspose):
            return None
        stored = sum(math.prod(self.recipe.constant_shape(name)) for _, name in op.constants())
        work = 0 if form is None else form.multiply_adds(before)
        return Link(form, before, after, (work, stored), (op,))

    def _form(self, op: Operation, shape: Shape) -> Convolution | None:
        """Return an operation on samples of a shape as a convolution, or None."""
        axes = len(shape) - 1
        ones = (1,) * axes
        if isinstance(op, layer.Conv):
            weight, bias = self._array(op.weight), self._optional(op.bias)
            bias = None if bias is None else bias.view(-1, *ones)
            return Convolution(weight, bias, op.stride, op.padding, op.dilation, op.groups)
        if isinstance(op, layer.Matmul) and axes == 0:
            return Convolution(self._array(op.weight), self._optional(op.bias), (), (), ())
        if isinstance(op, layer.Multiply):
            factor = _by_channel(self._array(op.factor), shape)
            return None if factor is None else diagonal(factor, None, axes)
        if isinstance(op, layer.AddConstant):
            bias = _sample_shaped(self._array(op.value), shape)
            one = torch.ones(shape[0], dtype=torch.float64, device=bias.device)
            return replace(diagonal(one, None, axes), bias=bias)
        if isinstance(op, layer.AvgPool) and not op.ceil_mode:
            if any(op.padding) and not op.count_include_pad:
                return None
            share = 1 / (op.divisor or math.prod(op.kernel))
            weight = torch.full((shape[0], 1, *op.kernel), share, dtype=torch.float64)
            return Convolution(weight, None, op.stride, op.padding, ones, shape[0])
        if isinstance(op, layer.Pad) and op.value == 0 and len(op.pads) == axes:
            if any(a != b or a < 0 for a, b in op.pads):
                return None
            weight = torch.ones(shape[0], 1, *ones, dtype=torch.float64)
            padding = tuple(a for a, _ in op.pads)
            return Convolution(weight, None, ones, padding, ones, shape[0], op.mode)
        return None

    def _array(self, name: str) -> Tensor:
        return torch.as_tensor(self.recipe.constants[name]).double()

    def _optional(self, name: str | None) -> Tensor | None:
        return None if name is None else self._array(name)

    def _append(self, chain: Chain, link: Link) -> Chain:
        """Append a link; a product behind a flattening becomes one window over the whole map."""
        last = chain.links[-1] if chain.links else None
        if last is None or last.form is not None or not last.operations:
            return chain.then(link)
        before = last.operations[-1]
        if isinstance(before, layer.Reshape) and link.form is not None:
            whole = _window(link.form, last.input_shape)
            if whole is not None:
                both = (*last.operations, *link.operations)
                joined = Link(whole, last.input_shape, link.output_shape, link.cost, both)
                return replace(chain, links=(*chain.links[:-1], joined))
        if isinstance(before, layer.ConvTranspose) and link.form is not None:
            scaled = self._scaled(before, last.transposed, link.form)
            if scaled is not None:
                joined = replace(last, transposed=scaled)
                return replace(chain, links=(*chain.links[:-1], joined))
        return chain.then(link)

    def _scaled(
        self, op: layer.ConvTranspose, held: Convolution | None, by: Convolution
    ) -> Convolution | None:
        """Return weight and bias of a transposed convolution whose channels are multiplied and shifted."""
        if not by.is_diagonal or by.constant_map():
            return None
        weight = self._array(op.weight) if held is None else held.weight
        bias = self._optional(op.bias) if held is None else held.bias
        factor = by.weight.flatten()
        shape = (op.groups, -1, *weight.shape[1:])
        axes = (1,) * (weight.dim() - 2)
        scaled = weight.view(shape) * factor.view(op.groups, 1, -1, *axes)
        shift = None if by.bias is None else by.bias.flatten()
        if bias is not None:
            shift = bias * factor if shift is None else bias * factor + shift
        weight = scaled.view_as(weight)
        return Convolution(weight, shift, op.stride, op.padding, op.dilation, op.groups)

    # -- sums and concatenations ------------------------------------------------------------------

    def _sum(self, op: layer.Add) -> None:
        terms: list[Chain] = []
        for name in op.inputs:
            held = self.values[name]
            if isinstance(held, list) and self.readers[name] == 1:
                terms += held
            else:
                terms.append(self._chain(name))
        output = op.outputs[0]
        put_off = self.readers[output] == 1 and output in self.adds
        found = terms if put_off else self._resolve(terms, self.shapes[output])
        self.values[output] = found

    def _resolve(self, terms: Sequence[Chain], shape: Shape) -> str | Chain:
        """Merge the terms of a sum that start at one value; write the rest and add them."""
        left: list[Chain] = []
        for term in terms:
            for index, other in enumerate(left):
                both = _added(other, term)
                if both is not None:
                    left[index] = both
                    break
            else:
                left.append(term)
        if len(left) == 1:
            return left[0]
        return self.builder.add(layer.Add, *map(self._write, left))

    def _concatenation(self, op: layer.Concatenate) -> None:
        chains = [self._chain(name) for name in op.inputs]
        forms = [_whole(chain) for chain in chains]
        one = len({chain.source for chain in chains}) == 1 and all(chain.links for chain in chains)
        if one and all(len(chain.links) == 1 for chain in chains) and None not in forms:
            both = concatenate([form for form in forms if form is not None])
            if both is not None:
                costs = [chain.links[0].cost for chain in chains]
                cost = sum(work for work, _ in costs), sum(stored for _, stored in costs)
                shape = self.shapes[op.outputs[0]]
                link = Link(both, chains[0].shape, shape, cost)
                self.values[op.outputs[0]] = Chain(chains[0].source, chains[0].shape, (link,))
                return
        values = [self._write(chain) for chain in chains]
        self.values[op.outputs[0]] = self._rewrite(op, values)[0]

    # -- writing ----------------------------------------------------------------------------------

    def _write(self, chain: Chain) -> str:
        """Append the operations of a chain, merged where that is cheapest."""
        value = chain.source
        for links in cheapest_cut(chain.links):
            if len(links) == 1 and links[0].transposed is not None:
                value = self._emit_transposed(links[0], value)
                continue
            if len(links) == 1 and links[0].operations:
                for op in links[0].operations:
                    (value,) = self._rewrite(op, [value])
                continue
            form = _composed(links)
            if form is None:
                raise TypeError("a segment that is no convolution")
            value = self._emit(form, value, links[0].input_shape, links[-1].output_shape)
        return value

    def _emit(self, form: Convolution, value: str, before: Shape, after: Shape) -> str:
        """Append a convolution as the simplest operations that compute it."""
        axes, bias = len(form.kernel), form.bias
        whole = axes and form.kernel == before[1:] and not any(form.padding)
        if form.is_diagonal:
            value = self._multiply(form, value)
        elif axes == 0 or (whole and form.groups == 1):
            if axes:
                value = self.builder.add(layer.Reshape, value, shape=(math.prod(before),))
            weight = self._constant("weight", regrouped(form.weight, form.groups, 1).flatten(1))
            held = None if bias is None else self._constant("bias", bias.flatten())
            value, bias = self.builder.add(layer.Matmul, value, weight=weight, bias=held), None
        else:
            value, bias = self._convolve(form, value)
        if bias is not None:
            held = self._constant("shift", bias)
            value = self.builder.add(layer.AddConstant, value, value=held)
        if self.builder.shape(value) != after:
            value = self.builder.add(layer.Reshape, value, shape=after)
        return value

    def _multiply(self, form: Convolution, value: str) -> str:
        if bool((form.weight == 1).all()):
            return value
        factor = self._constant("factor", form.weight[:, 0])
        return self.builder.add(layer.Multiply, value, factor=factor)

    def _convolve(self, form: Convolution, value: str) -> tuple[str, Tensor | None]:
        """Append a convolution; return its value and the constant map that is still to be added."""
        padding, bias, held = form.padding, form.bias, None
        if form.mode != "zeros" and any(padding):
            pads = tuple((size, size) for size in padding)
            value = self.builder.add(layer.Pad, value, pads=pads, mode=form.mode)
            padding = (0,) * len(padding)
        if bias is not None and not form.constant_map():
            held, bias = self._constant("bias", bias.flatten()), None
        value = self.builder.add(
            layer.Conv,
            value,
            weight=self._constant("weight", form.weight),
            bias=held,
            stride=form.stride,
            padding=padding,
            dilation=form.dilation,
            groups=form.groups,
        )
        return value, bias

    def _emit_transposed(self, link: Link, value: str) -> str:
        op, held = link.operations[0], link.transposed
        if not isinstance(op, layer.ConvTranspose) or held is None:
            raise TypeError("no transposed convolution")
        return self.builder.add(
            layer.ConvTranspose,
            value,
            weight=self._constant("weight", held.weight),
            bias=None if held.bias is None else self._constant("bias", held.bias),
            stride=op.stride,
            padding=op.padding,
            output_padding=op.output_padding,
            dilation=op.dilation,
            groups=op.groups,
        )

    def _constant(self, name: str, array: Tensor) -> str:
        return self.builder.constant(name, array.contiguous())


def cheapest_cut(links: Sequence[Link]) -> Iterator[Sequence[Link]]:
    """Cut a chain into segments of one convolution each, with the fewest multiply-adds, then numbers."""
    best: list[tuple[Cost, int]] = [((0, 0), 0)]  # the cost of the first links, and the last cut
    for end in range(1, len(links) + 1):
        options = []
        for start in range(max(0, end - _LONGEST), end):
            cost = _segment_cost(links[start:end])
            if cost is not None:
                work, stored = best[start][0]
                options.append(((work + cost[0], stored + cost[1]), start))
        best.append(min(options))
    cuts, end = [], len(links)
    while end:
        start = best[end][1]
        cuts.append(links[start:end])
        end = start
    yield from reversed(cuts)


def _segment_cost(links: Sequence[Link]) -> Cost | None:
    if len(links) == 1:
        return links[0].cost
    form = _composed([_planned(link) for link in links])
    return None if form is None else _cost(form, links[0].input_shape)


def _cost(form: Convolution, shape: Shape) -> Cost:
    stored = form.weight.numel() + (0 if form.bias is None else form.bias.numel())
    apart = form.constant_map() or (form.is_diagonal and form.bias is not None)
    extra = math.prod(form.output_shape(shape)) if apart else 0  # the bias is a pass of its own
    return form.multiply_adds(shape) + extra, stored


def _planned(link: Link) -> Link:
    """Return a link without numbers, for shapes and costs only."""
    if link.form is None:
        return link
    bias = None if link.form.bias is None else link.form.bias.to("meta")
    return replace(link, form=replace(link.form, weight=link.form.weight.to("meta"), bias=bias))


def _composed(links: Iterable[Link]) -> Convolution | None:
    """Return the convolution that links in a row are, or None."""

    def behind(first: tuple[Convolution, Shape] | None, link: Link) -> Any:
        if first is None or link.form is None:
            return None
        form, shape = first
        both = compose(form, _lifted(link.form, len(form.kernel)), shape)
        return None if both is None else (both, shape)

    steps = list(links)
    if not steps or steps[0].form is None:
        return None
    start: Any = (steps[0].form, steps[0].input_shape)
    *_, last = accumulate(steps[1:], behind, initial=start)
    return None if last is None else last[0]


def _whole(chain: Chain) -> Convolution | None:
    """Return the convolution that a chain is; the identity for one without links."""
    if not chain.links:
        one = torch.ones(chain.shape[0], dtype=torch.float64)
        return diagonal(one, None, len(chain.shape) - 1)
    return _composed(chain.links)


def _added(a: Chain, b: Chain) -> Chain | None:
    """Return the sum of two chains as one, where they start at one value and it takes no more work."""
    if a.source != b.source or not 1 <= len(a.shape) <= 4:
        return None
    parts = []
    for chain in (a, b):
        planned = _whole(replace(chain, links=tuple(map(_planned, chain.links))))
        if planned is None:
            return None
        parts.append(planned)
    meta = [replace(p, weight=p.weight.to("meta")) for p in parts]
    total = add([_without_bias(p) for p in meta], a.shape)
    if total is None:
        return None
    apart = [_chain_cost(chain) for chain in (a, b)]
    work = sum(cost for cost, _ in apart) + math.prod(a.output_shape)
    cost = _cost(total, a.shape)
    if cost[0] > work:
        return None
    forms = [form for form in map(_whole, (a, b)) if form is not None]
    found = add(forms, a.shape)
    if found is None:
        return None
    return Chain(a.source, a.shape, (Link(found, a.shape, a.output_shape, _cost(found, a.shape)),))


def _without_bias(form: Convolution) -> Convolution:
    return replace(form, bias=None)


def _chain_cost(chain: Chain) -> Cost:
    found = [_segment_cost(links) or (0, 0) for links in cheapest_cut(chain.links)]
    return sum(work for work, _ in found), sum(stored for _, stored in found)


def _lifted(form: Convolution, axes: int) -> Convolution:
    """Return a product of vectors as a convolution of maps with one pixel."""
    if len(form.kernel) == axes:
        return form
    ones = (1,) * axes
    bias = None if form.bias is None else form.bias.view(-1, *ones)
    weight = form.weight.view(*form.weight.shape, *ones)
    return Convolution(weight, bias, ones, (0,) * axes, ones, form.groups)


def _window(form: Convolution, shape: Shape) -> Convolution | None:
    """Return a product with a flattened map (C, ...) as a convolution with one window."""
    if form.kernel or form.groups != 1 or not 2 <= len(shape) <= 4:
        return None
    ones = (1,) * (len(shape) - 1)
    bias = None if form.bias is None else form.bias.view(-1, *ones)
    weight = form.weight.view(-1, *shape)
    return Convolution(weight, bias, ones, (0,) * len(ones), ones)


def _by_channel(factor: Tensor, shape: Shape) -> Tensor | None:
    """Return a factor that broadcasts to a sample as one number for each channel, or None."""
    full = _sample_shaped(factor, shape)
    if math.prod(full.shape[1:]) > 1:
        return None
    return full.flatten().expand(shape[0])


def _sample_shaped(array: Tensor, shape: Shape) -> Tensor:
    """Return an array that broadcasts to a sample with all its axes, (C, 1, …) or (C, *spatial)."""
    array = array.view(*[1] * (len(shape) - array.dim()), *array.shape)
    sizes = [shape[0], *(1 for _ in shape[1:])]
    if math.prod(array.shape[1:]) > 1:
        sizes = list(shape)
    return array.expand(*sizes)
