"""Expand a model: train its convolutions as sums of linear chains and branches, deploy them as they are."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from .errors import is_real, refusal, shape_text
from .graph.graph import collapsed
from .nn.expanded import EXPANDABLE, KINDS, Expanded, expanded, grouped_shape, terms_of
from .nn.registry import has_hooks
from .nn.sequential import ConformalSequential
from .utils.text import Block, Printed, Table, count, suggest

Only = Callable[[str, nn.Module], bool] | Iterable[str]
_WIDEST = 16.0  # a larger factor is a mistake, such as a number of channels
_NAMED = 5  # layers that an error lists


@dataclass(frozen=True, repr=False)
class Expansion(Printed):
    """What :func:`expand` did: one row for each layer with a weight.

    Attributes:
        rows: path, type, weights when deployed, weights in training, and why the layer was kept as it is.
    """

    kind: str
    rows: tuple[tuple[str, str, int, int, str], ...]

    def _blocks(self) -> Iterable[Block]:
        total = sum(row[2] for row in self.rows), sum(row[3] for row in self.rows)
        yield f"{self.kind}: {count(total[0])} weights deployed, {count(total[1])} in training"
        header = "layer", "type", "deployed", "training", "kept because"
        yield Table(header, [(p, t, count(a), count(b), why) for p, t, a, b, why in self.rows])


def expand(
    model: nn.Module,
    *,
    kind: str | Callable[[nn.Module], nn.Module] = "chain+branches",
    width: float = 2.0,
    only: Only | None = None,
    norm: bool = False,
) -> nn.Module:
    """Copy a model and let its convolutions train as sums of linear chains and branches.

    The copy has the same outputs at first. It trains like the model, with more parameters; :func:`collapse` returns
    the plain model, and :func:`conformallayers.fold` folds both to the same network. ``print(model.expansion)`` lists
    the layers, and why a layer was kept as it is.

    Args:
        model: any module.
        kind: what is added to the kernel of a layer: ``"chain"``, convolutions in a row, ``width`` times as wide
            inside; ``"branches"``, a pointwise convolution and the identity; ``"chain+branches"``; or a function from
            a layer to a module whose call, without arguments, returns a tensor of the shape of its weight.
        width: of chains, relative to the channels of the layer.
        only: names of the layers to expand, or a function of (name, layer) that chooses them. None takes the
            convolutions of more than one tap: the factors of a 1×1 convolution or a linear layer lower the accuracy.
        norm: put a BatchNorm behind each expanded convolution that has a bias, which takes it up again when the
            model is collapsed or folded. For models without BatchNorm that train from the beginning; the outputs are
            the same at first in evaluation mode only. Transposed convolutions, those with tied weights and those in a
            :class:`~conformallayers.ConformalLayers` get none.

    Examples:
        >>> import torch, conformallayers as cl
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10))
        >>> bigger = cl.expand(model)
        >>> x = torch.rand(2, 3, 8, 8)
        >>> torch.allclose(bigger(x), model(x), atol=1e-5)
        True
        >>> cl.collapse(bigger).state_dict().keys() == model.state_dict().keys()
        True
    """
    _check(model, kind, width)
    chosen = _chosen(model, only)
    if not chosen:
        remedy = "Linear layers and 1×1 convolutions are expanded if only=... names them."
        raise refusal("expand(model)", "convolutions to expand", "none", remedy)
    bigger = copy.deepcopy(model)
    replaced: dict[int, Expanded] = {}
    tied: dict[int, Expanded] = {}  # by the weight that layers share
    rows, obstacles = [], _obstacles(bigger, chosen)
    held = Counter(id(bigger.get_submodule(path).weight) for path in obstacles)
    containers = [part for part in bigger.modules() if isinstance(part, ConformalSequential)]
    conformal = {id(part) for container in containers for part in container.modules()}
    for path, why in obstacles.items():
        layer: Any = bigger.get_submodule(path)
        weight, counted = layer.weight, layer.weight.numel()
        if not why:
            first = tied.get(id(weight))
            terms, alone = _terms(layer, kind, width), held[id(weight)] == 1
            normalized = norm and alone and id(layer) not in conformal
            found = replaced[id(layer)] = expanded(layer, terms, first, normalized)
            tied.setdefault(id(weight), found)
            counted = found.counted_weights
        rows.append((path or "(model)", type(layer).__name__, weight.numel(), counted, why))
    for parent in list(bigger.modules()):
        for name, child in parent._modules.items():
            parent._modules[name] = replaced.get(id(child), child)
    bigger = replaced.get(id(bigger), bigger)
    report: Any = Expansion(kind if isinstance(kind, str) else "own terms", tuple(rows))
    bigger.expansion = report
    return bigger


def collapse(model: nn.Module) -> nn.Module:
    """Return the plain model of an expanded one: the original layers, with the composed weights.

    The keys of its ``state_dict`` are those of the model before :func:`expand`. The expanded model is not changed.
    """
    if not isinstance(model, nn.Module):
        raise refusal("collapse(model)", "an nn.Module", type(model).__name__, "Pass the model.")
    plain = collapsed(copy.deepcopy(model))
    vars(plain).pop("expansion", None)
    return plain


def _check(model: object, kind: object, width: object) -> None:
    if not isinstance(model, nn.Module):
        raise refusal("expand(model)", "an nn.Module", type(model).__name__, "Pass the model.")
    if hasattr(model, "recipe"):
        remedy = "Expand the model, train it, and fold it then."
        raise refusal("expand(model)", "a model with layers", "a Folded", remedy)
    if any(isinstance(module, Expanded) for module in model.modules()):
        remedy = "Expand the plain model: cl.expand(cl.collapse(model), ...)."
        raise refusal("expand(model)", "a plain model", "an expanded one", remedy)
    if kind not in KINDS and (isinstance(kind, str) or not callable(kind)):
        expected = f"one of {', '.join(KINDS)}, or a function of a layer"
        remedy = f"Leave it out for chain+branches.{suggest(str(kind), KINDS)}"
        raise refusal("expand(kind=...)", expected, repr(kind), remedy)
    if not is_real(width) or not 1 <= width <= _WIDEST:
        expected = f"a number from 1 to {_WIDEST:g}"
        raise refusal("expand(width=...)", expected, repr(width), "The default is 2.")


def _chosen(model: nn.Module, only: Only | None) -> set[str]:
    """Return the paths of the layers to expand; refuse names that the model does not have."""
    found = {path: layer for path, layer in model.named_modules() if isinstance(layer, EXPANDABLE)}
    if only is None:
        return {path for path, layer in found.items() if max(grouped_shape(layer)[3:]) > 1}
    if callable(only):
        return {path for path, layer in found.items() if only(path, layer)}
    names = {only} if isinstance(only, str) else set(only)
    unknown = sorted(names - found.keys())
    if unknown:
        expected, named = "names of convolutions or linear layers", ", ".join([*found][:_NAMED])
        remedy = suggest(unknown[0], found).strip() or f"Choose from: {named or 'none'}."
        raise refusal("expand(only=...)", expected, repr(unknown[0]), remedy)
    return names


def _obstacles(model: nn.Module, chosen: set[str]) -> dict[str, str]:
    """Return by path why a convolution or linear layer is kept as it is, or the empty string."""
    layers = {path: layer for path, layer in model.named_modules() if isinstance(layer, EXPANDABLE)}
    layers = {
        path: m for path, m in layers.items() if isinstance(getattr(m, "weight", None), Tensor)
    }
    found = {p: _obstacle(m) or ("" if p in chosen else "not chosen") for p, m in layers.items()}
    held = Counter(id(held) for part in model.modules() for held in part._parameters.values())
    held.subtract(id(layers[path].weight) for path, why in found.items() if not why)
    shared = "its weight is shared with one that is kept"
    return {
        p: why or (shared if held[id(layers[p].weight)] > 0 else "") for p, why in found.items()
    }


def _obstacle(layer: Any) -> str:
    """Return why a layer cannot be expanded, or the empty string."""
    if type(layer) not in EXPANDABLE:
        return "its class is not torch.nn's own"
    if "forward" in vars(layer) or has_hooks(layer):
        return "it has hooks"
    if layer._modules or layer._parameters.keys() != {"weight", "bias"}:
        return "it holds more or less than a weight and a bias"
    return "" if layer.weight.requires_grad else "its weight is frozen"


def _terms(layer: Any, kind: Any, width: float) -> Callable[[tuple[int, ...]], list[nn.Module]]:
    if not callable(kind):
        return terms_of(kind, width, layer.weight)
    term, weight = kind(layer), layer.weight
    made = term() if isinstance(term, nn.Module) else term
    if not isinstance(made, Tensor) or made.shape != weight.shape:
        expected = f"a module that returns a tensor of shape {shape_text(weight.shape)}"
        got = f"shape {shape_text(made.shape)}" if isinstance(made, Tensor) else repr(made)[:80]
        remedy = "It is called without arguments; its result is added to the weight."
        raise refusal(f"expand(kind=...) of {layer}", expected, got, remedy)
    return lambda _: [term]
