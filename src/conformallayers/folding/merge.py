"""Recipe → Recipe: merge every run of affine operations into the cheapest exact ones.

A run is a chain of operations with one reader each, or a sum of chains that start at one value. Chains are cut where
that takes the fewest multiply-adds; where two operations are not exactly one convolution, they stay two.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from ..recipe import layer_operations as layer
from ..recipe.operation import Operation, Shape
from ..recipe.recipe import INPUT, Recipe, RecipeBuilder
from .chains import (
    Chain,
    History,
    Link,
    added,
    cheapest_cut,
    composed,
    history_of,
    whole_chain,
    window,
)
from .convolution import Convolution, concatenate, cropped, diagonal, regrouped

_MOST_PASSES = 8


@dataclass(frozen=True)
class Region:
    """Affine operations of a model, and the operation that they have become."""

    before: History
    after: History
    output_shape: Shape
    multiply_adds: int


def merge(recipe: Recipe) -> tuple[Recipe, tuple[Region, ...]]:
    """Merge affine operations until nothing changes; the numbers stay the same but for rounding.

    Returns the shorter recipe, and the regions in which operations were merged.
    """
    histories: dict[str, History] = {}
    for _ in range(_MOST_PASSES):
        one = _Pass(recipe, histories)
        merged = one.run()
        if len(merged.operations) == len(recipe.operations):
            break
        recipe, histories = merged, one.written
    return recipe, tuple(_regions(recipe, histories))


def _regions(recipe: Recipe, histories: Mapping[str, History]) -> Iterator[Region]:
    shapes, walk = recipe.shapes(), _Pass(recipe, {})
    after: list[str] = []  # the operations since the last value with a history
    work = 0
    for op in recipe.operations:
        link = walk.link(op)
        before = histories.get(op.outputs[0])
        if link is None:
            after, work = [], 0
            continue
        after, work = [*after, op.kind], work + link.cost[0]
        if before is not None:
            if len(before) > 1:
                yield Region(before, tuple(after), shapes[op.outputs[0]], work)
            after, work = [], 0


class _Pass:
    """One walk over a recipe."""

    def __init__(self, recipe: Recipe, histories: Mapping[str, History]) -> None:
        self.recipe, self.shapes = recipe, recipe.shapes()
        self.histories = histories  # of the values of the recipe
        self.written: dict[str, History] = {}  # of the values of the new recipe
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
            elif (link := self.link(op)) is not None:
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

    def link(self, op: Operation) -> Link | None:
        """Return an operation as a link of a chain; None for one that is not affine."""
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
        return Link(form, before, after, (work, stored), self._history(op), (op,))

    def _history(self, op: Operation) -> History:
        return self.histories.get(op.outputs[0], (op.kind,))

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
            whole = window(link.form, last.input_shape)
            if whole is not None:
                both = (*last.operations, *link.operations)
                history = (*last.history, *link.history)
                joined = Link(whole, last.input_shape, link.output_shape, link.cost, history, both)
                return replace(chain, links=(*chain.links[:-1], joined))
        if isinstance(before, layer.ConvTranspose) and link.form is not None:
            scaled = self._scaled(before, last.transposed, link.form)
            if scaled is not None:
                joined = replace(last, transposed=scaled, history=(*last.history, *link.history))
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
                both = added(other, term)
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
        forms = [whole_chain(chain) for chain in chains]
        one = len({chain.source for chain in chains}) == 1 and all(chain.links for chain in chains)
        if one and all(len(chain.links) == 1 for chain in chains) and None not in forms:
            both = concatenate([form for form in forms if form is not None])
            if both is not None:
                costs = [chain.links[0].cost for chain in chains]
                cost = sum(work for work, _ in costs), sum(stored for _, stored in costs)
                shape = self.shapes[op.outputs[0]]
                history = (*(kind for chain in chains for kind in history_of(chain)), op.kind)
                link = Link(both, chains[0].shape, shape, cost, history)
                self.values[op.outputs[0]] = Chain(chains[0].source, chains[0].shape, (link,))
                return
        values = [self._write(chain) for chain in chains]
        self.values[op.outputs[0]] = self._rewrite(op, values)[0]

    # -- writing ----------------------------------------------------------------------------------

    def _write(self, chain: Chain) -> str:
        """Append the operations of a chain, merged where that is cheapest."""
        value = chain.source
        for links in cheapest_cut(chain.links):
            history = tuple(kind for link in links for kind in link.history)
            if len(links) == 1 and links[0].transposed is not None:
                value = self._emit_transposed(links[0], value)
            elif len(links) == 1 and links[0].operations:
                for op in links[0].operations:
                    (value,) = self._rewrite(op, [value])
                history = self._history(links[0].operations[-1])
            else:
                form = composed(links)
                if form is None:
                    raise TypeError("a segment that is no convolution")
                value = self._emit(form, value, links[0].input_shape, links[-1].output_shape)
            self.written[value] = history
        return value

    def _emit(self, form: Convolution, value: str, before: Shape, after: Shape) -> str:
        """Append a convolution as the simplest operations that compute it."""
        form = cropped(form, before)
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
