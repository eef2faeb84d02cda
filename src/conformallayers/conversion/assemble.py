"""Assemble items to a chain of layers, with branches as Residual, Parallel or Traced."""

from __future__ import annotations

import operator
from collections import OrderedDict
from collections.abc import Sequence
from typing import cast

import torch
from torch import fx, nn

from ..nn.branches import Join, Parallel, Residual
from ..nn.traced import Traced
from .graph import INPUT, Item

Chain = list[tuple[str, nn.Module]]


class Assembly:
    """Assemble the modules between two values of a graph.

    Every path from the input to an item passes its *dominators*. Between two neighbouring dominators of the output
    there is one layer, or branches that end in a join.
    """

    def __init__(self, items: Sequence[Item]) -> None:
        self.items = {item.name: item for item in items if not item.unused}
        self.place = {name: place for place, name in enumerate([INPUT, *self.items])}
        self.dominators: dict[str, set[str]] = {INPUT: {INPUT}}
        for name, item in self.items.items():
            self.dominators[name] = {name} | self._before(item)

    def _before(self, item: Item) -> set[str]:
        return set.intersection(*(self.dominators[source] for source in item.sources))

    def chain(self, start: str, end: str) -> Chain:
        """Return the modules from a value to another, in order, with their names."""
        found: Chain = []
        while end != start:
            item = self.items[end]
            begin = max(self._before(item), key=lambda name: self.place[name])
            found.append((end, self._joined(begin, item)))
            end = begin
        return found[::-1]

    def _joined(self, start: str, item: Item) -> nn.Module:
        """Return the module from a value to an item: a layer, or branches and their join."""
        if not isinstance(item.module, Join):
            return cast(nn.Module, item.module)
        inside = [self._between(start, source) for source in item.sources]
        # An item on two branches is computed once: neither Residual nor Parallel can share it.
        if sum(map(len, inside)) > len(set().union(*inside)):
            return self._traced(start, item.name)
        branches = [self.chain(start, source) for source in item.sources]
        if item.module.how == "sum":
            skip, body = sorted(branches, key=len)
            return Residual(OrderedDict(body), shortcut=_sequence(skip) if skip else None)
        parts = (_sequence(branch) if branch else nn.Identity() for branch in branches)
        return Parallel(*parts, join="concatenate", dim=item.module.dim)

    def _between(self, start: str, end: str) -> set[str]:
        """Return the items on all ways from a value to another, without the first."""
        found: set[str] = set()
        ends = [end]
        while ends:
            name = ends.pop()
            if name != start and name not in found:
                found.add(name)
                ends += self.items[name].sources
        return found

    def _traced(self, start: str, end: str) -> Traced:
        """Return branches that share values as a graph."""
        graph, root = fx.Graph(), nn.Module()
        nodes = {start: graph.placeholder("x")}
        for name in sorted(self._between(start, end), key=lambda name: self.place[name]):
            item = self.items[name]
            values, module = [nodes[source] for source in item.sources], item.module
            if not isinstance(module, Join):
                root.add_module(name, module)
                nodes[name] = graph.call_module(name, tuple(values))
            elif module.how == "sum":
                nodes[name] = graph.call_function(operator.add, tuple(values))
            else:
                nodes[name] = graph.call_function(torch.cat, (values, module.dim))
        graph.output(nodes[end])
        return Traced(fx.GraphModule(root, graph))


def _sequence(chain: Chain) -> nn.Module:
    return nn.Sequential(OrderedDict(chain))
