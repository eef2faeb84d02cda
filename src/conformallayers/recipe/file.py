"""Validate the document of a folded network in a file, before an array is read.

``docs/deploy.md`` has the schema. Nothing here needs torch, so that every runtime can use it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from types import EllipsisType
from typing import Any

from ..errors import refusal
from . import integer_operations as integer
from . import layer_operations as layer
from . import point_operations as point
from .archive import Archive, unbuildable
from .document import read_recipe
from .fields import Reader, number, optional, several, whole, word
from .operation import Operation, Shape, expect
from .recipe import INPUT, Recipe

DTYPES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}
# A few numbers of a small file could ask for any amount of memory, so that recipes have limits.
OPERATIONS_LIMIT = 10_000
VALUE_LIMIT = 2**27  # elements of one value of a sample, its padding included
SAMPLE_LIMIT = 2**28  # elements that one sample needs at a time
WINDOW_LIMIT = 2**20  # elements of a window of a pooling
PLACES_LIMIT: dict[type[Operation], int] = {  # along one axis, which numpy computes one by one
    layer.AdaptiveAvgPool: 2**18,
    layer.AdaptiveMaxPool: 2**18,
    layer.Upsample: 2**22,
    layer.Pad: 2**22,
}
_Document = Mapping[str, Any]
# The kind of a value. Each runtime chooses the peaks of samples for itself, and the choice cancels only where
# every operation reads values of the kinds that it expects.
_FEATURES, _PEAK, _TAU = "features", "a peak", "τ"
_ENERGY = "an energy"
# Whole numbers have scalars of their own, which every runtime rounds alike.
_INTEGERS, _EXACT_PEAK, _EXACT_TAU = "whole numbers", "an exact peak", "an exact τ"
_EXACT_ENERGY = "an exact energy"
_Kinds = tuple[str | EllipsisType, ...]  # an ellipsis repeats the kind before it, or drops it
_KINDS: dict[type[Operation], tuple[_Kinds, tuple[str, ...]]] = {  # of inputs and of outputs
    point.Normalize: ((_FEATURES,), (_FEATURES, _PEAK, _TAU)),
    point.Rescale: ((_FEATURES, _PEAK, _TAU), (_FEATURES, _PEAK, _TAU, _ENERGY)),
    point.Rebase: ((_FEATURES, _PEAK, _TAU), (_FEATURES, _PEAK, _TAU)),
    **dict.fromkeys(
        (point.SumSquares, point.QuadraticForm, point.BandedForm),
        ((_FEATURES, ...), (_ENERGY,)),
    ),
    point.Advance: ((_TAU, _PEAK, _ENERGY, ...), (_TAU,)),
    point.Divide: ((_FEATURES, _TAU, _PEAK), (_FEATURES,)),
    integer.QuantizePoint: ((_FEATURES,), (_INTEGERS, _EXACT_PEAK, _EXACT_TAU)),
    integer.IntegerEnergy: ((_INTEGERS,), (_EXACT_ENERGY,)),
    integer.IntegerAdvance: ((_EXACT_TAU, _EXACT_PEAK, _EXACT_ENERGY, ...), (_EXACT_TAU,)),
    integer.IntegerRebase: ((_EXACT_PEAK, _EXACT_TAU), (_EXACT_PEAK, _EXACT_TAU)),
}


@dataclass(frozen=True)
class FoldDocument:
    """A folded network as its file describes it, checked.

    Attributes:
        recipe: its constants are the entries of the archive, which have shapes and no numbers.
        dtype: "float64", "float32", "float16" or "bfloat16".
        strategy: of each part, joined with "+".
        origin: the fingerprint of the weights that were folded, or None.
        labels, about: the names of the outputs and other notes, or None.
        parts: the plan of each part; ``docs/deploy.md`` lists the entries.
    """

    recipe: Recipe
    dtype: str
    strategy: str
    origin: str | None
    labels: tuple[str, ...] | None
    about: dict[str, Any] | None
    parts: tuple[dict[str, Any], ...]


def read_fold(archive: Archive) -> FoldDocument:
    """Return the folded network that an archive describes; read no array.

    Raises:
        ConformalError: the archive holds no fold, or one that does not fit together.
    """
    document = archive.document
    if document["kind"] != "folded":
        got = "a model with layers" if document["kind"] == "model" else "a training checkpoint"
        remedy = (
            "Fold it first: cl.save(cl.fold(model, input_shape), path), or conformallayers fold."
        )
        raise refusal(f"load({archive.path})", "a folded network", got, remedy)
    try:
        dtype, strategy = word(*DTYPES)(document.get("dtype")), _text(document.get("strategy"))
        recipe = _recipe(archive, dtype)
        labels, about = read_notes(document, recipe.output_shape)
        parts = several(_part)(document.get("parts"))
        expect(len({part["path"] for part in parts}) == len(parts), "parts of one path")
    except Exception as error:
        raise unbuildable(archive.path, error) from error
    origin = document.get("origin")
    return FoldDocument(recipe, dtype, strategy, origin, labels, about, parts)


def read_notes(
    document: _Document, output_shape: Shape | None
) -> tuple[tuple[str, ...] | None, dict[str, Any] | None]:
    """Return the labels and the notes of a document; None where it has none.

    Raises:
        ValueError: labels are no list of words, one for each output, or notes are no object.
    """
    labels, about = document.get("labels"), document.get("about")
    if labels is not None:
        words = isinstance(labels, list) and all(isinstance(label, str) for label in labels)
        expect(words, f"labels that are no words: {labels!r:.80}")
        fits = output_shape is None or len(labels) == prod(output_shape)
        expect(fits, f"{len(labels)} labels for {prod(output_shape or ())} outputs")
    expect(about is None or isinstance(about, dict), f"no object: {about!r:.80}")
    return None if labels is None else tuple(labels), about


# -- the recipe -------------------------------------------------------------------------------------


def _recipe(archive: Archive, dtype: str) -> Recipe:
    """Return the recipe of a document, checked operation by operation."""
    document = archive.document["recipe"]
    operations = document.get("operations")
    _limit(len(operations) if isinstance(operations, list) else 0, OPERATIONS_LIMIT, "operations")
    recipe = read_recipe(document, archive.entries)
    expect(recipe.input_shape, "samples without a coefficient")
    stored = DTYPES | {"int32": "I32", "int8": "I8"}
    for name, kind in recipe.constant_dtypes(dtype).items():
        found = archive.entries[name].dtype
        expect(found == stored[kind], f"the constant {name:.60} of dtype {found}")
        expect(name.isidentifier(), f"a constant named {name!r:.60}")
    for operation in recipe.operations:  # a call has one, too
        module = getattr(operation, "module", None)
        expect(module is None, f"{operation.kind} of a module, which no file holds")
    _check_kinds(recipe)
    _check_scales(recipe)
    _check_sizes(recipe)
    return recipe


def _check_kinds(recipe: Recipe) -> None:
    """Refuse a value where an operation takes another kind of value."""
    kinds = {INPUT: _FEATURES}
    for operation in recipe.operations:
        found = [kinds[name] for name in operation.inputs]
        sums = isinstance(operation, (layer.Add, layer.Elementwise)) and set(found) == {_ENERGY}
        whole = set(found) == {_INTEGERS} and integer.keeps_integers(operation)
        expected = found if sums or whole else _read_kinds(operation)
        for name, kind, needed in zip(operation.inputs, found, expected, strict=True):
            expect(kind == needed, f"{operation.kind} takes {needed}, but {name!r:.60} is {kind}")
        usual = _INTEGERS if whole or integer.makes_integers(operation) else _FEATURES
        _, written = _KINDS.get(type(operation), ((), (_ENERGY if sums else usual,)))
        kinds.update(zip(operation.outputs, written, strict=True))
    expect(kinds[recipe.output] == _FEATURES, "an output that is no batch of numbers")


def _read_kinds(operation: Operation) -> list[str]:
    """Return the kinds of the values that an operation reads."""
    reads, _ = _KINDS.get(type(operation), ((_FEATURES, ...), ()))
    if isinstance(operation, integer.READERS):
        reads = (*(_INTEGERS,) * len(getattr(operation, "multipliers", "q")), _EXACT_TAU, ...)
    fixed = [kind for kind in reads if isinstance(kind, str)]
    if reads[-1] is ...:
        repeated = fixed.pop()
        fixed += [repeated] * (len(operation.inputs) - len(fixed))
    return fixed


def _check_scales(recipe: Recipe) -> None:
    """Refuse operations that mix values of different scales.

    From ``normalize`` to the division, the values of a part are relative to a peak, which each runtime chooses.
    Values from outside the part and constants are not, so that they may not be added before a ``rebase``.
    """
    parts: dict[str, int | None] = {INPUT: None}  # the part that a value belongs to
    peaks: dict[str, str | None] = {INPUT: None}  # the peak that a value is relative to
    for index, operation in enumerate(recipe.operations):
        found = {parts[name] for name in operation.inputs}
        near = {peaks[name] for name in operation.inputs}
        expect(len(found) == 1, f"{operation.kind} reads values of different scales")
        (part,), peak = found, next(iter(near))
        if near != {None}:  # some input is relative to a peak: then all are, to the same one
            expect(len(near) == 1, f"{operation.kind} reads values that are relative to two peaks")
            keeps = type(operation) in _KINDS or layer.is_homogeneous(operation)
            expect(keeps, f"{operation.kind}, which no factor passes, reads relative values")
        if isinstance(operation, point.Normalize):
            expect(part is None, "a part inside of another")
            part = index
        elif isinstance(operation, point.Divide):
            part = peak = None
        if isinstance(operation, (point.Normalize, point.Rescale)):
            peak = operation.outputs[1]
        elif isinstance(operation, point.Rebase):
            peak = None
        parts.update(dict.fromkeys(operation.outputs, part))
        peaks.update(dict.fromkeys(operation.outputs, peak))
    expect(parts[recipe.output] is None, "an output without its scale")


def _check_sizes(recipe: Recipe) -> None:
    """Refuse values that would take more memory than any network needs."""
    shapes = recipe.shapes()
    for name, shape in shapes.items():
        _limit(prod(shape), VALUE_LIMIT, f"elements of {name!r:.60}")
    for operation in recipe.operations:
        before, after = shapes[operation.inputs[0]], shapes[operation.outputs[0]]
        _check_windows(operation, before, after)
        places = PLACES_LIMIT.get(type(operation))
        if places is not None and getattr(operation, "mode", None) != "zeros":
            _limit(max(after), places, f"places of {operation.kind} along an axis")
    _limit(recipe.peak_elements(), SAMPLE_LIMIT, "elements of a sample at a time")


def _check_windows(operation: Operation, before: Shape, after: Shape) -> None:
    """Refuse windows and padding that are much larger than the maps that they are applied to."""
    padding = getattr(operation, "padding", None)
    if padding is not None:
        inner = after if isinstance(operation, layer.ConvTranspose) else before
        padded = inner[0] * prod(n + 2 * p for n, p in zip(inner[1:], padding, strict=True))
        _limit(padded, VALUE_LIMIT, f"elements of {operation.kind} with its padding")
    _limit(prod(getattr(operation, "kernel", ())), WINDOW_LIMIT, f"elements of {operation.kind}")


def _limit(count: int, limit: int, what: str) -> None:
    expect(count <= limit, f"{count} {what}, and {limit} are the most")


# -- the plans of parts -----------------------------------------------------------------------------


def _part(part: Any) -> dict[str, Any]:
    """Return the plan of a part, each entry checked."""
    texts = dict.fromkeys(("path", "strategy", "reason"), _text)
    more = {"candidates": several(_candidate)}
    stages = {"advice": lambda item: several(_text)(item or []), "operations": _operations}
    found = _object(part, {**texts, "absorbed": whole(0), **more, **stages})
    known = any(item["strategy"] == found["strategy"] for item in found["candidates"])
    expect(known, "a strategy that is no candidate")
    return found


def _operations(item: Any) -> tuple[int, int] | None:
    """Return the first operation of a stage and its end; files written before stages have none."""
    if item is None:
        return None
    first, end = several(whole(0))(item)
    expect(first <= end, "operations in another order")
    return first, end


def _candidate(item: Any) -> dict[str, Any]:
    """Return a candidate; a strategy that does not apply has no cost and takes infinite time."""
    costs = dict.fromkeys(("multiply_adds", "bytes", "seconds"), optional(_amount))
    found = _object(item, {"strategy": _text, "note": _text, **costs})
    absent = [found[key] is None for key in costs]
    expect(all(absent) or not any(absent), "a candidate with half of its costs")
    expect(type(found["bytes"]) in (int, type(None)), "parts of a byte")
    found["seconds"] = math.inf if found["seconds"] is None else found["seconds"]
    return found


def _object(item: Any, readers: Mapping[str, Reader]) -> dict[str, Any]:
    """Return some entries of an object, each of them checked."""
    expect(isinstance(item, dict), f"{item!r:.60} is no object")
    return {key: read(item.get(key)) for key, read in readers.items()}


def _text(value: Any) -> str:
    expect(isinstance(value, str), f"{value!r:.60} is no text")
    return str(value)


def _amount(value: Any) -> Any:
    """Return a finite number >= 0 as it is, whole or not."""
    expect(number(value) >= 0, f"{value!r:.60} is below 0")
    return value
