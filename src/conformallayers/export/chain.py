"""What a fold does as a chain of modules: files and C programs have no graphs."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.passes.shape_prop import ShapeProp
from torch.nn import functional as F

from ..errors import refusal
from ..folding.folded import Folded
from ..nn.extra_layers import Centre
from ..utils.text import call_text

_CALLS: dict[Any, Callable[..., nn.Module]] = {
    torch.flatten: lambda start_dim=0, end_dim=-1: nn.Flatten(start_dim, end_dim),
    torch.relu: nn.ReLU,
    F.relu: nn.ReLU,
}
_SIGNS = {operator.sub: 1, torch.sub: 1, operator.add: -1, torch.add: -1}
_SAMPLES = 2  # shapes are followed with so many: an axis of one could be the batch or not


def chain_of(folded: Folded, where: str, remedy: str = "") -> list[nn.Module]:
    """Return the modules of a fold, one behind the other, or refuse a graph that is no chain.

    A constant that is subtracted or added is a :class:`Centre` here.

    Args:
        folded: what to read.
        where: that asks, for the refusal.
        remedy: what else one can do.
    """
    body = folded.body
    if not isinstance(body, fx.GraphModule):
        return [body]
    modules: list[nn.Module] = []
    previous: fx.Node | None = None
    for node in body.graph.nodes:
        if node.op == "get_attr":
            continue
        if node.op == "output" and node.args == (previous,):
            break
        if node.op != "placeholder" or previous is not None:
            module = _module(body, node, previous) or _centre(folded, body, node, previous)
            if module is None:
                expected, got = "a chain around the folded parts", call_text(node)
                allowed = "Use modules, flatten, relu and constants that are subtracted"
                raise refusal(where, expected, got, f"{allowed}, one after the other{remedy}.")
            modules.append(module)
        previous = node
    return modules


def _module(body: fx.GraphModule, node: fx.Node, previous: fx.Node | None) -> nn.Module | None:
    """Return a node that follows the one before it as a module; None if there is none for it."""
    if node.all_input_nodes != [previous] or node.args[:1] != (previous,):
        return None
    if node.op == "call_module":
        return body.get_submodule(str(node.target)) if len(node.args) == 1 else None
    target = getattr(torch, str(node.target), None) if node.op == "call_method" else node.target
    make = _CALLS.get(target)
    return None if make is None else make(*node.args[1:], **node.kwargs)


def _centre(
    folded: Folded, body: fx.GraphModule, node: fx.Node, previous: fx.Node | None
) -> Centre | None:
    """Return ``x − constant`` or ``x + constant`` as a module; None if the node is neither."""
    if node.target not in _SIGNS or len(node.args) != 2 or node.kwargs or node.args[0] != previous:
        return None
    value: Any = node.args[1]
    if isinstance(value, fx.Node):
        if value.op != "get_attr":
            return None
        value = operator.attrgetter(str(value.target))(body)
    shape = _shape_before(folded, body, node)
    mean = _sample(torch.as_tensor(value, dtype=folded.dtype, device=folded.anchor.device), shape)
    if mean is None:
        return None
    centre = Centre(shape, dtype=folded.dtype, device=folded.anchor.device)
    centre.mean.copy_(_SIGNS[node.target] * mean)
    return centre


def _shape_before(folded: Folded, body: fx.GraphModule, node: fx.Node) -> tuple[int, ...]:
    """Return the shape of a sample that reaches a node."""
    with torch.no_grad():
        zeros = torch.zeros(_SAMPLES, *folded.input_shape).to(folded.anchor)
        ShapeProp(body).propagate(zeros)
    before = node.args[0]
    assert isinstance(before, fx.Node)
    return tuple(before.meta["tensor_meta"].shape[1:])


def _sample(value: Tensor, shape: tuple[int, ...]) -> Tensor | None:
    """Return a constant with the shape of a sample; None if it differs from sample to sample.

    Examples:
        >>> _sample(torch.ones(1, 3, 1, 1), (3, 2, 2)).shape
        torch.Size([3, 2, 2])
        >>> _sample(torch.ones(2, 3, 1, 1), (3, 2, 2)) is None
        True
    """
    try:
        whole = torch.broadcast_to(value.detach(), (_SAMPLES, *shape))
    except RuntimeError:
        return None
    varies = value.dim() > len(shape) and value.shape[-len(shape) - 1] != 1
    return None if varies else whole[0]
