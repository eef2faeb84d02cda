"""Choose the rectifiers that stay, and where the head begins."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import nn

from ..errors import refusal
from ..nn.homogeneous import Abs
from ..utils.text import suggest
from .graph import INPUT, Item

Keep = str | Sequence[str]
_CHOICES = ("all", "pooling", "none")
_RECTIFIERS = (nn.ReLU, nn.LeakyReLU, nn.PReLU, Abs)
_WHERE = "convert(keep=...)"


def is_rectifier(item: Item) -> bool:
    """Tell whether an item is a nonlinear map of single values."""
    return isinstance(item.module, _RECTIFIERS)


def checked_keep(keep: Any, items: Sequence[Item]) -> str | tuple[str, ...]:
    """Return ``keep`` if it is a choice or names rectifiers of the model, or refuse it."""
    expected = f"{', '.join(repr(choice) for choice in _CHOICES)} or a list of paths of rectifiers"
    if isinstance(keep, str):
        if keep in _CHOICES:
            return keep
        remedy = f"One path is a list too: keep=[{keep!r}].{suggest(keep, _CHOICES)}"
        raise refusal(_WHERE, expected, repr(keep), remedy)
    named = isinstance(keep, Iterable) and not isinstance(keep, bytes)
    paths = tuple(keep) if named else ()
    if not named or not all(isinstance(path, str) for path in paths):
        raise refusal(_WHERE, expected, repr(keep), 'The default is "pooling".')
    rectifiers = [item for item in items if is_rectifier(item)]
    known = list(dict.fromkeys(name for item in rectifiers for name in (item.path, item.name)))
    for path in paths:
        if path in known:
            continue
        kinds = [item.kind for item in items if path in (item.path, item.name)]
        got = f"{path!r}, which is a {kinds[0]}" if kinds else repr(path)
        shown = ", ".join(known[:8]) + (", …" if len(known) > 8 else "")
        remedy = f"The model has {shown or 'no rectifier'}.{suggest(path, known)}"
        raise refusal(_WHERE, "paths of rectifiers", got, remedy)
    return paths


def reasons(
    items: Sequence[Item], keep: str | tuple[str, ...], head: set[str]
) -> dict[str, tuple[bool, str]]:
    """Return, for every rectifier before the head, whether it stays, and why."""
    found = {}
    paths = {item.path for item in items if is_rectifier(item)}
    for item in items:
        if not is_rectifier(item) or item.name in head:
            continue
        if keep == "pooling":
            beside = _beside(item, items)
            found[item.name] = beside is not None, beside or "no pooling or stride beside it"
        elif isinstance(keep, str):
            found[item.name] = keep == "all", f'keep="{keep}"'
        else:
            kept = item.path in keep or item.name in {*keep} - paths
            found[item.name] = kept, "named in keep" if kept else "not named in keep"
    return found


def _beside(item: Item, items: Sequence[Item]) -> str | None:
    """Return the pooling or stride next to a rectifier, seen through normalisation and dropout."""
    by_name = {one.name: one for one in items}
    after = _reached(item, lambda one: [user for user in items if one.name in user.sources])
    before = _reached(item, lambda one: [by_name[name] for name in one.sources if name != INPUT])
    for word, found in (("before", after), ("behind", before)):
        if found is not None:
            kind = "" if found.function else f"{found.kind} "
            return f"{word} {kind}{found.label}"
    return None


def _reached(item: Item, neighbours: Callable[[Item], list[Item]]) -> Item | None:
    """Return the first item in one direction that pools or has a stride."""
    for one in neighbours(item):
        if _reduces(one.module):
            return one
        if isinstance(one.module, _TRANSPARENT):
            found = _reached(one, neighbours)
            if found is not None:
                return found
    return None


_TRANSPARENT = (nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd, nn.Identity)
_POOLS = tuple(
    getattr(nn, f"{name}{n}d")
    for n in (1, 2, 3)
    for name in ("MaxPool", "AvgPool", "AdaptiveMaxPool", "AdaptiveAvgPool", "LPPool")
)


def _reduces(module: Any) -> bool:
    if type(module) is nn.Sequential:
        return any(_reduces(part) for part in module)
    strided = isinstance(module, nn.modules.conv._ConvNd) and max(module.stride) > 1
    return strided or isinstance(module, _POOLS)
