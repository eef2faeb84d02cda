"""Recipe → Recipe: merge every run of affine operations into the cheapest exact ones.

A run is a chain of operations with one reader each, or a sum or concatenation of chains. Chains are cut where that takes
the least work; operations that are not exactly one convolution stay apart. Nothing is computed before the last step, which
writes the new recipe operation by operation.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from ..recipe import layer_operations as layer
from ..recipe.operation import Operation, Shape
from ..recipe.recipe import INPUT, Recipe, RecipeBuilder
from .affine import AffineOperations
from .chains import Chain, Link, Step, cheapest, cost_of, summed
from .convolution import Convolution, Numbers, concatenate, cropped, regrouped, turned
from .regions import Region, regions_of

_MOST_PASSES = 16


def merge(recipe: Recipe, dtype: torch.dtype = torch.float64) -> tuple[Recipe, tuple[Region, ...]]:
    """Merge affine operations until nothing changes; the numbers stay the same but for rounding.

    Returns the shorter recipe with merged constants in a dtype, and a record of each region.
    """
    shapes, read = recipe.shapes(), AffineOperations(recipe)
    before: list[Step] = []
    for index, op in enumerate(recipe.operations):
        place, after = shapes[op.inputs[0]], shapes[op.outputs[0]]
        link = read.link(op, index, place, after)
        kept = op if link is None else None
        before.append(Step(op.inputs, op.outputs, link, kept, frozenset((index,))))
    steps, work = before, None
    for _ in range(_MOST_PASSES):
        steps = _Pass(steps, shapes, recipe.output).run()
        links = [step.link.cost for step in steps if step.link is not None]
        if work == (len(steps), sum(cost.total for cost in links)):
            break
        work = (len(steps), sum(cost.total for cost in links))
    regions = regions_of(before, steps, shapes, recipe.output)
    return _Writer(recipe, dtype).write(steps), regions


@dataclass(frozen=True, eq=False)
class _Joined:
    """A sum or a concatenation that is not written yet."""

    operation: Operation | None
    terms: tuple[Chain, ...]
    origin: frozenset[int]


class _Pass:
    """One walk over the steps."""

    def __init__(self, steps: Sequence[Step], shapes: dict[str, Shape], output: str) -> None:
        self.old, self.shapes, self.output = steps, shapes, output
        self.readers = Counter(name for step in steps for name in step.inputs)
        self.readers[output] += 1
        self.reader = {name: step for step in steps for name in step.inputs}
        self.steps: list[Step] = []
        self.values: dict[str, Chain | _Joined] = {}

    def run(self) -> list[Step]:
        for step in self.old:
            name = step.outputs[0]
            if step.link is not None:
                self.values[name] = self._followed(step.inputs[0], step.link)
            elif step.joins:
                self.values[name] = self._joined(step)
            else:
                inputs = tuple(map(self._written, step.inputs))
                self.steps.append(replace(step, inputs=inputs))
        self._written(self.output)
        return self.steps

    def _chain(self, name: str) -> Chain:
        """Return what leads to a value that one operation reads; a value that several read is written first."""
        held = self.values.get(name)
        if isinstance(held, _Joined):
            held = self.values[name] = self._resolved(held, name)
        if held is not None and (self.readers[name] == 1 or not held.links):
            return held
        return Chain(self._written(name), self.shapes[name])

    def _written(self, name: str) -> str:
        """Return the name of a value after writing what leads to it."""
        held = self.values.get(name)
        if isinstance(held, _Joined):
            held = self._resolved(held, name)
        if held is None:
            return name
        source = self._write(held)
        self.values[name] = Chain(source, self.shapes[name])
        return source

    def _write(self, chain: Chain) -> str:
        value = chain.source
        for link in cheapest(chain.links):
            self.steps.append(Step((value,), (link.output,), link, None, link.origin))
            self.shapes[link.output] = link.output_shape
            value = link.output
        return value

    def _followed(self, source: str, link: Link) -> Chain | _Joined:
        """Append a link; factors behind a sum or concatenation of convolutions go into each of them."""
        held = self.values.get(source)
        once = self.readers[source] == 1 and self._spreads(link)
        if isinstance(held, _Joined) and once and all(term.weighted for term in held.terms):
            return _spread(held, link)
        return self._chain(source).then(link)

    @staticmethod
    def _spreads(link: Link | None) -> bool:
        form = None if link is None or link.rows else link.form
        return form is not None and form.is_diagonal and form.bias != "map"

    def _joined(self, step: Step) -> Chain | _Joined:
        terms: list[Chain] = []
        sums, origin, (output,) = isinstance(step.operation, layer.Add), step.origin, step.outputs
        for name in step.inputs:
            held = self.values.get(name)
            inner = isinstance(held, _Joined) and isinstance(held.operation, layer.Add)
            if isinstance(held, _Joined) and inner and sums and self.readers[name] == 1:
                terms += held.terms
                origin |= held.origin
            else:
                terms.append(self._chain(name))
        joined = _Joined(step.operation, tuple(terms), origin)
        reader = self.reader.get(output)
        if self.readers[output] > 1 or reader is None:
            return self._resolved(joined, output)
        nested = sums and isinstance(reader.operation, layer.Add)
        waits = nested or self._spreads(reader.link)
        return joined if waits else self._resolved(joined, output)

    def _resolved(self, joined: _Joined, output: str) -> Chain:
        """Merge the terms that start at one value; write the rest and join them."""
        op, terms = joined.operation, list(joined.terms)
        one = None
        if isinstance(op, layer.Add):
            terms = summed(terms, output)
            one = terms[0] if len(terms) == 1 else None
        else:
            one = self._stacked(terms)
        if one is not None:
            last = replace(
                one.links[-1], output=output, origin=one.links[-1].origin | joined.origin
            )
            return replace(one, links=(*one.links[:-1], last))
        inputs = tuple(map(self._write, terms))
        self.steps.append(Step(inputs, (output,), None, op, joined.origin))
        return Chain(output, self.shapes[output])

    def _stacked(self, terms: Sequence[Chain]) -> Chain | None:
        """Return the concatenation of convolutions of one value as one, or None."""
        links = [cheapest(term.links) for term in terms]
        if len({term.source for term in terms}) > 1 or any(len(found) != 1 for found in links):
            return None
        forms = [found[0].form for found in links]
        if any(form is None or found[0].rows for form, found in zip(forms, links, strict=True)):
            return None
        form = concatenate([form for form in forms if form is not None])
        if isinstance(form, str):
            return None
        shape = (form.channels[1], *links[0][0].output_shape[1:])
        link = links[0][0].merged(form, *(found[0] for found in links[1:]))
        return Chain(terms[0].source, terms[0].shape, (replace(link, output_shape=shape),))


def _spread(joined: _Joined, link: Link) -> _Joined:
    """Return a join with the factors and shifts behind it in each of its terms."""
    terms, start, form = [], 0, link.form
    if form is None:
        raise TypeError("factors without a form")
    sums = isinstance(joined.operation, layer.Add)
    for index, term in enumerate(joined.terms):
        shape = term.output_shape
        rows = slice(None) if sums else slice(start, start + shape[0])
        start += shape[0]
        own = _channels(form, rows, shape[0], biased=index == 0 or not sums)
        name = f"{link.output} of {index}"
        cost = cost_of(own, shape)
        terms.append(term.then(Link(name, shape, shape, own, cost, origin=link.origin)))
    return _Joined(joined.operation, tuple(terms), joined.origin | link.origin)


def _channels(form: Convolution, rows: slice, count: int, biased: bool) -> Convolution:
    def numbers() -> Numbers:
        weight, bias = form.numbers()
        return weight[rows], None if bias is None or not biased else bias[rows]

    bias = form.bias if biased else None
    return replace(form, numbers=numbers, channels=(count, count), groups=count, bias=bias)


class _Writer:
    """Write steps as a recipe; merged constants are computed here, one after another."""

    def __init__(self, recipe: Recipe, dtype: torch.dtype) -> None:
        self.recipe, self.dtype = recipe, dtype
        self.builder = RecipeBuilder(recipe.input_shape)
        self.values, self.constants = {INPUT: INPUT}, dict[str, str]()

    def write(self, steps: Iterable[Step]) -> Recipe:
        for step in steps:
            inputs = [self.values[name] for name in step.inputs]
            if step.operation is not None:
                outputs = self._copy(step.operation, inputs)
                self.values.update(zip(step.outputs, outputs, strict=True))
            elif step.link is not None:
                (value,) = inputs
                for op in step.link.operations:
                    (value,) = self._copy(op, [value])
                value = value if step.link.operations else self._link(step.link, value)
                self.values[step.outputs[0]] = value
        return self.builder.recipe(self.values[self.recipe.output])

    def _copy(self, op: Operation, inputs: Sequence[str]) -> tuple[str, ...]:
        """Append an operation of the old recipe with other inputs."""
        settings: dict[str, Any] = {}
        for item in fields(op):
            held = getattr(op, item.name)
            if item.name in ("inputs", "outputs"):
                continue
            if "constant" in item.metadata and held is not None:
                if held not in self.constants:
                    wide, array = held in self.recipe.wide, self.recipe.constants[held]
                    self.constants[held] = self.builder.constant(held, array, wide=wide)
                held = self.constants[held]
            elif item.name == "module" and held is not None:
                held = self.builder.module(held, self.recipe.modules[held])
            settings[item.name] = held
        return self.builder.add_many(type(op), *inputs, names=op.outputs, **settings)

    def _link(self, link: Link, value: str) -> str:
        """Append a merged link as the simplest operations that compute it."""
        form, before, after = link.form, link.input_shape, link.output_shape
        if form is None:
            raise TypeError("a merged link without a form")
        flat = bool(form.kernel) and len(after) == 1
        form = cropped(form, before) if flat else form
        weight, bias = form.numbers()
        whole = flat and form.kernel == before[1:] and not any(form.padding) and form.groups == 1
        injective = form.output_padding is not None or set(form.stride) <= {1}
        told = form.bias == "map" and injective and 1 not in after
        if form.fixed and not (flat or told or form.is_diagonal):
            # Samples of another size must not pass: the shape of the constant map does not tell them.
            value = self.builder.add(layer.Reshape, value, shape=before)
        if form.is_diagonal:
            if not bool((weight == 1).all()):
                factor = self._constant("factor", weight.view(len(weight), *weight.shape[2:]))
                value = self.builder.add(layer.Multiply, value, factor=factor)
        elif whole or not form.kernel:
            if whole:
                value = self.builder.add(layer.Reshape, value, shape=(math.prod(before),))
            matrix = self._constant("weight", regrouped(weight, form.groups, 1).flatten(1))
            held = None if bias is None else self._constant("bias", bias.flatten())
            value, bias = self.builder.add(layer.Matmul, value, weight=matrix, bias=held), None
        else:
            value, bias = self._convolve(form, value, weight, bias)
        if bias is not None:
            held = self._constant("shift", bias)
            value = self.builder.add(layer.AddConstant, value, value=held)
        if self.builder.shape(value) != after:
            value = self.builder.add(layer.Reshape, value, shape=after)
        return value

    def _convolve(
        self, form: Convolution, value: str, weight: Tensor, bias: Tensor | None
    ) -> tuple[str, Tensor | None]:
        """Append a convolution; return its value and the constant map that is still to be added."""
        padding, held, options = form.padding, None, dict[str, Any]()
        kind: type[Operation] = layer.Conv
        if form.mode != "zeros" and any(padding):
            pads = tuple((size, size) for size in padding)
            value = self.builder.add(layer.Pad, value, pads=pads, mode=form.mode)
            padding = (0,) * len(padding)
        if bias is not None and form.bias == "channel":
            held, bias = self._constant("bias", bias.flatten()), None
        if form.output_padding is not None:
            kind, weight = layer.ConvTranspose, turned(weight, form.groups)
            options["output_padding"] = form.output_padding
        value = self.builder.add(
            kind,
            value,
            weight=self._constant("weight", weight),
            bias=held,
            stride=form.stride,
            padding=padding,
            dilation=form.dilation,
            groups=form.groups,
            **options,
        )
        return value, bias

    def _constant(self, name: str, array: Tensor) -> str:
        return self.builder.constant(name, array.to(self.dtype).contiguous())
