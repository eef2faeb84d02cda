"""What became of each affine region of a network, and why it was not merged further."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..recipe import layer_operations as layer
from ..recipe.recipe import Shape
from .chains import Chain, Cost, Step, added, segment, worth_merging


@dataclass(frozen=True)
class Region:
    """Affine operations between others, and the operations that they have become.

    Attributes:
        before, after: the kinds of the operations.
        output_shape: of one sample.
        cost_before, cost_after: multiply-adds of one sample, and weights.
        reasons: why operations that are left were not merged, a clause each.
    """

    before: tuple[str, ...]
    after: tuple[str, ...]
    output_shape: Shape
    cost_before: Cost
    cost_after: Cost
    reasons: tuple[str, ...] = ()


def regions_of(
    before: Sequence[Step], after: Sequence[Step], shapes: Mapping[str, Shape], output: str
) -> tuple[Region, ...]:
    """Return the regions with a weight or a sum, in their order."""
    root = _components(before, after, output)
    members: dict[int, tuple[list[Step], list[Step]]] = defaultdict(lambda: ([], []))
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
        reached = _cost(new, shapes), tuple(dict.fromkeys(texts))
        found.append(Region(kinds[0], kinds[1], shape, cost, *reached))
    return tuple(found)


def _components(before: Sequence[Step], after: Sequence[Step], output: str) -> dict[int, int]:
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


def _cost(steps: Sequence[Step], shapes: Mapping[str, Shape]) -> Cost:
    cost = Cost()
    for step in steps:
        if step.link is not None:
            cost = cost.plus(step.link.cost)
        elif isinstance(step.operation, layer.Add):
            cost = cost.plus(Cost((len(step.inputs) - 1) * math.prod(shapes[step.outputs[0]])))
    return cost


def _kinds(step: Step) -> Iterator[str]:
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
    steps: Sequence[Step], shapes: Mapping[str, Shape], output: str
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


def _sum_reason(step: Step, producer: Mapping[str, Step], shapes: Mapping[str, Shape]) -> str:
    chains = []
    for name in step.inputs:
        held = producer.get(name)
        alone = Chain(name, shapes[name])
        if held is None or held.link is None:
            chains.append(alone)
        else:
            chains.append(Chain(held.inputs[0], held.link.input_shape, (held.link,)))
    if len({chain.source for chain in chains}) > 1:
        return "a sum of different values"
    both = added(chains, step.outputs[0])
    return both if isinstance(both, str) else ""
