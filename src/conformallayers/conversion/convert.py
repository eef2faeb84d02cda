"""Convert a plain CNN into its conformal twin."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from typing import cast

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ..container import ConformalLayers
from ..errors import ConformalError, cause_line, checked_shape, refusal
from ..nn.activations import RadialActivation, ReSPro
from ..nn.branches import Join
from ..nn.registry import branches, is_affine, is_homogeneous
from ..utils.html import Block, Printed, Table
from .assemble import Assembly
from .compare import check_twin
from .graph import INPUT, Item, read
from .keep import Keep, checked_keep, reasons


@dataclass(frozen=True)
class Change:
    """One call of a model and its action: ``kept …``, ``replaced by …``, ``dropped`` or ``refused``."""

    path: str
    type: str
    action: str
    reason: str


@dataclass(frozen=True, repr=False)
class Conversion(Printed):
    """The changes of :func:`conformallayers.convert`; prints as a table with a row for every call of the model, and a warning if there is one."""

    changes: tuple[Change, ...] = ()
    warning: str = ""

    def _blocks(self) -> Iterator[Block]:
        yield Table(("path", "type", "what", "why"), [astuple(one) for one in self.changes])
        if self.warning:
            yield f"warning: {self.warning}"


class Converted(nn.Sequential):
    """The result of :func:`conformallayers.convert`: ``features``, a :class:`conformallayers.ConformalLayers`, and mostly a plain ``head``.

    Attributes:
        conversion: the :class:`Conversion`.
    """

    conversion = Conversion()


def convert(model: nn.Module, input_shape: tuple[int, ...], *, keep: Keep = "pooling") -> Converted:
    """Return the conformal twin of a plain CNN, with its weights; the model is not changed.

    Linear layers, normalisation, pooling, sums and concatenations stay what they are, in a
    :class:`ConformalLayers` with ``offset="learned"`` and ``unit="rms"``. Rectifiers stay as ends of stages where
    ``keep`` says so; the others become ``cl.ReSPro(1.0, projective=True)``, which folds. The head, everything behind the
    last layer of maps once samples are vectors, stays a plain ``nn.Sequential`` behind the division.

    Weights are copied, numbers are not all kept. A point is x/t with ``t = √(mean x² + offset²)``. Biases and BatchNorms act
    on the point exactly, and rectifiers and pooling commute with the division, so that with ``keep="all"`` the twin of
    x is the model of x/t: ``twin(x) = model(x / t)``. A ReSPro instead of a rectifier computes something else, a rescaling of
    the whole sample: fine-tune.

    Args:
        model: an ``nn.Sequential`` or any module that torch.fx can trace, with one input and one output, in any mode.
            Its twin has the graph of evaluation mode, and the mode, dtype and device of the model.
        input_shape: of one sample, without the batch axis.
        keep: the rectifiers that stay: ``"all"``; ``"pooling"``, those next to a pooling or a layer with stride, before or behind
            it, with only normalisation or dropout between; ``"none"``; or a list of paths of modules. Functions and second calls
            of a module have the name that ``conversion`` shows.

    Returns:
        A :class:`~conformallayers.conversion.convert.Converted` model. ``print(twin.conversion)`` lists what became of every layer.

    Raises:
        ConformalError: one error with a table of everything that cannot be converted.

    Examples:
        >>> model = nn.Sequential(
        ...     nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.MaxPool2d(2),
        ...     nn.Flatten(), nn.Linear(32, 10),
        ... )
        >>> twin = convert(model, (3, 8, 8))
        >>> print(twin.conversion)
        path  type       what                why
        ----  ---------  ------------------  ------------------------------
        0     Conv2d     kept                affine
        1     ReLU       replaced by ReSPro  no pooling or stride beside it
        2     Conv2d     kept                affine
        3     ReLU       kept                before MaxPool2d 4
        4     MaxPool2d  kept                homogeneous
        5     Flatten    kept in the head    behind the division
        6     Linear     kept in the head    behind the division
    """
    if not isinstance(model, nn.Module):
        raise refusal("convert(model)", "an nn.Module", type(model).__name__, "Pass the model.")
    where = f"convert({type(model).__name__})"
    shape = checked_shape(input_shape, "convert(input_shape=...)")
    if any(isinstance(module, ConformalLayers) for module in model.modules()):
        remedy = "Convert the plain part alone, or train it as it is."
        raise refusal(where, "a plain model", "one with ConformalLayers", remedy)
    if any(map(is_lazy, model.parameters())):
        remedy = "Run it once on a batch: model(x)."
        raise refusal(where, "a model with weights", "uninitialised parameters", remedy)
    with torch.inference_mode(False):  # parameters made in it cannot be trained
        return _converted(where, model, shape, keep)


def _converted(where: str, model: nn.Module, shape: tuple[int, ...], keep: Keep) -> Converted:
    copied = _copied(where, model)
    items = read(copied, shape)
    head = _head(items)
    problems = [item for item in items if item.problem is not None]
    refused = [item for item in problems if item.module is None or item.name not in head]
    if refused:
        raise _refusal(where, refused)
    chosen = reasons(items, checked_keep(keep, items), head)
    changes = tuple(_change(item, chosen, head) for item in items)
    modes = {part: part.training for item in items if item.module for part in item.module.modules()}
    check_twin(where, model, shape, copied, _assembled(items, head))
    twin = _assembled([_replaced(item, chosen) for item in items], head)
    twin.conversion = Conversion(changes, _warning(twin, chosen))
    twin.train(model.training)
    for part, mode in modes.items():
        part.training = mode
    return twin


def _copied(where: str, model: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(model)
    except Exception as error:
        expected = "a model that copy.deepcopy copies"
        remedy = "Remove what has no copy, such as torch.nn.utils.remove_weight_norm(layer)."
        raise refusal(where, expected, cause_line(error), remedy) from error


def _head(items: Sequence[Item]) -> set[str]:
    """Return the names of the items behind the division.

    The head begins behind the last layer of maps, where samples are vectors or the first module stands that
    a ConformalLayers cannot hold. In a model of vectors every layer with weights counts as a layer of maps.
    """
    spatial = [index for index, item in enumerate(items) if item.spatial]
    weighted = [i for i, item in enumerate(items) if item.module and [*item.module.parameters()]]
    last = max(spatial or weighted, default=len(items))
    for index in range(last + 1, len(items)):
        item = items[index]
        vector = bool(spatial) and len(item.output_shape) == 1
        if (item.problem or vector) and len(item.sources) == 1 and _cuts(items, index):
            return {item.name for item in items[index:]}
    return set()


def _cuts(items: Sequence[Item], index: int) -> bool:
    """Tell whether no later item reads a value from before an item."""
    before = {INPUT, *(item.name for item in items[:index])}
    return not any(before & {*item.sources} for item in items[index + 1 :])


def _refusal(where: str, refused: Sequence[Item]) -> ConformalError:
    """Return one error with a table of all items that cannot be converted."""
    changes = (Change(item.label, item.kind, "refused", item.problem or "") for item in refused)
    expected = "layers that are linear, homogeneous or radial before the head"
    got, remedy = f"{len(refused)} that cannot be converted", "Change these and convert again:"
    first = refusal(where, expected, got, remedy)
    return ConformalError(f"{first}\n{Conversion(tuple(changes))}")


def _change(item: Item, chosen: Mapping[str, tuple[bool, str]], head: set[str]) -> Change:
    module, names = item.module, ""
    if module is not None and item.function and not isinstance(module, Join):
        parts = module if type(module) is nn.Sequential else [module]
        names = " as " + ", ".join(type(part).__name__ for part in parts)
    action = "kept"
    if item.unused:
        action, reason = "dropped", item.unused
    elif item.name in head:
        action, reason = "kept in the head", "behind the division"
    elif item.name in chosen:
        kept, reason = chosen[item.name]
        action = action if kept else "replaced by ReSPro"
        names = names if kept else ""
        if not kept and isinstance(module, nn.PReLU):
            reason += "; its weight is dropped"
    else:
        reason = _reason(cast(nn.Module, module))
    return Change(item.label, item.kind, action + names, reason)


def _warning(twin: Converted, chosen: Mapping[str, tuple[bool, str]]) -> str:
    """Return a sentence about a twin that lost all of its rectifiers, or nothing."""
    if all(kept for kept, _ in chosen.values()) or any(map(is_homogeneous, twin[0].modules())):
        return ""
    return (
        "nothing rectifies in the features now: the direction of their output is linear in x. "
        'Pass keep="all", or the paths of the rectifiers to keep.'
    )


def _reason(module: nn.Module) -> str:
    if isinstance(module, Join):
        return f"{'sum' if module.how == 'sum' else 'concatenation'} of points"
    if isinstance(module, RadialActivation):
        return "an activation that folds"
    if branches(module):
        return "branches, as they are"
    if is_homogeneous(module):
        return "homogeneous"
    return "affine" if is_affine(module) else "linear"


def _replaced(item: Item, chosen: Mapping[str, tuple[bool, str]]) -> Item:
    """Return an item with a ReSPro if it is a rectifier that does not stay.

    The kernels learn the scale of the points, which are of order 1 in root mean squares behind a BatchNorm;
    α = 1 keeps such points as long as they are.
    """
    if chosen.get(item.name, (True, ""))[0]:
        return item
    return replace(item, module=ReSPro(1.0, projective=True))


def _assembled(items: Sequence[Item], head: set[str]) -> Converted:
    used = [item for item in items if not item.unused]
    if not used:
        remedy = "Pass the model with its layers."
        raise refusal("convert(model)", "a model that calls layers", "one that calls none", remedy)
    chain = Assembly(used).chain(INPUT, used[-1].name)
    features = OrderedDict((name, module) for name, module in chain if name not in head)
    twin = Converted()
    twin.add_module("features", ConformalLayers(features, offset="learned", unit="rms"))
    if head:
        behind = OrderedDict((name, module) for name, module in chain if name in head)
        twin.add_module("head", nn.Sequential(behind))
    return twin
