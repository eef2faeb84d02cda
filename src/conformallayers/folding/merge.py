"""Recipe → Recipe: merge every run of affine operations into the cheapest exact ones.

A run is a chain of operations with one reader each, or a sum or concatenation of chains. Chains are cut where that takes
the least work; operations that are not exactly one convolution stay apart. Nothing is computed before the last step, which
writes the new recipe operation by operation.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..recipe import layer_operations as layer
from ..recipe.recipe import INPUT, Operation, Recipe, RecipeBuilder, Shape
from .chains import (
    Link,
    LinkChain,
    MergeCost,
    MergeStep,
    Region,
    cheapest,
    cost_of,
    regions_of,
    summed,
)
from .convolution import (
    Convolution,
    Numbers,
    concatenate,
    cropped,
    diagonal,
    pointwise,
    regrouped,
    swapped_channels,
)

_MOST_PASSES = 16  # a cap; two or three passes reach the end, where nothing changes


def merge(recipe: Recipe, dtype: torch.dtype = torch.float64) -> tuple[Recipe, tuple[Region, ...]]:
    """Merge affine operations until nothing changes; the numbers stay the same but for rounding.

    Returns the shorter recipe with merged constants in a dtype, and a record of each region.
    """
    shapes, read = recipe.shapes(), AffineOperations(recipe)
    before: list[MergeStep] = []
    for index, op in enumerate(recipe.operations):
        place, after = shapes[op.inputs[0]], shapes[op.outputs[0]]
        link = read.link(op, index, place, after)
        kept = op if link is None else None
        before.append(MergeStep(op.inputs, op.outputs, link, kept, frozenset((index,))))
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
    terms: tuple[LinkChain, ...]
    origin: frozenset[int]


class _Pass:
    """One walk over the steps."""

    def __init__(self, steps: Sequence[MergeStep], shapes: dict[str, Shape], output: str) -> None:
        self.old, self.shapes, self.output = steps, shapes, output
        self.readers = Counter(name for step in steps for name in step.inputs)
        self.readers[output] += 1
        self.reader = {name: step for step in steps for name in step.inputs}
        self.steps: list[MergeStep] = []
        self.values: dict[str, LinkChain | _Joined] = {}

    def run(self) -> list[MergeStep]:
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

    def _chain(self, name: str) -> LinkChain:
        """Return the links up to a value that are not written; a value with several readers is written first."""
        held = self.values.get(name)
        if isinstance(held, _Joined):
            held = self.values[name] = self._resolved(held, name)
        if held is not None and (self.readers[name] == 1 or not held.links):
            return held
        return LinkChain(self._written(name), self.shapes[name])

    def _written(self, name: str) -> str:
        """Return the name of a value after writing the links up to it."""
        held = self.values.get(name)
        if isinstance(held, _Joined):
            held = self._resolved(held, name)
        if held is None:
            return name
        source = self._write(held)
        self.values[name] = LinkChain(source, self.shapes[name])
        return source

    def _write(self, chain: LinkChain) -> str:
        value = chain.source
        for link in cheapest(chain.links):
            self.steps.append(MergeStep((value,), (link.output,), link, None, link.origin))
            self.shapes[link.output] = link.output_shape
            value = link.output
        return value

    def _followed(self, source: str, link: Link) -> LinkChain | _Joined:
        """Append a link; factors after a sum or concatenation of convolutions go into each of them."""
        held = self.values.get(source)
        form = self._factors(link) if self.readers[source] == 1 else None
        if isinstance(held, _Joined) and form is not None and all(t.weighted for t in held.terms):
            return _distributed(held, link, form)
        return self._chain(source).then(link)

    @staticmethod
    def _factors(link: Link | None) -> Convolution | None:
        """Return the form of a link that the terms of a join may take over: factors of channels."""
        form = None if link is None or link.rows else link.form
        return form if form is not None and form.is_diagonal and form.bias != "map" else None

    def _joined(self, step: MergeStep) -> LinkChain | _Joined:
        terms: list[LinkChain] = []
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
        waits = nested or self._factors(reader.link) is not None
        return joined if waits else self._resolved(joined, output)

    def _resolved(self, joined: _Joined, output: str) -> LinkChain:
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
        self.steps.append(MergeStep(inputs, (output,), None, op, joined.origin))
        return LinkChain(output, self.shapes[output])

    def _stacked(self, terms: Sequence[LinkChain]) -> LinkChain | None:
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
        return LinkChain(terms[0].source, terms[0].shape, (replace(link, output_shape=shape),))


def _distributed(joined: _Joined, link: Link, form: Convolution) -> _Joined:
    """Return a join with the factors and shifts after it moved into each of its terms."""
    terms, start = [], 0
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
        self.values, self.names = {INPUT: INPUT}, dict[str, str]()

    def write(self, steps: Iterable[MergeStep]) -> Recipe:
        for step in steps:
            inputs = [self.values[name] for name in step.inputs]
            if step.operation is not None:
                outputs = self.builder.copy(step.operation, inputs, self.recipe, self.names)
                self.values.update(zip(step.outputs, outputs, strict=True))
            elif step.link is not None:
                (value,) = inputs
                for op in step.link.operations:
                    (value,) = self.builder.copy(op, [value], self.recipe, self.names)
                value = value if step.link.operations else self._link(step.link, value)
                self.values[step.outputs[0]] = value
        return self.builder.recipe(self.values[self.recipe.output])

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
        if form.fixed and not (flat or told):
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
            kind, weight = layer.ConvTranspose, swapped_channels(weight, form.groups)
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


class AffineOperations:
    """Read the operations of a recipe as links."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe

    def link(self, op: Operation, position: int, shape: Shape, after: Shape) -> Link | None:
        """Return an operation on samples of a shape as a link; None for one that is not affine."""
        if len(op.inputs) != 1 or len(op.outputs) != 1 or not shape:
            return None
        rows, form = self._by_row(op, shape), None
        if rows is None:
            rows, form = (), self._form(op, shape, after)
        elif isinstance(op, layer.Matmul):
            form = self._matmul(op)
        else:
            form = self._by_channel(op, shape[-1:])
        moves = isinstance(op, (layer.Reshape, layer.Permute, layer.Upsample))
        if form is None and not moves:
            return None
        cost = MergeCost() if form is None else cost_of(form, shape[len(rows) :], rows)
        if isinstance(op, layer.Upsample):
            cost = MergeCost(math.prod(after))
        if isinstance(op, layer.AddConstant):  # a single pass
            cost = cost._replace(work=math.prod(shape))
        stored = sum(math.prod(self.recipe.constant_shape(name)) for _, name in op.constants())
        origin = frozenset((position,))
        uniform = isinstance(op, (layer.AdaptiveAvgPool, layer.Upsample))
        if isinstance(op, layer.AvgPool):
            uniform = not (any(op.padding) or op.ceil_mode)
        cost = cost._replace(weights=stored - cost.maps)
        return Link(op.outputs[0], shape, after, form, cost, (op,), origin, rows, uniform)

    def _by_row(self, op: Operation, shape: Shape) -> Shape | None:
        """Return the leading axes if the channels of the operation are the last of several axes."""
        if len(shape) == 1:
            return None
        if isinstance(op, layer.Matmul):
            return shape[:-1]
        if isinstance(op, (layer.Multiply, layer.AddConstant)):
            ((_, name),) = op.constants()
            size = self.recipe.constant_shape(name)
            if size and size[-1] > 1 and math.prod(size[:-1]) == 1:
                return shape[:-1]
        return None

    def _form(self, op: Operation, shape: Shape, after: Shape) -> Convolution | None:
        axes, ones = len(shape) - 1, (1,) * (len(shape) - 1)
        if isinstance(op, (layer.Conv, layer.ConvTranspose)):
            return self._convolution(op)
        if isinstance(op, layer.Matmul):
            return self._matmul(op)
        if isinstance(op, (layer.Multiply, layer.AddConstant)):
            return self._by_channel(op, shape)
        adaptive = isinstance(op, layer.AdaptiveAvgPool)
        pool = op.regular(shape) if isinstance(op, layer.AdaptiveAvgPool) else op
        if isinstance(pool, layer.AvgPool) and not pool.ceil_mode:
            if any(pool.padding) and not pool.count_include_pad:
                return None
            share = 1 / math.prod(pool.kernel)
            found = _depthwise(shape[0], share, pool.kernel, pool.stride, pool.padding)
            return replace(found, fixed=adaptive)
        if isinstance(op, layer.Pad) and op.value == 0 and len(op.pads) == axes:
            if any(a != b or a < 0 for a, b in op.pads):
                return None
            found = _depthwise(shape[0], 1.0, ones, ones, tuple(a for a, _ in op.pads))
            return replace(found, mode=op.mode)
        return None

    def _convolution(self, op: Any) -> Convolution:
        shape, transposed = self.recipe.constant_shape(op.weight), hasattr(op, "output_padding")
        channels = shape[1] * op.groups, shape[0]
        channels = (channels[1], channels[0]) if transposed else channels

        def weight(array: Tensor) -> Tensor:
            return swapped_channels(array, op.groups) if transposed else array

        return Convolution(
            self._numbers(op, len(shape) - 2, weight),
            channels,
            shape[2:],
            op.stride,
            op.padding,
            op.dilation,
            op.groups,
            None if op.bias is None else "channel",
            output_padding=op.output_padding if transposed else None,
        )

    def _matmul(self, op: layer.Matmul) -> Convolution:
        out, into = self.recipe.constant_shape(op.weight)
        bias = None if op.bias is None else "channel"
        return pointwise(self._numbers(op, 0), (into, out), 0, bias=bias)

    def _numbers(
        self, op: Any, axes: int, weight: Callable[[Tensor], Tensor] = lambda array: array
    ) -> Callable[[], Numbers]:
        def numbers() -> Numbers:
            bias = None if op.bias is None else self.array(op.bias).view(-1, *(1,) * axes)
            return weight(self.array(op.weight)), bias

        return numbers

    def _by_channel(self, op: Operation, shape: Shape) -> Convolution | None:
        """Return a factor or a summand that broadcasts to a sample, or None if factors differ by pixel."""
        ((_, name),) = op.constants()
        array = self.array(name)
        while array.dim() > len(shape):
            array = array[0]
        array = array.view(*[1] * (len(shape) - array.dim()), *array.shape)
        by_pixel = math.prod(array.shape[1:]) > 1
        if isinstance(op, layer.AddConstant):
            if not bool(array.any()):
                return diagonal(torch.ones(shape[0], dtype=array.dtype), None, len(shape) - 1)
            full = array.expand(shape if by_pixel else (shape[0], *(1,) * (len(shape) - 1)))
            return diagonal(torch.ones(shape[0], dtype=array.dtype), full, len(shape) - 1)
        return (
            None if by_pixel else diagonal(array.flatten().expand(shape[0]), None, len(shape) - 1)
        )

    def array(self, name: str) -> Tensor:
        """Return a constant in float64."""
        return torch.as_tensor(self.recipe.constants[name]).to("cpu", torch.float64)


def _depthwise(
    channels: int, share: float, kernel: Shape, stride: Shape, padding: Shape
) -> Convolution:
    def numbers() -> Numbers:
        return torch.full((channels, 1, *kernel), share, dtype=torch.float64), None

    ones = (1,) * len(kernel)
    return Convolution(
        numbers, (channels, channels), kernel, stride, padding, ones, groups=channels
    )
