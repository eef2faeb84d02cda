"""Chains of affine operations: what they are together, and where to cut them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch

from ..recipe.operation import Operation, Shape
from .convolution import Convolution, add, compose, diagonal

_LONGEST = 16  # links that are considered as one convolution
Cost = tuple[int, int]  # multiply-adds, numbers that are stored
History = tuple[str, ...]  # the kinds of the operations of the model that a value comes from


@dataclass(frozen=True, eq=False)
class Link:
    """One operation of a chain, or several that were merged into a convolution.

    ``form`` is None for an operation that no convolution computes; then it stays as it is.
    """

    form: Convolution | None
    input_shape: Shape
    output_shape: Shape
    cost: Cost
    history: History
    operations: tuple[Operation, ...] = ()  # as they were, in order; empty if merged
    transposed: Convolution | None = None  # weight and bias of a transposed one that was scaled


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
    if not _worth_a_kernel(links):
        return None
    form = composed([_planned(link) for link in links])
    return None if form is None else _cost(form, links[0].input_shape)


def _worth_a_kernel(links: Sequence[Link]) -> bool:
    """Tell whether links have weights already, or are factors: a pool alone stays a pool."""
    forms = [link.form for link in links]
    weighted = any(f is not None and f.groups < max(f.channels) for f in forms)
    depthwise = any(
        link.cost[1] > 0 and f is not None and not f.is_diagonal
        for link, f in zip(links, forms, strict=True)
    )
    return weighted or depthwise or all(f is not None and f.is_diagonal for f in forms)


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


def composed(links: Iterable[Link]) -> Convolution | None:
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


def whole_chain(chain: Chain) -> Convolution | None:
    """Return the convolution that a chain is; the identity for one without links."""
    if not chain.links:
        one = torch.ones(chain.shape[0], dtype=torch.float64)
        return diagonal(one, None, len(chain.shape) - 1)
    return composed(chain.links)


def added(a: Chain, b: Chain) -> Chain | None:
    """Return the sum of two chains as one, where they start at one value and it takes no more work."""
    if a.source != b.source or not 1 <= len(a.shape) <= 4:
        return None
    parts = []
    for chain in (a, b):
        planned = whole_chain(replace(chain, links=tuple(map(_planned, chain.links))))
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
    forms = [form for form in map(whole_chain, (a, b)) if form is not None]
    found = add(forms, a.shape)
    if found is None:
        return None
    history = (*history_of(a), *history_of(b), "add")
    link = Link(found, a.shape, a.output_shape, _cost(found, a.shape), history)
    return Chain(a.source, a.shape, (link,))


def history_of(chain: Chain) -> History:
    """Return the kinds of all operations of a chain."""
    return tuple(kind for link in chain.links for kind in link.history)


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


def window(form: Convolution, shape: Shape) -> Convolution | None:
    """Return a product with a flattened map (C, ...) as a convolution with one window."""
    if form.kernel or form.groups != 1 or not 2 <= len(shape) <= 4:
        return None
    ones = (1,) * (len(shape) - 1)
    bias = None if form.bias is None else form.bias.view(-1, *ones)
    weight = form.weight.view(-1, *shape)
    return Convolution(weight, bias, ones, (0,) * len(ones), ones)
