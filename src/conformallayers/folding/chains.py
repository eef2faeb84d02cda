"""Chains of affine operations: where to cut and how to order them, sums of chains, and what became of each region."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import combinations
from typing import NamedTuple

import torch

from ..recipe import layer_operations as layer
from ..recipe.recipe import Operation, Shape
from ..utils.text import count
from .convolution import Convolution, add, compose, diagonal, lifted, window

# A weight is read once for every sample of batch 1: it costs as much as some multiply-adds.
_WEIGHT = 8
_MAP = 3  # passes that a constant map takes: it is stored, read and added


class MergeCost(NamedTuple):
    """The multiply-adds of one sample, and the numbers that are stored as weights and in constant maps."""

    work: int = 0
    weights: int = 0
    maps: int = 0

    @property
    def total(self) -> int:
        """Both as multiply-adds."""
        return self.work + _WEIGHT * self.weights

    @property
    def stored(self) -> int:
        """All numbers that are stored."""
        return self.weights + self.maps

    def plus(self, other: MergeCost) -> MergeCost:
        """Return the sum of two costs."""
        return MergeCost(*(a + b for a, b in zip(self, other, strict=True)))


@dataclass(frozen=True, eq=False)
class Link:
    """An affine map of one value: an operation, or several that were merged into a convolution.

    Attributes:
        output: the name of the value that it writes.
        form: None for an operation that no convolution computes.
        operations: as they are in the recipe, in order; empty if they were merged.
        origin: the positions of the operations that it comes from.
        rows: the leading axes of a value whose channels are the last axis, a batch to the form.
        uniform: whether it treats channels alike and keeps constants, so that it commutes with single pixels.
    """

    output: str
    input_shape: Shape
    output_shape: Shape
    form: Convolution | None
    cost: MergeCost
    operations: tuple[Operation, ...] = ()
    origin: frozenset[int] = frozenset()
    rows: Shape = ()
    uniform: bool = False

    def merged(self, form: Convolution, *others: Link) -> Link:
        """Return the link that starts where this one does, ends with the last one, and has a form."""
        shape = self.input_shape[len(self.rows) :]
        return Link(
            (self, *others)[-1].output,
            self.input_shape,
            (self, *others)[-1].output_shape,
            form,
            cost_of(form, shape, self.rows),
            origin=self.origin.union(*(other.origin for other in others)),
            rows=self.rows,
        )


@dataclass(frozen=True, eq=False)
class LinkChain:
    """Links that are not written yet, after a value that is."""

    source: str
    shape: Shape  # of the source
    links: tuple[Link, ...] = ()

    @property
    def output_shape(self) -> Shape:
        """The shape after the last link."""
        return self.links[-1].output_shape if self.links else self.shape

    @property
    def weighted(self) -> bool:
        """Whether the chain ends with a convolution or product that takes factors for nothing."""
        last = self.links[-1] if self.links else None
        return (
            last is not None and last.form is not None and last.cost.weights > 0 and not last.rows
        )

    def then(self, link: Link) -> LinkChain:
        """Return the chain with one more link, which moves past a reshape or permutation where it can."""
        if self.links:
            *before, last = self.links
            link = _by_row(last, link)
            moved = _past_reshape(last, link, before[-1] if before else None)
            if moved is not None:
                return replace(self, links=(*before, *moved))
        return replace(self, links=(*self.links, link))


@dataclass(frozen=True, eq=False)
class MergeStep:
    """An operation of the recipe, or a link that one or several have become, with their positions."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    link: Link | None
    operation: Operation | None  # None for a link
    origin: frozenset[int]

    @property
    def joins(self) -> bool:
        """Whether it is a sum, or a concatenation of channels."""
        return isinstance(self.operation, layer.Add) or (
            isinstance(self.operation, layer.Concatenate) and self.operation.axis == 0
        )


def cost_of(form: Convolution, shape: Shape, rows: Shape = ()) -> MergeCost:
    """Return the cost of a convolution of samples of a shape."""
    out = math.prod(form.output_shape(shape))
    passes = _MAP if form.bias == "map" else int(form.is_diagonal and form.bias is not None)
    places = math.prod(rows)
    work = places * (form.multiply_adds(shape) + passes * out)
    stored = form.weights() + (form.channels[1] if form.bias == "channel" else 0)
    return MergeCost(work, stored, out if form.bias == "map" else 0)


def _past_reshape(last: Link, link: Link, before: Link | None) -> tuple[Link, ...] | None:
    """Return a product after a flattening as one window, and factors after a permutation before it."""
    operation = last.operations[-1] if last.operations else None
    if isinstance(operation, layer.Reshape) and link.form is not None and not link.rows:
        whole = window(link.form, last.input_shape)
        if last.form is None and whole is not None:
            both = (*last.operations, *link.operations) if link.operations else ()
            return (replace(last.merged(whole, link), cost=link.cost, operations=both),)
    if isinstance(operation, layer.Permute) and before is not None and link.form is not None:
        axis = operation.order[-1 if link.rows else 0]
        rows = last.input_shape[:-1] if axis == len(last.input_shape) - 1 else ()
        usable = link.form.is_diagonal and link.form.bias != "map" and (rows or axis == 0)
        if usable and before.form is not None and before.rows == rows:
            factor, shift = link.form.numbers()
            shift, axes = shift if shift is None else shift.flatten(), len(last.input_shape) - 1
            form = diagonal(factor.flatten(), shift, 0 if rows else axes)
            shape = last.input_shape
            name, held = f"{link.output} before {last.output}", link.origin
            moved = Link(name, shape, shape, form, link.cost, origin=held, rows=rows)
            return moved, replace(last, output=link.output)
    return None


def _by_row(last: Link, link: Link) -> Link:
    """Return a single factor as one for each entry of the last axis, if that axis holds the channels of the link before."""
    form = link.form
    if not last.rows or link.rows or form is None or not form.is_diagonal or form.bias:
        return link
    factor = form.numbers()[0].flatten()
    if bool((factor != factor[0]).any()):
        return link
    own = diagonal(factor[:1].expand(last.output_shape[-1]), None, 0)
    return replace(link, form=own, rows=last.output_shape[:-1])


# -- chains -----------------------------------------------------------------------------------------


def segment(links: Sequence[Link]) -> Link | str:
    """Return links in a row as one, or the reason why they are not."""
    first, found = links[0], links[0].form
    shape = first.input_shape[len(first.rows) :]
    for link in links[1:]:
        if found is None or link.form is None:
            return "not a convolution"
        if link.rows != first.rows:
            return "the channels are another axis"
        both = compose(found, lifted(link.form, len(found.kernel)), shape)
        if isinstance(both, str):
            return both
        found = both
    if found is None:
        return "not a convolution"
    return first if len(links) == 1 else first.merged(found, *links[1:])


def worth_merging(links: Sequence[Link], one: Link) -> str | None:
    """Return why one link is no better than several; None if it is."""
    forms = [link.form for link in links if link.form is not None]
    pairs = zip(links, forms, strict=True)
    kernels = (link.cost.weights > 0 and not form.is_diagonal for link, form in pairs)
    if not any(kernels) and not all(form.is_diagonal for form in forms):
        return "a pool without weights stays a pool"
    return _dearer(one.cost, total(links))


def _dearer(one: MergeCost, apart: MergeCost) -> str | None:
    """Return why one operation costs more than several; None if it does not."""
    if one.work > apart.work:
        return f"merging would take {count(one.work)} multiply-adds, not {count(apart.work)}"
    if one.total > apart.total:
        return f"merging would take {count(one.weights)} weights, not {count(apart.weights)}"
    return None


def total(links: Sequence[Link]) -> MergeCost:
    """Return the cost of links that run one by one."""
    return reduce(MergeCost.plus, (link.cost for link in links), MergeCost())


def cheapest(links: Sequence[Link]) -> list[Link]:
    """Merge links in a row so that they take the least work."""
    best: list[tuple[int, list[Link]]] = [(0, [])]  # the cost of the first links, merged
    for end in range(1, len(links) + 1):
        options = []
        for start in range(end):
            part = links[start:end]
            one = part[0] if len(part) == 1 else segment(part)
            if isinstance(one, Link) and (len(part) == 1 or worth_merging(part, one) is None):
                work, before = best[start]
                options.append((work + one.cost.total, len(before), [*before, one]))
        work, _, found = min(options, key=lambda option: option[:2])
        best.append((work, found))
    return _reordered(best[-1][1])


def _reordered(links: list[Link]) -> list[Link]:
    """Exchange neighbours where the other order takes less work; a flattening between them stays."""
    found = list(links)
    for index in range(len(found) - 1):
        first, second = pair = found[index : index + 2]
        if len(first.input_shape) != len(second.output_shape):
            continue
        other = _exchanged(*pair) or _shifted(*pair)
        if other is not None and total(other).total < total(pair).total:
            found[index : index + 2] = other
    return found


def _exchanged(first: Link, second: Link) -> list[Link] | None:
    """Return single pixels and a pool or an interpolation in the other order."""
    pixels, uniform = (second, first) if first.uniform else (first, second)
    form, start, end = pixels.form, first.input_shape, second.output_shape
    if not uniform.uniform or form is None or not form.pointwise or form.bias == "map":
        return None
    if pixels.rows:
        return None
    middle, held = f"{second.output} before {first.output}", start[0]
    pixels = replace(pixels, operations=())  # they are of the former size
    if uniform is first:
        between = (form.channels[1], *start[1:])
        moved = replace(pixels, output=middle, input_shape=start, output_shape=between)
        kept = replace(uniform, output=second.output, input_shape=between, output_shape=end)
        held, order = form.channels[1], [moved, kept]
    else:
        between = (start[0], *end[1:])
        kept = replace(uniform, output=middle, input_shape=start, output_shape=between)
        moved = replace(pixels, output=second.output, input_shape=between, output_shape=end)
        order = [kept, moved]
    # A pool that was moved to where it is cheapest stays a pool.
    work = uniform.cost.work * held // uniform.input_shape[0]
    costs = {kept: MergeCost(work), moved: cost_of(form, moved.input_shape)}
    forms = {kept: None, moved: form}
    return [replace(link, cost=costs[link], form=forms[link]) for link in order]


def _shifted(first: Link, second: Link) -> list[Link] | None:
    """Return ``W(s·x + b)`` as ``(W·s)(x + b/s)``: without a constant map where W pads, in one pass."""
    form, weighted = first.form, second.form
    if form is None or weighted is None or not form.is_diagonal or form.bias != "channel":
        return None
    if weighted.is_diagonal or second.cost.weights == 0 or first.rows != second.rows:
        return None
    factor, shift = (None if n is None else n.flatten() for n in form.numbers())
    if factor is None or shift is None or bool((factor == 1).all() | (factor == 0).any()):
        return None
    axes, shape = len(form.kernel), first.input_shape[len(first.rows) :]
    moved = diagonal(torch.ones_like(factor), shift / factor, axes)
    scaled = compose(diagonal(factor, None, axes), weighted, shape)
    if isinstance(scaled, str):
        return None
    cost = MergeCost(math.prod(first.input_shape), len(factor))
    return [replace(first.merged(moved), cost=cost), second.merged(scaled)]


# -- sums -------------------------------------------------------------------------------------------


def whole(chain: LinkChain) -> Link | str:
    """Return a chain as one link; the identity for one without links."""
    if chain.links:
        return segment(chain.links)
    one = diagonal(torch.ones(chain.shape[0]), None, len(chain.shape) - 1)
    return Link(chain.source, chain.shape, chain.shape, one, MergeCost())


def added(chains: Sequence[LinkChain], output: str) -> LinkChain | str:
    """Return the sum of chains that start at one value as one chain, or why it is none."""
    first = chains[0]
    if not 1 <= len(first.shape) <= 4:
        return "not a convolution"
    links = [whole(chain) for chain in chains]
    for link in links:
        if isinstance(link, str):
            return link
    parts = [link for link in links if isinstance(link, Link)]
    rows = {link.rows for link in parts if not link.form or not link.form.is_diagonal or link.rows}
    if len(rows) > 1 or rows - {()}:
        return "the channels are another axis"
    form = add([link.form for link in parts if link.form is not None], first.shape)
    if isinstance(form, str):
        return form
    one = replace(parts[0].merged(form, *parts[1:]), output=output, output_shape=first.output_shape)
    apart = [link for chain in chains for link in cheapest(chain.links)]
    adds = MergeCost((len(chains) - 1) * math.prod(first.output_shape))
    return _dearer(one.cost, total(apart).plus(adds)) or LinkChain(
        first.source, first.shape, (one,)
    )


def summed(terms: Sequence[LinkChain], output: str) -> list[LinkChain]:
    """Merge the terms of a sum that start at one value: all of them, or pair by pair."""
    left = list(terms)
    for source in dict.fromkeys(term.source for term in terms):
        group = [term for term in left if term.source == source]
        both = added(group, f"{output} of {source}") if len(group) > 1 else ""
        if isinstance(both, LinkChain):
            left = [term for term in left if term.source != source]
            left.append(both)
    pairs = list(combinations(range(len(left)), 2))
    while pairs:
        i, j = pairs.pop(0)
        if left[i].source != left[j].source:
            continue
        both = added([left[i], left[j]], f"{output} of {left[i].source} and {len(left)}")
        if isinstance(both, LinkChain):
            left = [both, *(term for k, term in enumerate(left) if k not in (i, j))]
            pairs = list(combinations(range(len(left)), 2))
    return left


# -- regions ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Region:
    """Affine operations between others, and the operations that they have become.

    Attributes:
        before, after: the kinds of the operations.
        output_shape: of one sample.
        cost_before, cost_after: multiply-adds of one sample, and weights.
        reasons: why operations that are left were not merged, a clause each.
        start: the first value; in a fold the module or function that makes it.
    """

    before: tuple[str, ...]
    after: tuple[str, ...]
    output_shape: Shape
    cost_before: MergeCost
    cost_after: MergeCost
    reasons: tuple[str, ...] = ()
    start: str = ""


def regions_of(
    before: Sequence[MergeStep],
    after: Sequence[MergeStep],
    shapes: Mapping[str, Shape],
    output: str,
) -> tuple[Region, ...]:
    """Return the regions with a weight or a sum, in their order."""
    root = _components(before, after, output)
    members: dict[int, tuple[list[MergeStep], list[MergeStep]]] = defaultdict(lambda: ([], []))
    for which, steps in enumerate((before, after)):
        for step in steps:
            if (step.link is not None or step.joins) and step.origin:
                members[root[min(step.origin)]][which].append(step)
    reasons = dict(_reasons(after, shapes, output))
    found = []
    for _, (old, new) in sorted(members.items()):
        cost = _cost(old, shapes)
        if not cost.work:
            continue
        kinds = [tuple(kind for step in steps for kind in _kinds(step)) for steps in (old, new)]
        texts = [reasons[step.outputs[0]] for step in new if step.outputs[0] in reasons]
        shape = shapes[old[-1].outputs[0]]
        reached = _cost(new, shapes), tuple(dict.fromkeys(texts)), old[0].outputs[0]
        found.append(Region(kinds[0], kinds[1], shape, cost, *reached))
    return tuple(found)


def _components(
    before: Sequence[MergeStep], after: Sequence[MergeStep], output: str
) -> dict[int, int]:
    """Return the first operation of the region of each: joined by values that one operation reads."""
    root = {min(step.origin): min(step.origin) for step in before}

    def find(index: int) -> int:
        while root[index] != index:
            index = root[index]
        return index

    def unite(a: int, b: int) -> None:
        first, second = sorted((find(a), find(b)))
        root[second] = first

    affine = {
        step.outputs[0]: min(step.origin) for step in before if step.link is not None or step.joins
    }
    readers = Counter(name for step in before for name in step.inputs)
    readers[output] += 1
    for step in before:
        if step.outputs[0] in affine:
            for name in step.inputs:
                if name in affine and readers[name] == 1:
                    unite(affine[name], min(step.origin))
    for step in after:
        for index in step.origin:
            unite(index, min(step.origin))
    return {index: find(index) for index in root}


def _cost(steps: Sequence[MergeStep], shapes: Mapping[str, Shape]) -> MergeCost:
    cost = MergeCost()
    for step in steps:
        if step.link is not None:
            cost = cost.plus(step.link.cost)
        elif isinstance(step.operation, layer.Add):
            cost = cost.plus(MergeCost((len(step.inputs) - 1) * math.prod(shapes[step.outputs[0]])))
    return cost


def _kinds(step: MergeStep) -> Iterator[str]:
    form = None if step.link is None else step.link.form
    if step.operation is not None:
        yield step.operation.kind
    elif step.link is None or step.link.operations or form is None:
        yield from (op.kind for op in step.link.operations) if step.link is not None else ()
    elif form.is_diagonal:
        yield "add_constant" if form.bias else "multiply"
    elif form.output_padding is not None:
        yield "conv_transpose"
    else:
        yield "conv" if form.kernel and len(step.link.output_shape) > 1 else "matmul"


def _reasons(
    steps: Sequence[MergeStep], shapes: Mapping[str, Shape], output: str
) -> Iterator[tuple[str, str]]:
    """Yield the value and the reason for each pair of operations that stay apart."""
    producer = {name: step for step in steps for name in step.outputs}
    readers = Counter(name for step in steps for name in step.inputs)
    readers[output] += 1
    for step in steps:
        (name, *_), why = step.inputs, ""
        before = producer.get(name)
        if step.link is not None and before is not None and before.link is not None:
            if readers[name] == 1 and step.link.form is not None and before.link.form is not None:
                both = segment([before.link, step.link])
                why = both if isinstance(both, str) else ""
                if not isinstance(both, str):
                    why = worth_merging([before.link, step.link], both) or ""
        elif isinstance(step.operation, layer.Add):
            why = _sum_reason(step, producer, shapes)
        if why:
            yield step.outputs[0], why


def _sum_reason(
    step: MergeStep, producer: Mapping[str, MergeStep], shapes: Mapping[str, Shape]
) -> str:
    chains = []
    for name in step.inputs:
        held = producer.get(name)
        alone = LinkChain(name, shapes[name])
        if held is None or held.link is None:
            chains.append(alone)
        else:
            chains.append(LinkChain(held.inputs[0], held.link.input_shape, (held.link,)))
    if len({chain.source for chain in chains}) > 1:
        return "the terms of the sum come from different values"
    both = added(chains, step.outputs[0])
    return both if isinstance(both, str) else ""
